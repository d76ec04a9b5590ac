"""Measure a decode step through captured graphs, against eager runs and transformers' ``generate``.

    python benchmarks/bench_graphs.py [--quick] [--threads N]

A Llama with 4 layers, hidden size 128 and random weights over bytes is saved, and every variant loads it from
the files. All variants must generate the same greedy tokens for the same prompts, which every round checks.
They alternate in one process; the median over all decode steps is reported. A step is everything from one
token to the next: scheduling, forward pass, sampling.

Then the parts of a step of 7 requests at capture size 8: host work before a replay, the pact check, and the
replay itself. Parts of a few microseconds are measured with graphs that do nothing, because the time of a
replay varies by more than that.

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
from random_llama import VOCAB, save_model

from graphpact import Lane, StepOutputs
from graphpact.cli.console import data, print_table
from graphpact.graphs import Graph
from graphpact.plugins import PluginCatalog
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.sampler import Sampler

CPU = torch.device("cpu")
BATCH_SIZES = (1, 8, 32)
LIVE, SIZE = 7, 8

STEPS = ("batch", "variant", "step ms", "tokens/s", "x eager", "x generate")
PARTS = ("part of a step", "us", "of tape's replay", "of cpu_graph's replay")
GRAPHS = ("variant", "shape", "nodes", "memory KiB", "capture ms")

PACT = ("off", "sampled", "always")
REPLAYED = ("tape", "cpu_graph")
FILL, HOST = "registry fill", "Lane.run without the graph"
IN_GRAPH, BEFORE = "metadata hook, work in the graph", "metadata hook, work before the graph"
SCHEDULE, SAMPLE = "outside the lane: schedule", "outside the lane: sample"

Tokens = list[list[int]]


class Scale(NamedTuple):
    """The size of the measurement."""

    layers: int
    prompt: int
    """Tokens of each prompt."""
    new: int
    """Tokens generated per prompt, the first of them by the prefill."""
    rounds: int
    compiled: tuple[int, ...]
    """Batch sizes for cpu_graph, which compiles each."""
    calls: int
    """Calls of a part per timing."""
    turns: int
    """Timings per part."""


FULL = Scale(layers=4, prompt=32, new=65, rounds=9, compiled=BATCH_SIZES, calls=100, turns=101)
QUICK = Scale(layers=1, prompt=4, new=5, rounds=1, compiled=(1,), calls=3, turns=3)


# -- the variants ----------------------------------------------------------------------------------


class Variant(ABC):
    """Base class of the variants: one way to continue prompts greedily."""

    def __init__(self, name: str, sizes: Sequence[int], rounds: int) -> None:
        self.name = name
        self.sizes = tuple(sizes)
        self.rounds = rounds

    @abstractmethod
    def write(self, prompts: Tokens, count: int) -> tuple[Tokens, list[float]]:
        """Generate ``count`` tokens per prompt; return them, and the seconds of each decode step."""


class EngineVariant(Variant):
    """The graphpact engine with a configuration."""

    def __init__(self, name: str, path: Path, sizes: Sequence[int], rounds: int, *overrides: str) -> None:
        super().__init__(name, sizes, rounds)
        self.engine = make_engine(path, max(sizes), *overrides)

    def write(self, prompts: Tokens, count: int) -> tuple[Tokens, list[float]]:
        """Step the engine until all requests finish; the first step is the prefill."""
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        requests = [self.engine.add(prompt, sampling) for prompt in prompts]
        times = [time.perf_counter()]
        while self.engine.scheduler.has_work:
            if len(self.engine.step()) != len(prompts):
                raise SystemExit(f"{self.name}: a step did not include every request")
            times.append(time.perf_counter())
        return [request.output_token_ids for request in requests], _differences(times[1:])


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]  # transformers' types are partial
    """A stopping criterion that records the time of each token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersVariant(Variant):
    """``generate`` of transformers with its default attention and cache."""

    def __init__(self, path: Path, rounds: int) -> None:
        super().__init__("generate", BATCH_SIZES, rounds)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def write(self, prompts: Tokens, count: int) -> tuple[Tokens, list[float]]:
        """Generate; a step ends when the stopping criteria are called."""
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
                f"engine.num_threads={torch.get_num_threads()}",  # as everything that it is compared with
                *overrides,
            ],
        )
    )


