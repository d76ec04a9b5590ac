"""Virtual time: the same in each run, and not that of the machine."""

import itertools
import time
from collections.abc import Callable

import pytest

from graphpact_swarm.runs.clock import VirtualClock

NAMES = [f"{name}{suffix}" for name in ("time", "monotonic", "perf_counter") for suffix in ("", "_ns")]


def course() -> list[float]:
    """Return what a run reads."""
    read: list[float] = []
    with VirtualClock() as clock:
        for _ in range(3):
            clock.tick()
            read += [getattr(time, name)() for name in NAMES]
            time.sleep(0.5)
    return read


def test_two_runs_read_the_same_times() -> None:
    """Whatever the machine does, a run reads the same numbers."""
    assert course() == course()


@pytest.mark.parametrize("name", NAMES)
def test_time_advances_with_each_call(name: str) -> None:
    """No two times are the same, so a loop that waits for a time ends."""
    with VirtualClock():
        read: Callable[[], float] = getattr(time, name)
        times = [read() for _ in range(1000)]
    assert all(a < b for a, b in itertools.pairwise(times))


def test_passes_and_sleeps_advance_it() -> None:
    """A sleep takes virtual time only, and a pass a hundredth of a second."""
    begun = time.perf_counter()
    with VirtualClock() as clock:
        before = time.monotonic()
        time.sleep(1000)
        assert time.monotonic() - before == pytest.approx(1000, abs=1e-4)
        before = time.time()
        clock.tick()
        assert time.time() - before == pytest.approx(0.01, abs=1e-4)
    assert time.perf_counter() - begun < 100


def test_the_real_clock_comes_back() -> None:
    """After the run the module is as before, also if the run raised."""
    real = {name: getattr(time, name) for name in [*NAMES, "sleep"]}

    def run() -> None:
        with VirtualClock():
            assert all(getattr(time, name) is not real[name] for name in real)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert {name: getattr(time, name) for name in real} == real
