"""Decode steps end to end: the engine's lanes, transformers, torch.compile, vLLM, llama.cpp.

A step is everything from one token to the next: scheduling, forward pass, sampling, and the bookkeeping of
each side. Prefill is not included.

Does not: measure prompts; see `graphpact_bench.prefill`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from graphpact_bench.models import BYTES, ModelShape, random_prompts
from graphpact_bench.options import BenchOptions, Dtype, saved_model
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.timing import Race, Spread, race
from graphpact_bench.ways.base import WaySetting, notes_of_versions
from graphpact_bench.ways.table import choose_ways, make_ways, tie_judge

LEFT_OUT = "it compiles, and --quick does not; name it by --way"


class DecodeScale(NamedTuple):
    """The size of the measurement.

    Args:
        shape: The model.
        batch_sizes: Requests at a time.
        prompt: Tokens of each prompt.
        new: Tokens generated for a prompt, the first of them by the prefill.
        rounds: Timed rounds.
    """

    shape: ModelShape
    batch_sizes: tuple[int, ...]
    prompt: int
    new: int
    rounds: int


FULL = DecodeScale(BYTES, batch_sizes=(1, 8, 32), prompt=32, new=65, rounds=9)
QUICK = DecodeScale(
    ModelShape(width=64, layers=1, heads=2, kv_heads=2, intermediate=96),
    batch_sizes=(1, 2),
    prompt=4,
    new=5,
    rounds=1,
)


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield a table for each shape of a model."""
    scale = QUICK if options.quick else FULL
    scale = scale._replace(
        batch_sizes=options.batch_sizes or scale.batch_sizes, rounds=options.rounds or scale.rounds
    )
    for shape in options.shapes or (scale.shape,):
        yield _measure_shape(options, scale._replace(shape=shape))


def _measure_shape(options: BenchOptions, scale: DecodeScale) -> Table:
    """Return the table of one model.

    Raises:
        DifferentTokensError: Two ways generate different tokens.
    """
    shape = scale.shape
    table = Table(
        name="decode",
        title=f"decode step, Llama {shape}, {options.setting}: greedy, {scale.new} tokens after each prompt"
        f" of {scale.prompt}, medians over the steps of {scale.rounds} round(s)",
        columns=[
            Column(key="batch", heading="batch", format="d"),
            Column(key="way", heading="way"),
            *spread_columns("step_ms", "step ms", ".3f"),
            Column(key="tokens_per_s", heading="tokens/s", format=".0f"),
            Column(key="x_eager", heading="x eager", format=".2f"),
            Column(key="x_generate", heading="x generate", format=".2f"),
            Column(key="x_generate_best", heading="of the best", format=".2f"),
            Column(key="ties", heading="ties", format="d"),
        ],
        chart=Chart(value="step_ms", label=["batch", "way"]),
    )
    names = choose_ways(options.ways, options.device.type, compiling=not options.quick)
    with saved_model(shape, scale.prompt + scale.new) as path, ExitStack() as stack:
        setting = WaySetting(
            path,
            shape,
            scale.batch_sizes,
            scale.prompt,
            scale.new,
            options.dtype,
            options.device,
            options.pythons,
        )
        ways, table.skipped = make_ways(names, setting, options.say)
        for way in ways:
            stack.callback(way.close)
        table.skipped += left_out(options, names)
        judge = tie_judge(setting)
        for size in scale.batch_sizes:
            options.say(f"{shape}: decoding {size} at a time")
            prompts = random_prompts(size, scale.prompt, shape.vocab)
            raced = race(ways, prompts, scale.new, scale.rounds, is_tie=judge)
            for name, reason in raced.failed.items():
                table.skipped.append(Skipped(what=f"{name}, batch {size}", reason=reason))
            _add_rows(table, size, [way.name for way in ways], raced)
    table.notes += [agreement(options.dtype), *notes_of_versions(ways)]
    return table


def _add_rows(table: Table, size: int, names: Sequence[str], raced: Race) -> None:
    """Add a row for each way that was timed, relative to ``eager`` and ``generate``."""
    spreads = {name: Spread.of(raced.steps(name)) for name in names if name in raced.written}
    for name, spread in spreads.items():
        factors = {
            f"x_{other}": spreads[other].median / spread.median if other in spreads else None
            for other in ("eager", "generate")
        }
        generate = spreads.get("generate")
        table.add(
            batch=size,
            way=name,
            **spread_values("step_ms", spread.times(1e3)),
            tokens_per_s=size / spread.median,
            ties=raced.ties[name],
            x_generate_best=None if generate is None else generate.best / spread.best,
            **factors,
        )


def left_out(options: BenchOptions, names: Sequence[str]) -> list[Skipped]:
    """Return why ``--quick`` lacks the ways that compile."""
    if not options.quick or options.ways:
        return []
    every = choose_ways((), options.device.type, compiling=True)
    return [Skipped(what=name, reason=LEFT_OUT) for name in every if name not in names]


def agreement(dtype: Dtype) -> str:
    """Return the sentence below a table that says how equal the tokens are."""
    if dtype == "float32":
        return "all ways generate the same tokens; x: a factor of speed"
    return (
        "all ways generate the same tokens, up to ties: prompts that a way continued differently after two"
        " logits that are as good as equal; x: a factor of speed"
    )
