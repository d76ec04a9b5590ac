"""Tests of the tape: what a replay repeats, what cannot be recorded, and which memory is external."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from graphpact.errors import CaptureError
from graphpact_kernels import AttendCall, PagedRows, ScoreOptions, pack_kv_indices, paged_attention
from graphpact_tape import nodes, recorder
from graphpact_tape.tape import Tape, TapeDriver
from support import PROGRAMS, leaves, run_program

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps."""
    with torch.inference_mode():
        yield


@pytest.fixture
def driver() -> TapeDriver:
    """Return a new tape driver."""
    return TapeDriver(CPU)


def _clear(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        # A view that overlaps itself cannot be filled; its base can.
        base = tensor if tensor._base is None else tensor._base
        base.fill_(float("nan") if base.is_floating_point() else 1)


def _replays_like_eager(
    fn: Callable[..., Any], *inputs: torch.Tensor, rounds: int = 3, seed: int = 0
) -> Tape:
    """Capture ``fn`` and assert that replays on new contents of ``inputs`` equal eager, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    graph = TapeDriver(CPU).capture(lambda: fn(*inputs))
    held = {t.untyped_storage()._cdata for t in inputs}
    for _ in range(rounds):
        for tensor in inputs:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator))
            else:
                tensor.copy_(torch.randint(0, 3, tensor.shape, generator=generator))
        before = [tensor.clone() for tensor in inputs]
        outputs = leaves(graph.outputs)
        _clear([t for t in outputs if t.untyped_storage()._cdata not in held])
        graph.replay()
        got, left = [t.clone() for t in outputs], [t.clone() for t in inputs]
        for tensor, value in zip(inputs, before, strict=True):
            tensor.copy_(value)
        expected = leaves(fn(*inputs))
        assert len(got) == len(expected) > 0
        for a, b in zip([*got, *left], [*expected, *inputs], strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
    return graph


# -- what a replay repeats and what it ignores -----------------------------------------------------


def test_tensors_are_read_at_replay_and_numbers_stay(driver: TapeDriver) -> None:
    """A replay reads the new contents of a recorded tensor, but uses the host number of the capture."""
    x, factor = torch.ones(3), 2
    graph = driver.capture(lambda: x * factor)
    x.fill_(5)
    factor = 100
    graph.outputs.fill_(float("nan"))
    graph.replay()
    assert graph.outputs.tolist() == [10, 10, 10]


def test_a_new_tensor_under_an_old_name_is_not_seen(driver: TapeDriver) -> None:
    """A replay reads the recorded tensor, not another one that was later stored under the same name."""
    box = {"x": torch.ones(2)}
    old = box["x"]
    graph = driver.capture(lambda: box["x"] + 1)
    box["x"] = torch.full((2,), 50.0)
    old.fill_(7)
    graph.replay()
    assert graph.outputs.tolist() == [8, 8]


def test_replay_runs_no_python_of_the_region(driver: TapeDriver) -> None:
    """The region's Python runs only for warm-up and recording; a replay keeps the recorded branch."""
    x, calls = torch.ones(2), []

    def region() -> torch.Tensor:
        calls.append(1)
        return x + 1 if len(calls) < 10 else x - 1

    graph = driver.capture(region, warmup=3)
    assert len(calls) == 4
    for value in range(20):
        x.fill_(value)
        graph.replay()
        assert graph.outputs.tolist() == [value + 1] * 2
    assert len(calls) == 4


def test_containers_changed_after_capture_do_not_matter(driver: TapeDriver) -> None:
    """Lists of tensors, sizes and indices are recorded as at capture; later changes have no effect."""
    parts, sizes = [torch.ones(1), torch.ones(2)], [2, 1]
    x, where = torch.arange(4.0), [3, 1]
    graph = driver.capture(lambda: (torch.cat(parts), torch.zeros(sizes), x[where]))
    first = parts[0]
    parts.clear()
    sizes[:] = [9, 9]
    where[:] = [0, 0, 0]
    first.fill_(4)
    _clear(leaves(graph.outputs))
    graph.replay()
    assert graph.outputs[0].tolist() == [4, 1, 1]
    assert graph.outputs[1].tolist() == [[0], [0]]
    assert graph.outputs[2].tolist() == [3, 1]


def test_in_place_work_is_repeated(driver: TapeDriver) -> None:
    """An in-place operation runs once in each replay."""
    counter = torch.zeros(1)
    graph = driver.capture(lambda: counter.add_(1), warmup=0)
    counter.zero_()
    for _ in range(3):
        graph.replay()
    assert counter.item() == 3
    assert graph.num_nodes == 1


def test_views_are_no_nodes(driver: TapeDriver) -> None:
    """Views, views of views, expansions and splits add no node and show changes of their base."""
    x = torch.arange(24.0).view(4, 6).clone()

    def region() -> tuple[torch.Tensor, ...]:
        a, b = x.split([2, 4], dim=1)
        return a[1:].t(), b.unsqueeze(0).transpose(1, 2)[0, 1:3], x[:, :1].expand(4, 5), *x.chunk(2)

    graph = driver.capture(region)
    assert graph.num_nodes == 0
    _replays_like_eager(lambda x: [t + 1 for t in region()] + [x[1:].view(3, 2, 3)[:, 1] * 2], x)


def test_writes_through_views_reach_the_base(driver: TapeDriver) -> None:
    """A write through a view of a view reaches the base in each replay."""

    def region(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(4, 6)
        y[1:].view(3, 2, 3)[:, 1].copy_(x[1:, :3])
        y.t()[0] += x[:, 5]
        y.narrow(1, 2, 2).mul_(3).add_(1)
        return y

    _replays_like_eager(region, torch.randn(4, 6))


def test_uninitialised_memory_is_not_run(driver: TapeDriver) -> None:
    """``empty`` adds no node: it is memory of the graph, and each replay repeats the writes to it."""

    def region(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(3)
        z = torch.empty_like(x)
        w = x.new_empty(3)
        torch.mul(x, 2, out=y)
        return z.copy_(y) + w.fill_(1)

    assert _replays_like_eager(region, torch.randn(3)).num_nodes == 4


def test_a_graph_holds_what_it_needs(driver: TapeDriver) -> None:
    """The tape keeps inputs and intermediates alive that are not referenced elsewhere."""
    given = [torch.arange(4.0)]

    def region() -> torch.Tensor:
        weight = torch.full((4,), 3.0)
        return (given[0] * weight).sum(0, keepdim=True)

    graph = driver.capture(region)
    assert driver.capture(lambda: torch.rand(4, 4) @ torch.rand(4, 4)).num_nodes == 3
    given[0].fill_(1)
    memory = StorageWeakRef(given.pop().untyped_storage())
    gc.collect()
    assert not memory.expired()
    graph.replay()
    assert graph.outputs.item() == 12
    graph.release()
    assert memory.expired()


def test_graphs_of_one_driver_do_not_overlap(driver: TapeDriver) -> None:
    """The outputs of a tape do not change when another tape of the same driver replays."""
    x = torch.ones(5)
    one, two = driver.capture(lambda: x + 1), driver.capture(lambda: x + 2)
    x.fill_(10)
    one.replay()
    x.fill_(20)
    two.replay()
    assert one.outputs.tolist() == [11] * 5
    assert two.outputs.tolist() == [22] * 5


# -- how an operation is repeated ------------------------------------------------------------------

_WITH_OUT = {
    "add": lambda x: x + 1,
    "mm": lambda x: x @ x.t(),
    "bmm": lambda x: torch.bmm(x.expand(2, 4, 6), x.t().expand(2, 6, 4)),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], dim=1),
    "topk": lambda x: torch.topk(x, 3, dim=1),
    "max.dim": lambda x: torch.max(x, dim=1),
    "sort": lambda x: torch.sort(x, dim=1, stable=True),
    "mean to float64": lambda x: x.mean(dim=1, dtype=torch.float64),
    "sum of a dtype": lambda x: torch.sum(x > 0, dim=0),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "where": lambda x: torch.where(x > 0, x, -x),
    "full": lambda x: torch.full((4, 6), 7) + x,
    "new_zeros": lambda x: x.new_zeros(2, 3) + x[:2, :3],
    "one argument arange": lambda x: torch.arange(6, dtype=torch.float32) * x,
    "to a transposed layout": lambda x: x.t() + 1,
    "cumsum": lambda x: x.cumsum(1, dtype=torch.float64),
}
_WITHOUT_OUT = {  # at least one operation of each kind
    "var_mean": lambda x: torch.var_mean(x, dim=1),
    "embedding": lambda x: functional.embedding((x > 0).long(), x),
    "index": lambda x: x[(x[:, 0] > 0).long(), torch.arange(4)],
    "gather": lambda x: x.gather(1, (x > 0).long()),
    "_to_copy": lambda x: (x.to(torch.float64), x.to(torch.bfloat16), x.mul(9).to(torch.int32)),
    "zeros and ones": lambda x: torch.zeros(4, 6, dtype=torch.int64) + torch.ones_like(x).long(),
    "three argument arange": lambda x: torch.arange(1, 13, 2) + x,
    "layer_norm": lambda x: functional.layer_norm(x, (6,)),
    "rms_norm": lambda x: functional.rms_norm(x, (6,)),
    "linear": lambda x: functional.linear(x, x, x[:, 0]),
    "matmul": lambda x: torch.matmul(x.expand(2, 4, 6), x.t()),
    "contiguous": lambda x: x.t().contiguous(),
    "reshape that copies": lambda x: x.t().reshape(3, 8),
    "sdpa": lambda x: functional.scaled_dot_product_attention(*[x.view(1, 2, 4, 3)] * 3),
    "sdpa with a mask": lambda x: functional.scaled_dot_product_attention(
        *[x.view(1, 2, 4, 3)] * 3, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()
    ),
    "split_with_sizes_copy": lambda x: torch.split_with_sizes_copy(x, [2, 4], dim=1),
    "foreach": lambda x: torch._foreach_mul([x, x[:1]], 2.0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "conv": lambda x: functional.conv1d(x[None], torch.ones(2, 4, 3)),
    "channels last": lambda x: x.view(1, 6, 2, 2).contiguous(memory_format=torch.channels_last),
    "a composite that computes": lambda x: x[:, :4] + torch.quasirandom.SobolEngine(4).draw(4),
    "silu, gelu": lambda x: functional.silu(x) * functional.gelu(x, approximate="tanh"),
}
_IN_PLACE = {
    "masked_fill_": lambda x: x.masked_fill_(x > 0, -1.0),
    "index_put": lambda x: x.index_put((torch.tensor([0, 2]),), x[1] * 3),
    "index_put_ accumulate": lambda x: x.index_put_((torch.tensor([1, 1]),), x[:2] * 2, accumulate=True),
    "setitem": lambda x: (x.__setitem__((slice(None), 1), x[:, 0]), x)[1],
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([3, 0]), x[1:3] * 2),
    "scatter_add_": lambda x: x.scatter_add_(1, torch.zeros(4, 6).long(), x.clone()),
    "foreach_": lambda x: (torch._foreach_mul_([x[0], x[1]], 2.0), x)[1],
    "foreach_copy_": lambda x: (torch._foreach_copy_([x[0]], [x[1]]), x)[1],
    "out= of the caller": lambda x: torch.add(x, 1, out=x),
    "arange out=": lambda x: torch.arange(6, out=x[0]) + x[1],
    "mutating and returning new": lambda x: functional.batch_norm(
        x, x.new_zeros(6), x.new_ones(6), training=True
    ),
}


@pytest.mark.parametrize("name", [*_WITH_OUT, *_WITHOUT_OUT, *_IN_PLACE])
def test_every_way_to_run_an_operation_again(name: str) -> None:
    """Operations with an out-variant, without one, and in place have the same results as an eager run."""
    fn = {**_WITH_OUT, **_WITHOUT_OUT, **_IN_PLACE}[name]
    graph = _replays_like_eager(fn, torch.randn(4, 6))
    assert graph.num_nodes > 0


@pytest.mark.parametrize("name", _WITH_OUT)
def test_out_variants_are_used_where_the_schema_has_one(name: str) -> None:
    """These operations write directly into the recorded tensors: no node runs and then copies."""
    x = torch.randn(4, 6)
    graph = TapeDriver(CPU).capture(lambda: _WITH_OUT[name](x))
    assert not [op for op, _, _ in graph._nodes if isinstance(op, nodes.RunAndCopy)]


def test_random_operations_advance() -> None:
    """Each replay draws new random numbers, equal to those that an eager run would draw."""
    x = torch.ones(1000)

    def region() -> tuple[torch.Tensor, ...]:
        noise = torch.empty(5).uniform_()
        return torch.rand(4), torch.randn_like(x), functional.dropout(x, 0.5, training=True), noise

    graph = TapeDriver(CPU).capture(region)
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        got = []
        for _ in range(2):
            graph.replay()
            got.append([t.clone() for t in graph.outputs])
        torch.manual_seed(seed)
        for outputs in got:
            for a, b in zip(outputs, region(), strict=True):
                assert torch.equal(a, b)
        drawn += got
    for i in range(4):
        assert len({tuple(outputs[i].tolist()) for outputs in drawn}) == 4


def test_a_custom_operator_is_one_node() -> None:
    """A custom operator of graphpact is one node, and its replay writes ``out`` from the new inputs."""
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    rows, indptr = torch.tensor([1, 2]), torch.tensor([0, 2, 3], dtype=torch.int32)
    pages = torch.zeros(4, dtype=torch.int32)

    def region() -> None:
        pack_kv_indices(table, rows, indptr, page_size=1, out=pages)

    graph = TapeDriver(CPU).capture(region)
    assert graph.num_nodes == 1
    table += 100
    rows.copy_(torch.tensor([2, 0]))
    indptr.copy_(torch.tensor([0, 1, 4]))
    pages.fill_(-1)
    graph.replay()
    assert pages.tolist() == [108, 100, 101, 102]


def test_attention_is_one_node_and_reads_its_index_tensors_at_replay() -> None:
    """The attention kernel is one node and can be replayed for other lengths than at capture."""
    q, kv = torch.randn(2, 2, 4), torch.randn(8, 1, 4)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    pages, last = torch.tensor([3, 4, 5, 6], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    rows = PagedRows(
        qo_indptr=torch.tensor([0, 1, 2], dtype=torch.int32),
        kv_indptr=indptr,
        kv_indices=pages,
        kv_last_page_len=last,
        page_size=1,
        max_q_len=1,
        max_kv_len=8,
    )

    def region() -> torch.Tensor:
        return paged_attention(AttendCall(q, kv, kv, rows, ScoreOptions(scaling=0.5)))

    graph = TapeDriver(CPU).capture(region)
    assert graph.num_nodes == 1
    for lengths in ([1, 3], [3, 1], [2, 2]):
        indptr.copy_(torch.tensor([0, lengths[0], 4]))
        q.normal_()
        graph.outputs.fill_(float("nan"))
        graph.replay()
        assert torch.equal(graph.outputs, region())


# -- what cannot be recorded -----------------------------------------------------------------------

_HOST_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool(x[0, 0] > 0),
    "if": lambda x: 1 if x[0, 0] else 2,
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x.sum()),
    "index": lambda x: [1, 2, 3][x[0, 0].long()],
    "format": lambda x: f"{x.sum()}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x) + 1,
    "contains": lambda x: 3.0 in x,
    "nonzero": lambda x: x.nonzero(),
    "boolean mask": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x) + 1,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "arange to a tensor": lambda x: torch.arange(x[0, 0]),
    "full of a tensor": lambda x: torch.full((2,), x[0, 0]),
    "slice to a tensor": lambda x: x[: x[0, 0].long()],
    "alpha of a tensor": lambda x: torch.add(x, x, alpha=x[0, 0]),
    "bincount": lambda x: torch.bincount(x[0].long()),
}


