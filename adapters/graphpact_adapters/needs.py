"""`needs_of`: finds the values that an author's code reads and the adapter does not have.

An adapter passes strict objects to the code: a missing name raises `NeedsValueError`, which ends the run. To
find all missing names, the code runs again after each one, with an `Assumed` value for every name found
before. A name that the code reads with a default, by ``getattr`` or ``hasattr``, raises too, but the code
catches this error, so the name is not needed.

Does not: judge the code, because its results with assumed values mean nothing.
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
    """A stand-in for a missing value: the number 1, false, empty, callable, without attributes.

    Args:
        path: The path of the missing value.
    """

    path: str

    def __new__(cls, path: str) -> Self:
        """Return the stand-in for a path."""
        made = super().__new__(cls, 1)
        made.path = path
        return made

    def __bool__(self) -> bool:
        return False  # a feature that is not configured is off

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
    """Return an assumed value for a missing name, or raise an error if no value is assumed for it.

    Args:
        owner: The path of the object that lacks the name.
        name: The name.
        message: The message of the error.
        hint: The hint of the error.
        error: The class of the error.

    Raises:
        NeedsValueError: No value is assumed for the path. The class is ``error``.
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
    """Yield the values that the author's code reads and the adapter does not have, by kind of step.

    In the first lane of each kind of step every shape is captured, and one batch runs in a graph and without
    one. A kind of step that lacks nothing is left out.

    Args:
        plan: Returns the lanes of options, with an adapter that has not called the author's code before.
        options: Options of the run.
        ask: Asks the author's code for its declarations about a lane, before the lane runs.
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
    if of_plan:  # without these values there are no lanes
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
    """Return the missing values that an attempt reads, and the error that still ends it, or None."""
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
    """Return the paths, but not those of an object if the path of one of its attributes is there too."""
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
