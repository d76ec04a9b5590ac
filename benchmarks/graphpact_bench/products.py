"""Products of a few rows with a weight: the compiled kernel of `cpu_graph`, and torch's.

The weights come from memory: each call multiplies with copies of a weight, so many that together they are
several times the last-level cache. Both give the same numbers, up to rounding, before anything is timed.

Does not: measure a step; `graphpact_bench.widths` does.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from graphpact_bench.machine import cold_copies
from graphpact_bench.options import BenchOptions
from graphpact_bench.report import Chart, Column, Table, spread_columns, spread_values
from graphpact_bench.timing import DifferentResultsError, Spread, UnavailableWayError, take_turns
from graphpact_kernels.compiled import is_faster, linear, load

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Computes ``x @ weight.T`` into the third tensor."""


class ProductScale(NamedTuple):
    """The size of the measurement.

    Args:
        weights: (outputs, inputs) of each weight.
        rows: Numbers of rows.
        turns: Timed turns.
    """

    weights: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    turns: int


FULL = ProductScale(
    ((128, 128), (344, 128), (576, 576), (1536, 576), (576, 1536), (2048, 2048), (4096, 4096)),
    rows=(1, 8, 16, 32, 64),
    turns=7,
)
QUICK = ProductScale(((64, 32),), rows=(1, 3), turns=1)


def _of_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> object:
    return torch.mm(x, weight.T, out=out)


def _compiled(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> object:
    return linear(x, weight, None, out)


@torch.inference_mode()
def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the table of every weight and number of rows.

    Raises:
        UnavailableWayError: The kernels cannot be built here.
        DifferentResultsError: The two products differ by more than rounding.
    """
    fault = load()
    if fault is not None:
        raise UnavailableWayError(f"there are no compiled kernels: {fault}")
    scale = QUICK if options.quick else FULL
    sizes = tuple(dict.fromkeys(each for shape in options.shapes for each in shape.matrices))
    table = Table(
        name="products",
        title=f"product of rows with a weight that no cache holds, {options.setting}: {scale.turns} turns",
        columns=[
            Column(key="weight", heading="weight"),
            Column(key="rows", heading="rows", format="d"),
            *spread_columns("torch_us", "torch us", ".1f"),
            *spread_columns("compiled_us", "compiled us", ".1f"),
            Column(key="ratio", heading="compiled by torch", format=".2f"),
            Column(key="gb_per_s", heading="GB/s", format=".1f"),
            Column(key="taken", heading="cpu_graph takes"),
        ],
        notes=[
            "both give the same numbers, up to rounding",
            "compiled by torch: of the medians; GB/s: the weight by the time of the compiled kernel",
        ],
        chart=Chart(value="ratio", label=["weight"], x="rows"),
    )
    for outputs, inputs in sizes or scale.weights:
        for rows in options.batch_sizes or scale.rows:
            options.say(f"products: {outputs} x {inputs}, {rows} row(s)")
            of_torch, compiled = _race(outputs, inputs, rows, options, scale.turns)
            taken = is_faster(rows, options.torch_dtype)
            nbytes = outputs * inputs * options.torch_dtype.itemsize
            table.add(
                weight=f"{outputs} x {inputs}",
                rows=rows,
                **spread_values("torch_us", of_torch.times(1e6)),
                **spread_values("compiled_us", compiled.times(1e6)),
                ratio=compiled.median / of_torch.median,
                gb_per_s=nbytes / compiled.median / 1e9,
                taken="compiled" if taken else "torch",
            )
    yield table


def _race(outputs: int, inputs: int, rows: int, options: BenchOptions, turns: int) -> tuple[Spread, Spread]:
    """Return the seconds of one product, of torch and of the compiled kernel."""
    dtype = options.torch_dtype
    copies = 2 if options.quick else cold_copies(outputs * inputs * dtype.itemsize)
    weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(copies)]
    x, out = torch.randn(rows, inputs, dtype=dtype), torch.empty(rows, outputs, dtype=dtype)
    _require_equal(x, weights[0])

    def all_copies(product: Product) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                product(x, weight, out)

        return run

    taken = take_turns({"torch": all_copies(_of_torch), "compiled": all_copies(_compiled)}, turns=turns + 1)
    first, second = (Spread.of(each[1:]).times(1 / copies) for each in taken.values())  # the first warms up
    return first, second


def _require_equal(x: torch.Tensor, weight: torch.Tensor) -> None:
    results = []
    for product in (_of_torch, _compiled):
        results.append(torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype))
        product(x, weight, results[-1])
    first, second = (result.double() for result in results)
    # The sums are float32 in both, and as large as the square root of the number of inputs.
    of_sums = 64 * torch.finfo(torch.float32).eps * x.shape[1] ** 0.5
    if not torch.allclose(first, second, rtol=4 * torch.finfo(x.dtype).eps, atol=of_sums):
        raise DifferentResultsError(
            f"{x.shape[0]} row(s) with a weight {tuple(weight.shape)} of {x.dtype}: the compiled product and"
            f" torch's differ by {float((first - second).abs().max()):.3g}",
            hint="one of the two is wrong: nothing was timed",
        )