def make_variants(path: Path, scale: Scale, compiled: Sequence[int]) -> list[Variant]:
    """Return every variant; cpu_graph only for the batch sizes ``compiled``."""
    rounds, sizes = scale.rounds, f"lanes.decode.batch_sizes={list(BATCH_SIZES)}"
    tape = 'lanes.decode.runner="cuda_graph"', sizes
    variants: list[Variant] = [
        EngineVariant("eager", path, BATCH_SIZES, rounds, 'lanes.decode.runner="eager"'),
        EngineVariant("tape", path, BATCH_SIZES, rounds, *tape),
        EngineVariant("tape, strict", path, BATCH_SIZES, 1, *tape, "lanes.decode.strict=true"),
    ]
    if compiled:
        sizes = f"lanes.decode.batch_sizes={list(compiled)}"
        runner = 'lanes.decode.runner="cpu_graph"'
        variants.append(EngineVariant("cpu_graph", path, compiled, rounds, runner, sizes))
    return [*variants, TransformersVariant(path, rounds)]


# -- whole steps -----------------------------------------------------------------------------------


def measure_steps(variants: Sequence[Variant], scale: Scale) -> list[tuple[object, ...]]:
    """Return the rows of the table.

    Raises:
        SystemExit: Two variants generate different tokens.
    """
    rows: list[tuple[object, ...]] = []
    for size in BATCH_SIZES:
        generator = torch.Generator().manual_seed(size)
        prompts = torch.randint(VOCAB, (size, scale.prompt), generator=generator).tolist()
        here = [variant for variant in variants if size in variant.sizes]
        expected, _ = here[0].write(prompts, scale.new)
        for variant in here[1:]:  # the check, and the warm-up
            require_equal(expected, variant.write(prompts, scale.new)[0], here[0], variant)
        seconds: dict[str, list[float]] = {variant.name: [] for variant in here}
        for turn in range(scale.rounds):
            for variant in here:
                if turn < variant.rounds:
                    written, times = variant.write(prompts, scale.new)
                    require_equal(expected, written, here[0], variant)
                    seconds[variant.name] += times
        median = {name: statistics.median(times) for name, times in seconds.items()}
        for variant in variants:
            taken = median.get(variant.name)
            if taken is None:
                rows.append((size, variant.name, *"----"))
                continue
            faster = [f"{median[other] / taken:.2f}" for other in ("eager", "generate")]
            rows.append((size, variant.name, f"{taken * 1e3:.3f}", f"{size / taken:.0f}", *faster))
    return rows


def require_equal(expected: Tokens, written: Tokens, reference: Variant, variant: Variant) -> None:
    """Check that two variants generate the same tokens.

    Raises:
        SystemExit: A row differs; the message has both rows.
    """
    for row, (theirs, ours) in enumerate(zip(expected, written, strict=True)):
        if theirs != ours:
            raise SystemExit(
                f"batch {len(expected)}, row {row}: {variant.name!r} writes {ours}, {reference.name!r}"
                f" writes {theirs}"
            )


def describe_graphs(variants: Sequence[Variant]) -> list[tuple[object, ...]]:
    """Return a row for each captured shape, in the order of capture."""
    rows: list[tuple[object, ...]] = []
    for variant in variants:
        if not isinstance(variant, EngineVariant):
            continue
        lane = variant.engine.lanes[0]
        for shape, captured in lane.captured.items():
            graph, seconds = captured.graph, captured.stats.capture_seconds
            size = f"{graph.pool_nbytes / 1024:.1f}"
            rows.append((variant.name, shape, graph.num_nodes, size, f"{seconds * 1e3:.0f}"))
    return rows


# -- the parts of a step ---------------------------------------------------------------------------


class RepeatedStep:
    """A decode step of `LIVE` requests at capture size `SIZE`, which can be repeated.

    A repetition writes the same keys and values to the same slots; the step is never committed.
    """

    def __init__(self, path: Path, scale: Scale, *overrides: str) -> None:
        sizes = f"lanes.decode.batch_sizes=[{SIZE}]"
        self.engine = make_engine(path, SIZE, sizes, *overrides)
        generator = torch.Generator().manual_seed(0)
        sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
        for prompt in torch.randint(VOCAB, (LIVE, scale.prompt), generator=generator).tolist():
            self.engine.add(prompt, sampling)
        for _ in range(2):
            self.engine.step()
        scheduled = self.engine.scheduler.schedule()
        if scheduled is None or not scheduled.batch.forward_mode.is_decode:
            raise SystemExit(f"the third step of {LIVE} new requests is not a decode")
        self.requests, self.batch = scheduled.requests, scheduled.batch
        self.lane: Lane = self.engine.lanes[0]
        ((self.shape, self.captured),) = self.lane.captured.items()
        self.graph = self.captured.graph
        self.logits = self.replay().logits

    def replay(self) -> StepOutputs:
        """Run the step through the lane."""
        return self.lane.run(self.batch)

    def refresh(self) -> None:
        """Call the metadata hook of the backend."""
        step = self.captured.step
        self.lane.backend.init_metadata_replay(step.view, self.shape, step.metadata)

    def fill(self) -> None:
        """Call the hook of the runner that fills the registry."""
        if self.lane.registry is not None:
            self.lane.runner.populate(self.lane.registry, self.batch, self.shape)


