"""A decode step by the width of the model, beside the limit: its matrix products alone, on cold weights.

The products of a step are those of every layer in order, and of the logits, each with weights of its own.
Cold: they run over copies of all weights, so many that together they are several times the last-level cache;
so every weight comes from memory. Warm: over one copy. They are torch's products: a step that multiplies with
torch cannot be faster on weights that the caches do not hold. One with kernels of its own can, down to the
time in which the weights are read at all, which is the third row beside the ways: the sum of each matrix.

Does not: count attention, norms, or anything else of a step into the limit.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from graphpact_bench.decode import agreement, left_out
from graphpact_bench.machine import cold_copies
from graphpact_bench.models import PRESETS, ModelShape, random_prompts
from graphpact_bench.options import BenchOptions, saved_model
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.timing import Spread, race
from graphpact_bench.ways.base import WaySetting
from graphpact_bench.ways.table import choose_ways, make_ways, tie_judge

COLD, WARM = "matrix products, cold", "matrix products, warm"
READ = "weights read, cold"
_SLOW = {
    "tape-strict": "it is many times slower than a step",
    "compile": "it compiles for minutes",
    "generate-compiled": "it compiles for minutes",
}
"""Ways that are left out unless they are named, and why."""


class WidthScale(NamedTuple):
    """The size of the measurement.

    Args:
        shapes: The models.
        batch_sizes: Requests at a time.
        prompt: Tokens of each prompt.
        new: Tokens generated for a prompt, the first of them by the prefill.
        rounds: Timed rounds.
    """

    shapes: tuple[ModelShape, ...]
    batch_sizes: tuple[int, ...]
    prompt: int
    new: int
    rounds: int


FULL = WidthScale(tuple(PRESETS.values()), batch_sizes=(1, 8), prompt=16, new=17, rounds=5)
QUICK = WidthScale(
    (
        ModelShape(width=64, layers=1, heads=2, kv_heads=2, intermediate=96),
        ModelShape(width=128, layers=1, heads=4, kv_heads=2, intermediate=192),
    ),
    batch_sizes=(1, 2),
    prompt=4,
    new=5,
    rounds=1,
)


class MatrixProducts:
    """The matrix products of a step of a model, alone.

    Args:
        shape: The sizes of the model.
        batch: Rows of the products.
        dtype: The dtype of weights and rows.
        device: The device.
        is_cold: Whether the weights come from memory.
        repeats: Steps in one call, where one copy of the weights is used.
    """

    def __init__(
        self,
        shape: ModelShape,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_cold: bool,
        repeats: int = 3,
    ) -> None:
        nbytes = shape.num_weights * dtype.itemsize
        copies = cold_copies(nbytes) if is_cold else 1
        self._synchronize: Callable[[], None] = (
            functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
        )
        made: Callable[..., torch.Tensor] = functools.partial(torch.randn, dtype=dtype, device=device)
        self.copies = [[made(*sizes) for sizes in shape.matrices] for _ in range(copies)]
        self.rows = [made(batch, inputs) for _, inputs in shape.matrices]
        self.outputs = [made(batch, outputs) for outputs, _ in shape.matrices]
        self.repeats = 1 if copies > 1 else repeats

    def multiply(self) -> list[float]:
        """Return the seconds of the products of one step, for each copy of the weights."""

        def products(weights: Sequence[torch.Tensor]) -> None:
            for row, weight, output in zip(self.rows, weights, self.outputs, strict=True):
                torch.mm(row, weight.T, out=output)

        return self._time(products)

    def read(self) -> list[float]:
        """Return the seconds in which the weights are read once, for each copy of them."""

        def sums(weights: Sequence[torch.Tensor]) -> None:
            for weight in weights:
                weight.view(-1).view(
                    torch.float32
                ).sum()  # of a bfloat16 the bits: converting it takes longer

        return self._time(sums)

    @torch.inference_mode()
    def _time(self, work: Callable[[Sequence[torch.Tensor]], None]) -> list[float]:
        taken = []
        for weights in self.copies * self.repeats:
            start = time.perf_counter()
            work(weights)
            self._synchronize()
            taken.append(time.perf_counter() - start)
        return taken


def _nothing() -> None:
    pass


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield a table for each shape of a model; one picture has all of them."""
    scale = QUICK if options.quick else FULL
    scale = scale._replace(
        shapes=options.shapes or scale.shapes, batch_sizes=options.batch_sizes or scale.batch_sizes
    )
    names = choose_ways(options.ways, options.device.type, compiling=not options.quick)
    missing = left_out(options, [*names, *_SLOW])
    if not options.ways:
        names = [name for name in names if name not in _SLOW]
        missing += [Skipped(what=name, reason=f"{why}; name it by --way") for name, why in _SLOW.items()]
    for shape in scale.shapes:
        table = Table(
            name="widths",
            title=f"decode step by width, {options.setting}: greedy, {scale.new} tokens after each prompt of"
            f" {scale.prompt}, medians over the steps of {scale.rounds} round(s)",
            columns=[
                Column(key="model", heading="model"),
                Column(key="width", heading="width", format="d"),
                Column(key="weights_mib", heading="weights MiB", format=".1f"),
                Column(key="batch", heading="batch", format="d"),
                Column(key="way", heading="way"),
                *spread_columns("step_ms", "step ms", ".3f"),
                Column(key="x_limit", heading="x limit", format=".2f"),
                Column(key="x_limit_best", heading="of the best", format=".2f"),
                Column(key="gb_per_s", heading="GB/s", format=".1f"),
                Column(key="ties", heading="ties", format="d"),
            ],
            skipped=list(missing),
            notes=[
                agreement(options.dtype),
                f"x limit: the step by '{COLD}', of medians and of the best",
                "GB/s: the weights of the products by the step",
            ],
            chart=Chart(value="step_ms", label=["way", "batch"], x="weights_mib", is_shared=True),
        )
        add_shape(table, options, scale, shape, names)
        yield table


