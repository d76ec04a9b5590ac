"""Segments that are split at repeated blocks: where, how often blocks are compiled, and what replays do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpact_cpu_graph import blocks, shared_library
from graphpact_cpu_graph.inductor import InductorDriver, InductorGraph
from graphpact_cpu_graph.pieces import pieces_of
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.recorder import Recorder, Segment

CPU = torch.device("cpu")
WIDTH = 6


class Layers:
    """A model of equal layers, which write a cache in place, between a first and a last operation.

    Args:
        count: The number of layers.
        number: A number that each layer multiplies with, by the number of the layer.
    """

    def __init__(self, count: int, number: Callable[[int], float] = lambda _: 2.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(2, WIDTH, generator=generator)
        self.weights = torch.randn(count, WIDTH, WIDTH, generator=generator).unbind()
        self.caches = [torch.zeros(4, WIDTH) for _ in range(count)]
        self.where = torch.tensor([2, 0])
        self.number = number

    def __call__(self) -> torch.Tensor:
        """Return the result of all layers."""
        table = self.where + 1
        h = self.x + self.x.exp() * 0.25  # as a layer ends, so that the blocks could begin with these calls
        for at, (weight, cache) in enumerate(zip(self.weights, self.caches, strict=True)):
            wide = torch.cat([h, h * self.number(at)], dim=1)  # twice as many bytes as cross between layers
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            y = torch.tanh(normed[:, :WIDTH] @ weight + normed[:, WIDTH:])
            cache.index_copy_(0, self.where, y)
            z = torch.sigmoid(cache[table] * 0.5 - 1).clamp(0.1) / 3
            h = h + torch.relu(z - y).neg().exp() * 0.25
        return h.sum(0)

    def state(self, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """Return the result of ``run`` and the caches after it."""
        for cache in self.caches:
            cache.fill_(0.5)
        return [run().clone(), *(cache.clone() for cache in self.caches)]


def split(region: Callable[[], Any]) -> list[Segment]:
    """Return the pieces of a region."""
    guard = HostReadGuard(HostMemory([]), "while a test records", AssertionError)
    recording = InductorDriver(CPU).record(Recorder(guard), region)
    pieces = pieces_of(recording.parts)
    assert all(isinstance(piece, Segment) for piece in pieces)
    calls = [call for piece in pieces for call in piece.calls]  # type: ignore[union-attr]
    assert calls == recording.segments[0].calls
    return pieces  # type: ignore[return-value]


def replayed(region: Callable[[], Any]) -> InductorGraph:
    """Return the graph of ``region``."""
    return InductorDriver(CPU).capture(region)


def require_right(graph: InductorGraph, model: Layers, seed: int) -> None:
    """Require that a replay for another input does what the model does eagerly."""
    model.x.normal_(generator=torch.Generator().manual_seed(seed))
    got = model.state(lambda: (graph.replay(), graph.outputs)[1])
    torch.testing.assert_close(got, model.state(model))


def counted_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return a list to which each call of a function of `shared_library` adds its arguments."""
    calls: list[Any] = []
    called = getattr(shared_library, name)
    monkeypatch.setattr(shared_library, name, lambda *args: (calls.append(args), called(*args))[1])
    return calls


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of any size be pieces of their own."""
    monkeypatch.setattr(blocks, "LEAST_BYTES", 1)


def test_equal_layers_are_pieces_of_their_own() -> None:
    """Each of at least 8 layers is one piece, with what is before and after them in two more."""
    sizes = [[call.op for call in piece.calls] for piece in split(Layers(9))]
    assert len(sizes) == 11
    assert all(ops == sizes[1] for ops in sizes[1:-1])
    assert sizes[1][-1] is torch.ops.aten.add.Tensor  # what crosses is smallest after the last operation
    assert sizes[1][0] is torch.ops.aten.mul.Tensor


@pytest.mark.parametrize("few", ["layers", "operations", "alike"])
def test_other_segments_stay_whole(few: str) -> None:
    """With 7 layers, 100 operations in short blocks, or layers of different numbers, nothing is split."""

    def short() -> torch.Tensor:
        h = torch.ones(2)
        for _ in range(50):
            h = (h + 1) * 2
        return h

    regions = {"layers": Layers(7), "operations": short, "alike": Layers(9, number=float)}
    assert len(split(regions[few])) == 1


def test_layers_of_two_kinds_that_alternate_are_split_in_pairs() -> None:
    """If every second layer has another number, two layers are a block."""
    pieces = split(Layers(17, number=lambda at: float(at % 2)))
    lengths = [len(piece.calls) for piece in pieces]
    whole = len(split(Layers(9))[1].calls)
    assert lengths.count(2 * whole) == 8


def test_small_layers_share_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has as many layers as read LEAST_BYTES; if that makes less than two pieces, none is split."""
    model = Layers(9)
    layer = len(split(model)[1].calls)
    nbytes = model.weights[0].nbytes + model.x.nbytes + model.where.nbytes  # x: what crosses is as large
    lengths = []
    for count in (1, 4, 5):
        monkeypatch.setattr(blocks, "LEAST_BYTES", count * nbytes)
        lengths.append([len(piece.calls) // layer for piece in split(model)])
    assert [each[1:-1] for each in lengths] == [[1] * 9, [4, 4], []]
    assert len(lengths[2]) == 1


def test_layers_are_compiled_once(
    compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 9 equal layers one is compiled, with what is before and after them, and replays equal eager runs."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shared_library, "_loaded", {})
    builds = counted_calls(monkeypatch, "_library")
    model = Layers(9)
    graph = replayed(model)
    assert len(builds) == 3
    assert len(graph._steps) == 11
    for seed in range(3):
        require_right(graph, model, seed)


def test_equal_layers_without_a_cpp_program_share_one_python_program(
    compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If inductor has no C++ program for a layer, its Python program is made once, and replays are right."""
    monkeypatch.setattr(shared_library, "_loaded", {})
    monkeypatch.setattr(shared_library, "_library", lambda *_: None)
    monkeypatch.setattr(shared_library, "_from_cache", lambda _: None)
    made = counted_calls(monkeypatch, "_python_program")
    model = Layers(9)
    graph = replayed(model)
    assert len(made) == 3
    require_right(graph, model, seed=0)


def test_no_more_memory_is_kept_than_crosses(interpreted: None) -> None:
    """A graph keeps its output and the one result that crosses from each piece to the next."""
    graph = replayed(Layers(9))
    whole = replayed(Layers(7))
    assert whole.pool_nbytes == WIDTH * 4
    assert graph.pool_nbytes == WIDTH * 4 + 2 * 8 + 10 * 2 * WIDTH * 4  # the table crosses too


def test_the_longest_run_may_begin_with_less_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block before the first whole one and the rest of the last one belong to the outer pieces."""
    monkeypatch.setattr(blocks, "LEAST_NODES", 2)
    x = torch.ones(4)

    def region() -> torch.Tensor:
        h = x * 3
        for _ in range(10):
            h = (h + 1) * 3
        return h

    pieces = split(region)
    assert sum(len(piece.calls) == 2 for piece in pieces) >= blocks.LEAST_REPEATS
