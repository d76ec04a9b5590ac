"""Products of rows with a weight in compiled graphs: which are replaced, and what they compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_kernels import needs_compiled
from graphpact_cpu_graph import fx_graph, products
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cpu_graph.products import Product
from graphpact_kernels.compiled.build import multiplies_pairs
from graphpact_tape.recorder import RecordedCall

CPU = torch.device("cpu")
F32 = torch.float32

pytestmark = needs_compiled


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Return a list to which captures add the products that the compiled kernel computes."""
    taken: list[Product] = []

    def product_of(call: RecordedCall) -> Product | None:
        product = products.product_of(call)
        if product is not None:
            taken.append(product)
        return product

    monkeypatch.setattr(fx_graph, "product_of", product_of)
    return taken


def linear(rows: int, dtype: torch.dtype = F32, *, bias: bool = False) -> Callable[[], torch.Tensor]:
    """Return a linear layer as models call it, applied to ``rows`` rows."""
    layer = torch.nn.Linear(80, 60, bias=bias, dtype=dtype)
    x = torch.randn(1, rows, 80, dtype=dtype)
    return lambda: layer(x)


A, B, COLUMN = torch.randn(3, 80), torch.randn(80, 60), torch.randn(3, 1)


@pytest.mark.parametrize(
    ("region", "count"),
    [
        (linear(1), 1),
        (linear(8, bias=True), 1),
        (linear(64), 1),
        (linear(65), int(torch.backends.cpu.get_cpu_capability() == "AVX512")),
        (linear(4, torch.bfloat16), 1),
        (linear(65, torch.bfloat16), int(multiplies_pairs())),
        (linear(3, torch.float64), 0),
        (lambda: A[:, :60] @ B[:60].t(), 0),  # 3600 elements
        (lambda: A @ B, 0),  # the weight has the other memory order
        (lambda: torch.addmm(COLUMN, A, B.t().contiguous().t()), 0),  # not the bias of a layer
        (lambda: torch.addmm(B[0], A, B.t().contiguous().t(), beta=2), 0),
    ],
    ids=[
        "one row",
        "a bias",
        "many rows",
        "rows of a prefill",
        "bfloat16",
        "rows of a prefill in bfloat16",
        "float64",
        "a small weight",
        "another order",
        "a column",
        "a factor",
    ],
)
def test_the_kernel_takes_products_with_a_weight(
    region: Callable[[], Any], count: int, found: list[Product], interpreted: None
) -> None:
    """Only products that the kernel computes faster are replaced; all products have correct results."""
    graph = InductorDriver(CPU).capture(region)
    assert len(found) == count
    graph.outputs.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(graph.outputs, region())


@pytest.mark.sweep
def test_a_weight_that_changes_in_place_takes_effect(compiler: None, found: list[Product]) -> None:
    """Replays read the weights in place: new values of weight, bias and rows give new results."""
    layer, x = torch.nn.Linear(80, 60), torch.randn(3, 80)
    graph = InductorDriver(CPU).capture(lambda: layer(x).relu())
    assert len(found) == 1
    for _ in range(3):
        for tensor in (layer.weight, layer.bias, x):
            tensor.normal_()
        graph.outputs.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(graph.outputs, layer(x).relu())


def test_without_compiled_kernels_products_are_torchs(
    found: list[Product], interpreted: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the kernels cannot be built, torch computes the products, and one warning gives the reason."""
    products._is_built.cache_clear()
    monkeypatch.setattr(products, "load", lambda: "no compiler here")
    try:
        for _ in range(2):
            region = linear(2)
            graph = InductorDriver(CPU).capture(region)
            graph.replay()
            torch.testing.assert_close(graph.outputs, region())
    finally:
        products._is_built.cache_clear()
    assert not found
    assert [record.message for record in caplog.records] == [
        "cpu_graph uses torch's products instead of the compiled kernel: no compiler here"
    ]
