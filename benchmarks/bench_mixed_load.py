"""Measure the latency of a mixed load: long prompts arrive while other requests decode.

    python benchmarks/bench_mixed_load.py [--quick] [--threads N] [--chunk N] [--prefill-runner NAME]

The model is the shipped ``tiny-llama``. Some requests decode from begin to end. Each time that they have a
number of tokens more, a long prompt arrives. So every way of scheduling serves the same load, on any machine:

    whole prompts       each prompt is one step; prefill and decode steps take turns
    chunks              a prompt is computed in chunks; prefill and decode steps take turns
    chunks, mixed       the same chunks, and every running request decodes in each of their steps

Reported are the time to first token of the long prompts, from their arrival, and the time between tokens of
the requests that decode, from the first arrival to the first token of the last prompt. The ways alternate in
one process. The first round is the warm-up and is not counted; each number is the median over the rounds.
Every way must generate the same greedy tokens, which every round checks.

Does not: run on a GPU, or look for the best chunk.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before transformers is imported

import torch
import transformers

from graphpact.cli.console import data, print_table
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.request import Request

MODEL = Path(__file__).parents[1] / "examples/models/tiny-llama"
WHOLE, CHUNKS, MIXED = "whole prompts", "chunks", "chunks, mixed"
WAYS = (WHOLE, CHUNKS, MIXED)
FIRST, BETWEEN, LOAD = "first token", "between tokens", "the whole load"
COLUMNS = ("time", "way", "median ms", "95% ms", "max ms", "x median", "x 95%", "x max")

Tokens = list[list[int]]


class Scale(NamedTuple):
    """The size of the measurement."""

    decoding: int
    """Requests that decode from begin to end."""
    arrivals: int
    """Long prompts."""
    prompt: int
    """Tokens of a long prompt."""
    every: int
    """Tokens of a decoding request from one arrival to the next."""
    new: int
    """Tokens generated after each long prompt."""
    rounds: int


FULL = Scale(decoding=4, arrivals=8, prompt=768, every=16, new=8, rounds=9)
QUICK = Scale(decoding=2, arrivals=2, prompt=40, every=4, new=2, rounds=1)


class Round(NamedTuple):
    """What one way needed for the load, in seconds, and its tokens."""

    first: list[float]
    between: list[float]
    load: float
    tokens: Tokens


class Way:
    """An engine with one way of scheduling.

    Args:
        name: One of `WAYS`.
        scale: The size of the measurement.
        chunk: Prompt tokens of a chunk.
        runner: The runner of the prefill lane.
    """

    def __init__(self, name: str, scale: Scale, chunk: int, runner: str) -> None:
        self.name = name
        options = [
            f"model.path='{MODEL}'",
            'engine.attention_backend="flashinfer"',
            'engine.device="cpu"',
            f"engine.max_num_seqs={2 * scale.decoding}",
            f"engine.max_num_batched_tokens={scale.prompt + 2 * scale.decoding}",
            f"engine.num_threads={torch.get_num_threads()}",
            f"engine.mixed={str(name == MIXED).lower()}",
            f"engine.max_prefill_chunk={scale.prompt if name == WHOLE else chunk}",
            f'lanes.prefill.runner="{runner}"',
        ]
        self.engine = Engine(EngineConfig.load(None, env={}, overrides=options))

    def serve(self, scale: Scale) -> Round:
        """Serve the load once."""
        engine, draw = self.engine, torch.Generator().manual_seed(0)

        def add(length: int, new: int) -> Request:
            prompt = torch.randint(256, (length,), generator=draw).tolist()
            return engine.add(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True))

        decoding = [add(8, scale.every * (scale.arrivals + 2)) for _ in range(scale.decoding)]
        prompts: list[Request] = []
        times: dict[str, list[float]] = {}  # of the arrival and of each token, by request
        start = time.perf_counter()
        while engine.scheduler.has_work:
            due = len(decoding[0].output_token_ids) >= scale.every * (len(prompts) + 1)
            if due and len(prompts) < scale.arrivals:
                prompts.append(add(scale.prompt, scale.new))
                times[prompts[-1].request_id] = [time.perf_counter()]
            tokened = engine.step()
            now = time.perf_counter()
            for request in tokened:
                times.setdefault(request.request_id, []).append(now)
        of_prompts = [times[request.request_id] for request in prompts]
        begin, end = of_prompts[0][0], of_prompts[-1][1]
        gaps = [gap for one in decoding for gap in itertools.pairwise(times[one.request_id])]
        return Round(
            first=[each[1] - each[0] for each in of_prompts],
            between=[after - before for before, after in gaps if before <= end and after >= begin],
            load=now - start,
            tokens=[request.output_token_ids for request in (*decoding, *prompts)],
        )


def measure(ways: Sequence[Way], scale: Scale) -> list[list[Round]]:
    """Return the rounds of every way, without the warm-up.

    Raises:
        SystemExit: Two ways generate different tokens.
    """
    rounds: list[list[Round]] = [[] for _ in ways]
    for _ in range(scale.rounds + 1):
        for way, its_rounds in zip(ways, rounds, strict=True):
            its_rounds.append(way.serve(scale))
            if its_rounds[-1].tokens != rounds[0][0].tokens:
                raise SystemExit(f"{way.name!r} and {ways[0].name!r} generate different tokens")
    return [each[1:] for each in rounds]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 95th percentile and the largest of the values."""
    return statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[-1], max(values)


def describe(ways: Sequence[Way], rounds: Sequence[Sequence[Round]]) -> list[tuple[object, ...]]:
    """Return the rows of the table; the first way is the one that the others are divided by."""
    rows: list[tuple[object, ...]] = []
    for name in (FIRST, BETWEEN):
        found = [
            [spread(one.first if name == FIRST else one.between) for one in its_rounds]
            for its_rounds in rounds
        ]
        medians = [[statistics.median(column) for column in zip(*each, strict=True)] for each in found]
        for way, numbers in zip(ways, medians, strict=True):
            factors = [number / whole for number, whole in zip(numbers, medians[0], strict=True)]
            rows.append(
                (name, way.name, *(f"{n * 1000:.1f}" for n in numbers), *(f"{x:.2f}" for x in factors))
            )
    loads = [statistics.median(one.load for one in its_rounds) for its_rounds in rounds]
    rows += [
        (LOAD, way.name, f"{load * 1000:.0f}", "", "", f"{load / loads[0]:.2f}", "", "")
        for way, load in zip(ways, loads, strict=True)
    ]
    return rows


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small load, one round: a smoke test")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads; default 1")
    parser.add_argument(
        "--chunk", type=int, default=None, help="prompt tokens of a chunk; default 1/6 prompt"
    )
    parser.add_argument("--prefill-runner", default="eager", help="runner of the prefill lane; default eager")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = QUICK if options.quick else FULL
    chunk = options.chunk or scale.prompt // 6
    console = data()
    console.print(
        f"tiny-llama, CPU, {torch.get_num_threads()} thread(s), torch {torch.__version__}, prefill runner"
        f" {options.prefill_runner}: {scale.decoding} requests decode; {scale.arrivals} prompts of"
        f" {scale.prompt} tokens arrive, one every {scale.every} tokens; chunks of {chunk}",
        soft_wrap=True,
    )
    ways = [Way(name, scale, chunk, options.prefill_runner) for name in WAYS]
    rows = describe(ways, measure(ways, scale))
    console.print("all ways generate the same tokens\n")
    print_table(console, COLUMNS, rows, numbers=COLUMNS[2:])


if __name__ == "__main__":
    main()
