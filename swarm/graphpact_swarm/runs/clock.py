"""`VirtualClock`: the time of a run counts passes and calls, so that it is the same in each run.

Schedulers read the clock: for priorities, for the time that a request waited, for statistics. A run on a slow
machine would take other decisions than one on a fast machine.

Does not: change what C code reads, or the timeouts of locks and pipes.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_BEGIN = 1_800_000_000.0  # seconds; a date, for code that prints one
_PASS = 0.01  # seconds of a pass
_CALL = 1e-6  # seconds of a call: two times are never the same, and a loop that waits for a time ends
_CLOCKS = ("time", "monotonic", "perf_counter")


class VirtualClock:
    """A context in which the functions of the module `time` read this clock, and ``sleep`` advances it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real: dict[str, Callable[..., Any]] = {}

    def tick(self) -> None:
        """Advance by a pass of the engine's loop."""
        self.now += _PASS

    def __enter__(self) -> Self:
        for name in _CLOCKS:
            begin = _BEGIN if name == "time" else 0.0
            self._replace(name, lambda begin=begin: begin + self._read())
            self._replace(f"{name}_ns", lambda begin=begin: int((begin + self._read()) * 1e9))
        self._replace("sleep", self._sleep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, real in self._real.items():
            setattr(time, name, real)
        self._real.clear()

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        self._real[name] = getattr(time, name)
        setattr(time, name, function)

    def _read(self) -> float:
        self.now += _CALL
        return self.now

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
