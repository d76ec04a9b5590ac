"""External tensors that the `cuda` driver reports for its graphs, tested with fakes of `torch.cuda`.

The fakes record nothing: these tests cover what the driver sees while a region runs.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from graphpact import CudaGraphBufferRegistry, ForwardBatch, GraphShape
from graphpact.attention import Buffers
from graphpact.errors import CaptureError, PactBreach
from graphpact.graphs import Graph
from graphpact_cuda_graph.driver import CudaDriver
from graphpact_flashinfer import FlashInferBackend
from graphpact_kernels import write_indptr
from graphpact_tape.tape import Tape
from rigs.lane import SHAPE_OF, LaneRig

CPU = torch.device("cpu")
SHAPE = SHAPE_OF[2]


class FakeGraph:
    """A fake ``torch.cuda.CUDAGraph`` that does nothing."""

    def capture_begin(self, pool: Any = None, *, check_input_liveness: bool = False) -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End."""

    def replay(self) -> None:
        """Replay nothing."""

    def reset(self) -> None:
        """Forget nothing."""


class FakeEvent:
    """A fake ``torch.cuda.Event``."""

    def record(self, stream: Any = None) -> None:
        """Mark nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class FakeStream:
    """A fake ``torch.cuda.Stream``."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the parts of `torch.cuda` that the driver uses by fakes on host memory."""
    fakes: dict[str, Any] = {
        "CUDAGraph": FakeGraph,
        "Event": FakeEvent,
        "Stream": FakeStream,
        "graph_pool_handle": object,
        "current_stream": FakeStream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _: 0,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    yield
    gc.collect()


def storages(graph: Graph) -> list[int]:
    """Return the addresses of the storages that a graph reports as external."""
    external = graph.external_tensors()
    assert external is not None
    return [t.untyped_storage().data_ptr() for t in external]


def test_inputs_are_seen_and_what_the_region_makes_is_not() -> None:
    """Tensors that existed before the region are reported in order of use, and equal views only once."""
    x, table, out = torch.ones(8), torch.ones(8), torch.zeros(6)

    def region() -> torch.Tensor:
        made = x[2:] * table[:6] + x[2:]
        return torch.add(made, made, out=out)

    graph = CudaDriver(CPU).capture(region)
    assert storages(graph) == [t.data_ptr() for t in (x, table, out)]
    assert graph.externals == "dispatched"
    graph.release()
    assert graph.external_tensors() == []


def test_the_arguments_of_a_custom_operator_are_seen() -> None:
    """A custom operator is one dispatch; the tensors that it reads and writes are reported."""
    counts, offsets = torch.ones(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    with torch.inference_mode():
        graph = CudaDriver(CPU).capture(lambda: write_indptr(counts, out=offsets))
    assert set(storages(graph)) == {counts.data_ptr(), offsets.data_ptr()}


def test_what_goes_round_the_dispatcher_is_not_seen() -> None:
    """A kernel that takes an address is not dispatched, so its tensor is not reported: `dispatched`."""
    hidden, seen = torch.ones(4), torch.ones(4)
    raw = hidden.numpy()

    def region() -> torch.Tensor:
        raw[:] = 2  # similar to a kernel that is launched with a pointer
        return seen + 1

    graph = CudaDriver(CPU).capture(region)
    assert storages(graph) == [seen.data_ptr()]
    assert graph.externals == "dispatched"


def test_a_returned_input_and_a_gone_one() -> None:
    """An input that the region returns is reported; memory that was freed is no longer reported."""
    held, temporary = torch.ones(4), torch.ones(4)
    gone = weakref.ref(temporary)
    region = [temporary]
    graph = CudaDriver(CPU).capture(lambda: (held, region[0] + 1))
    assert len(storages(graph)) == 2
    del temporary
    region.clear()
    gc.collect()
    assert gone() is None
    assert storages(graph) == [held.data_ptr()]


def test_an_eager_call_is_no_part_of_the_graph() -> None:
    """A tensor that an eager call reads is not reported, and neither is the tensor that it returns."""
    driver = CudaDriver(CPU)
    x, other, y = (torch.ones(4) for _ in range(3))

    def region() -> torch.Tensor:
        between = driver.eager_call(lambda t: t + other, x * 2)
        return between * y

    graph = driver.capture(region)
    assert graph.num_segments == 2
    assert storages(graph) == [x.data_ptr(), y.data_ptr()]


def test_warm_up_runs_are_not_looked_at() -> None:
    """A tensor that only the first warm-up run uses is not reported."""
    first, later, runs = torch.ones(4), torch.ones(4), [0]

    def region() -> torch.Tensor:
        runs[0] += 1
        return (first if runs[0] == 1 else later) + 1

    assert storages(CudaDriver(CPU).capture(region)) == [later.data_ptr()]


def test_a_capture_that_fails_leaves_no_mode() -> None:
    """An error of the region passes through and leaves no dispatch mode active."""

    def fails() -> None:
        raise KeyError

    driver = CudaDriver(CPU)
    with pytest.raises(KeyError):
        driver.capture(fails, warmup=0)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert driver.capture(lambda: torch.ones(2)).external_tensors() == []


def test_sparse_and_wrapped_tensors_are_no_obstacle() -> None:
    """A region may use tensors without storage; for a wrapper its inner tensors are reported."""
    sparse = torch.eye(3).to_sparse()
    inside = torch.ones(3)
    wrapped: Any = TwoTensor(inside, inside.clone())

    def region() -> Any:
        return torch.sparse.mm(sparse, torch.ones(3, 3)), wrapped * 2

    told = storages(CudaDriver(CPU).capture(region))
    assert {inside.data_ptr(), wrapped.b.data_ptr()} <= set(told)


def test_higher_order_operators_run() -> None:
    """A higher-order operator runs in a region, and its tensors are reported."""
    x, y = (torch.ones(2, 2, dtype=torch.int8) for _ in range(2))

    def region() -> Any:
        return torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, x, y)

    assert {x.data_ptr(), y.data_ptr()} <= set(storages(CudaDriver(CPU).capture(region)))


class HoldsLengths(FlashInferBackend):
    """A backend whose attention reads a tensor that the backend creates in every step."""

    lens: torch.Tensor
    fill_is_device_only = False

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill, and create the tensor."""
        super().fill_metadata(view, metadata)
        self.lens = view.seq_lens + 1

    def forward(self, *args: Any) -> torch.Tensor:
        """Attend, and read the tensor."""
        return super().forward(*args) + 0 * self.lens.sum()


def test_the_pact_covers_what_the_backend_holds() -> None:
    """The pact covers a tensor of the backend that the graph reads; replacing it is a breach."""
    rig = LaneRig(backend=HoldsLengths, driver=CudaDriver(CPU))
    assert rig.lane.captured[SHAPE].held == ["lens"]
    assert rig.lane.stats.externals == "dispatched"
    with pytest.raises(PactBreach, match=r"backend\.lens"):
        rig.lane.run(rig.batch(3, 2))


class NoSlot(FlashInferBackend):
    """A backend whose query offsets are in memory that no slot declares."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        """Bind the offsets to a new tensor."""
        made = super().allocate_metadata(view, shape, buffers)
        made.qo_indptr = torch.zeros_like(made.qo_indptr)
        return made


def test_a_strict_lane_finds_metadata_outside_the_slots() -> None:
    """A strict lane refuses metadata that the graph reads outside all slots, as on the tape."""
    with pytest.raises(CaptureError, match=r"metadata\.qo_indptr, which is not in the memory of a slot"):
        LaneRig(backend=NoSlot, driver=CudaDriver(CPU, strict=True))
    assert LaneRig(driver=CudaDriver(CPU, strict=True)).lane.captured.get(SHAPE) is not None


def test_a_driver_that_tells_nothing_is_named_in_the_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the driver does not report external tensors, the lane's statistics contain `unknown`."""
    assert LaneRig().lane.stats.externals == "all"
    monkeypatch.setattr(Tape, "external_tensors", lambda _: None)
    lane = LaneRig().lane
    assert lane.stats.externals == "unknown"
    assert {s.externals for s in lane.stats.shapes.values()} == {"unknown"}
    assert isinstance(lane.registry, CudaGraphBufferRegistry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_host_number_is_no_input(dtype: torch.dtype) -> None:
    """A tensor without dimensions on another device is taken by value; all other tensors are reported."""
    watch = CudaDriver(torch.device("cuda", 0)).capture  # not the device of the tensors
    number, row = torch.tensor(2, dtype=dtype), torch.ones(3, dtype=dtype)
    assert storages(watch(lambda: row * number)) == [row.data_ptr()]
