"""What a decode step takes through captured graphs, against eager runs and transformers' ``generate``.

    python benchmarks/bench_graphs.py [--quick] [--threads N]

A Llama of 4 layers, 128 wide, with random weights over bytes, is saved and then loaded by every way from
its files. All ways write the same greedy tokens after the same prompts, which is checked in every round;
they take turns in one process, and the median over all decode steps counts. A step is everything from one
token to the next: scheduling, the forward pass, the choice of the token.

Then the parts of a step of 7 requests in a bucket of 8: what the host does before a replay, what the pact
costs, and the replay by itself. What costs microseconds is measured around graphs that do nothing, since a
replay varies by more.

Does not: run on a GPU, or measure prefill.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before transformers is imported

import torch
import transformers

from graphpact import ForwardBatch, GraphShape, Lane, StepOutputs
from graphpact.cli.console import data, print_table
from graphpact.graphs import Graph
from graphpact.plugins import PluginCatalog
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 256
BATCH_SIZES = (1, 8, 32)
LIVE, BUCKET = 7, 8

STEPS = ("batch", "way", "step ms", "tokens/s", "x eager", "x generate")
PARTS = ("part of a step", "us", "of tape's replay", "of cpu_graph's replay")
GRAPHS = ("way", "shape", "nodes", "memory KiB", "capture ms")

PACT = ("off", "sampled", "always")
REPLAYED = ("tape", "cpu_graph")
FILL, HOST = "registry fill", "Lane.replay without the graph"
IN_GRAPH, BEFORE = "metadata hook, work in the graph", "metadata hook, work before the graph"
SCHEDULE, SAMPLE = "outside the lane: schedule", "outside the lane: sample"

Tokens = list[list[int]]


class Scale(NamedTuple):
    """How much is measured."""

    layers: int
    prompt: int
    """Tokens of each prompt."""
    new: int
    """Tokens that are written after it, the first of them by the prefill."""
    rounds: int
    compiled: tuple[int, ...]
    """Batch sizes that are compiled."""
    calls: int
    """Calls of a part that are timed together."""
    turns: int
    """How often that is done."""


FULL = Scale(layers=4, prompt=32, new=65, rounds=9, compiled=BATCH_SIZES, calls=100, turns=101)
QUICK = Scale(layers=1, prompt=4, new=5, rounds=1, compiled=(1,), calls=3, turns=3)


def save_model(path: Path, layers: int) -> None:
    """Write the checkpoint: random weights, wide enough that no two logits come near each other."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)


# -- the ways --------------------------------------------------------------------------------------


class Way(ABC):
    """One way to continue prompts greedily."""

    def __init__(self, name: str, sizes: Sequence[int], rounds: int) -> None:
        self.name = name
        self.sizes = tuple(sizes)
        self.rounds = rounds

    @abstractmethod
    def write(self, prompts: Tokens, count: int) -> tuple[Tokens, list[float]]:
        """Return ``count`` tokens after each prompt, and the seconds of each decode step."""


