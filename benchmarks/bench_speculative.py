"""Measure decoding with speculation against plain decoding, with and without graphs.

    python benchmarks/bench_speculative.py [--quick] [--threads N]

The target is the shipped ``tiny-llama``, the draft models are its two heads, and the prompts are those of
``examples/prompts.txt``: one after the other, and eight at once, of which two occur twice. Every variant must
generate the same greedy tokens, which every round checks. The first round is the warm-up and is not counted.
The variants alternate in one process; the median over the rounds is reported. Prefill is not included.

With speculation there are fewer steps, and each takes longer. Both factors are reported, relative to plain
decoding with graphs; speculation wins if their product is below 1. Beside them: ``accepted``, the tokens of a
request that one verification yields, and the parts of a step: the lanes ``draft``, ``verify`` and
``draft_extend``, and the rest, which is the host work of algorithm, acceptance, sampling and scheduler.

Does not: run on a GPU, train heads, or measure prefill.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before transformers is imported

import torch
import transformers

from graphpact.cli.console import data, print_table
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.speculation import SpeculationStats

EXAMPLES = Path(__file__).parents[1] / "examples"
TARGET = EXAMPLES / "models/tiny-llama"
HEADS = {"eagle": "tiny-llama-eagle", "frozen_kv_mtp": "tiny-llama-mtp"}
CHAIN, TREE = "chain", "tree"
SHAPES = {
    CHAIN: ("num_steps=3", "topk=1"),
    TREE: ("num_steps=3", "topk=4", "num_draft_tokens=8"),
}
LANES = {
    "plain": ("decode",),
    "eagle": ("draft", "verify", "draft_extend"),
    "frozen_kv_mtp": ("draft", "verify"),
}
PARTS = ("draft", "verify", "draft_extend")
REST = "rest"
COLUMNS = (
    "batch",
    "variant",
    "graphs",
    "tokens/s",
    "x plain",
    "accepted",
    "x steps",
    "x step time",
    *PARTS,
    REST,
)

Tokens = list[list[int]]


class Scale(NamedTuple):
    """The size of the measurement."""

    new: int
    """Tokens generated per prompt, the first of them by the prefill."""
    rounds: int
    sizes: tuple[int, ...]
    """Requests at a time."""
    prompts: int
    """Prompts that run one after the other if there is one request at a time."""


FULL = Scale(new=101, rounds=5, sizes=(1, 8), prompts=6)
QUICK = Scale(new=9, rounds=1, sizes=(1, 2), prompts=1)


@dataclass
class Round:
    """What a variant needed for all prompts, without prefill.

    Args:
        tokens: The generated tokens of each prompt.
        seconds: Time of all decode steps.
        steps: Their number.
        verifications: Verified drafts.
        accepted: Accepted drafts.
        lanes: Seconds in the lanes of speculation, by mode.
    """

    tokens: Tokens = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    verifications: int = 0
    accepted: int = 0
    lanes: Counter[str] = field(default_factory=Counter)


class Variant:
    """An engine with one configuration.

    Args:
        algorithm: The speculation algorithm; "plain": none.
        shape: A chain or a tree; empty without speculation.
        graphs: Whether the lanes of decode steps replay graphs.
        scale: The size of the measurement.
    """

    def __init__(self, algorithm: str, shape: str, scale: Scale, *, graphs: bool) -> None:
        self.name = f"{algorithm}, {shape}" if shape else algorithm
        self.graphs = graphs
        options = [
            f"model.path='{TARGET}'",
            'engine.attention_backend="flashinfer"',
            'engine.device="cpu"',
            "engine.max_model_len=256",
            f"engine.max_num_seqs={max(scale.sizes)}",
            f"engine.num_threads={torch.get_num_threads()}",
        ]
        if shape:
            options += [
                f'speculative.algorithm="{algorithm}"',
                f"speculative.draft_model='{EXAMPLES / 'models' / HEADS[algorithm]}'",
                *(f"speculative.{key}" for key in SHAPES[shape]),
            ]
        if not graphs:
            options += [f"lanes.{lane}.capture=false" for lane in LANES[algorithm]]
        self.engine = Engine(EngineConfig.load(None, env={}, overrides=options))

    def write(self, prompts: Sequence[str], size: int, count: int) -> Round:
        """Continue ``prompts`` by ``count`` tokens, ``size`` of them at a time."""
        done, speculation = Round(), self.engine.speculation
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        for begin in range(0, len(prompts), size):
            requests = [self.engine.add(prompt, sampling) for prompt in prompts[begin : begin + size]]
            if len(self.engine.step()) != len(requests):
                raise SystemExit(f"{self.name}: the first step did not read every prompt")
            if speculation:
                speculation.stats = SpeculationStats()  # without the prompts
            start = time.perf_counter()
            while self.engine.scheduler.has_work:
                self.engine.step()
                done.steps += 1
            done.seconds += time.perf_counter() - start
            done.tokens += [request.output_token_ids for request in requests]
            if speculation:
                done.verifications += speculation.stats.verifications
                done.accepted += speculation.stats.accepted.total()
                done.lanes.update(speculation.stats.seconds)
        return done


def measure(
    variants: Sequence[Variant], size: int, prompts: Sequence[str], scale: Scale
) -> list[list[Round]]:
    """Return the rounds of every variant, without the warm-up.

    Raises:
        SystemExit: Two variants generate different tokens.
    """
    rounds: list[list[Round]] = [[] for _ in variants]
    for _ in range(scale.rounds + 1):
        for variant, its_rounds in zip(variants, rounds, strict=True):
            its_rounds.append(variant.write(prompts, size, scale.new))
            expected, found = rounds[0][0].tokens, its_rounds[-1].tokens
            if found != expected:
                raise SystemExit(
                    f"{size} at a time: {variant.name!r} writes {found}, {variants[0].name!r} writes"
                    f" {expected}"
                )
    return [each[1:] for each in rounds]


def describe(
    variants: Sequence[Variant], rounds: Sequence[Sequence[Round]], size: int
) -> tuple[list[tuple[object, ...]], list[str]]:
    """Return the rows of the table, and for each speculation that loses against plain decoding a line.

    Args:
        variants: The first is the one that the others are compared with.
        rounds: The rounds of each.
        size: Requests at a time.
    """
    seconds = [statistics.median(each.seconds for each in its_rounds) for its_rounds in rounds]
    rows: list[tuple[object, ...]] = []
    losses: list[str] = []
    for variant, its_rounds, taken in zip(variants, rounds, seconds, strict=True):
        one, plain = its_rounds[0], rounds[0][0]  # the counts of every round are the same
        steps = one.steps / plain.steps
        step = taken / seconds[0] / steps
        shares = {p: statistics.median(r.lanes[p] / r.seconds for r in its_rounds) for p in PARTS}
        shares[REST] = 1 - sum(shares.values())
        tokens = sum(len(each) - 1 for each in one.tokens)
        drafts = one.verifications > 0
        accepted = 1 + one.accepted / one.verifications if drafts else 1
        cells = [f"{shares[p]:.0%}" if drafts and shares[p] else "-" for p in (*PARTS, REST)]
        graphs = "yes" if variant.graphs else "no"
        rows.append(
            (
                *(size, variant.name, graphs, f"{tokens / taken:.0f}", f"{seconds[0] / taken:.2f}"),
                *(f"{accepted:.2f}", f"{steps:.2f}", f"{step:.2f}", *cells),
            )
        )
        if drafts and taken > seconds[0]:
            parts = ", ".join(f"{p} {shares[p] * step:.2f}" for p in (*PARTS, REST) if shares[p])
            losses.append(
                f"batch {size}, {variant.name}, graphs {graphs}: loses. {steps:.2f} x the steps, and each"
                f" takes {step:.2f} x as long as a plain one: {parts}"
            )
    return rows, losses


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, one round: a smoke test")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads; default 1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = QUICK if options.quick else FULL
    console = data()
    console.print(
        f"tiny-llama and its draft heads, CPU, {torch.get_num_threads()} thread(s),"
        f" torch {torch.__version__}, transformers {transformers.__version__}"
    )
    variants = [
        Variant(algorithm, shape, scale, graphs=graphs)
        for algorithm, shapes in (("plain", [""]), *((name, SHAPES) for name in HEADS))
        for shape in shapes
        for graphs in (True, False)
    ]
    lines = (EXAMPLES / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line]
    rows, losses = [], []
    for size in scale.sizes:
        several = [*prompts, *prompts][:size] if size > 1 else prompts[: scale.prompts]
        more, lost = describe(variants, measure(variants, size, several, scale), size)
        rows += more
        losses += lost
    console.print(f"all variants generate the same tokens: {scale.new} per prompt\n")
    print_table(console, COLUMNS, rows, numbers=(COLUMNS[0], *COLUMNS[3:]))
    for loss in losses:
        console.print(loss, soft_wrap=True)


if __name__ == "__main__":
    main()
