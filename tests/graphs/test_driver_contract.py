"""The driver contract, the same tests for every driver: the tape here, CUDA graphs where there is a GPU."""

import functools
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from graphpact.errors import CaptureError
from graphpact.graphs import GraphDriver
from graphpact.graphs.cuda import CudaDriver
from graphpact.graphs.tape import TapeDriver

_CUDA = torch.device("cuda", 0)
_NO_CUDA = CudaDriver.unavailable(_CUDA)
_DRIVERS = [
    pytest.param((TapeDriver, torch.device("cpu")), id="tape"),
    pytest.param(
        (functools.partial(TapeDriver, strict=True), torch.device("cpu")), id="tape-strict"
    ),
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
    """What `graphpact.graphs.driver` promises of every driver."""

    @pytest.fixture(autouse=True)
    def _inference(self) -> Iterator[None]:
        """A lane steps in inference mode, and so does every test here."""
        with torch.inference_mode():
            yield

    @pytest.fixture
    def driver(self, kind: tuple[type[GraphDriver], torch.device]) -> GraphDriver:
        """A driver of the kind under test."""
        make, device = kind
        return make(device)

    def test_it_says_where_it_is_available(self, driver: GraphDriver) -> None:
        """A driver that was made is available on its device, and has the name it is selected by."""
        assert type(driver).unavailable(driver.device) is None
        assert driver.name in ("tape", "cuda")

    def test_replay_reads_tensors_and_keeps_numbers(self, driver: GraphDriver) -> None:
        """Tensors count by address and at replay, host numbers as they were at capture."""
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
        """The region runs once a warm-up and once for the recording."""
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
        """In-place work on a tensor of the caller happens once a replay."""
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
        """Matmuls, a norm, attention, an embedding and in-place work replay as eager runs them."""
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
        """Graphs of one pool replay in any order, the largest captured first."""
        inputs = [torch.zeros(n, device=driver.device) for n in (64, 8, 1)]
        graphs = [driver.capture(lambda x=x: (x * 2).sin() + 1) for x in inputs]
        for i in (0, 2, 1, 1, 2, 0, 1):
            inputs[i].normal_()
            graphs[i].outputs.fill_(float("nan"))
            graphs[i].replay()
            torch.testing.assert_close(graphs[i].outputs, (inputs[i] * 2).sin() + 1)

    def test_a_host_read_is_refused_and_the_driver_works_on(self, driver: GraphDriver) -> None:
        """A host read keeps no graph and spoils neither the driver nor the device."""
        x = torch.ones(3, device=driver.device)
        with pytest.raises(CaptureError, match="help: "):
            driver.capture(lambda: x * x.sum().item())
        assert (x + 1).tolist() == [2, 2, 2]
        graph = driver.capture(lambda: x + 1)
        x.fill_(4)
        graph.replay()
        assert graph.outputs.tolist() == [5, 5, 5]

    def test_random_numbers_advance(self, driver: GraphDriver) -> None:
        """Two replays draw different numbers."""
        graph = driver.capture(lambda: torch.rand(100, device=driver.device))
        drawn = set()
        for _ in range(3):
            graph.replay()
            drawn.add(tuple(graph.outputs.tolist()))
        assert len(drawn) == 3

    def test_garbage_is_not_collected_into_a_graph(self, driver: GraphDriver) -> None:
        """The collector is in the state that it was in before, captured or refused."""
        x = torch.ones(1, device=driver.device)
        driver.capture(lambda: x + 1)
        with pytest.raises(CaptureError):
            driver.capture(x.item)
        assert gc.isenabled()

    def test_it_says_how_much_it_keeps(self, driver: GraphDriver) -> None:
        """A graph's pool is at least its outputs, where the driver can tell, and nothing once released."""
        x = torch.ones(1 << 20, device=driver.device)
        graph = driver.capture(lambda: x * 2 + 1)
        assert graph.pool_nbytes == -1 or graph.pool_nbytes >= graph.outputs.nbytes
        later = driver.capture(lambda: x[:8] + 1)
        assert later.pool_nbytes >= -1
        graph.release()
        assert graph.pool_nbytes == 0

    def test_it_says_what_it_reads_or_that_it_cannot(self, driver: GraphDriver) -> None:
        """What a graph reads and did not make is external, its outputs are not; or none is told."""
        x = torch.ones(8, device=driver.device)
        table = torch.ones(8, device=driver.device)
        graph = driver.capture(lambda: x[2:] * table[:6] + 1)
        external = graph.external_tensors()
        if external is None:
            return
        assert {t.data_ptr() for t in external} == {x[2:].data_ptr(), table.data_ptr()}
        assert graph.outputs.data_ptr() not in {t.data_ptr() for t in external}
        graph.release()
        assert graph.external_tensors() == []

    def test_release_lets_go_of_outputs(self, driver: GraphDriver) -> None:
        """A released graph holds its outputs no longer."""
        x = torch.ones(2, device=driver.device)
        graph = driver.capture(lambda: x + 1)
        outputs = weakref.ref(graph.outputs)
        graph.release()
        gc.collect()
        assert outputs() is None
        assert graph.outputs is None


def test_cuda_says_why_it_is_unavailable() -> None:
    """CUDA graphs are refused on a CPU with a reason, before anything of CUDA is touched."""
    reason = CudaDriver.unavailable(torch.device("cpu"))
    assert reason is not None
    assert "cpu" in reason


@pytest.mark.skipif(not _NO_CUDA, reason="this machine has a GPU")
def test_without_a_gpu_cuda_says_so() -> None:
    """A machine without a GPU is told so by name."""
    assert _NO_CUDA == "torch sees no CUDA device"
