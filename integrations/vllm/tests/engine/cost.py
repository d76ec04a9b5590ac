"""What the guard costs in vLLM's own throughput benchmark: runs with and without it take turns in a process.

    python cost.py [TURNS]

Requests and the clock are those of ``vllm bench throughput``, on the tape, with random tokens and the model
runner that ``VLLM_USE_V2_MODEL_RUNNER`` names. The tape is slower than a GPU, so the microseconds of the
guard matter more than their share of a step.

Does not: measure a GPU, or what it costs to note what builders make, which is done on the tape in any case.
"""

import dataclasses
import os
import pkgutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["GRAPHPACT"] = "tape,guard"
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

sys.path.append(str(Path(__file__).parents[3]))  # what tests of all engines share

from engines import ENGINE
from guard_cost import microseconds_of_a_check, take_turns
from vllm import LLM
from vllm.benchmarks import throughput
from vllm.utils.argparse_utils import FlexibleArgumentParser

from graphpact_vllm.hooks import InProcess, state
from graphpact_vllm.seams.graphs import BREAKABLE, MODEL_REPLAY, REPLAY, WRAPPER

LOAD = {"random-input-len": "32", "random-output-len": "64", "num-prompts": "8"}


def main(turns: int) -> None:
    """Print tokens a second, microseconds of a replayed step, and the difference from none for each way."""
    parser = FlexibleArgumentParser()
    throughput.add_cli_args(parser)
    load = [word for key, value in LOAD.items() for word in (f"--{key}", value)]
    args = parser.parse_args(["--model", ENGINE["model"], "--dataset-name", "random", *load])
    throughput.validate_args(args)
    llm = LLM(**ENGINE)
    requests = throughput.get_requests(args, llm.get_tokenizer())
    guard = InProcess.guard.guard
    hooked = [*_hooked()]

    def run_with(settings: dict[str, int] | None) -> tuple[float, float]:
        """Return the seconds of a run, and the microseconds for each replay in it."""
        for owner, name, function in hooked:
            setattr(owner, name, function.__wrapped__ if settings is None else function)
        if settings is not None:
            guard.settings = dataclasses.replace(guard.settings, **settings)
        before = _replays()
        seconds, _ = throughput._run_vllm_requests(llm, requests, 1, True, False, False, False)  # noqa: FBT003  vLLM's own
        return seconds, seconds * 1e6 / (_replays() - before)

    taken = take_turns(run_with, turns)
    tokens = sum(request.expected_output_len for request in requests)
    _print(taken, tokens)
    alone = microseconds_of_a_check(next(iter(guard.records.values())))
    sys.stdout.write(f"the pact alone, one replay: {alone:.1f} us\n")
    if faults := guard.summary()["faults"]:
        sys.exit(f"the guard reported {faults}")


def _hooked() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and function of the methods around replays, which the guard wraps last."""
    for target in (REPLAY, MODEL_REPLAY, WRAPPER, BREAKABLE):
        parent, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(parent)
        yield owner, name, getattr(owner, name)


def _print(taken: dict[str, list[tuple[float, float]]], tokens: int) -> None:
    sys.stdout.write(f"{'':32}{'tokens/s':>12}{'us a step':>12}{'less none':>12}\n")
    none = [step for _, step in taken["no guard"]]
    for name, times in taken.items():
        rate = tokens / statistics.median(seconds for seconds, _ in times)
        steps = [step for _, step in times]
        gap = statistics.median(a - b for a, b in zip(steps, none, strict=True))
        sys.stdout.write(f"{name:32}{rate:12,.0f}{statistics.median(steps):12,.0f}{gap:12,.0f}\n")


def _replays() -> int:
    return sum(counts["replays"] for counts in state()["steps"]["graphs"].values())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
