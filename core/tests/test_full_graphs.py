"""Tests of full graphs of every mode, by a runner that implements only `shapes`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, ForwardMode, GraphShape, Limits
from graphpact.attention import DraftLimits
from graphpact.errors import EngineError
from graphpact.runners import RunnerContext, dummy_batch
from graphpact_flashinfer import FlashInferBackend
from rigs.lane import CONTEXT, CPU, DRAFTS, MAX_BS, MODES, PAGE, STEPS, FullGraphs, LaneRig

CASES = [(mode, 1) for mode in MODES] + [
    (ForwardMode.TARGET_VERIFY, 2),
    (ForwardMode.DRAFT_DECODE, 2),
]
NAMES = [f"{mode.value}-{topk}" for mode, topk in CASES]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps."""
    with torch.inference_mode():
        yield


# -- dummies ---------------------------------------------------------------------------------------


def _context(mode: ForwardMode, fill: int, width: int, topk: int, steps: int) -> RunnerContext:
    capabilities = replace(FlashInferBackend.capabilities, seq_len_fill_value=fill)
    limits = Limits(8, 64, 128, 4, DraftLimits(steps, topk, width))
    return RunnerContext(CPU, capabilities, limits, mode=mode)


def _new_tokens(dummy: ForwardBatch) -> list[int]:
    if dummy.extend_seq_lens_cpu is not None:
        return dummy.extend_seq_lens_cpu.tolist()
    return [dummy.num_tokens // dummy.batch_size] * dummy.batch_size


@settings(derandomize=True, max_examples=60)
@given(
    bs=st.integers(1, 6),
    ragged_tokens=st.integers(1, 40),
    fill=st.integers(0, 5),
    width=st.integers(1, 4),
    topk=st.integers(1, 3),
    steps=st.integers(1, 3),
)
@pytest.mark.parametrize("mode", MODES)
def test_a_dummy_is_a_batch_that_could_have_been(
    mode: ForwardMode, bs: int, ragged_tokens: int, fill: int, width: int, topk: int, steps: int
) -> None:
    """A default dummy has exactly its shape, uses only scratch, and has positions that fit its lengths."""
    context = _context(mode, fill, width, topk, steps)
    each = context.tokens_per_request
    tokens = ragged_tokens if each is None else bs * each
    dummy = FullGraphs(context).dummy(GraphShape(mode, bs, tokens))
    dummy.require_consistent()
    assert (dummy.forward_mode, dummy.batch_size, dummy.num_tokens) == (mode, bs, tokens)
    for name, tensor in dummy.tensors().items():
        assert tensor.shape[0] == (tokens if name in _BY_TOKEN else bs), name
    for scratch in (dummy.req_pool_indices, dummy.out_cache_loc, dummy.input_ids):
        assert not scratch.any()
    new, lens = _new_tokens(dummy), dummy.seq_lens.tolist()
    assert dummy.seq_lens_cpu.tolist() == lens
    assert sum(new) == tokens
    assert max(new) - min(new) <= 1
    expected = []
    for length, count in zip(lens, new, strict=True):
        if mode is ForwardMode.DRAFT_DECODE:
            expected += [length] * count
        elif mode is ForwardMode.TARGET_VERIFY:
            expected += range(length, length + count)
        else:
            assert length >= count
            expected += range(length - count, length)
    assert dummy.positions.tolist() == expected
    assert min(expected) >= 0
    assert dummy.num_draft_steps == (steps if mode is ForwardMode.DRAFT_DECODE else 1)
    assert (dummy.tree_mask is not None) == (mode is ForwardMode.TARGET_VERIFY and topk > 1)


_BY_TOKEN = {"input_ids", "positions", "out_cache_loc", "tree_mask"}


def test_a_dummy_counts_real_tokens_where_layers_ask() -> None:
    """If the number of live tokens has a slot, a dummy contains it, on the device and on the host."""
    context = replace(_context(ForwardMode.DECODE, 1, 1, 1, 1), num_token_non_padded=True)
    dummy = dummy_batch(GraphShape(ForwardMode.DECODE, 4, 4), context)
    assert dummy.num_token_non_padded is not None
    assert (dummy.num_token_non_padded.tolist(), dummy.num_token_non_padded_cpu) == ([4], 4)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.is_ragged])
