"""The latency of a mixed load: long prompts arrive while other requests decode.

The model is the ``tiny-llama`` of the repository's examples. Some requests decode from begin to end. Each
time that they have a number of tokens more, a long prompt arrives. So every way of scheduling serves the same
load, on any machine:

    whole prompts       each prompt is one step; prefill and decode steps take turns
    chunks              a prompt is computed in chunks; prefill and decode steps take turns
    chunks, mixed       the same chunks, and every running request decodes in each of their steps

Reported are the time to first token of the long prompts, from their arrival, and the time between tokens of
the requests that decode, from the first arrival to the first token of the last prompt.

Does not: run on a GPU, or look for the best chunk.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from graphpact_bench.examples import examples_folder
from graphpact_bench.options import BenchOptions
from graphpact_bench.report import Chart, Column, Table
from graphpact_bench.timing import Agreement, Tokens
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.request import Request

WHOLE, CHUNKS, MIXED = "whole prompts", "chunks", "chunks, mixed"
WAYS = (WHOLE, CHUNKS, MIXED)
FIRST, BETWEEN, LOAD = "first token", "between tokens", "the whole load"


class LoadScale(NamedTuple):
    """The size of the measurement.

    Args:
        decoding: Requests that decode from begin to end.
        arrivals: Long prompts.
        prompt: Tokens of a long prompt.
        every: Tokens of a decoding request from one arrival to the next.
        new: Tokens generated after each long prompt.
        rounds: Timed rounds.
    """

    decoding: int
    arrivals: int
    prompt: int
    every: int
    new: int
    rounds: int


FULL = LoadScale(decoding=4, arrivals=8, prompt=768, every=16, new=8, rounds=9)
QUICK = LoadScale(decoding=2, arrivals=2, prompt=40, every=4, new=2, rounds=1)


class LoadRound(NamedTuple):
    """What one way needed for the load.

    Args:
        first: Seconds from the arrival of each long prompt to its first token.
        between: Seconds between the tokens of the requests that decode.
        load: Seconds of the whole load.
        tokens: The tokens of every request.
    """

    first: list[float]
    between: list[float]
    load: float
    tokens: Tokens


class SchedulingWay:
    """An engine with one way of scheduling.

    Args:
        name: One of `WAYS`.
        scale: The size of the measurement.
        chunk: Prompt tokens of a chunk.
        runner: The runner of the prefill lane.
    """

    def __init__(self, name: str, scale: LoadScale, chunk: int, runner: str) -> None:
        self.name = name
        options = [
            f"model.path='{examples_folder() / 'models/tiny-llama'}'",
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

    def serve(self, scale: LoadScale) -> LoadRound:
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
        return LoadRound(
            first=[each[1] - each[0] for each in of_prompts],
            between=[after - before for before, after in gaps if before <= end and after >= begin],
            load=now - start,
            tokens=[request.output_token_ids for request in (*decoding, *prompts)],
        )


def take_rounds(ways: Sequence[SchedulingWay], scale: LoadScale) -> list[list[LoadRound]]:
    """Return the rounds of every way, without the first, which is the check and the warm-up.

    Raises:
        DifferentTokensError: Two ways generate different tokens.
    """
    rounds: list[list[LoadRound]] = [[] for _ in ways]
    agreement: Agreement | None = None
    for _ in range(scale.rounds + 1):
        for way, its_rounds in zip(ways, rounds, strict=True):
            its_rounds.append(way.serve(scale))
            agreement = agreement or Agreement([], its_rounds[-1].tokens, way.name)
            agreement.require(way.name, its_rounds[-1].tokens)
    return [each[1:] for each in rounds]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 95th percentile and the largest of the values."""
    return statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[-1], max(values)


def add_rows(table: Table, ways: Sequence[SchedulingWay], rounds: Sequence[Sequence[LoadRound]]) -> None:
    """Add the rows of the table; the first way is the one that the others are divided by."""
    keys = ("median", "p95", "max")
    for name in (FIRST, BETWEEN):
        found = [
            [spread(one.first if name == FIRST else one.between) for one in its_rounds]
            for its_rounds in rounds
        ]
        medians = [[statistics.median(column) for column in zip(*each, strict=True)] for each in found]
        for way, numbers in zip(ways, medians, strict=True):
            factors = [number / whole for number, whole in zip(numbers, medians[0], strict=True)]
            table.add(
                time=name,
                way=way.name,
                **{f"{key}_ms": number * 1e3 for key, number in zip(keys, numbers, strict=True)},
                **{f"x_{key}": factor for key, factor in zip(keys, factors, strict=True)},
            )
    loads = [statistics.median(one.load for one in its_rounds) for its_rounds in rounds]
    for way, load in zip(ways, loads, strict=True):
        none = {"p95_ms": None, "max_ms": None, "x_p95": None, "x_max": None}
        table.add(time=LOAD, way=way.name, median_ms=load * 1e3, x_median=load / loads[0], **none)


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the table of every way to schedule."""
    scale = QUICK if options.quick else FULL
    chunk = options.chunk or scale.prompt // 6
    forms = {"median": "median", "p95": "95%", "max": "max"}
    table = Table(
        name="mixed-load",
        title=f"tiny-llama, {options.setting}, prefill runner {options.prefill_runner}: {scale.decoding}"
        f" requests decode; {scale.arrivals} prompts of {scale.prompt} tokens arrive, one every {scale.every}"
        f" tokens; chunks of {chunk}; medians of {scale.rounds} round(s)",
        columns=[
            Column(key="time", heading="time"),
            Column(key="way", heading="way"),
            *(Column(key=f"{key}_ms", heading=f"{text} ms", format=".1f") for key, text in forms.items()),
            *(Column(key=f"x_{key}", heading=f"x {text}", format=".2f") for key, text in forms.items()),
        ],
        notes=["all ways generate the same tokens; x: a factor of time"],
        chart=Chart(value="median_ms", label=["time", "way"]),
    )
    options.say("mixed-load: building engines")
    ways = [SchedulingWay(name, scale, chunk, options.prefill_runner) for name in WAYS]
    options.say("mixed-load: measuring")
    add_rows(table, ways, take_rounds(ways, scale))
    yield table