class EngineWay(Way):
    """graphpact's engine, by its configuration."""

    def __init__(
        self, name: str, path: Path, sizes: Sequence[int], rounds: int, *overrides: str
    ) -> None:
        super().__init__(name, sizes, rounds)
        self.engine = make_engine(path, max(sizes), *overrides)

    def write(self, prompts: Tokens, count: int) -> tuple[Tokens, list[float]]:
        """Step the engine until all are done; the first step is the prefill."""
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        requests = [self.engine.add(prompt, sampling) for prompt in prompts]
        times = [time.perf_counter()]
        while self.engine.scheduler.has_work:
            if len(self.engine.step()) != len(prompts):
                raise SystemExit(f"{self.name}: a step left a request out")
            times.append(time.perf_counter())
        return [request.output_token_ids for request in requests], _differences(times[1:])


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]  # transformers' types are partial
    """Notes when each token is there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersWay(Way):
    """``generate`` of transformers as it comes: its own attention and cache."""

    def __init__(self, path: Path, rounds: int) -> None:
        super().__init__("generate", BATCH_SIZES, rounds)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def write(self, prompts: Tokens, count: int) -> tuple[Tokens, list[float]]:
        """Generate; the steps end when the stopping criteria are asked."""
        clock, ids = _Clock(), torch.tensor(prompts)
        written = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            stopping_criteria=[clock],
        )
        return written[:, ids.shape[1] :].tolist(), _differences(clock.times)


def _differences(times: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(times)]


def make_engine(path: Path, largest: int, *overrides: str) -> Engine:
    """Return an engine for steps of up to ``largest`` requests."""
    return Engine(
        EngineConfig.load(
            None,
            env={},
            overrides=[
                f"model.path='{path}'",
                'engine.device="cpu"',
                f"engine.max_num_seqs={largest}",
                "engine.max_num_batched_tokens=4096",
                *overrides,
            ],
        )
    )


def make_ways(path: Path, scale: Scale, compiled: Sequence[int]) -> list[Way]:
    """Return every way; of cpu_graph's batch sizes there may be few, or none."""
    rounds, buckets = scale.rounds, f"lanes.decode.batch_sizes={list(BATCH_SIZES)}"
    tape = 'lanes.decode.runner="cuda_graph"', buckets
    ways: list[Way] = [
        EngineWay("eager", path, BATCH_SIZES, rounds, 'lanes.decode.runner="eager"'),
        EngineWay("tape", path, BATCH_SIZES, rounds, *tape),
        EngineWay("tape, strict", path, BATCH_SIZES, 1, *tape, "lanes.decode.strict=true"),
    ]
    if compiled:
        buckets = f"lanes.decode.batch_sizes={list(compiled)}"
        runner = 'lanes.decode.runner="cpu_graph"'
        ways.append(EngineWay("cpu_graph", path, compiled, rounds, runner, buckets))
    return [*ways, TransformersWay(path, rounds)]


# -- whole steps -----------------------------------------------------------------------------------


def measure_steps(ways: Sequence[Way], scale: Scale) -> list[tuple[object, ...]]:
    """Return the rows of the table.

    Raises:
        SystemExit: Two ways write different tokens.
    """
    rows: list[tuple[object, ...]] = []
    for size in BATCH_SIZES:
        generator = torch.Generator().manual_seed(size)
        prompts = torch.randint(VOCAB, (size, scale.prompt), generator=generator).tolist()
        here = [way for way in ways if size in way.sizes]
        expected, _ = here[0].write(prompts, scale.new)
        for way in here[1:]:  # the check, and the warm-up
            require_equal(expected, way.write(prompts, scale.new)[0], here[0], way)
        seconds: dict[str, list[float]] = {way.name: [] for way in here}
        for turn in range(scale.rounds):
            for way in here:
                if turn < way.rounds:
                    written, times = way.write(prompts, scale.new)
                    require_equal(expected, written, here[0], way)
                    seconds[way.name] += times
        median = {name: statistics.median(times) for name, times in seconds.items()}
        for way in ways:
            taken = median.get(way.name)
            if taken is None:
                rows.append((size, way.name, *"----"))
                continue
            faster = [f"{median[other] / taken:.2f}" for other in ("eager", "generate")]
            rows.append((size, way.name, f"{taken * 1e3:.3f}", f"{size / taken:.0f}", *faster))
    return rows


def require_equal(expected: Tokens, written: Tokens, reference: Way, way: Way) -> None:
    """Refuse to compare the times of ways that do not do the same.

    Raises:
        SystemExit: A row differs; the message has both.
    """
    for row, (theirs, ours) in enumerate(zip(expected, written, strict=True)):
        if theirs != ours:
            raise SystemExit(
                f"batch {len(expected)}, row {row}: {way.name!r} writes {ours}, {reference.name!r}"
                f" writes {theirs}"
            )