@pytest.mark.parametrize("name", _HOST_READS)
def test_host_reads_are_refused_by_line(driver: TapeDriver, name: str) -> None:
    """A host read while recording raises an error with its line; the driver can record again."""
    x = torch.ones(2, 3)
    read = _HOST_READS[name]
    with pytest.raises(CaptureError) as error:
        driver.capture(lambda: read(x + 1))
    line = read.__code__.co_firstlineno
    assert f"{__file__}:{line}: " in str(error.value)
    assert "help: " in str(error.value)
    # The driver still works, and no dispatch mode is left active.
    assert torch.ones(1).item() == 1
    graph = driver.capture(lambda: x * 2)
    x.fill_(4)
    graph.replay()
    assert graph.outputs.tolist() == [[8] * 3] * 2


_DYNAMIC_COMPOSITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long(), dim=0),
    "where of one argument": lambda x: torch.where(x > 0),
    "tensor_split": lambda x: torch.tensor_split(x, (x[:1, 0] > 0).long()),
}


@pytest.mark.parametrize("name", _DYNAMIC_COMPOSITES)
def test_composite_operators_of_unknown_length_are_refused(driver: TapeDriver, name: str) -> None:
    """A composite operation whose output length depends on data is refused."""
    x = torch.ones(2, 3)
    with pytest.raises(CaptureError):
        driver.capture(lambda: _DYNAMIC_COMPOSITES[name](x))


