"""What the guard costs a decode step of SGLang: rounds without it and with it take turns in one process.

    python cost.py [TURNS]

Each round answers the same prompts; a step of it is one pass of SGLang's event loop with a replay. The tape
is slower than a GPU, so the microseconds of the guard matter more than their share of a step.

Does not: measure a GPU.
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["GRAPHPACT"] = "tape,guard"
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from graphpact_sglang import stand_ins

sys.path.append(str(Path(__file__).parents[3]))  # what tests of all engines share
stand_ins.install()

from engines import ENGINE, requests  # noqa: E402  after the stand-ins

from graphpact_guard import Guard  # noqa: E402
from graphpact_sglang.hooks import InProcess, state  # noqa: E402
from graphpact_sglang.in_process import InProcessEngine  # noqa: E402

WAYS: dict[str, dict[str, int] | None] = {
    "no guard": None,
    "pact": {"contents": 0, "verify": 0},
    "pact, contents:64": {"contents": 64, "verify": 0},
    "pact, contents:64, verify:64": {"contents": 64, "verify": 64},
    "pact, contents:1": {"contents": 1, "verify": 0},
    "pact, verify:1": {"contents": 0, "verify": 1},
}


def main(turns: int) -> None:
    """Print the microseconds of a step for each way, and its difference from none."""
    engine = InProcessEngine(**ENGINE)
    given = requests(max_new_tokens=100, every=0)
    hooks = InProcess.guard
    assert hooks is not None
    guard = hooks.guard
    assert guard is not None

    def round_with(settings: dict[str, int] | None) -> float:
        """Return the microseconds of a step."""
        hooks.guard = None if settings is None else guard
        if settings is not None:
            guard.settings = dataclasses.replace(guard.settings, **settings)
        before = _replays()
        begin = time.perf_counter()
        engine.run(given)
        return (time.perf_counter() - begin) * 1e6 / (_replays() - before)

    taken = _take_turns({name: lambda its=its: round_with(its) for name, its in WAYS.items()}, turns)
    alone = _microseconds_of_a_check(guard)
    sys.stdout.write(f"{'':32}{'us a step':>12}{'less none':>12}\n")
    for name, times in taken.items():
        gaps = [a - b for a, b in zip(times, taken["no guard"], strict=True)]
        sys.stdout.write(f"{name:32}{statistics.median(times):12,.0f}{statistics.median(gaps):12,.0f}\n")
    sys.stdout.write(f"the pact alone, one replay of a decode graph: {alone:.1f} us\n")


def _take_turns(ways: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, run in ways.items():
            took = run()
            if turn:  # the first turn is a warm-up
                taken[name].append(took)
    return taken


def _replays() -> int:
    graphs = state()["steps"]["graphs"].items()
    return sum(counts["replays"] for name, counts in graphs if name.startswith("DecodeCudaGraphRunner"))


def _microseconds_of_a_check(guard: Guard) -> float:
    """Return the time of one check of the largest decode graph."""
    key = next(key for key in guard.records if key.runner == "DecodeCudaGraphRunner")
    record, calls = guard.records[key], 2000
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(calls):
            list(record.faults({}, {}))
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    return statistics.median(times)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