@torch.inference_mode()
def measure_parts(path: Path, scale: Scale, *, compiled: bool) -> list[tuple[object, ...]]:
    """Return the rows of the table."""
    tape = 'lanes.decode.runner="cuda_graph"'
    steps = {mode: RepeatedStep(path, scale, tape, f'verify.pact="{mode}"') for mode in PACT}
    off = steps["off"]
    before = RepeatedStep(path, scale, tape, "lanes.decode.metadata_in_graph=false")
    runs = {"tape": off}
    if compiled:
        runs["cpu_graph"] = RepeatedStep(path, scale, 'lanes.decode.runner="cpu_graph"')
    whole = take_turns({name: step.graph.replay for name, step in runs.items()}, scale, calls=1)
    bare = {name: statistics.median(times) for name, times in whole.items()}

    sampler = Sampler()
    with doing_nothing([step.graph for step in steps.values()]):
        taken = take_turns(
            {
                FILL: off.fill,
                IN_GRAPH: off.refresh,
                **{mode: step.replay for mode, step in steps.items()},
                BEFORE: before.refresh,
                SCHEDULE: off.engine.scheduler.schedule,
                SAMPLE: lambda: sampler.sample(off.logits, off.requests),
            },
            scale,
            calls=scale.calls,
        )
    parts = {name: statistics.median(taken[name]) for name in (FILL, IN_GRAPH, BEFORE)}
    for mode in PACT[1:]:
        pairs = zip(taken[mode], taken["off"], strict=True)
        parts[f"pact check, {mode}"] = statistics.median(a - b for a, b in pairs)
    for mode in PACT:
        parts[f"{HOST}, pact {mode}"] = statistics.median(taken[mode])
    parts |= {name: statistics.median(taken[name]) for name in (SCHEDULE, SAMPLE)}

    def share(part: float) -> list[str]:
        return [f"{part / bare[variant]:.1%}" if variant in bare else "-" for variant in REPLAYED]

    rows: list[tuple[object, ...]] = [(name, f"{part:.1f}", *share(part)) for name, part in parts.items()]
    rows += [
        (f"{variant} replay by itself", f"{bare[variant]:.0f}" if variant in bare else "-", "", "")
        for variant in REPLAYED
    ]
    return rows


@contextlib.contextmanager
def doing_nothing(graphs: Sequence[Graph]) -> Iterator[None]:
    """Make the replays of ``graphs`` do nothing inside the context."""
    before = [graph.replay for graph in graphs]
    for graph in graphs:
        graph.replay = _nothing  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        for graph, replay in zip(graphs, before, strict=True):
            graph.replay = replay  # type: ignore[method-assign]  # restore


def _nothing() -> None:
    pass


def take_turns(
    parts: Mapping[str, Callable[[], object]], scale: Scale, *, calls: int
) -> dict[str, list[float]]:
    """Return the microseconds of one call of each part, per turn; a turn is ``calls`` calls."""
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
    parser.add_argument("--quick", action="store_true", help="one layer, one round: a smoke test")
    parser.add_argument("--threads", type=int, help="number of torch threads; torch's default if not given")
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
        save_model(path, scale.layers, max_position_embeddings=128)
        variants = make_variants(path, scale, compiled)
        rows = measure_steps(variants, scale)
        parts = measure_parts(path, scale, compiled=SIZE in compiled)
    console.print(f"all variants generate the same tokens: {scale.new} per prompt of {scale.prompt}\n")
    print_table(console, STEPS, rows, numbers=(STEPS[0], *STEPS[2:]))
    if no_compiler:
        console.print(f"cpu_graph is skipped: {no_compiler}")
    console.print("target for batch 8: at least 2 x generate\n")
    print_table(console, PARTS, parts, numbers=PARTS[1:])
    console.print("targets: the pact at most 20 us; host work at most 5% of the replay\n")
    print_table(console, GRAPHS, describe_graphs(variants), numbers=GRAPHS[2:])


if __name__ == "__main__":
    main()
