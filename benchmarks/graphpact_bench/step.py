"""The parts of a decode step of 7 requests at capture size 8: host work, pact check, replay, sampling.

Does not: measure whole steps; see `graphpact_bench.decode`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from graphpact.errors import EngineError
from graphpact.plugins import PluginCatalog
from graphpact_bench.models import BYTES, ModelShape, random_prompts
from graphpact_bench.options import BenchOptions, saved_model
from graphpact_bench.repeated_step import LIVE, SIZE, MetadataByHook, RepeatedStep, doing_nothing
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.timing import Spread, UnavailableWayError, take_turns
from graphpact_bench.ways.engines import require_driver
from graphpact_engine.sampler import Sampler

PACT = ("off", "sampled", "always")
FILL, HOST = "registry fill", "Lane.run without the graph"
IN_GRAPH, BEFORE = "metadata hook, work in the graph", "metadata hook, work before the graph"
SCHEDULE, SAMPLE = "outside the lane: schedule", "outside the lane: sample"
AROUND = "outside the lane: schedule and sample"
TAPE, COMPILED = "tape", "cpu_graph"
CUDA = "cuda"


class StepScale(NamedTuple):
    """The size of the measurement.

    Args:
        shape: The model.
        prompt: Tokens of each prompt.
        calls: Calls of a part in a turn.
        turns: Timings of each part.
    """

    shape: ModelShape
    prompt: int
    calls: int
    turns: int


FULL = StepScale(BYTES, prompt=32, calls=100, turns=101)
QUICK = StepScale(
    ModelShape(width=64, layers=1, heads=2, kv_heads=2, intermediate=96), prompt=4, calls=3, turns=3
)


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield a table for each shape of a model."""
    scale = QUICK if options.quick else FULL
    for shape in options.shapes or (scale.shape,):
        with saved_model(shape, max_position_embeddings=128) as path:
            yield measure_parts(path, options, scale._replace(shape=shape))


@torch.inference_mode()
def measure_parts(path: Path, options: BenchOptions, scale: StepScale) -> Table:
    """Return the table of one model."""
    graphs, skipped = graphs_of(options)
    with ExitStack() as stack:
        prompts = random_prompts(LIVE, scale.prompt, scale.shape.vocab)

        def make(*overrides: str, catalog: PluginCatalog | None = None) -> RepeatedStep:
            step = RepeatedStep(path, prompts, options, *overrides, catalog=catalog)
            stack.callback(step.engine.close)
            return step

        options.say("step: capturing")
        main = graphs[TAPE if TAPE in graphs else CUDA]
        modes = {mode: make(*main, f'verify.pact="{mode}"') for mode in PACT}
        off, before = modes["off"], make(*main, catalog=MetadataByHook.scan())
        runs = {TAPE if TAPE in graphs else CUDA: off}
        if COMPILED in graphs:
            runs[COMPILED] = make(*graphs[COMPILED])
        options.say("step: measuring")
        whole = take_turns(
            {name: _synchronized(step.graph.replay, options) for name, step in runs.items()},
            turns=scale.turns,
        )
        sampler = Sampler()
        with doing_nothing([step.graph for step in (*modes.values(), before)]):
            taken = take_turns(
                {
                    FILL: off.fill,
                    IN_GRAPH: off.refresh,
                    **{mode: step.replay for mode, step in modes.items()},
                    BEFORE: before.refresh,
                    SCHEDULE: off.engine.scheduler.schedule,
                    SAMPLE: lambda: sampler.sample(off.logits, off.requests),
                },
                turns=scale.turns,
                calls=scale.calls,
            )
    return step_table(options, scale, whole, taken, skipped)


def graphs_of(options: BenchOptions) -> tuple[dict[str, tuple[str, ...]], list[Skipped]]:
    """Return the configuration of the decode lane for each kind of graph, and why one is missing."""
    graphs: dict[str, tuple[str, ...]] = {}
    skipped = []
    kinds = {TAPE: ("cuda_graph", "tape"), COMPILED: ("cpu_graph", "inductor")}
    if options.device.type == "cuda":
        kinds = {CUDA: ("cuda_graph", "cuda")}
    for name, (runner, driver) in kinds.items():
        try:
            require_driver(driver, options.device)
        except UnavailableWayError as error:
            skipped.append(Skipped(what=name, reason=error.message))
            continue
        if name == COMPILED and options.quick and COMPILED not in options.ways:
            skipped.append(Skipped(what=name, reason="it compiles, and --quick does not; name it by --way"))
            continue
        graphs[name] = f'lanes.decode.runner="{runner}"', f'lanes.decode.graph_driver="{driver}"'
    if not graphs.keys() & {TAPE, CUDA}:
        raise EngineError(f"no graph can be recorded on {options.device}: {skipped[0].reason}")
    return graphs, skipped


def step_table(
    options: BenchOptions,
    scale: StepScale,
    whole: Mapping[str, list[float]],
    taken: Mapping[str, list[float]],
    skipped: list[Skipped],
) -> Table:
    """Return the table of what was timed.

    Args:
        options: The options of the run.
        scale: The size of the measurement.
        whole: Seconds of the replays, by kind of graph.
        taken: Seconds of the parts, by name.
        skipped: What is missing.
    """
    bare = {name: Spread.of(times) for name, times in whole.items()}
    parts = {name: Spread.of(taken[name]) for name in (FILL, IN_GRAPH, BEFORE)}
    for mode in PACT[1:]:
        parts[f"pact check, {mode}"] = Spread.of_differences(taken[mode], taken["off"])
    parts |= {f"{HOST}, pact {mode}": Spread.of(taken[mode]) for mode in PACT}
    parts |= {name: Spread.of(taken[name]) for name in (SCHEDULE, SAMPLE)}
    both = [schedule + sample for schedule, sample in zip(taken[SCHEDULE], taken[SAMPLE], strict=True)]
    parts[AROUND] = Spread.of(both)
    parts |= {f"{name} replay by itself": spread for name, spread in bare.items()}
    table = Table(
        name="step",
        title=f"parts of a decode step of {LIVE} requests at size {SIZE}, Llama {scale.shape},"
        f" {options.setting}: {scale.turns} turns",
        columns=[
            Column(key="part", heading="part of a step"),
            *spread_columns("us", "us", ".1f"),
            *(Column(key=f"of_{name}", heading=f"of {name}'s replay", format=".1%") for name in bare),
        ],
        skipped=skipped,
        notes=[
            "shares are those of the best; a pact check is the difference from the same lane without a pact",
            "aims: the pact at most 20 us; host work at most 5% of the replay, and 60 us",
        ],
        chart=Chart(value="us", label=["part"]),
    )
    for name, spread in parts.items():
        shares = {f"of_{graph}": spread.best / replay.best for graph, replay in bare.items()}
        table.add(part=name, **spread_values("us", spread.times(1e6)), **shares)
    return table


def _synchronized(replay: Callable[[], None], options: BenchOptions) -> Callable[[], None]:
    if options.device.type != "cuda":
        return replay

    def run() -> None:
        replay()
        torch.cuda.synchronize()

    return run
