"""Captures in a block, and the stand-in for torch's CUDA graphs."""

import types
from collections.abc import Callable, Iterator

import pytest
import torch

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs import DeclaredMemory
from graphpact_tape import TapeDriver, stand_in_for_cuda_graphs

MODES = pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _driver(strict: bool) -> TapeDriver:  # noqa: FBT001
    return TapeDriver(torch.device("cpu"), strict=strict)


@MODES
def test_a_block_is_recorded_as_a_function_is(strict: bool) -> None:  # noqa: FBT001
    """A replay of a captured block repeats its work on the captured addresses, with the captured numbers."""
    driver, x, factor = _driver(strict), torch.arange(4.0), 3
    with driver.capturing() as capture:
        out = (x * factor).sin()
    for values in ([1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 0.0, 9.0]):
        x.copy_(torch.tensor(values))
        out.zero_()
        factor = 5
        capture.graph.replay()
        assert torch.equal(out, (x * 3).sin())
    assert capture.graph.num_nodes == 2


@MODES
def test_an_eager_section_runs_in_every_replay(strict: bool) -> None:  # noqa: FBT001
    """The function of an eager section runs between two segments, sees their memory, and is not recorded."""
    driver, x, seen = _driver(strict), torch.ones(3), []

    def attend(source: torch.Tensor, target: torch.Tensor) -> None:
        seen.append(source.tolist())
        target.copy_(source * len(seen))

    with driver.capturing() as capture:
        doubled = x * 2
        attended = torch.empty_like(doubled)
        with driver.eager_section() as section:
            assert not driver.is_capturing
            attend(doubled, attended)
            section.fn = lambda: attend(doubled, attended)
        assert driver.is_capturing
        out = attended + 1
    seen.clear()
    for count, value in enumerate((4.0, 5.0), start=1):
        x.fill_(value)
        capture.graph.replay()
        assert torch.equal(out, x * 2 * count + 1)
    assert seen == [[8.0] * 3, [10.0] * 3]
    assert capture.graph.num_segments == 2


