"""Products by oneDNN: chosen by time for each shape, on weights that may change."""

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn import functional

from graphpact_cpu_graph import native, products
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cpu_graph.opaque import linear

CPU = torch.device("cpu")
_aten = torch.ops.aten


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch, compiler: None) -> list[tuple[int, ...]]:
    """Replace every product that can be replaced; return the list of their shapes, which a capture fills."""
    shapes: list[tuple[int, ...]] = []

    def all_of(found: list[products._Product], *_: object) -> list[tuple[int, ...]]:
        shapes.extend(each.shape for each in found)
        return shapes

    monkeypatch.setattr(products, "_faster", all_of)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native.artifacts, "find", lambda _: None)
    return shapes


def test_products_of_onednn_read_their_weights_in_every_replay(every: list[tuple[int, ...]]) -> None:
    """Replays follow rows, weights and biases that were written in place; other products stay torch's."""
    x, v, w = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(8, 16)
    b, c = torch.randn(16), torch.randn(8)

    def region() -> torch.Tensor:
        hidden = functional.linear(functional.linear(x, v, b).relu(), w, c)
        return functional.linear(hidden, v)[0] @ (hidden[0] + 1).t().repeat(2, 1)

    graph = InductorDriver(CPU).capture(region)
    assert sorted(every) == [(6, 8, 16), (6, 16, 8), (6, 16, 8)]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for tensor in (x, v, w, b, c):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        graph.replay()
        torch.testing.assert_close(graph.outputs, region(), rtol=1e-4, atol=1e-4)


BIAS = torch.ones(4)
UNCHANGED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda x, w: functional.linear(x.double(), w.double()),
    "weights in another layout": lambda x, w: x @ w,
    "a weight that is computed": lambda x, w: functional.linear(x, w * 2),
    "factors": lambda x, w: torch.addmm(BIAS, x, w.t(), beta=0.5),
    "a bias for each row": lambda x, w: torch.addmm(x, x, w.t()),
    "a batch of products": lambda x, w: torch.bmm(x[None], w.t()[None]),
}


@pytest.mark.parametrize("kind", UNCHANGED)
def test_other_products_stay_as_they_are(kind: str, every: list[tuple[int, ...]]) -> None:
    """Products that oneDNN would not compute, or not the same, are left to the compiler."""
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = InductorDriver(CPU).capture(lambda: UNCHANGED[kind](x, w))
    assert every == []
    w.mul_(2)
    graph.replay()
    torch.testing.assert_close(graph.outputs, UNCHANGED[kind](x, w))


@pytest.mark.parametrize(
    ("seconds", "replaced"), [(0.5, [(3, 8, 4)]), (0.95, []), (2.0, [])], ids=["half", "little less", "twice"]
)
def test_the_faster_product_of_a_shape_is_chosen(
    seconds: float, replaced: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of oneDNN is taken where it is clearly faster, by a clock that its calls move."""
    now = [0.0]

    def timed(taken: float) -> Callable[..., None]:
        def product(*_: object) -> None:
            now[0] += taken

        return product

    monkeypatch.setattr(products.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(products, "linear", timed(seconds))
    monkeypatch.setattr(torch, "mm", timed(1.0))
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(_aten.mm.default, (x, graph.call_function(_aten.t.default, (w,))))
    node.meta["layout"] = ("torch.float32", (3, 8), (8, 1))
    graph.output(())
    assert products.choose_products(graph, [torch.ones(3, 4), torch.ones(8, 4)]) == replaced
    assert (_aten.mm.default in [n.target for n in graph.nodes]) is not bool(replaced)


def test_the_operator_is_torchs_linear() -> None:
    """The operator computes what torch computes, with and without a bias."""
    x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    torch.testing.assert_close(linear(x, w), functional.linear(x, w))
    torch.testing.assert_close(linear(x, w, b), functional.linear(x, w, b))