def describe_graphs(ways: Sequence[Way]) -> list[tuple[object, ...]]:
    """Return a row for each captured shape, in the order of capture."""
    rows: list[tuple[object, ...]] = []
    for way in ways:
        if not isinstance(way, EngineWay):
            continue
        lane = way.engine.lanes[0]
        for shape, captured in lane.captured.items():
            graph, seconds = captured.graph, captured.stats.capture_seconds
            size = f"{graph.pool_nbytes / 1024:.1f}"
            rows.append((way.name, shape, graph.num_nodes, size, f"{seconds * 1e3:.0f}"))
    return rows


# -- the parts of a step ---------------------------------------------------------------------------


class BareStep:
    """One decode step of `LIVE` requests in a bucket of `BUCKET`, which can be done again and again.

    Doing it again writes the same keys and values to the same slots, and nothing is committed.
    """

    def __init__(self, path: Path, scale: Scale, *overrides: str) -> None:
        bucket = f"lanes.decode.batch_sizes=[{BUCKET}]"
        self.engine = make_engine(path, BUCKET, bucket, *overrides)
        generator = torch.Generator().manual_seed(0)
        sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
        for prompt in torch.randint(VOCAB, (LIVE, scale.prompt), generator=generator).tolist():
            self.engine.add(prompt, sampling)
        for _ in range(2):
            self.engine.step()
        scheduled = self.engine.scheduler.schedule()
        if scheduled is None or not scheduled.batch.forward_mode.is_decode:
            raise SystemExit(f"the third step of {LIVE} new requests is no decode")
        self.requests, self.batch = scheduled.requests, scheduled.batch
        self.lane: Lane = self.engine.lanes[0]
        ((self.shape, self.captured),) = self.lane.captured.items()
        self.graph = self.captured.graph
        self.logits = self.replay().logits

    def replay(self) -> StepOutputs:
        """Do all that the lane does for the step."""
        return self.lane.run(self.batch)

    def refresh(self) -> None:
        """Call the backend's hook for the metadata."""
        step = self.captured.step
        self.lane.backend.init_metadata_replay(step.view, self.shape, step.metadata)

    def fill(self) -> None:
        """Call the runner's hook that fills the registry."""
        if self.lane.registry is not None:
            self.lane.runner.populate(self.lane.registry, self.batch, self.shape)

    def spell_out(self) -> Callable[[ForwardBatch], StepOutputs]:
        """Return what `Lane.run` does for a replay, written without a word of pacts."""
        lane, graph, captured = self.lane, self.graph, self.captured
        populate, prepare = lane.runner.populate, lane.runner.prepare_replay
        refresh, registry = lane.backend.init_metadata_replay, lane.registry
        limit = lane.backend.context.limits.max_context_len
        if registry is None:
            raise SystemExit("the lane has no graphs")

        @torch.inference_mode()
        def replay(batch: ForwardBatch) -> StepOutputs:
            batch.require_consistent()
            if max(batch.seq_lens_cpu.tolist()) > limit:
                raise SystemExit("a sequence is too long")
            shape = lane.fit(batch)
            if not isinstance(shape, GraphShape) or batch.kind not in captured.admitted:
                raise SystemExit("the step is no replay")
            populate(registry, batch, shape)
            view = prepare(registry, batch, shape)
            captured.step.live = batch
            captured.step.metadata = refresh(view, shape, captured.step.metadata)
            graph.replay()
            stats = captured.stats
            stats.replays += 1
            stats.raw_rows += batch.batch_size
            stats.raw_tokens += batch.num_tokens
            outputs: StepOutputs = graph.outputs
            return outputs.rows(batch.batch_size, batch.num_tokens)

        return replay


