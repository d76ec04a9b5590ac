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
from pathlib import Path

os.environ["GRAPHPACT"] = "tape,guard"
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from graphpact_sglang import stand_ins

sys.path.append(str(Path(__file__).parents[3]))  # what tests of all engines share
stand_ins.install()

from engines import ENGINE, requests  # noqa: E402  after the stand-ins
from guard_cost import microseconds_of_a_check, take_turns  # noqa: E402

from graphpact_sglang.hooks import InProcess, state  # noqa: E402
from graphpact_sglang.load.in_process import InProcessEngine  # noqa: E402


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

    taken = take_turns(round_with, turns)
    decode = next(key for key in guard.records if key.runner == "DecodeCudaGraphRunner")
    alone = microseconds_of_a_check(guard.records[decode])
    sys.stdout.write(f"{'':32}{'us a step':>12}{'less none':>12}\n")
    for name, times in taken.items():
        gaps = [a - b for a, b in zip(times, taken["no guard"], strict=True)]
        sys.stdout.write(f"{name:32}{statistics.median(times):12,.0f}{statistics.median(gaps):12,.0f}\n")
    sys.stdout.write(f"the pact alone, one replay of a decode graph: {alone:.1f} us\n")


def _replays() -> int:
    graphs = state()["steps"]["graphs"].items()
    return sum(counts["replays"] for name, counts in graphs if name.startswith("DecodeCudaGraphRunner"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
