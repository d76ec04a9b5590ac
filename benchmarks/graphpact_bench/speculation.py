"""Decoding with speculation against plain decoding: graphs of the tape, graphs of inductor, no graphs.

The target is the ``tiny-llama`` of the repository's examples, the draft models are its two heads, and the
prompts are those of ``examples/prompts.txt``: one after the other, and eight at once, of which two occur
twice. Prefill is not included.

With speculation there are fewer steps, and each takes longer. Both factors are reported, relative to plain
decoding through the same kind of graphs; speculation wins if their product is below 1. Beside them:
``accepted``, the tokens of a request that one verification yields, and the parts of a step: the lanes
``draft``, ``verify`` and ``draft_extend``, and the rest, which is the host work of algorithm, acceptance,
sampling and scheduler.

Does not: run on a GPU, train heads, or measure prefill.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from graphpact.errors import EngineError
from graphpact_bench.examples import examples_folder
from graphpact_bench.options import BenchOptions
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.timing import Agreement, Spread, Tokens
from graphpact_cpu_graph.inductor import missing_compiler
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.speculation import SpeculationStats

HEADS = {"eagle": "tiny-llama-eagle", "frozen_kv_mtp": "tiny-llama-mtp"}
CHAIN, TREE = "chain", "tree"
TOPK = 4
"""The branches of a tree."""
SHAPES = {
    CHAIN: ("num_steps=3", "topk=1"),
    TREE: ("num_steps=3", f"topk={TOPK}", "num_draft_tokens=8"),
}
LANES = {
    "plain": ("decode",),
    "eagle": ("draft", "verify", "draft_extend"),
    "frozen_kv_mtp": ("draft", "verify"),
}
NONE = "none"
GRAPHS = ("tape", "inductor", NONE)
"""The driver of the graphs of decode steps, in every lane but those of prefill."""
PARTS = ("draft", "verify", "draft_extend")
REST = "rest"


class SpeculationScale(NamedTuple):
    """The size of the measurement.

    Args:
        new: Tokens generated per prompt, the first of them by the prefill.
        rounds: Timed rounds.
        sizes: Requests at a time.
        prompts: Prompts that run one after the other if there is one request at a time.
    """

    new: int
    rounds: int
    sizes: tuple[int, ...]
    prompts: int


FULL = SpeculationScale(new=101, rounds=5, sizes=(1, 8), prompts=6)
QUICK = SpeculationScale(new=9, rounds=1, sizes=(1, 2), prompts=1)


@dataclass
class SpeculationRound:
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


class SpeculationVariant:
    """An engine with one configuration.

    Args:
        algorithm: The speculation algorithm; "plain" for none.
        shape: A chain or a tree; empty without speculation.
        graphs: The kind of graphs of decode steps, one of `GRAPHS`.
        scale: The size of the measurement.
        examples: The folder of the examples.
    """

    def __init__(
        self, algorithm: str, shape: str, scale: SpeculationScale, examples: Path, *, graphs: str
    ) -> None:
        self.name = f"{algorithm}, {shape}" if shape else algorithm
        self.graphs = graphs
        options = [
            f"model.path='{examples / 'models/tiny-llama'}'",
            'engine.attention_backend="flashinfer"',
            'engine.device="cpu"',
            "engine.max_model_len=256",
            f"engine.max_num_seqs={max(scale.sizes)}",
            f"engine.num_threads={torch.get_num_threads()}",
        ]
        if shape:
            options += [
                f'speculative.algorithm="{algorithm}"',
                f"speculative.draft_model='{examples / 'models' / HEADS[algorithm]}'",
                *(f"speculative.{key}" for key in SHAPES[shape]),
            ]
        for lane in LANES[algorithm]:
            is_wide = (algorithm, shape, lane) == ("frozen_kv_mtp", TREE, "draft")
            rows = TOPK if is_wide else 1  # of a request; the sizes count rows
            sizes = sorted({size * rows for size in scale.sizes})
            key, value = ("capture", "false") if graphs == NONE else ("graph_driver", f'"{graphs}"')
            options += [f"lanes.{lane}.{key}={value}", f"lanes.{lane}.batch_sizes={sizes}"]
        self.engine = Engine(EngineConfig.load(None, env={}, overrides=options))

    def write(self, prompts: Sequence[str], size: int, count: int) -> SpeculationRound:
        """Continue ``prompts`` by ``count`` tokens, ``size`` of them at a time."""
        done, speculation = SpeculationRound(), self.engine.speculation
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        for begin in range(0, len(prompts), size):
            requests = [self.engine.add(prompt, sampling) for prompt in prompts[begin : begin + size]]
            if len(self.engine.step()) != len(requests):
                raise EngineError(f"{self.name}: the first step did not read every prompt")
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


def take_rounds(
    variants: Sequence[SpeculationVariant], size: int, prompts: Sequence[str], scale: SpeculationScale
) -> list[list[SpeculationRound]]:
    """Return the rounds of every variant, without the first, which is the check and the warm-up.

    Raises:
        DifferentTokensError: Two variants generate different tokens.
    """
    rounds: list[list[SpeculationRound]] = [[] for _ in variants]
    agreement: Agreement | None = None
    for _ in range(scale.rounds + 1):
        for variant, its_rounds in zip(variants, rounds, strict=True):
            its_rounds.append(variant.write(prompts, size, scale.new))
            found = its_rounds[-1].tokens
            agreement = agreement or Agreement([], found, variant.name)
            agreement.require(f"{variant.name}, {size} at a time", found)
    return [each[1:] for each in rounds]


def _add_rows(
    table: Table,
    variants: Sequence[SpeculationVariant],
    rounds: Sequence[Sequence[SpeculationRound]],
    size: int,
) -> None:
    """Add the rows for ``size`` requests at a time, and a note for each speculation that loses.

    Args:
        table: The table.
        variants: Each is compared with the first of its kind of graphs, which is plain decoding.
        rounds: The rounds of each.
        size: Requests at a time.
    """
    spreads = [Spread.of([each.seconds for each in its_rounds]) for its_rounds in rounds]
    first = {variant.graphs: at for at, variant in reversed(list(enumerate(variants)))}
    for variant, its_rounds, spread in zip(variants, rounds, spreads, strict=True):
        at = first[variant.graphs]
        one, plain = its_rounds[0], rounds[at][0]  # the counts of every round are the same
        steps = one.steps / plain.steps
        x_time = spread.median / spreads[at].median
        drafts = one.verifications > 0
        shares = {p: statistics.median(r.lanes[p] / r.seconds for r in its_rounds) for p in PARTS}
        shares[REST] = 1 - sum(shares.values())
        tokens = sum(len(each) - 1 for each in one.tokens)
        table.add(
            batch=size,
            way=variant.name,
            graphs=variant.graphs,
            tokens_per_s=tokens / spread.median,
            **spread_values("seconds", spread),
            x_plain=1 / x_time,
            accepted=1 + one.accepted / one.verifications if drafts else 1,
            x_steps=steps,
            x_step_time=x_time / steps,
            **{part: shares[part] if drafts and shares[part] else None for part in (*PARTS, REST)},
        )
        if drafts and x_time > 1:
            parts = ", ".join(f"{p} {shares[p] * x_time / steps:.2f}" for p in (*PARTS, REST) if shares[p])
            table.notes.append(
                f"batch {size}, {variant.name}, graphs {variant.graphs}: loses. {steps:.2f} x the steps, and"
                f" each takes {x_time / steps:.2f} x as long as a plain one: {parts}"
            )


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the table of every way to draft."""
    scale = QUICK if options.quick else FULL
    scale = scale._replace(sizes=options.batch_sizes or scale.sizes)
    examples = examples_folder()
    table = Table(
        name="speculation",
        title=f"decoding with drafts, tiny-llama and its heads, {options.setting}: {scale.new} tokens after"
        f" each prompt, {scale.rounds} round(s)",
        columns=[
            Column(key="batch", heading="batch", format="d"),
            Column(key="way", heading="way"),
            Column(key="graphs", heading="graphs"),
            Column(key="tokens_per_s", heading="tokens/s", format=".0f"),
            *spread_columns("seconds", "s", ".3f"),
            Column(key="x_plain", heading="x plain", format=".2f"),
            Column(key="accepted", heading="accepted", format=".2f"),
            Column(key="x_steps", heading="x steps", format=".2f"),
            Column(key="x_step_time", heading="x step time", format=".2f"),
            *(Column(key=part, heading=part, format=".0%") for part in (*PARTS, REST)),
        ],
        notes=[
            "all ways generate the same tokens",
            "x plain: a factor of speed, against plain decoding through the same graphs",
        ],
        chart=Chart(value="tokens_per_s", label=["batch", "way", "graphs"]),
    )
    kinds = list(GRAPHS)
    fault = "it compiles, which --quick leaves out" if options.quick else missing_compiler()
    if fault is not None:
        kinds.remove("inductor")
        table.skipped.append(Skipped(what="graphs inductor", reason=fault))
    variants = []
    for algorithm, shapes in (("plain", [""]), *((name, SHAPES) for name in HEADS)):
        for shape in shapes:
            for graphs in kinds:
                options.say(f"speculation: building {algorithm} {shape}, graphs {graphs}")
                variants.append(SpeculationVariant(algorithm, shape, scale, examples, graphs=graphs))
    lines = (examples / "prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line]
    for size in scale.sizes:
        options.say(f"speculation: {size} at a time")
        several = [*prompts, *prompts][:size] if size > 1 else prompts[: scale.prompts]
        _add_rows(table, variants, take_rounds(variants, size, several, scale), size)
    yield table
