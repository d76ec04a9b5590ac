"""Metadata in detail: the fake request, uniform strides, windows, trees, idle batches, plans."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import BackendContext, ForwardBatch, ForwardMode, GraphShape, LayerSpec, Limits
from graphpact.attention import DraftLimits
from graphpact.buffers import build_decode_registry
from graphpact.errors import EngineError, PactBreach
from graphpact.pact import Pact
from graphpact_flashinfer import FakeRequest, FlashInferBackend, FlashInferMetadata
from graphpact_flashinfer.kernels import PortablePlan
from graphpact_flashinfer.rows import Rows
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
EXAMPLES = settings(derandomize=True, max_examples=60)
CONTEXT, ROWS = 96, 4
STATIC = 64  # tokens of an extend graph
CHAIN = DraftLimits()


def backend_of(
    page_size: int = 4,
    *,
    windows: tuple[int | None, ...] = (None,),
    draft: DraftLimits = CHAIN,
) -> FlashInferBackend:
    """Return a backend whose request row r has the slots from r * 96 + 96 on, in order."""
    layers = [LayerSpec(i, 2, 1, 4, 4, 0.5, sliding_window=w) for i, w in enumerate(windows)]
    table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
    table[1:] = torch.arange(CONTEXT, CONTEXT * (ROWS + 1)).view(ROWS, CONTEXT)
    slots = CONTEXT * (ROWS + 1)
    cache = SimpleNamespace(
        k=[torch.zeros(slots, 1, 4) for _ in windows], v=[torch.zeros(slots, 1, 4) for _ in windows]
    )
    limits = Limits(ROWS, STATIC, CONTEXT, page_size, draft)
    return FlashInferBackend(BackendContext(CPU, torch.float32, layers, limits, table, cache))


def batch_of(
    mode: ForwardMode,
    lengths: list[int],
    num_tokens: int,
    new: list[int] | None = None,
    **more: Any,
) -> ForwardBatch:
    """Return a batch of ``num_tokens`` tokens; those beyond the ``new`` ones are padding."""
    lens = torch.tensor(lengths)
    fields: dict[str, Any] = {"out_cache_loc": torch.zeros(num_tokens, dtype=torch.int64)}
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(lengths),
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(1, len(lengths) + 1),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        extend_seq_lens=torch.tensor(new) if new else None,
        extend_seq_lens_cpu=torch.tensor(new) if new else None,
        **(fields | more),
    )


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


# -- padded tokens of an extend ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_last_query_offset_is_the_static_count_for_every_raw_count(
    page_size: int, mode: ForwardMode
) -> None:
    """``qo_indptr[-1]`` is the static count for 1 to 64 raw tokens; live requests are as without padding."""
    backend = backend_of(page_size)
    for raw in range(1, STATIC + 1):
        new = [1, raw - 1] if raw > 1 else [1]
        lengths = [20, 12 + raw][: len(new)]
        padded = backend.init_metadata_eager(batch_of(mode, lengths, STATIC, new))
        exact = backend.init_metadata_eager(batch_of(mode, lengths, raw, new))
        assert int(padded.qo_indptr[-1]) == STATIC
        assert padded.qo_indptr[:-1].tolist() == exact.qo_indptr[:-1].tolist()
        assert padded.kv_indptr[:-1].tolist() == exact.kv_indptr[:-1].tolist()
        real = int(exact.kv_indptr[-1])
        assert torch.equal(padded.kv_indices[:real], exact.kv_indices[:real])
        assert exact.qo_indptr[-2:].tolist() == [raw, raw]


def test_scratch_is_the_only_page_of_the_fake_request() -> None:
    """The fake request has page 0 only, as often as its padding tokens need, for any earlier contents."""
    backend = backend_of(4)
    for raw in (3, 61, 64, 9):
        metadata = backend.init_metadata_eager(batch_of(ForwardMode.EXTEND, [raw], STATIC, [raw]), fill=77)
        fake = FakeRequest.of(STATIC, raw, 4)
        start, end = metadata.kv_indptr[-2:].tolist()
        assert end - start == fake.num_dummy_pages == -(-(STATIC - raw) // 4)
        assert metadata.kv_indices[start:end].tolist() == [0] * fake.num_dummy_pages
        keys = (end - start - 1) * 4 + int(metadata.kv_last_page_len[-1]) if end > start else 0
        assert keys == fake.extra_kv == fake.pad_tokens == STATIC - raw


def test_the_fake_request_is_counted_from_host_numbers() -> None:
    """Queries, keys and pages of the fake request need no device read."""
    assert FakeRequest.of(64, 50, 4) == FakeRequest(pad_tokens=14, extra_kv=14, num_dummy_pages=4)
    assert FakeRequest.of(64, 64, 4) == FakeRequest(0, 0, 0)
    batch = batch_of(ForwardMode.EXTEND, [30, 20], STATIC, [30, 20])
    batch.seq_lens = batch.extend_seq_lens = torch.empty(2, device="meta")
    rows = Rows.of(batch, 4)
    assert (rows.num_q, rows.num_kv) == ([30, 20, 14], [30, 20, 14])


def test_an_extend_without_lengths_on_the_host_is_refused() -> None:
    """An extend without host lengths is refused; the error names the required fields."""
    batch = batch_of(ForwardMode.EXTEND, [3], 3, [3])
    batch.extend_seq_lens_cpu = None
    with pytest.raises(EngineError, match="must carry extend_seq_lens and extend_seq_lens_cpu"):
        backend_of().init_metadata_eager(batch)


# -- uniform modes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(5))
def test_the_stride_of_draft_extend_is_uniform_whatever_was_accepted(accepted: int) -> None:
    """``qo_indptr`` steps by num_draft_tokens for any accepted length (SGLang PR 19807)."""
    backend, width = backend_of(), 4
    batch = batch_of(ForwardMode.DRAFT_EXTEND, [9, 30, 17], 3 * width, [max(accepted, 1), accepted, 1])
    metadata = backend.init_metadata_eager(batch)
    assert metadata.qo_indptr.tolist() == [0, 4, 8, 12]
    assert metadata.kv_indptr.tolist() == [0, 3, 11, 16]
    assert metadata.kv_last_page_len.tolist() == [1, 2, 1]


@pytest.mark.parametrize("step", range(3))
def test_a_draft_step_sees_one_key_more_than_the_one_before(step: int) -> None:
    """Step i of a draft attends to ``seq_len + i + 1`` keys and writes its own KV slots."""
    backend = backend_of(1, draft=DraftLimits(num_steps=3))
    slots = torch.arange(6).view(2, 3) + 700
    batch = batch_of(ForwardMode.DRAFT_DECODE, [5, 9], 2, out_cache_loc=slots)
    metadata = backend.init_metadata_eager(batch).steps[step]
    assert metadata.kv_indptr.diff().tolist() == [5 + step + 1, 9 + step + 1]
    assert metadata.out_cache_loc.tolist() == slots[:, step].tolist()


def test_branches_share_the_sequence_and_see_their_own_slots() -> None:
    """With top-k > 1 each branch is a row: the slots of the sequence, then its own up to the step."""
    backend = backend_of(16, draft=DraftLimits(num_steps=3, topk=2), windows=(None, 4))
    slots = torch.arange(12).view(4, 3) + 300
    batch = batch_of(ForwardMode.DRAFT_DECODE, [5, 9], 4, out_cache_loc=slots)
    metadata = backend.init_metadata_eager(batch).steps[1]
    rows = [
        metadata.kv_indices[a:b].tolist()
        for a, b in zip(metadata.kv_indptr[:-1].tolist(), metadata.kv_indptr[1:].tolist(), strict=True)
    ]
    assert rows[0] == [*range(96, 101), 300, 301]
    assert rows[1] == [*range(96, 101), 303, 304]
    assert rows[3] == [*range(192, 201), 309, 310]
    window = metadata.windows[4]
    assert window.kv_indices[: int(window.kv_indptr[1])].tolist() == [99, 100, 300, 301]


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=ROWS),
    window=st.integers(1, 20),
    width=st.integers(1, 4),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_a_windows_indices_hold_no_page_that_no_query_sees(
    lengths: list[int], window: int, width: int, page_size: int
) -> None:
    """The indices of a window are a suffix of the full ones, from the page of the first visible key."""
    backend = backend_of(page_size, windows=(None, window))
    batch = batch_of(ForwardMode.TARGET_VERIFY, lengths, width * len(lengths))
    metadata = backend.init_metadata_eager(batch)
    tail = metadata.windows[window]
    for i, length in enumerate(lengths):
        begin, end = metadata.kv_indptr[i : i + 2].tolist()
        first = max(length + width - width + 1 - window, 0) // page_size
        mine = tail.kv_indices[tail.kv_indptr[i] : tail.kv_indptr[i + 1]].tolist()
        assert mine == metadata.kv_indices[begin + first : end].tolist()
    assert torch.equal(tail.kv_last_page_len, metadata.kv_last_page_len)


@EXAMPLES
@given(data=st.data(), window=st.sampled_from([None, 3, 6]))
def test_mask_bits_say_what_each_draft_token_sees(data: st.DataObject, window: int | None) -> None:
    """A mask bit is set for the sequence, the token's ancestors and the token itself, cut by the window."""
    width = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    parents = [[data.draw(st.integers(-1, i - 1)) for i in range(width)] for _ in lengths]
    paths: list[list[list[int]]] = []
    for tree in parents:
        paths.append([])
        for token, parent in enumerate(tree):
            paths[-1].append([*(paths[-1][parent] if parent >= 0 else []), token])
    mask = torch.zeros(len(lengths) * width, width, dtype=torch.bool)
    for r, path in enumerate(paths):
        for token, seen in enumerate(path):
            mask[r * width + token, seen] = True
    backend = backend_of(4, windows=(None, window), draft=DraftLimits(1, 2, width))
    batch = batch_of(ForwardMode.TARGET_VERIFY, lengths, len(mask), tree_mask=mask)
    metadata = backend.init_metadata_eager(batch)
    indices = metadata if window is None else metadata.windows[window]
    pages = indices.kv_indptr.diff().tolist()
    for r, length in enumerate(lengths):
        held = (pages[r] - 1) * 4 + int(indices.kv_last_page_len[r])
        first = length + width - held
        begin = int(indices.mask_indptr[r])
        for token, path in enumerate(paths[r]):
            keys = [*range(length), *(length + other for other in path)]
            seen = {key - first for key in (keys if window is None else keys[-window:])}
            bits = {
                k
                for k in range(held)
                if int(indices.mask[begin + (token * held + k) // 8]) >> (token * held + k) % 8 & 1
            }
            assert bits == seen


def test_a_tree_needs_a_lane_that_was_laid_out_for_it() -> None:
    """A tree mask in a lane with top-k 1 is refused; the error names the limit."""
    batch = batch_of(ForwardMode.TARGET_VERIFY, [5], 2, tree_mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(EngineError, match=r"limits\.draft\.topk is 1"):
        backend_of().init_metadata_eager(batch)


@pytest.mark.parametrize("mode", [*ForwardMode])
def test_an_idle_rank_has_empty_metadata(mode: ForwardMode) -> None:
    """In every mode, the metadata of a batch without requests has no query, key or chunk.

    Attention with it returns no rows.
    """
    backend = backend_of(windows=(None, 4))
    empty = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=0,
        input_ids=empty,
        positions=empty,
        out_cache_loc=empty.view(0, 1) if mode is ForwardMode.DRAFT_DECODE else empty,
        req_pool_indices=empty,
        seq_lens=empty,
        seq_lens_cpu=empty,
        extend_seq_lens=empty,
        extend_seq_lens_cpu=empty,
    )
    metadata = backend.init_metadata_eager(batch)
    q, kv = torch.zeros(0, 2, 4), torch.zeros(0, 1, 4)
    part = metadata.steps[0] if mode is ForwardMode.DRAFT_DECODE else metadata
    assert len(part.out_cache_loc) == 0
    assert not part.qo_indptr.any()
    for indices in (part, part.windows[4]):
        assert not indices.kv_indptr.any()
        assert isinstance(indices.plan, PortablePlan)
        assert indices.plan.arguments.num_rows == 0
        assert not indices.plan.o_indptr.any()
    assert backend.forward(q, kv, kv, backend.context.layers[0], part).shape == (0, 2, 4)


# -- plans ---------------------------------------------------------------------------------------------


@EXAMPLES
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=ROWS))
def test_a_plan_covers_every_key_and_fits_the_grid(lengths: list[int]) -> None:
    """The chunks of a plan cover all keys of each request and are at most ``max_chunks``."""
    metadata = backend_of(1).init_metadata_eager(batch_of(ForwardMode.DECODE, lengths, len(lengths)))
    plan = metadata.plan
    assert isinstance(plan, PortablePlan)
    size, chunks = int(plan.kv_chunk_size), plan.o_indptr.diff().tolist()
    assert [-(-n // size) for n in lengths] == chunks
    assert sum(chunks) <= plan.arguments.max_chunks


def _captured() -> tuple[FlashInferBackend, Any, GraphShape, FlashInferMetadata, Pact]:
    """Return an attached backend, a maker of views, and shape, metadata and pact of one capture."""
    backend = backend_of(1)
    registry = build_decode_registry(
        max_bs=2,
        max_num_token=2,
        device=CPU,
        seq_len_fill_value=1,
        register_global_num_tokens=False,
        enable_mrope=False,
        zero_input_ids=True,
    )
    backend.attach(registry, TapeDriver(CPU))
    shape = GraphShape(ForwardMode.DECODE, 2, 2)

    def view_of(lengths: list[int]) -> ForwardBatch:
        batch = batch_of(ForwardMode.DECODE, lengths, 2)
        registry.fill_from(batch, raw_bs=2, padded_bs=2, raw_num_tokens=2, padded_num_tokens=2)
        return registry.extract_buffer(padded_bs=2, padded_num_tokens=2, forward_batch_template=batch)

    view = view_of([1, 1])
    metadata = backend.init_metadata_capture(view, shape)
    return backend, view_of, shape, metadata, Pact.of(shape, registry, view=view, metadata=metadata)


def test_a_plan_is_renewed_in_place_before_every_replay() -> None:
    """A replay's plan is made from its own lengths, at the captured address."""
    backend, view_of, shape, metadata, pact = _captured()
    backend.records_metadata = True  # the graph would fill the metadata
    for lengths in ([90, 3], [1, 1], [40, 70]):
        view = view_of(lengths)
        replayed = backend.init_metadata_replay(view, shape, metadata)
        pact.check(view=view, metadata=replayed)
        size = int(replayed.plan.kv_chunk_size)
        assert replayed.plan.o_indptr.diff().tolist() == [-(-n // size) for n in lengths]


def test_other_plan_arguments_than_the_captured_ones_break_the_pact() -> None:
    """A plan for another number of heads breaks the pact, which names the field."""
    backend, view_of, shape, metadata, pact = _captured()
    (layer,) = backend.context.layers
    backend._layer_of = {None: LayerSpec(0, 4, 1, 4, 4, layer.scaling)}
    view = view_of([3, 4])
    replayed = backend.init_metadata_replay(view, shape, metadata)
    with pytest.raises(PactBreach, match=r"metadata\.plan\.arguments\.num_qo_heads"):
        pact.check(view=view, metadata=replayed)


def test_a_stale_plan_gives_another_result() -> None:
    """The portable kernel attends to planned keys only: the plan of shorter requests changes the output."""
    backend = backend_of(1)
    cache, (layer,) = backend.context.kv_cache, backend.context.layers
    for tensor in (cache.k[0], cache.v[0]):
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    batch = batch_of(ForwardMode.DECODE, [60, 50], 2)
    q, kv = torch.ones(2, 2, 4), torch.ones(2, 1, 4)
    metadata = backend.init_metadata_eager(batch)
    right = backend.forward(q, kv, kv, layer, metadata)
    short = backend.init_metadata_eager(batch_of(ForwardMode.DECODE, [20, 50], 2))
    metadata.plan = short.plan
    stale = backend.forward(q, kv, kv, layer, metadata)
    assert not torch.allclose(stale[0], right[0])
    torch.testing.assert_close(stale[1], right[1])