@torch.inference_mode()
def measure_parts(path: Path, scale: Scale, *, compiled: bool) -> list[tuple[object, ...]]:
    """Return the rows of the table."""
    tape = 'lanes.decode.runner="cuda_graph"'
    steps = {mode: BareStep(path, scale, tape, f'verify.pact="{mode}"') for mode in PACT}
    off = steps["off"]
    before = BareStep(path, scale, tape, "lanes.decode.metadata_in_graph=false")
    runs = {"tape": off}
    if compiled:
        runs["cpu_graph"] = BareStep(path, scale, 'lanes.decode.runner="cpu_graph"')
    whole = take_turns({name: step.graph.replay for name, step in runs.items()}, scale, calls=1)
    bare = {name: statistics.median(times) for name, times in whole.items()}

    sampler, bare_replay = Sampler(), off.spell_out()
    with doing_nothing([step.graph for step in steps.values()]):
        taken = take_turns(
            {
                FILL: off.fill,
                IN_GRAPH: off.refresh,
                "no pact": lambda: bare_replay(off.batch),
                **{mode: step.replay for mode, step in steps.items()},
                BEFORE: before.refresh,
                SCHEDULE: off.engine.scheduler.schedule,
                SAMPLE: lambda: sampler.sample(off.logits, off.requests),
            },
            scale,
            calls=scale.calls,
        )
    parts = {name: statistics.median(taken[name]) for name in (FILL, IN_GRAPH, BEFORE)}
    for mode in PACT:
        pairs = zip(taken[mode], taken["no pact"], strict=True)
        parts[f"pact check, {mode}"] = statistics.median(a - b for a, b in pairs)
    for mode in PACT:
        parts[f"{HOST}, pact {mode}"] = statistics.median(taken[mode])
    parts |= {name: statistics.median(taken[name]) for name in (SCHEDULE, SAMPLE)}

    def share(part: float) -> list[str]:
        return [f"{part / bare[way]:.1%}" if way in bare else "-" for way in REPLAYED]

    rows: list[tuple[object, ...]] = [
        (name, f"{part:.1f}", *share(part)) for name, part in parts.items()
    ]
    rows += [
        (f"{way} replay by itself", f"{bare[way]:.0f}" if way in bare else "-", "", "")
        for way in REPLAYED
    ]
    return rows


@contextlib.contextmanager
def doing_nothing(graphs: Sequence[Graph]) -> Iterator[None]:
    """Let the replays of ``graphs`` do nothing for a while."""
    before = [graph.replay for graph in graphs]
    for graph in graphs:
        graph.replay = _nothing  # type: ignore[method-assign]  # for the while
    try:
        yield
    finally:
        for graph, replay in zip(graphs, before, strict=True):
            graph.replay = replay  # type: ignore[method-assign]  # as it was


def _nothing() -> None:
    pass


def take_turns(
    parts: Mapping[str, Callable[[], object]], scale: Scale, *, calls: int
) -> dict[str, list[float]]:
    """Return the microseconds of one call of each, once a turn; a turn is ``calls`` calls."""
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(scale.turns):
        for name, part in parts.items():
            start = time.perf_counter()
            for _ in range(calls):
                part()
            taken[name].append((time.perf_counter() - start) / calls * 1e6)
    return taken


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one layer, one round: a look")
    parser.add_argument("--threads", type=int, help="torch's threads; its own choice by default")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = QUICK if options.quick else FULL
    no_compiler = PluginCatalog.scan().select("graph_driver", "inductor").unavailable(CPU)
    compiled = () if no_compiler else scale.compiled
    console = data()
    console.print(
        f"{scale.layers} layers, CPU, {torch.get_num_threads()} threads, torch {torch.__version__},"
        f" transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_model(path, scale.layers)
        ways = make_ways(path, scale, compiled)
        rows = measure_steps(ways, scale)
        parts = measure_parts(path, scale, compiled=BUCKET in compiled)
    console.print(
        f"all ways write the same tokens: {scale.new} after each prompt of {scale.prompt}\n"
    )
    print_table(console, STEPS, rows, numbers=(STEPS[0], *STEPS[2:]))
    if no_compiler:
        console.print(f"cpu_graph is left out: {no_compiler}")
    console.print("aim for batch 8: at least 2 x generate\n")
    print_table(console, PARTS, parts, numbers=PARTS[1:])
    console.print("aims: the pact at most 20 us; host work at most 5% of the replay\n")
    print_table(console, GRAPHS, describe_graphs(ways), numbers=GRAPHS[2:])


if __name__ == "__main__":
    main()
