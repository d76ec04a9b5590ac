"""Measure prefill steps through broken and split graphs, against eager steps and torch.compile alone.

    python benchmarks/bench_prefill.py [--quick] [--threads N] [--device cpu|cuda]

A Llama with 4 layers, hidden size 128 and random weights over bytes is saved, and every way loads it from the
files. A prompt of each length is read in one step, whole (a graph of exactly its tokens) and with the longest
padding that the default sizes allow. All ways must give the same token, which every round checks. They
alternate in one process; the median over the rounds is reported. A step is all of `Engine.step`: scheduling,
forward pass, sampling.

Beside it: what a capture takes, in seconds and memory for all sizes together.

Does not: measure decoding, or steps in which others decode; `bench_mixed_load.py` does.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before transformers is imported

import torch
import transformers
from random_llama import VOCAB, save_model
from torch._dynamo import config as dynamo_config

from graphpact import Lane
from graphpact.cli.console import data, print_table
from graphpact_cpu_graph import inductor
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig

COMPILED = "torch.compile alone"
RUNNERS = {"breakable": "breakable_cuda_graph", "piecewise": "piecewise_cuda_graph"}
STEPS = ("tokens", "of a graph of", "way", "step ms", "x eager")
CAPTURES = ("way", "graphs", "segments", "nodes", "memory MiB", "seconds")


class Scale(NamedTuple):
    """The size of the measurement."""

    layers: int
    counts: tuple[int, ...]
    """Token counts that are captured."""
    rounds: int


FULL = Scale(layers=4, counts=(16, 32, 64, 128, 256, 512, 1024), rounds=15)
QUICK = Scale(layers=1, counts=(4, 8), rounds=1)


class Way:
    """An engine whose prefill lane has one runner and one driver.

    Args:
        name: Its name in the table.
        path: The checkpoint.
        scale: The size of the measurement.
        device: The device.
        overrides: More of the configuration.
    """

    def __init__(self, name: str, path: Path, scale: Scale, device: str, *overrides: str) -> None:
        self.name = name
        largest = max(scale.counts)
        options = [
            f"model.path='{path}'",
            f'engine.device="{device}"',
            f"engine.max_model_len={largest + 8}",
            "engine.max_num_seqs=1",
            f"engine.max_num_batched_tokens={largest}",
            f"engine.num_threads={torch.get_num_threads()}",
            "lanes.decode.capture=false",
            *overrides,
        ]
        if any("runner" in option for option in overrides):
            options.append(f"lanes.prefill.token_counts={list(scale.counts)}")
        start = time.perf_counter()
        self.engine = Engine(EngineConfig.load(None, env={}, overrides=options))
        self.seconds = time.perf_counter() - start
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

    def read(self, prompt: Sequence[int]) -> tuple[int, float]:
        """Read a prompt; return the token after it, and the seconds of the step."""
        replays = self.lane.stats.replays
        request = self.engine.add(list(prompt), SamplingParams(max_new_tokens=1, ignore_eos=True))
        start = time.perf_counter()
        self.engine.step()
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        if not request.is_finished or self.lane.stats.replays - replays != bool(self.lane.captured):
            raise SystemExit(f"{self.name}: a prompt of {len(prompt)} tokens was not one step of its graph")
        return request.output_token_ids[0], taken


def measure(ways: Sequence[Way], length: int, rounds: int) -> list[float]:
    """Return the median seconds of each way for a prompt of ``length`` tokens.

    Raises:
        SystemExit: Two ways give different tokens.
    """
    taken: list[list[float]] = [[] for _ in ways]
    generator = torch.Generator().manual_seed(length)
    for at in range(rounds + 1):
        prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
        tokens = []
        for way, its in zip(ways, taken, strict=True):
            token, seconds = way.read(prompt)
            tokens.append(token)
            if at:  # the first round is the warm-up
                its.append(seconds)
        if len(set(tokens)) > 1:
            given = ", ".join(f"{way.name} {token}" for way, token in zip(ways, tokens, strict=True))
            raise SystemExit(f"a prompt of {length} tokens gives different tokens: {given}")
    return [statistics.median(its) for its in taken]


def make_ways(path: Path, scale: Scale, device: str) -> tuple[list[Way], list[str]]:
    """Return the ways to measure, eager first, and why others are skipped."""
    drivers = {"cpu": ["tape", "inductor"], "cuda": ["cuda"]}[device]
    skipped = []
    fault = inductor.missing_compiler() if device == "cpu" else None
    if fault is not None:
        drivers.remove("inductor")
        skipped = [f"{COMPILED} and the driver inductor are skipped: {fault}"]
    ways = [Way("eager", path, scale, device)]
    for name, runner in RUNNERS.items():
        for driver in drivers:
            lane = f"lanes.prefill.runner={runner}", f"lanes.prefill.graph_driver={driver}"
            ways.append(Way(f"{name}, {driver}", path, scale, device, *lane))
    if fault is None:
        ways.append(Way(COMPILED, path, scale, device))
        ways[-1].compile_model()
    return ways, skipped


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, one round: a smoke test")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads; default 1")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = QUICK if options.quick else FULL
    console = data()
    console.print(
        f"Llama, {scale.layers} layers, 128 wide, {options.device}, {torch.get_num_threads()} thread(s),"
        f" torch {torch.__version__}, transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), scale.layers, max_position_embeddings=2048)
        ways, skipped = make_ways(Path(folder), scale, options.device)
        rows: list[tuple[object, ...]] = []
        losses: list[str] = []
        for count, before in zip(scale.counts, (0, *scale.counts), strict=False):
            for length in (before + 1, count) if before else (count,):
                medians = measure(ways, length, scale.rounds)
                for way, seconds in zip(ways, medians, strict=True):
                    graph = count if way.lane.captured else "-"
                    ratio = medians[0] / seconds
                    rows.append((length, graph, way.name, f"{seconds * 1e3:.2f}", f"{ratio:.2f}"))
                    if way.lane.captured and ratio < 1:
                        where = f"{length} tokens in a graph of {count}"
                        losses.append(f"{where}, {way.name}: {ratio:.2f} x eager")
    console.print(f"all ways give the same tokens, medians of {scale.rounds} rounds\n")
    print_table(console, STEPS, rows, numbers=(*STEPS[:2], *STEPS[3:]))
    captures = []
    for way in ways:
        graphs = [captured.graph for captured in way.lane.captured.values()]
        if graphs:
            nodes = sum(graph.num_nodes for graph in graphs)
            memory = sum(graph.pool_nbytes for graph in graphs) / 2**20
            spent = sum(stats.capture_seconds for stats in way.lane.stats.shapes.values())
            captures.append(
                (way.name, len(graphs), graphs[0].num_segments, nodes, f"{memory:.1f}", f"{spent:.1f}")
            )
    print_table(console, CAPTURES, captures, numbers=CAPTURES[1:])
    for line in (*skipped, *(f"loses: {loss}" for loss in losses)):
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
