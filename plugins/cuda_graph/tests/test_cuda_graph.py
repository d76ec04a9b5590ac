"""The runner of full decode graphs: capture sizes, dummy batches, captures and replays."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import EagerReason, ForwardBatch, ForwardMode, GraphShape, Limits
from graphpact.attention import GraphSupport
from graphpact.errors import CaptureError, ConfigError
from graphpact.runners import RunnerContext
from graphpact.tensors import equal
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend
from rigs.lane import CONTEXT, CPU, PAGE, SHAPE_OF, LaneRig


def _backend(fill: int) -> type[FlashInferBackend]:
    capabilities = replace(FlashInferBackend.capabilities, seq_len_fill_value=fill)
    return type("Filled", (FlashInferBackend,), {"capabilities": capabilities})


def _runner(max_bs: int = 8, batch_sizes: list[int] | None = None, fill: int = 1) -> CudaGraphRunner:
    limits = Limits(max_bs, max_bs, CONTEXT, PAGE)
    return CudaGraphRunner(
        RunnerContext(CPU, _backend(fill).capabilities, limits, batch_sizes=batch_sizes, lane="decode")
    )


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, which allows writes to the outputs of graphs."""
    with torch.inference_mode():
        yield


# -- capture sizes ---------------------------------------------------------------------------------


def test_configured_sizes_are_taken_as_they_are() -> None:
    """The runner captures the configured request counts, sorted, each once."""
    assert _runner(8, [4, 1, 4]).shapes() == (
        GraphShape(ForwardMode.DECODE, 1, 1),
        GraphShape(ForwardMode.DECODE, 4, 4),
    )


@settings(derandomize=True, max_examples=40)
@given(max_bs=st.integers(1, 600))
def test_the_default_sizes_end_at_the_largest_step(max_bs: int) -> None:
    """The largest default capture size is the largest step."""
    assert _runner(max_bs).shapes()[-1] == GraphShape(ForwardMode.DECODE, max_bs, max_bs)


def test_a_size_that_no_step_fills_is_refused() -> None:
    """A size above the largest step is refused; the error names key, value and limit."""
    with pytest.raises(ConfigError) as error:
        _runner(8, [4, 9]).shapes()
    for part in ("lanes.decode.batch_sizes has 9", "at most 8 requests (engine.max_num_seqs)", "help: "):
        assert part in str(error.value)


@pytest.mark.parametrize("sizes", [[], [0], [-2, 4]])
def test_impossible_sizes_are_refused(sizes: list[int]) -> None:
    """An empty list of sizes, or a size below 1, is refused; the error shows the list."""
    with pytest.raises(ConfigError) as error:
        _runner(8, sizes).shapes()
    assert str(sizes) in str(error.value)


def test_a_lane_serves_its_mode_only() -> None:
    """In a decode lane, other modes and batches above the largest size have an eager reason."""
    assert CudaGraphRunner.modes == {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}
    assert CudaGraphRunner.needs is GraphSupport.UNIFORM_DECODE
    rig = LaneRig(batch_sizes=[2], capture=False)
    assert rig.lane.fit(rig.batch(1)) is EagerReason.NOT_CAPTURED
    rig.lane.capture_all()
    batch = rig.batch(1)
    assert rig.lane.fit(batch) == GraphShape(ForwardMode.DECODE, 2, 2)
    batch.forward_mode = ForwardMode.EXTEND
    assert rig.lane.fit(batch) is EagerReason.WRONG_MODE
    assert rig.lane.fit(rig.batch(1, 1, 1)) is EagerReason.OVER_LARGEST


# -- registry and dummies --------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0, 1, 5])
def test_slots_are_padded_with_the_backends_length(fill: int) -> None:
    """The registry has the largest capture size; padding rows have row 0 and the backend's fill length."""
    registry = LaneRig(backend=_backend(fill), batch_sizes=[2, 3], capture=False).lane.registry
    assert registry is not None
    assert (registry.max_bs, registry.max_num_tokens) == (3, 3)
    for name in ("seq_lens", "seq_lens_cpu"):
        assert registry.get_slot(name).slice_for(3, 3).tolist() == [fill] * 3
    assert registry.get_slot("req_pool_indices").slice_for(3, 3).tolist() == [0] * 3


@pytest.mark.parametrize("fill", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_dummy_is_a_batch_that_could_have_been(fill: int, size: int) -> None:
    """A dummy has exactly the shape and consistent fields, on request row 0 and KV slot 0."""
    shape = GraphShape(ForwardMode.DECODE, size, size)
    dummy = _runner(8, [8], fill).dummy(shape)
    length = max(fill, 1)  # at least the token itself
    assert dummy.forward_mode is ForwardMode.DECODE
    assert dummy.batch_size == dummy.num_tokens == size
    assert dummy.seq_lens.tolist() == dummy.seq_lens_cpu.tolist() == [length] * size
    assert dummy.positions.tolist() == [length - 1] * size
    for tensor in (dummy.out_cache_loc, dummy.req_pool_indices, dummy.input_ids):
        assert tensor.tolist() == [0] * size
        assert tensor.dtype is torch.int64
    assert dummy.extend_seq_lens is None


# -- capture and replay ----------------------------------------------------------------------------


def test_capture_writes_scratch_only() -> None:
    """Captures write only KV slot 0; all other slots and the request table do not change."""
    rig = LaneRig(poisons=False, capture=False)
    before = [t.clone() for t in rig.caches]
    table = rig.table.clone()
    rig.lane.capture_all()
    for cache, old in zip(rig.caches, before, strict=True):
        assert equal(cache[1:], old[1:])
        assert not torch.equal(cache[0], old[0])  # the dummy did run
    assert torch.equal(rig.table, table)
    assert len(rig.lane.stats.shapes) == 3


def test_a_dummy_on_live_memory_is_caught_when_planted() -> None:
    """A dummy batch that would write a live KV slot is refused before the write; the error names the slot."""
    rig = LaneRig(batch_sizes=[2], poisons=False, capture=False)
    honest = rig.runner.dummy

    def careless(shape: GraphShape) -> ForwardBatch:
        batch = honest(shape)
        batch.out_cache_loc += PAGE
        return batch

    rig.runner.dummy = careless
    before = rig.kv.k[0].clone()
    with pytest.raises(CaptureError, match=f"writes KV slot {PAGE}, which a live request may own"):
        rig.lane.capture_all()
    assert equal(rig.kv.k[0], before)
    assert not rig.lane.captured


def test_replays_of_every_size_equal_eager() -> None:
    """Replays of growing and shrinking batches equal eager runs."""
    rig = LaneRig()
    generator = torch.Generator().manual_seed(5)
    sizes = [4, 3, 1, 4, 1, 2, 4, 2, 3, 1]
    for size in sizes:
        assert rig.agrees(*torch.randint(1, CONTEXT + 1, (size,), generator=generator).tolist())
    assert rig.lane.stats.replays == len(sizes)


def test_one_shape_is_one_view() -> None:
    """The view of a shape is the same object, in the same memory, at every replay."""
    rig = LaneRig(batch_sizes=[2, 4])
    shape = SHAPE_OF[4]
    captured = rig.lane.captured[shape]
    assert rig.lane.registry is not None
    views = [captured.context.view]
    for lengths in ((1, 2, 3), (8, 8, 8, 8), (4, 4, 4)):
        batch = rig.batch(*lengths)
        rig.lane.run(batch)
        views += [captured.context.view, rig.lane.registry.static_inputs(batch, shape)]
    assert all(view is views[0] for view in views)
    assert views[0].seq_lens.tolist() == [4, 4, 4, 1]
    assert views[0].batch_size == 4
