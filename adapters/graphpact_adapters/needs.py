"""What an author's code reads of the plain values that it is given, and the adapter lacks: `needs_of`.

An adapter gives strict objects: a name that one of them lacks raises `NeedsValueError`, and the run ends.
To find all names, the code runs once for each: those found before are assumed, as `Assumed`. What the code
asks with a default, by ``getattr`` or ``hasattr``, raises as well, is caught there, and is no need.

Does not: judge the code. With assumed values it computes nothing that counts.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import torch

from graphpact.plugin_calls import describe_error, place_of
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.records.raised import NeedsValueError, need_of
from graphpact_conformance.suite import Needs, PlannedLane
from graphpact_conformance.targets import Options

_assumed: ContextVar[Collection[str]] = ContextVar("_assumed", default=())


class Assumed(int):
    """A value in the place of a missing one: the number 1, false, empty, callable, without attributes.

    Args:
        path: The missing value.
    """

    path: str

    def __new__(cls, path: str) -> Self:
        """Return the value of a path."""
        made = super().__new__(cls, 1)
        made.path = path
        return made

    def __bool__(self) -> bool:
        return False  # a feature that nobody configured is off

    def __call__(self, *_: Any, **__: Any) -> Self:
        """Return itself."""
        return self

    def __getitem__(self, _: Any) -> Self:
        return self

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return assume_missing(
            self.path, name, "an attribute of an assumed value", hint="", error=_NotAssumedError
        )


class _NotAssumedError(NeedsValueError, AttributeError):
    """An assumed value was asked for an attribute."""


def assume_missing(
    owner: str, name: str, message: str, *, hint: str, error: type[NeedsValueError]
) -> Assumed:
    """Return an assumed value for a missing name; raise where it is not assumed.

    Args:
        owner: The path of the object that lacks the name.
        name: The name.
        message: Of the error.
        hint: Of the error.
        error: The class of the error.

    Raises:
        NeedsValueError: It is ``error``; nothing is assumed for the path.
    """
    path = f"{owner}.{name}"
    if path in _assumed.get():
        return Assumed(path)
    raise error(path, message, hint=hint)


@contextmanager
def _assuming(paths: Collection[str]) -> Iterator[None]:
    token = _assumed.set(paths)
    try:
        yield
    finally:
        _assumed.reset(token)


def needs_of(
    plan: Callable[[Options], Sequence[PlannedLane]],
    options: Options,
    ask: Callable[[PlannedLane], object] = str,
) -> Iterator[Needs]:
    """Yield what the author's code reads and the adapter lacks, for each kind of step that lacks something.

    In the first lane of each kind of step every shape is captured, and one batch runs in a graph and without
    one.

    Args:
        plan: Returns the lanes of options, with an adapter that has not called the author's code before.
        options: Options of the run.
        ask: Asks the author's code what it declares of a lane, which is run then.
    """

    def lanes() -> dict[str, PlannedLane]:
        found: dict[str, PlannedLane] = {}
        for each in plan(options):
            found.setdefault(str(each.lane.config.case), each)
        return found

    def run(kind: str) -> None:
        lane = lanes()[kind]
        ask(lane)
        _run(lane.lane)

    kinds: list[str] = []
    of_plan, stopped = _tried(lambda: kinds.extend(lanes()))
    found = [Needs(kind, *_tried(partial(run, kind))) for kind in dict.fromkeys(kinds)]
    if of_plan:  # without these there are no lanes
        paths = [path for each in found for path in each.paths]
        ends = [stopped, *(each.stopped for each in found)]
        yield Needs(None, list(dict.fromkeys([*of_plan, *paths])), next(filter(None, ends), None))
        return
    yield from (each for each in found if each.paths)


def _run(lane: LaneUnderTest) -> None:
    with torch.inference_mode():
        rig = lane.build()
    (steps,) = lane.drawn(1, 0)
    for eagerly in (False, True):
        error = rig.step(steps[0], eagerly=eagerly).error
        if error is not None:
            raise error


def _tried(attempt: Callable[[], object]) -> tuple[list[str], str | None]:
    """Return the missing values that an attempt reads, and the error that then ends it; None if none does."""
    paths: list[str] = []
    while True:
        try:
            with _assuming(paths):
                attempt()
        except Exception as error:  # noqa: BLE001  the author's code may raise anything
            need = need_of(error)
            if need is None or need.path in paths:
                return _deepest(paths), f"{describe_error(error)}, at {place_of(error)}"
            paths.append(need.path)
        else:
            return _deepest(paths), None


def _deepest(paths: Sequence[str]) -> list[str]:
    """Return the paths without those of objects whose attributes are among them."""
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
