"""What measurements of the guard's cost in an engine share: the settings, their turns, and the pact alone.

Does not: start an engine, or take the guard out of it.
"""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from graphpact_guard import GraphRecord

Taken = TypeVar("Taken")

WAYS: dict[str, dict[str, int] | None] = {
    "no guard": None,
    "pact": {"contents": 0, "verify": 0},
    "pact, contents:64": {"contents": 64, "verify": 0},
    "pact, contents:64, verify:64": {"contents": 64, "verify": 64},
    "pact, contents:1": {"contents": 1, "verify": 0},
    "pact, verify:1": {"contents": 0, "verify": 1},
}
"""Settings of the guard by name; None for no guard."""


def take_turns(run_with: Callable[[dict[str, int] | None], Taken], turns: int) -> dict[str, list[Taken]]:
    """Return what ``run_with`` took with each of `WAYS`, in turns; a first turn warms up and is left out."""
    taken: dict[str, list[Taken]] = {name: [] for name in WAYS}
    for turn in range(turns + 1):
        for name, settings in WAYS.items():
            took = run_with(settings)
            if turn:
                taken[name].append(took)
    return taken


def microseconds_of_a_check(record: GraphRecord) -> float:
    """Return the median time of one check of a graph."""
    times, calls = [], 2000
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(calls):
            list(record.faults({}, {}))
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    return statistics.median(times)
