"""`Draws`: makes sure that a region uses only the default random generator, and only by drawing from it.

A replay repeats the recorded draws, beginning with the generator's state at that time. It does not repeat
what Python does to a generator: setting a seed, restoring a state (``fork_rng``, checkpointing), making a new
generator. Torch has no hook for these actions, so the state of the generator is compared around each draw: it
must not change between two draws. While the region runs, the generator has a seed that no caller would set.

Does not: see random numbers of other libraries, such as ``random`` and numpy; they are host numbers.
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from graphpact.graphs.lines import Line
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.tasks import RecordedTask

__tracebackhide__ = True

_UNOWNED_SEED = 0x6772_6170_6870_6163
"""The seed of the generator while a region runs. If the seed is different afterwards, the region changed
it.
"""

_KNOWN = frozenset({"aten", "graphpact", "graphpact_compiled"})
"""Namespaces of which every operation that draws has a tag: those of torch and of graphpact's kernels."""

_HINT = "a replay only repeats draws: seed, fork or restore the generator outside of the region"


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which operations on ``device`` draw by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class Draws:
    """The draws of one region.

    Args:
        guard: Creates the errors.
        device: The device of the driver.
    """

    def __init__(self, guard: HostReadGuard, device: torch.device) -> None:
        self._guard = guard
        self._generator = default_generator(device)
        self._left = torch.empty(0)  # the state after the last draw
        self._last: Line | None = None  # the line of the last draw

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Check the draws of the region that runs in this context, and undo them at the end.

        Raises:
            CaptureError: At the end the generator is not in the state in which the last draw left it.
        """
        before = self._generator.get_state()
        self._generator.manual_seed(_UNOWNED_SEED)
        self.accept()
        try:
            yield
            # Without a draw in the region, other threads may have drawn; but only the region sets a seed.
            is_kept = (
                self._generator.initial_seed() == _UNOWNED_SEED
                if self._last is None
                else torch.equal(self._generator.get_state(), self._left)
            )
            if not is_kept:
                raise self._refusal("by the end of the region")
        finally:
            self._generator.set_state(before)

    def accept(self) -> None:
        """Accept the present state of the generator, because eager calls may change it."""
        self._left = self._generator.get_state()

    def check_generator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `CaptureError` if device work draws from another generator."""
        for leaf in (*args, *kwargs.values()) if _may_draw(func) else ():
            if isinstance(leaf, torch.Generator) and _identity(leaf) != _identity(self._generator):
                raise self._guard.refusal(
                    f"{func} draws from a generator other than the default",
                    "use the device's default generator: a graph does not advance any other generator",
                    "GP18",
                )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, work of the host or the device, and return its result.

        Raises:
            CaptureError: ``func`` draws after the state of the generator was changed.
        """
        if not _may_draw(func):
            return func(*args, **kwargs)
        before = self._generator.get_state()
        result = func(*args, **kwargs)
        after = self._generator.get_state()
        if not torch.equal(before, after):  # ``func`` drew
            if not torch.equal(before, self._left):
                raise self._refusal(f"before {func} draws from it")
            self._left, self._last = after, Line()
        return result

    def _refusal(self, when: str) -> Exception:
        since = "" if self._last is None else f" after the draw at {self._last}"
        return self._guard.refusal(
            f"the state of the random generator is changed{since}, {when}, but not by a draw of the region,",
            _HINT,
            "GP18",
        )


def _identity(generator: Any) -> int:
    """Return the identity of a generator, which is equal for all its Python objects."""
    return int(generator._cdata)  # noqa: SLF001  no public name


@cache
def _may_draw(func: Any) -> bool:
    """Return whether ``func`` may draw from a generator, which its tag says, if it has reliable ones."""
    if isinstance(func, RecordedTask) or func.namespace not in _KNOWN:
        return True
    return torch.Tag.nondeterministic_seeded in func.tags
