"""Tests of the driver contract, the same for every driver.

The tape runs everywhere, inductor where there is a compiler, CUDA graphs where there is a GPU.
"""

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compiling import compiler  # noqa: F401  a fixture
from graphpact.errors import CaptureError, ReplayError
from graphpact.graphs import GraphDriver
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cuda_graph.driver import CudaDriver
from graphpact_kernels import pack_kv_indices
from graphpact_tape.tape import TapeDriver

_CUDA = torch.device("cuda", 0)
_NO_CUDA = CudaDriver.unavailable(_CUDA)
_DRIVERS = [
    pytest.param((TapeDriver, torch.device("cpu")), id="tape"),
    pytest.param(
        (functools.partial(TapeDriver, strict=True), torch.device("cpu")), id="tape-strict"
    ),
    pytest.param((InductorDriver, torch.device("cpu")), id="inductor"),
    pytest.param(
        (CudaDriver, _CUDA),
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(bool(_NO_CUDA), reason=str(_NO_CUDA))],
    ),
    pytest.param(
        (TapeDriver, _CUDA),
        id="tape-on-cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(bool(_NO_CUDA), reason=str(_NO_CUDA))],
    ),
]


@pytest.mark.parametrize("kind", _DRIVERS)
class TestDriverContract:
    """The promises of `graphpact.graphs.driver`, which every driver keeps."""

    @pytest.fixture(autouse=True)
    def _inference(self) -> Iterator[None]:
        """Enable inference mode, as lanes do for their steps."""
        with torch.inference_mode():
            yield

    @pytest.fixture
    def driver(
        self, kind: tuple[type[GraphDriver], torch.device], request: pytest.FixtureRequest
    ) -> GraphDriver:
        """Return a driver of the kind under test."""
        make, device = kind
        if make is InductorDriver:
            request.getfixturevalue("compiler")
        return make(device)

    def test_it_says_where_it_is_available(self, driver: GraphDriver) -> None:
        """A driver is available on its own device, and has one of the names of our drivers."""
        assert type(driver).unavailable(driver.device) is None
        assert driver.name in ("tape", "inductor", "cuda")

    def test_replay_reads_tensors_and_keeps_numbers(self, driver: GraphDriver) -> None:
        """A replay reads the new contents of a tensor, and uses host numbers as they were at capture."""
        x, factor = torch.ones(4, device=driver.device), 3.0
        graph = driver.capture(lambda: x * factor + 1)
        factor = 50.0
        for value in (2.0, 7.0, -1.0):
            x.fill_(value)
            graph.outputs.fill_(float("nan"))
            graph.replay()
            assert graph.outputs.tolist() == [value * 3 + 1] * 4

    def test_outputs_stay_where_they_are(self, driver: GraphDriver) -> None:
        """Every replay writes the same output memory, which the graph keeps."""
        x = torch.ones(4, device=driver.device)
        graph = driver.capture(lambda: {"logits": x + 1, "more": (x.sum(), x[1:])})
        address = graph.outputs["logits"].data_ptr()
        for value in (2.0, 3.0):
            x.fill_(value)
            graph.replay()
            assert graph.outputs["logits"].data_ptr() == address
            assert graph.outputs["logits"].tolist() == [value + 1] * 4
            assert graph.outputs["more"][0].item() == value * 4
            assert graph.outputs["more"][1].tolist() == [value] * 3

    def test_replay_runs_no_python(self, driver: GraphDriver) -> None:
        """The region's Python runs once per warm-up and once for the recording, and in no replay."""
        x, calls = torch.ones(2, device=driver.device), []

        def region() -> torch.Tensor:
            calls.append(None)
            return x + len(calls)

        graph = driver.capture(region, warmup=2)
        for _ in range(3):
            graph.replay()
        assert len(calls) == 3
        assert graph.outputs.tolist() == [4, 4]

    def test_writes_to_outside_tensors_are_repeated(self, driver: GraphDriver) -> None:
        """In-place work on a tensor of the caller happens once per replay."""
        cache = torch.zeros(6, 2, device=driver.device)
        where = torch.tensor([1, 2], device=driver.device)
        rows = torch.ones(2, 2, device=driver.device)
        graph = driver.capture(lambda: cache.index_add_(0, where, rows))
        cache.zero_()
        where.copy_(torch.tensor([3, 5]))
        graph.replay()
        graph.replay()
        assert cache.sum(1).tolist() == [0, 0, 0, 4, 0, 4]

    def test_a_model_sized_region(self, driver: GraphDriver) -> None:
        """Matmuls, a norm, attention, an embedding and in-place work replay to the results of eager."""
        device = driver.device
        weight = torch.randn(16, 16, device=device)
        ids = torch.zeros(3, dtype=torch.int64, device=device)

        def region() -> torch.Tensor:
            x = torch.nn.functional.embedding(ids, weight)
            x = torch.nn.functional.layer_norm(x, (16,)) @ weight
            heads = x.view(1, 3, 2, 8).transpose(1, 2)
            x = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return x.transpose(1, 2).reshape(3, 16).relu_().cumsum(0)

        graph = driver.capture(region)
        for values in ([1, 2, 3], [15, 0, 7]):
            ids.copy_(torch.tensor(values))
            graph.outputs.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(graph.outputs, region())

    def test_graphs_of_one_driver_interleave(self, driver: GraphDriver) -> None:
        """Graphs of one pool, the largest captured first, replay in any order."""
        inputs = [torch.zeros(n, device=driver.device) for n in (64, 8, 1)]
        graphs = [driver.capture(lambda x=x: (x * 2).sin() + 1) for x in inputs]
        for i in (0, 2, 1, 1, 2, 0, 1):
            inputs[i].normal_()
            graphs[i].outputs.fill_(float("nan"))
            graphs[i].replay()
            torch.testing.assert_close(graphs[i].outputs, (inputs[i] * 2).sin() + 1)

    def test_a_host_read_is_refused_and_the_driver_works_on(self, driver: GraphDriver) -> None:
        """A host read is refused, and the driver and the device still work."""
        x = torch.ones(3, device=driver.device)
        with pytest.raises(CaptureError, match="help: "):
            driver.capture(lambda: x * x.sum().item())
        assert (x + 1).tolist() == [2, 2, 2]
        graph = driver.capture(lambda: x + 1)
        x.fill_(4)
        graph.replay()
        assert graph.outputs.tolist() == [5, 5, 5]

    def test_views_follow_their_base(self, driver: GraphDriver) -> None:
        """Views taken inside and outside the region read and write the memory of their base."""
        x = torch.zeros(4, 6, device=driver.device)
        column = x[:, 1]

        def region() -> torch.Tensor:
            x.view(2, 2, 6)[1, :, 2:4].mul_(2)
            column.copy_(x.t()[0])
            return x[1:].transpose(0, 1) + 1

        graph = driver.capture(region, warmup=0)
        for seed in (1, 2):
            x.copy_(torch.arange(24.0).view(4, 6) * seed)
            expected = x.clone()
            expected[2:, 2:4] *= 2
            expected[:, 1] = expected[:, 0]
            graph.outputs.fill_(float("nan"))
            graph.replay()
            assert torch.equal(x, expected)
            assert torch.equal(graph.outputs, expected[1:].t() + 1)

    def test_what_an_operator_of_ones_own_writes_is_written(self, driver: GraphDriver) -> None:
        """A custom operator that mutates its argument does so in each replay, from the current inputs."""
        table = torch.arange(12, dtype=torch.int32, device=driver.device).view(3, 4)
        rows = torch.tensor([1, 2], device=driver.device)
        indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device=driver.device)
        pages = torch.zeros(4, dtype=torch.int32, device=driver.device)

        def region() -> torch.Tensor:
            pack_kv_indices(table, rows, indptr, page_size=1, out=pages)
            return pages * 2

        graph = driver.capture(region)
        for values, offsets, packed in (
            ([2, 0], [0, 1, 4], [8, 0, 1, 2]),
            ([0, 1], [0, 3, 4], [0, 1, 2, 4]),
        ):
            rows.copy_(torch.tensor(values))
            indptr.copy_(torch.tensor(offsets))
            pages.fill_(-1)
            graph.outputs.fill_(-1)
            graph.replay()
            assert pages.tolist() == packed
            assert graph.outputs.tolist() == [2 * page for page in packed]

    def test_eager_calls_break_a_graph_into_segments(self, driver: GraphDriver) -> None:
        """In each replay an eager call reads the results of the segment before, and feeds the next one."""
        x = torch.ones(3, device=driver.device)
        seen: list[list[float]] = []

        def on_the_host(y: torch.Tensor) -> torch.Tensor:
            seen.append(y.tolist())
            return y.new_full((3,), float(len(seen)))

        def region() -> torch.Tensor:
            middle = driver.eager_call(on_the_host, x * 2)
            return middle * 10 + x

        graph = driver.capture(region, warmup=0)
        assert graph.num_segments == 2
        assert len(seen) == 1
        for value in (3.0, 5.0):
            x.fill_(value)
            graph.outputs.fill_(float("nan"))
            graph.replay()
            assert seen[-1] == [value * 2] * 3
            assert graph.outputs.tolist() == [len(seen) * 10 + value] * 3
        assert driver.eager_call(on_the_host, x).tolist() == [4.0] * 3

    def test_an_eager_call_in_an_eager_call_is_a_part_of_it(self, driver: GraphDriver) -> None:
        """A nested eager call adds no segment, runs once per replay, and may synchronize the device."""
        x, seen = torch.ones(2, device=driver.device), []

        def inner(y: torch.Tensor) -> torch.Tensor:
            driver.synchronize()
            seen.append((driver.is_capturing, y.tolist()))
            return y * 2

        def outer(y: torch.Tensor) -> torch.Tensor:
            return driver.eager_call(inner, y) + 1

        graph = driver.capture(lambda: driver.eager_call(outer, x * 3) * 10, warmup=0)
        assert graph.num_segments == 2
        x.fill_(2)
        graph.replay()
        assert seen == [(False, [3, 3]), (False, [6, 6])]
        assert graph.outputs.tolist() == [130, 130]

    def test_an_eager_call_may_not_change_its_form(self, driver: GraphDriver) -> None:
        """An eager call whose result has another shape, dtype, number or structure in a replay raises."""
        x = torch.ones(4, device=driver.device)
        results: list[Any] = [x[:2] * 1, 7]

        def fickle(y: torch.Tensor) -> Any:
            return tuple(results)

        graph = driver.capture(lambda: driver.eager_call(fickle, x + 1)[0] + 1)
        graph.replay()
        for other in ([x[:3] * 1, 7], [x[:2].double(), 7], [x[:2] * 1, 8], [x[:2] * 1]):
            results[:] = other
            with pytest.raises(ReplayError, match="fickle between two segments returned"):
                graph.replay()

    def test_outputs_that_are_kept_are_copied(self, driver: GraphDriver) -> None:
        """A copy of a graph's outputs does not change when other graphs of the pool replay."""
        x = torch.ones(64, device=driver.device)
        graphs = [driver.capture(lambda n=n: (x[:n] * 2 + n).sin()) for n in (64, 16, 4)]
        x.fill_(0.5)
        kept = []
        for graph in graphs:
            graph.replay()
            kept.append(graph.outputs.clone())
        for n, copy in zip((64, 16, 4), kept, strict=True):
            torch.testing.assert_close(copy, (x[:n] * 2 + n).sin())

    def test_it_says_when_it_captures(self, driver: GraphDriver) -> None:
        """`is_capturing` is true only while the region is recorded: not in the warm-up, before or after."""
        x, said = torch.ones(2, device=driver.device), []

        def region() -> torch.Tensor:
            said.append(driver.is_capturing)
            return x + 1

        assert not driver.is_capturing
        driver.capture(region, warmup=2)
        assert said == [False, False, True]
        assert not driver.is_capturing

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_an_error_leaves_no_half_graph(self, driver: GraphDriver, at: int) -> None:
        """An error in any segment of a region passes through unchanged, and the driver can record again."""
        x, y = torch.ones(3, device=driver.device), torch.zeros(3, device=driver.device)

        def region() -> torch.Tensor:
            for step in range(3):
                if step == at and driver.is_capturing:
                    raise KeyError(step)
                y.add_(driver.eager_call(torch.mul, x, 2))
            return y + 1

        with pytest.raises(KeyError):
            driver.capture(region)
        assert not driver.is_capturing
        graph = driver.capture(lambda: x * 3)
        x.fill_(5)
        graph.replay()
        assert graph.outputs.tolist() == [15] * 3

    def test_captures_do_not_nest(self, driver: GraphDriver) -> None:
        """A capture inside another is refused, and the next capture works."""
        x = torch.ones(2, device=driver.device)
        with pytest.raises(CaptureError, match="inside another"):
            driver.capture(lambda: driver.capture(lambda: x + 1).outputs)
        assert driver.capture(lambda: x + 1).num_segments == 1

    def test_side_streams_fork_and_join(self, driver: GraphDriver) -> None:
        """Work on a side stream that is forked and joined is part of every replay."""
        x = torch.ones(1 << 16, device=driver.device)

        def region() -> torch.Tensor:
            main, side = driver.current_stream(), driver.stream()
            done = driver.event()
            side.wait_stream(main)
            with side:
                y = x * 2
                done.record()
            z = x + 1
            main.wait_event(done)
            return y + z

        graph = driver.capture(region)
        for value in (3.0, 4.0):
            x.fill_(value)
            graph.outputs.fill_(float("nan"))
            graph.replay()
            assert graph.outputs[:2].tolist() == [value * 3 + 1] * 2

    def test_host_memory_is_copied_in_the_streams_order(self, driver: GraphDriver) -> None:
        """The next replay reads what `copy_async` copied; after a wait its source may be rewritten."""
        pinned = torch.zeros(8, pin_memory=driver.device.type == "cuda")
        x = torch.zeros(8, device=driver.device)
        graph = driver.capture(lambda: x + 1)
        copied = driver.event()
        for value in (3.0, 4.0):
            pinned.fill_(value)
            driver.copy_async(x, pinned)
            copied.record()
            graph.outputs.fill_(float("nan"))
            graph.replay()
            copied.synchronize()
            assert graph.outputs.tolist() == [value + 1] * 8

    def test_random_numbers_advance(self, driver: GraphDriver) -> None:
        """Each replay draws different numbers."""
        graph = driver.capture(lambda: torch.rand(100, device=driver.device))
        drawn = set()
        for _ in range(3):
            graph.replay()
            drawn.add(tuple(graph.outputs.tolist()))
        assert len(drawn) == 3

    def test_garbage_is_not_collected_into_a_graph(self, driver: GraphDriver) -> None:
        """The garbage collector is enabled after a capture and after a refused one."""
        x = torch.ones(1, device=driver.device)
        driver.capture(lambda: x + 1)
        with pytest.raises(CaptureError):
            driver.capture(x.item)
        assert gc.isenabled()

    def test_it_says_how_much_it_keeps(self, driver: GraphDriver) -> None:
        """`pool_nbytes` is at least the size of the outputs, or -1 if unknown, and 0 after release."""
        x = torch.ones(1 << 20, device=driver.device)
        graph = driver.capture(lambda: x * 2 + 1)
        assert graph.pool_nbytes == -1 or graph.pool_nbytes >= graph.outputs.nbytes
        later = driver.capture(lambda: x[:8] + 1)
        assert later.pool_nbytes >= -1
        graph.release()
        assert graph.pool_nbytes == 0

    def test_it_says_what_it_reads_or_that_it_cannot(self, driver: GraphDriver) -> None:
        """External tensors are those that the graph reads and did not allocate, or None if unknown."""
        x = torch.ones(8, device=driver.device)
        table = torch.ones(8, device=driver.device)
        graph = driver.capture(lambda: x[2:] * table[:6] + 1)
        external = graph.external_tensors()
        if external is None:
            return
        memory = {t.untyped_storage().data_ptr() for t in external}
        assert memory == {x.data_ptr(), table.data_ptr()}
        assert graph.outputs.data_ptr() not in memory
        graph.release()
        assert graph.external_tensors() == []

    def test_release_lets_go_of_outputs(self, driver: GraphDriver) -> None:
        """A released graph no longer holds its outputs."""
        x = torch.ones(2, device=driver.device)
        graph = driver.capture(lambda: x + 1)
        outputs = weakref.ref(graph.outputs)
        graph.release()
        gc.collect()
        assert outputs() is None
        assert graph.outputs is None


def test_cuda_says_why_it_is_unavailable() -> None:
    """The CUDA driver is unavailable on a CPU, with a reason that names the device."""
    reason = CudaDriver.unavailable(torch.device("cpu"))
    assert reason is not None
    assert "cpu" in reason


@pytest.mark.skipif(not _NO_CUDA, reason="this machine has a GPU")
def test_without_a_gpu_cuda_says_so() -> None:
    """Without a GPU, the CUDA driver says that torch sees no CUDA device."""
    assert _NO_CUDA == "torch sees no CUDA device"
