"""FlashInfer's metadata in decode and extend against a plain loop, and the backend's declarations."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    BackendContext,
    CudaGraphBufferRegistry,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    LayerSpec,
    Limits,
    PaddingPolicy,
)
from graphpact.attention import GraphSupport, HeadLayout
from graphpact.buffers import build_decode_registry
from graphpact.errors import EngineError
from graphpact.pact import Pact
from graphpact_flashinfer import FlashInferBackend, FlashInferMetadata

CPU = torch.device("cpu")
EXAMPLES = settings(derandomize=True, max_examples=60)
CONTEXT, ROWS, MAX_BS = 20, 6, 4


class RandomPages:
    """A backend on a table of random pages, and batches on it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        per_row = -(-CONTEXT // page_size)
        pages = torch.randperm(ROWS * per_row, generator=torch.Generator().manual_seed(0)) + 1
        self.pages = [[0] * per_row, *pages.view(ROWS, per_row).tolist()]
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        for row in range(1, ROWS + 1):
            for j in range(CONTEXT):
                slot = self.pages[row][j // page_size] * page_size + j % page_size
                self.table[row, j] = slot
        num_slots = (ROWS * per_row + 1) * page_size
        self.kv = SimpleNamespace(k=[torch.zeros(num_slots, 1, 4)], v=[torch.zeros(num_slots, 1, 4)])
        self.limits = Limits(MAX_BS, 64, CONTEXT, page_size)
        self.layer = LayerSpec(0, 1, 1, 4, 4, scaling=0.5)
        self.backend = self.make()

    def make(self) -> FlashInferBackend:
        """Return a new backend on the same memory."""
        return FlashInferBackend(
            BackendContext(CPU, torch.float32, [self.layer], self.limits, self.table, self.kv)
        )

    def batch(self, rows: list[int], lengths: list[int], new: list[int] | None = None) -> ForwardBatch:
        """Return a decode batch, or an extend batch if ``new`` is given."""
        lens, count = torch.tensor(lengths), new or [1] * len(rows)
        positions = [j for n, c in zip(lengths, count, strict=True) for j in range(n - c, n)]
        owners = [r for r, c in zip(rows, count, strict=True) for _ in range(c)]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND if new else ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=torch.zeros(sum(count), dtype=torch.int64),
            positions=torch.tensor(positions),
            out_cache_loc=self.table[torch.tensor(owners), torch.tensor(positions)].long(),
            req_pool_indices=torch.tensor(rows),
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=torch.tensor(new) if new else None,
            extend_seq_lens_cpu=torch.tensor(new) if new else None,
        )

    def check(
        self,
        metadata: FlashInferMetadata,
        rows: list[int],
        lengths: list[int],
        new: list[int] | None = None,
    ) -> None:
        """Compare every index tensor with a loop over the requests and, for an extend, the fake request."""
        qo, kv, indices, last = [0], [0], [], []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            pages = [self.pages[row][j // self.page_size] for j in range(0, length, self.page_size)]
            qo.append(qo[-1] + (new[i] if new else 1))
            kv.append(kv[-1] + len(pages))
            indices += pages
            last.append(length - (len(pages) - 1) * self.page_size)
        if new is not None:
            pad = len(metadata.out_cache_loc) - sum(new)
            dummies = -(-pad // self.page_size)
            qo.append(qo[-1] + pad)
            kv.append(kv[-1] + dummies)
            indices += [0] * dummies
            last.append((pad - 1) % self.page_size + 1)
        assert metadata.qo_indptr.tolist() == qo
        assert metadata.kv_indptr.tolist() == kv
        assert metadata.kv_indices[: kv[-1]].tolist() == indices
        assert metadata.kv_last_page_len.tolist() == last
        tensors = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices)
        assert {t.dtype for t in (*tensors, metadata.kv_last_page_len)} == {torch.int32}


PAGES = {size: RandomPages(size) for size in (1, 3, 16)}
PAGE_SIZES = st.sampled_from(sorted(PAGES))
REQUESTS = st.lists(st.tuples(st.integers(1, ROWS), st.integers(1, CONTEXT)), min_size=1, max_size=MAX_BS)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


def _registry() -> CudaGraphBufferRegistry:
    return build_decode_registry(
        max_bs=MAX_BS,
        max_num_token=MAX_BS,
        device=CPU,
        seq_len_fill_value=1,
        register_global_num_tokens=False,
        enable_mrope=False,
        zero_input_ids=True,
    )


def _view(registry: CudaGraphBufferRegistry, batch: ForwardBatch, padded: int) -> ForwardBatch:
    registry.fill_from(
        batch,
        raw_bs=batch.batch_size,
        padded_bs=padded,
        raw_num_tokens=batch.num_tokens,
        padded_num_tokens=padded,
    )
    return registry.extract_buffer(padded_bs=padded, padded_num_tokens=padded, forward_batch_template=batch)


@EXAMPLES
@given(page_size=PAGE_SIZES, requests=REQUESTS)
def test_decode_metadata_equals_a_loop(page_size: int, requests: list[tuple[int, int]]) -> None:
    """The index tensors of any decode batch equal a loop over its requests."""
    paged = PAGES[page_size]
    rows, lengths = [r for r, _ in requests], [n for _, n in requests]
    batch = paged.batch(rows, lengths)
    metadata = paged.backend.init_metadata_eager(batch)
    paged.check(metadata, rows, lengths)
    assert metadata.out_cache_loc is batch.out_cache_loc
    assert (metadata.max_q_len, metadata.max_kv_len) == (1, CONTEXT)


@EXAMPLES
@given(page_size=PAGE_SIZES, requests=REQUESTS, data=st.data())
def test_extend_metadata_equals_a_loop(
    page_size: int, requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The index tensors of any extend batch, with and without cached prefixes, equal a loop."""
    paged = PAGES[page_size]
    rows, lengths = [r for r, _ in requests], [n for _, n in requests]
    new = [data.draw(st.integers(1, n)) for n in lengths]
    metadata = paged.backend.init_metadata_eager(paged.batch(rows, lengths, new))
    paged.check(metadata, rows, lengths, new)
    assert metadata.max_q_len == max(new)
    assert metadata.max_kv_len == max(lengths)


@EXAMPLES
@given(page_size=PAGE_SIZES, history=st.lists(REQUESTS, min_size=1, max_size=5))
def test_replay_says_what_capture_would_say_whatever_came_before(
    page_size: int, history: list[list[tuple[int, int]]]
) -> None:
    """After any history, a replay's metadata equals that of a new capture of the same batch."""
    paged = PAGES[page_size]
    registry, backend = _registry(), paged.make()
    backend.attach(registry)
    shapes = {n: GraphShape(ForwardMode.DECODE, n, n) for n in (2, MAX_BS)}
    captured, pacts = {}, {}
    for padded, shape in shapes.items():
        view = _view(registry, paged.batch([0] * padded, [1] * padded), padded)
        captured[padded] = backend.init_metadata_capture(view, shape)
        pacts[padded] = Pact.of(shape, registry, view=view, metadata=captured[padded])
    for requests in history:
        padded = 2 if len(requests) <= 2 else MAX_BS
        rows, lengths = [r for r, _ in requests], [n for _, n in requests]
        batch = paged.batch(rows, lengths)
        view = _view(registry, batch, padded)
        for slot in registry:  # the replay must not need contents of an earlier step
            if slot.owner == "flashinfer" and slot.buffer is not None:
                slot.buffer.fill_(-9)
        replayed = backend.init_metadata_replay(view, shapes[padded], captured[padded])
        pacts[padded].check(view=view, metadata=replayed)
        pad = padded - len(rows)
        paged.check(replayed, rows + [0] * pad, lengths + [1] * pad)

        other, fresh = _registry(), paged.make()
        fresh.attach(other)
        anew = fresh.init_metadata_capture(_view(other, batch, padded), shapes[padded])
        used = int(anew.kv_indptr[-1])
        for name in ("out_cache_loc", "qo_indptr", "kv_indptr", "kv_last_page_len"):
            assert torch.equal(getattr(anew, name), getattr(replayed, name))
        assert torch.equal(anew.kv_indices[:used], replayed.kv_indices[:used])
        assert (anew.max_q_len, anew.max_kv_len) == (replayed.max_q_len, replayed.max_kv_len)


def test_padding_is_one_key_in_scratch() -> None:
    """A padding row has one key, in page 0, and writes KV slot 0."""
    paged = PAGES[3]
    registry, backend = _registry(), paged.make()
    backend.attach(registry)
    view = _view(registry, paged.batch([2], [7]), MAX_BS)
    metadata = backend.init_metadata_capture(view, GraphShape(ForwardMode.DECODE, MAX_BS, MAX_BS))
    assert metadata.kv_indptr.tolist() == [0, 3, 4, 5, 6]
    assert metadata.kv_indices[3:6].tolist() == [0, 0, 0]
    assert metadata.kv_last_page_len.tolist() == [1, 1, 1, 1]
    assert metadata.out_cache_loc.tolist()[1:] == [0, 0, 0]


def test_a_stale_length_is_caught_when_planted() -> None:
    """Stale lengths in padding rows change the metadata, so the tests above can fail."""
    paged = PAGES[1]
    registry, backend = _registry(), paged.make()
    backend.attach(registry)
    shape = GraphShape(ForwardMode.DECODE, MAX_BS, MAX_BS)
    view = _view(registry, paged.batch([1, 2, 3, 4], [5, 6, 7, 8]), MAX_BS)
    captured = backend.init_metadata_capture(view, shape)
    view = _view(registry, paged.batch([1, 2], [5, 6]), MAX_BS)
    view.seq_lens[2:] = torch.tensor([7, 8])  # the padding rows, which a fill must reset
    backend.init_metadata_replay(view, shape, captured)
    with pytest.raises(AssertionError):
        paged.check(captured, [1, 2, 0, 0], [5, 6, 1, 1])


@pytest.mark.parametrize("page_size", sorted(PAGES))
def test_slots_hold_the_longest_requests(page_size: int) -> None:
    """kv_indices has room for a full step of the longest sequences, and for the fake request."""
    paged = PAGES[page_size]
    registry, backend = _registry(), paged.make()
    backend.attach(registry)
    batch = paged.batch([ROWS] * MAX_BS, [CONTEXT] * MAX_BS)
    shape = GraphShape(ForwardMode.DECODE, MAX_BS, MAX_BS)
    metadata = backend.init_metadata_capture(_view(registry, batch, MAX_BS), shape)
    paged.check(metadata, [ROWS] * MAX_BS, [CONTEXT] * MAX_BS)
    fake = -(-MAX_BS // page_size)  # pages of the padding tokens of an extend
    assert int(metadata.kv_indptr[-1]) == metadata.kv_indices.shape[0] - fake


def test_every_slot_is_declared_with_owner_and_reason() -> None:
    """Slots are int32 with owner and reason, and no fill writes them; metadata tensors are in slots."""
    paged = PAGES[16]
    registry, backend = _registry(), paged.make()
    inputs = set(registry.slot_names())
    backend.attach(registry)
    mine = [slot for slot in registry if slot.name not in inputs]
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    plan = ("plan", "plan_staging")
    assert [slot.name for slot in mine] == [f"flashinfer.{name}" for name in (*names, *plan)]
    for slot in mine:
        assert slot.owner == "flashinfer"
        assert slot.reason
        assert slot.padding_policy is PaddingPolicy.KEEP_PAD
        assert slot.dtype is torch.int32
        assert not slot.copy_from_fb
    view = _view(registry, paged.batch([1, 2], [3, 4]), 2)
    metadata = backend.init_metadata_capture(view, GraphShape(ForwardMode.DECODE, 2, 2))
    owned = {s.buffer.untyped_storage().data_ptr() for s in registry if s.buffer is not None}
    for name in (*names, "out_cache_loc"):
        assert getattr(metadata, name).untyped_storage().data_ptr() in owned


def test_eager_metadata_is_memory_of_its_own() -> None:
    """Eager metadata writes no slot."""
    paged = PAGES[3]
    registry, backend = _registry(), paged.make()
    backend.attach(registry)
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(-9)
    backend.init_metadata_eager(paged.batch([1, 2], [3, 4]))
    assert all(bool((s.buffer == -9).all()) for s in registry if s.buffer is not None)


@pytest.mark.parametrize("new", [None, [2, 5]])
def test_forward_writes_the_cache_and_attends(new: list[int] | None) -> None:
    """New keys and values are written to their slots only; attention sees them and the prefix."""
    paged = RandomPages(3)
    generator = torch.Generator().manual_seed(1)
    rows, lengths = [3, 5], [4, 9]
    total = sum(new or [1, 1])
    for cache in (paged.kv.k[0], paged.kv.v[0]):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    q, k, v = (torch.randn(total, 1, 4, generator=generator) for _ in range(3))
    batch = paged.batch(rows, lengths, new)
    metadata = paged.backend.init_metadata_eager(batch)
    before = paged.kv.k[0].clone()
    out = paged.backend.forward(q, k, v, paged.layer, metadata)
    assert torch.equal(paged.kv.k[0][batch.out_cache_loc], k)
    assert torch.equal(paged.kv.v[0][batch.out_cache_loc], v)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[batch.out_cache_loc] = False
    assert torch.equal(paged.kv.k[0][untouched], before[untouched])
    at = 0
    for row, length, count in zip(rows, lengths, new or [1, 1], strict=True):
        for position in range(length - count, length):
            slots = paged.table[row, : position + 1].long()
            weights = torch.softmax(paged.kv.k[0][slots, 0] @ q[at, 0] * 0.5, 0)
            torch.testing.assert_close(out[at, 0], weights @ paged.kv.v[0][slots, 0])
            at += 1


def test_an_extend_batch_needs_its_lengths() -> None:
    """An extend without the number of new tokens of each request is refused."""
    paged = PAGES[1]
    batch = paged.batch([1], [4], [2])
    batch.extend_seq_lens = None
    with pytest.raises(EngineError, match="extend_seq_lens"):
        paged.backend.init_metadata_eager(batch)


def test_capture_needs_a_registry() -> None:
    """A capture with a backend that is not attached to a registry raises EngineError."""
    paged = RandomPages(1)
    with pytest.raises(EngineError, match="attached to no registry"):
        paged.backend.init_metadata_capture(paged.batch([1], [1]), GraphShape(ForwardMode.DECODE, 1, 1))


def _missing(**changes: Any) -> list[str]:
    layer: dict[str, Any] = {"sliding_window": 3, "softcap": 2.0, "sinks": torch.ones(1)}
    asked = {"mode": ForwardMode.DECODE, "dtype": torch.float32, "device": CPU, "page_size": 7}
    layers = [LayerSpec(0, 1, 1, 40, 24, scaling=1.0, **layer)]
    return FlashInferBackend.capabilities.missing(layers, **(asked | changes))


def test_declared_capabilities() -> None:
    """The backend declares every mode, all float dtypes, windows, caps, sinks, trees, host plans; no MLA."""
    declared = FlashInferBackend.capabilities
    assert declared.modes == frozenset(ForwardMode)
    assert declared.graph_support is GraphSupport.ALWAYS
    assert declared.trees
    assert declared.head_layouts == {HeadLayout.MHA, HeadLayout.GQA}
    assert declared.seq_len_fill_value == 1
    assert declared.needs_host_plan
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert _missing(dtype=dtype, mode=ForwardMode.EXTEND) == []
    assert "dtype torch.int8" in _missing(dtype=torch.int8)[0]
    assert _missing(device=torch.device("meta"))[0].startswith("device meta (has cpu, cuda)")