def add_shape(
    table: Table, options: BenchOptions, scale: WidthScale, shape: ModelShape, names: list[str]
) -> None:
    """Measure one model and add its rows.

    Raises:
        DifferentTokensError: Two ways generate different tokens.
    """
    nbytes = shape.num_weights * options.torch_dtype.itemsize
    with saved_model(shape, scale.prompt + scale.new) as path, ExitStack() as stack:
        setting = WaySetting(
            path, shape, scale.batch_sizes, scale.prompt, scale.new, options.dtype, options.device
        )
        ways, skipped = make_ways(names, setting, options.say)
        table.skipped += skipped
        for way in ways:
            stack.callback(way.close)
        judge = tie_judge(setting)
        for size in scale.batch_sizes:
            options.say(f"widths: {shape}, {size} at a time")
            cold, warm = (
                MatrixProducts(shape, size, options.torch_dtype, options.device, is_cold=is_cold)
                for is_cold in (True, False)
            )
            raced = race(
                ways,
                random_prompts(size, scale.prompt, shape.vocab),
                scale.new,
                scale.rounds,
                is_tie=judge,
                beside={COLD: cold.multiply, WARM: warm.multiply, READ: cold.read},
            )
            del cold, warm
            for name, reason in raced.failed.items():
                table.skipped.append(Skipped(what=f"{name}, batch {size}", reason=reason))
            limit = Spread.of(raced.beside[COLD])
            times = {name: raced.steps(name) for name in raced.written} | raced.beside
            for name, each in times.items():
                spread = Spread.of(each)
                table.add(
                    model=str(shape),
                    width=shape.width,
                    weights_mib=nbytes / 2**20,
                    batch=size,
                    way=name,
                    **spread_values("step_ms", spread.times(1e3)),
                    x_limit=spread.median / limit.median,
                    x_limit_best=spread.best / limit.best,
                    gb_per_s=nbytes / spread.median / 1e9,
                    ties=raced.ties.get(name),
                )