@pytest.mark.parametrize(
    ("work", "shape"),
    [
        (lambda t: t.unsqueeze_(0).cumsum(1), (1, 2, 1, 1, 3)),
        (lambda t: t.squeeze_(1).cumsum(1), (2, 1, 3)),
        (lambda t: t.transpose_(0, 3).cumsum(0), (3, 1, 1, 2)),
        (lambda t: t[:, 0, 0].t_().cumsum(0), (3, 2)),
    ],
    ids=["unsqueeze_", "squeeze_", "transpose_", "t_"],
)
def test_shapes_changed_in_place_do_not_change_again(
    driver: TapeDriver, work: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    """A tensor of the region keeps its new shape in every replay; one from outside is refused."""
    x = torch.randn(2, 1, 1, 3)
    graph = driver.capture(lambda: work(x * 2))
    for _ in range(2):
        x.normal_()
        _clear(leaves(graph.outputs))
        graph.replay()
        assert graph.outputs.shape == shape
        assert torch.equal(graph.outputs, work(x * 2))
    with pytest.raises(CaptureError, match="changes a tensor's shape in place"):
        driver.capture(lambda: work(x), warmup=0)
    assert x.shape == (2, 1, 1, 3)


def test_constants_are_restored_before_they_are_changed_again() -> None:
    """A constant that a region writes starts from its value in each replay, or capture is refused."""
    x = torch.ones(2)

    def region() -> torch.Tensor:
        total = torch.tensor([1.0, 2.0])
        total += x
        return total

    try:
        graph = TapeDriver(CPU).capture(region)
    except CaptureError:
        return
    for _ in range(2):
        graph.replay()
    assert graph.outputs.tolist() == [2, 3]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch._foreach_add([x], 1.0),
        lambda x: torch.split_with_sizes_copy(x, [3], dim=1),
        lambda x: torch.unbind_copy(x[:1]),
    ],
    ids=["foreach_add", "split_with_sizes_copy", "unbind_copy"],
)
def test_lists_of_one_tensor(fn: Callable[[torch.Tensor], Any]) -> None:
    """An operation that returns a list replays correctly if the list has one tensor."""
    _replays_like_eager(fn, torch.randn(2, 3))