def test_a_dummy_of_more_tokens_than_its_requests_can_have_is_refused(mode: ForwardMode) -> None:
    """A shape with more tokens than its requests have positions is refused, because no batch can fill it."""
    context = _context(mode, 2, 1, 1, 1)
    most = 2 * context.limits.max_context_len
    assert dummy_batch(GraphShape(mode, 2, most), context).num_tokens == most
    with pytest.raises(EngineError, match=rf"tokens={most + 1}\] has more tokens than its requests can have"):
        dummy_batch(GraphShape(mode, 2, most + 1), context)


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.is_ragged])
def test_a_ragged_dummy_of_a_uniform_mode_is_refused(mode: ForwardMode) -> None:
    """A shape without a whole number of tokens per request is an error that names the shape."""
    shape = GraphShape(mode, 2, 5)
    with pytest.raises(EngineError, match=r"the tokens of .*\[bs=2, tokens=5\] cannot be divided"):
        dummy_batch(shape, _context(mode, 1, 1, 1, 1))


# -- capture and replay ----------------------------------------------------------------------------


def _batch(data: st.DataObject, rig: LaneRig) -> ForwardBatch:
    """Draw a batch of one to four requests, with room for the step's tokens."""
    bs = data.draw(st.integers(1, MAX_BS))
    room, ragged = CONTEXT - max(DRAFTS, STEPS), rig.mode.is_ragged
    cached = data.draw(st.lists(st.integers(0 if ragged else 1, room), min_size=bs, max_size=bs))
    if rig.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE):
        return rig.batch(*cached)
    each = rig.runner.context.tokens_per_request
    most = [min(CONTEXT - length, 16 // MAX_BS) for length in cached]
    new = [data.draw(st.integers(1, n)) if each is None else each for n in most]
    return rig.batch(*map(sum, zip(cached, new, strict=True)), new=new)


@pytest.mark.parametrize(("mode", "topk"), CASES, ids=NAMES)
def test_every_mode_is_captured_on_scratch_alone(mode: ForwardMode, topk: int) -> None:
    """Capturing every shape of a mode writes neither KV slots outside scratch nor the page table."""
    rig = LaneRig(mode, topk=topk, runner=FullGraphs, strict=True, capture=False)
    for cache in rig.caches:
        cache[PAGE:] = 7.0
    table = rig.table.clone()
    rig.lane.capture_all()
    assert set(rig.lane.captured) == set(rig.lane.shapes)
    assert len(rig.lane.shapes) == 3
    for cache in rig.caches:
        assert bool((cache[PAGE:] == 7.0).all())
        assert bool(cache[:1].any())  # the dummy did run
    assert torch.equal(rig.table, table)


@pytest.mark.few(2)
@pytest.mark.parametrize(("mode", "topk"), CASES, ids=NAMES)
def test_replays_of_every_mode_equal_eager_steps(mode: ForwardMode, topk: int) -> None:
    """On poisoned memory, a replay of any batch gives the outputs and the KV cache of an eager step."""
    rig = LaneRig(mode, topk=topk, runner=FullGraphs, strict=True)

    @settings(derandomize=True, max_examples=12)
    @given(data=st.data())
    def steps(data: st.DataObject) -> None:
        with torch.inference_mode():
            batch = _batch(data, rig)
            before = [cache.clone() for cache in rig.caches]
            replayed = rig.lane.run(batch).clone()
            after = [cache.clone() for cache in rig.caches]
            for cache, old in zip(rig.caches, before, strict=True):
                cache.copy_(old)
            eager = rig.lane.run_eager(batch)
            assert "logits" in replayed
            assert [*replayed] == [*eager]
            for name in replayed:
                assert len(replayed[name]) == batch.num_tokens
                torch.testing.assert_close(replayed[name], eager[name], rtol=0, atol=1e-9)
            for cache, written in zip(rig.caches, after, strict=True):
                torch.testing.assert_close(written[PAGE:], cache[PAGE:], equal_nan=True)

    steps()
    assert not rig.lane.stats.eager
    assert rig.lane.stats.replays > 0