@MODES
def test_a_block_that_fails_leaves_no_capture_behind(strict: bool) -> None:  # noqa: FBT001
    """After an error in a block, or in its eager section, the driver captures the next block."""
    driver, x = _driver(strict), torch.ones(2)
    with pytest.raises(ZeroDivisionError), driver.capturing():
        x.sum() / (1 // 0)
    with pytest.raises(ZeroDivisionError), driver.capturing(), driver.eager_section():
        x.sum() / (1 // 0)
    with pytest.raises(CaptureError, match=r"item"), driver.capturing():
        x.sum().item()
    with driver.capturing() as capture:
        out = x + 1
    capture.graph.replay()
    assert out.tolist() == [2.0, 2.0]


@MODES
def test_memory_that_the_block_gives_away_keeps_its_address(strict: bool) -> None:  # noqa: FBT001
    """What the caller still holds after the block is never reused for other intermediates."""
    driver, x, kept = _driver(strict), torch.randn(64), []
    with driver.capturing() as capture:
        value = x
        for _ in range(6):
            value = value.sin() + 1
            kept.append(value)
    capture.graph.replay()
    expected = x
    for each in kept:
        expected = expected.sin() + 1
        assert torch.equal(each, expected)


def _stand_in(
    monkeypatch: pytest.MonkeyPatch,
    driver: TapeDriver,
    memory: Callable[[], DeclaredMemory] = DeclaredMemory,
) -> types.ModuleType:
    module = types.ModuleType("device")
    for name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, None)
    stand_in_for_cuda_graphs(driver, module, memory)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA graphs are there")
@MODES
def test_code_that_names_cuda_graphs_records_on_a_tape(
    monkeypatch: pytest.MonkeyPatch,
    strict: bool,  # noqa: FBT001
) -> None:
    """Both of torch's forms, the context manager and the pair of calls, capture and replay."""
    module, x = _stand_in(monkeypatch, _driver(strict)), torch.ones(3)
    graphs = [torch.cuda.CUDAGraph(), module.CUDAGraph(keep_graph=True)]
    assert not module.is_current_stream_capturing()
    with torch.cuda.graph(graphs[0], pool=module.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        first = x * 2
    graphs[1].capture_begin(pool=graphs[0].pool())
    second = x * 3
    graphs[1].capture_end()
    graphs[1].instantiate()
    x.fill_(5)
    graphs[0].replay()
    assert first.tolist() == [10.0] * 3
    graphs[1].replay()
    assert second.tolist() == [15.0] * 3
    graphs[0].reset()
    with pytest.raises(EngineError, match="released"):
        graphs[0].replay()


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA graphs are there")
def test_a_graph_that_was_not_captured_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay before the capture is refused."""
    module = _stand_in(monkeypatch, _driver(strict=False))
    with pytest.raises(EngineError, match="before its capture"):
        module.CUDAGraph().replay()


def test_the_stand_in_is_refused_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is, its own graphs stay."""
    before = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EngineError, match="where a GPU is"):
        stand_in_for_cuda_graphs(_driver(strict=False), types.ModuleType("device"))
    assert torch.cuda.CUDAGraph is before


def _counting(driver: TapeDriver, *, resets: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Capture a block that scales by a count in a workspace; return input and output."""
    x, count = torch.ones(2), torch.zeros(1)
    driver.declare(DeclaredMemory(refreshed=[x], workspaces=[count], name_of=lambda t: "count"))
    with driver.capturing():
        if resets:
            count.zero_()
        count += 1
        out = x * count
    return x, out


def test_a_strict_block_must_reset_its_counters() -> None:
    """Nobody knows the outputs of a block, so a second replay must leave all its memory as the first."""
    with pytest.raises(CaptureError, match=r"second replay .* another result; .* changed: count") as caught:
        _counting(_driver(strict=True), resets=False)
    assert caught.value.rule == "GP18"
    _counting(_driver(strict=True), resets=True)
    _counting(_driver(strict=False), resets=False)


def test_the_caller_of_a_broken_block_replays_it_first() -> None:
    """Eager calls of a block need what an engine sets for a step, so the capture calls them once."""
    driver, x, calls = _driver(strict=True), torch.ones(2), []
    driver.declare(DeclaredMemory(refreshed=[x]))
    with driver.capturing() as capture:
        out = x + 1
        with driver.eager_section() as section:
            section.fn = lambda: calls.append(out.tolist())
        doubled = out * 2
    assert calls == []
    capture.graph.replay()
    assert calls == [[2.0, 2.0]]
    assert doubled.tolist() == [4.0, 4.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA graphs are there")
def test_the_stand_in_asks_for_the_memory_of_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict graph may write what is declared when its capture begins, and nothing else."""
    mine, other = torch.zeros(2), torch.zeros(2)
    declared = [DeclaredMemory(workspaces=[mine]), DeclaredMemory(workspaces=[other])]
    _stand_in(monkeypatch, _driver(strict=True), lambda: declared.pop(0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.fill_(3)
    mine.zero_()
    graph.replay()
    assert mine.tolist() == [3.0, 3.0]
    with (
        pytest.raises(CaptureError, match="not declared") as caught,
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        mine.fill_(4)
    assert caught.value.rule == "GP19"


@MODES
def test_host_memory_that_a_block_gets_may_be_read_in_it(strict: bool) -> None:  # noqa: FBT001
    """A tensor that is declared during the capture is read on the host, as is what is computed of it."""
    counts, x = torch.tensor([3, 4]), torch.ones(2)
    driver = _driver(strict)
    with pytest.raises(CaptureError, match="tolist"), driver.capturing():
        counts.tolist()
    driver = _driver(strict)
    driver.add_host_memory([counts])  # before a capture it is not kept
    with driver.capturing() as capture:
        driver.add_host_memory([counts])
        out = x * sum((counts * 2).tolist())
    x.fill_(2.0)
    capture.graph.replay()
    assert out.tolist() == [28.0, 28.0]
    assert capture.graph.num_nodes == 1