def test_an_error_of_the_region_is_the_regions(driver: TapeDriver) -> None:
    """An exception in the region passes through unchanged, and the driver can record again."""
    with pytest.raises(ZeroDivisionError):
        driver.capture(lambda: 1 // 0, warmup=0)
    assert driver.capture(lambda: torch.ones(2) + 1).num_nodes == 2


def test_host_reads_in_the_warm_up_are_free(driver: TapeDriver) -> None:
    """Host reads are allowed in the warm-up, for example in lazy initialization."""
    seen: list[float] = []
    x = torch.ones(2)

    def region() -> torch.Tensor:
        if not seen:
            seen.append(x.sum().item())
        return x + seen[0]

    assert driver.capture(region).num_nodes == 1


# -- external memory and pool ----------------------------------------------------------------------


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage, by its identity."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _recorded(graph: Tape) -> list[torch.Tensor]:
    """Return every tensor of a tape's nodes, of their copy destinations, and of its outputs."""
    copied = [op.outputs for op, _, _ in graph._nodes if isinstance(op, nodes.RunAndCopy)]
    return leaves([graph.outputs, copied, [node[1:] for node in graph._nodes]])


def _holds_to_its_memory(graph: Tape, inputs: list[torch.Tensor]) -> None:
    """Assert that recorded inputs are external and that all other recorded memory is the pool."""
    given, recorded = _storages(inputs), _storages(_recorded(graph))
    external = _storages(graph.external_tensors())
    assert external.keys() == recorded.keys() & given.keys()
    assert graph.pool_nbytes == sum(n for s, n in recorded.items() if s not in given)


@pytest.mark.parametrize("name", [*_WITH_OUT, *_WITHOUT_OUT, *_IN_PLACE])
def test_what_an_operation_makes_is_the_tapes_and_what_it_was_given_is_not(name: str) -> None:
    """For every way to repeat an operation, its input is external and its results are pool."""
    x = torch.randn(4, 6)
    fn = {**_WITH_OUT, **_WITHOUT_OUT, **_IN_PLACE}[name]
    graph = TapeDriver(CPU).capture(lambda: fn(x))
    _holds_to_its_memory(graph, [x])
    assert x.data_ptr() in {t.data_ptr() for t in graph.external_tensors()}


def test_constants_and_uninitialised_memory_are_the_tapes(driver: TapeDriver) -> None:
    """Constants, the copies that restore them and ``empty`` are pool; an unused ``empty`` is not."""
    x = torch.ones(4)

    def region() -> torch.Tensor:
        torch.empty(1000)
        return torch.empty(4).copy_(x).add_(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    graph = driver.capture(region)
    assert graph.pool_nbytes == 3 * x.nbytes
    assert [t.data_ptr() for t in graph.external_tensors()] == [x.data_ptr()]


def test_memory_of_others_is_found_wherever_it_comes_from(driver: TapeDriver) -> None:
    """A tensor in a closure is external if it is read, read through a view, written or returned."""
    read, seen, written, returned = (torch.ones(8) for _ in range(4))

    def region() -> tuple[torch.Tensor, ...]:
        written[:3].copy_(read[:3] + seen[5:].sum())
        return returned[2:4], read * 2

    external = driver.capture(region).external_tensors()
    found = {(t.data_ptr(), t.numel()) for t in external}
    assert {
        (read.data_ptr(), 8),
        (seen[5:].data_ptr(), 3),
        (written.data_ptr(), 3),
        (returned[2:].data_ptr(), 2),
    } <= found
    assert _storages(external).keys() == _storages([read, seen, written, returned]).keys()


def test_memory_that_was_freed_while_recording_is_nobodys_alibi(driver: TapeDriver) -> None:
    """An external storage that may have reused the identity of a freed one does not count as pool."""
    host = bytearray(16)

    def region() -> list[torch.Tensor]:
        freed = [torch.empty(4) for _ in range(50)]
        freed.clear()
        others = [torch.frombuffer(host, dtype=torch.float32) for _ in range(50)]
        return [other + 1 for other in others]

    graph = driver.capture(region)
    addresses = {t.data_ptr() for t in graph.external_tensors()}
    assert graph.pool_nbytes == 50 * 16 + 4  # and the number 1
    assert addresses == {torch.frombuffer(host, dtype=torch.float32).data_ptr()}


def test_finalizers_are_not_recorded(driver: TapeDriver) -> None:
    """Garbage with a finalizer that computes is not collected within a region, but after it."""
    finalized = torch.zeros(1)

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            finalized.add_(1)

    def region() -> torch.Tensor:
        for _ in range(2 * gc.get_threshold()[0]):
            Finalized()
        return finalized * 1

    graph = driver.capture(region, warmup=0)
    assert (gc.isenabled(), graph.outputs.item()) == (True, 0.0)
    gc.collect()
    assert finalized.item() > 0
    before = finalized.item()
    graph.replay()
    assert graph.outputs.item() == finalized.item() == before


def test_empty_tensors_are_nobodys(driver: TapeDriver) -> None:
    """A tensor without elements is neither external nor pool."""
    nothing = torch.empty(0)
    graph = driver.capture(lambda: torch.cat([nothing, nothing]))
    assert (graph.external_tensors(), graph.pool_nbytes) == ([], 0)


def test_a_released_tape_has_no_memory(driver: TapeDriver) -> None:
    """A released tape has no external tensors, an empty pool, and no references to its inputs."""
    inputs = [torch.ones(3)]
    graph = driver.capture(lambda: inputs[0] + 1)
    held = StorageWeakRef(inputs.pop().untyped_storage())
    gc.collect()
    assert not held.expired()
    graph.release()
    gc.collect()
    assert (graph.external_tensors(), graph.pool_nbytes) == ([], 0)
    assert held.expired()


# -- the end ---------------------------------------------------------------------------------------


def test_release_gives_the_memory_back(driver: TapeDriver) -> None:
    """`release` frees the intermediates and the outputs of a tape."""
    held: list[StorageWeakRef] = []

    def region() -> torch.Tensor:
        hidden = torch.ones(2) * 2
        out = hidden + 1
        held[:] = [StorageWeakRef(t.untyped_storage()) for t in (hidden, out)]
        return out

    graph = driver.capture(region)
    graph.replay()
    assert not any(ref.expired() for ref in held)
    graph.release()
    gc.collect()
    assert graph.outputs is None
    assert all(ref.expired() for ref in held)


def test_a_released_graph_cannot_be_replayed(driver: TapeDriver) -> None:
    """Replaying a released tape raises, as the driver contract requires."""
    graph = driver.capture(lambda: torch.ones(2) + 1)
    graph.release()
    with pytest.raises(Exception):  # noqa: B017, PT011  any error will do
        graph.replay()


def test_a_tape_runs_on_any_device() -> None:
    """The tape is available on the CPU and on CUDA, because it runs only eager torch."""
    assert TapeDriver.unavailable(CPU) is None
    assert TapeDriver.unavailable(torch.device("cuda")) is None


@pytest.mark.parametrize("strict", [False, True])
def test_the_data_of_a_parameter_is_read_at_each_replay(*, strict: bool) -> None:
    """A region may take ``.data`` of a parameter, whose class torch then passes, and replays read it anew."""
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    x = torch.arange(3.0)
    graph = TapeDriver(CPU, strict=strict).capture(lambda: x * weight.data)
    for value in (2.0, 5.0):
        weight.data.fill_(value)
        graph.replay()
        assert torch.equal(graph.outputs, x * value)


# -- random programs -------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=200)
@given(program=PROGRAMS, seed=st.integers(0, 999))
def test_random_programs_replay_bit_for_bit(program: list[tuple[str, int, int]], seed: int) -> None:
    """Replays of a random program on new contents equal eager runs, and its memory is external or pool."""
    with torch.inference_mode():
        inputs = torch.randn(4, 4), torch.randn(4, 4)
        graph = _replays_like_eager(lambda *xs: run_program(program, *xs), *inputs, rounds=2, seed=seed)
        _holds_to_its_memory(graph, list(inputs))


def test_a_forgotten_operation_is_caught_when_planted() -> None:
    """The comparison catches a recorder that drops an in-place operation."""
    keep = recorder.Recorder._record

    def forgetful(self: Any, func: Any, *rest: Any) -> None:
        if func is not torch.ops.aten.add_.Tensor:
            keep(self, func, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder.Recorder, "_record", forgetful)
        with pytest.raises(AssertionError):
            _replays_like_eager(lambda x: (x * 2).add_(x), torch.randn(3))
