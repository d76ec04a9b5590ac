"""Metadata against loops over requests, the kernels' checks, and the call of the native kernels."""

import gc
import inspect
import itertools
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
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
from graphpact.attention import DraftLimits, DraftMetadata, GraphSupport, HeadLayout
from graphpact.errors import ConfigError, EngineError
from graphpact.pact import Pact
from graphpact_trtllm_mla import NativeKernels, TRTLLMMLABackend
from graphpact_trtllm_mla.operators import attend_latents
from graphpact_trtllm_mla.providers import WORKSPACE

CPU = torch.device("cpu")
EXAMPLES = settings(derandomize=True, max_examples=60)
CONTEXT, ROWS, MAX_BS, WIDTH, STEPS = 150, 6, 4, 4, 3
RANK, ROPE, HEADS = 16, 8, 3
RAGGED = (ForwardMode.EXTEND, ForwardMode.MIXED)
DRAFTED = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE)
UNIFORM = (ForwardMode.DECODE, *DRAFTED, ForwardMode.DRAFT_EXTEND)


def width_of(mode: ForwardMode) -> int:
    """Return the number of tokens per request in a uniform mode."""
    return WIDTH if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1


class LatentPages:
    """A backend on a table of random pages, and batches on it.

    Past the keys of a step the table holds invalid slot numbers, as a freed row may.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        per_row = -(-CONTEXT // page_size)
        pages = torch.randperm(ROWS * per_row, generator=torch.Generator().manual_seed(0)) + 1
        self.pages = [[0] * per_row, *pages.view(ROWS, per_row).tolist()]
        self.num_slots = (ROWS * per_row + 1) * page_size
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        latents = torch.zeros(self.num_slots, 1, RANK + ROPE)
        self.kv = SimpleNamespace(k=[latents], v=[latents[..., :RANK]])
        self.limits = Limits(MAX_BS, 64, CONTEXT, page_size, DraftLimits(STEPS, 1, WIDTH))
        self.layer = LayerSpec(0, HEADS, 1, RANK + ROPE, RANK, 0.3, kv_lora_rank=RANK)

    def context(self, **changes: Any) -> BackendContext:
        """Return the context of a backend on this memory, with ``changes``."""
        layers = [self.layer]
        made = BackendContext(CPU, torch.float32, layers, self.limits, self.table, self.kv)
        return replace(made, **changes)

    def make(self) -> TRTLLMMLABackend:
        """Return a new backend on this memory."""
        return TRTLLMMLABackend(self.context())

    def slot(self, row: int, position: int) -> int:
        """Return the KV slot of a position of a request row."""
        page = self.pages[row][position // self.page_size]
        return page * self.page_size + position % self.page_size if row else 0

    def batch(
        self,
        mode: ForwardMode,
        requests: list[tuple[int, int, int]],
        *,
        padded_bs: int = 0,
        padded_tokens: int = 0,
    ) -> ForwardBatch:
        """Return a batch of ``(row, keys, new tokens)``, padded if counts are given.

        ``keys`` counts the keys of a request in this batch, drafts included; in a draft decode, in its first
        step.
        """
        self.table.fill_(self.num_slots + 7)
        self.table[0] = 0
        later = STEPS - 1 if mode is ForwardMode.DRAFT_DECODE else 0
        ids, slots = [], []
        for row, keys, new in requests:
            for at in range(keys + later):
                self.table[row, at] = self.slot(row, at)
            for at in range(keys - new, keys):
                ids.append(at)
                slots.append([self.slot(row, at + step) for step in range(later + 1)])
        pad_bs = max(padded_bs - len(requests), 0)
        pad_tokens = max(padded_tokens - len(ids), 0)
        counted = 0 if mode not in DRAFTED else width_of(mode)
        fill = TRTLLMMLABackend.capabilities.padded_seq_len(mode, width_of(mode))
        lens = torch.tensor([keys - counted for _, keys, _ in requests] + [fill] * pad_bs)
        new_tokens = torch.tensor([new for _, _, new in requests] + [0] * pad_bs)
        at_slots = torch.tensor(slots + [[0] * (later + 1)] * pad_tokens).long()
        ids_t = torch.tensor(ids + [0] * pad_tokens).long()
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests) + pad_bs,
            input_ids=ids_t,
            positions=ids_t,
            out_cache_loc=at_slots if later else at_slots.view(-1, later + 1)[:, 0],
            req_pool_indices=torch.tensor([row for row, _, _ in requests] + [0] * pad_bs).long(),
            seq_lens=lens.long(),
            seq_lens_cpu=lens.long(),
            extend_seq_lens=new_tokens if mode in RAGGED else None,
            extend_seq_lens_cpu=new_tokens if mode in RAGGED else None,
        )

    def check(
        self,
        metadata: Any,
        mode: ForwardMode,
        requests: list[tuple[int, int, int]],
        padded_bs: int = 0,
    ) -> None:
        """Compare every tensor of each step with loops over the requests."""
        steps = metadata.steps if isinstance(metadata, DraftMetadata) else (metadata,)
        assert len(steps) == (STEPS if mode is ForwardMode.DRAFT_DECODE else 1)
        fill = {ForwardMode.TARGET_VERIFY: 1 + WIDTH, ForwardMode.DRAFT_EXTEND: WIDTH}
        pad = (0, fill.get(mode, 2 if mode is ForwardMode.DRAFT_DECODE else 1), width_of(mode))
        if mode in RAGGED:
            pad = (0, 1, 0)
        padded = requests + [pad] * (padded_bs - len(requests))
        for step, part in enumerate(steps):
            offsets, lens = [0], []
            for i, (row, keys, new) in enumerate(padded):
                offsets.append(offsets[-1] + new)
                lens.append(keys + step)
                used = [self.pages[row][at // self.page_size] for at in range(lens[-1])]
                pages = [page for page, _ in itertools.groupby(used)] if row else [0]
                listed = part.block_kv_indices[i].tolist()
                assert listed[: len(pages)] == pages
                assert set(listed[len(pages) :]) <= {0}
            assert part.cu_seqlens_q.tolist() == offsets
            assert part.seq_lens_k.tolist() == lens
            assert part.block_kv_indices.shape[1] * self.page_size % 128 == 0
            tensors = (part.block_kv_indices, part.seq_lens_k, part.cu_seqlens_q)
            assert {t.dtype for t in tensors} == {torch.int32}
            assert part.max_seq_len_k >= max(lens, default=0)
            if mode in RAGGED:
                assert part.max_seq_len_q >= max(new for _, _, new in padded)
            else:
                assert part.max_seq_len_q == width_of(mode)
                assert part.sum_seq_lens_q == offsets[-1]


PAGES = {size: LatentPages(size) for size in (32, 64)}
PAGE_SIZES = st.sampled_from(sorted(PAGES))
MODES = st.sampled_from([*UNIFORM, *RAGGED])


@st.composite
def requests_of(draw: st.DrawFn, mode: ForwardMode) -> list[tuple[int, int, int]]:
    """Draw up to `MAX_BS` requests ``(row, keys, new tokens)``."""
    rows = draw(st.permutations(range(1, ROWS + 1)))[: draw(st.integers(1, MAX_BS))]
    found = []
    for row in rows:
        least = width_of(mode) + (1 if mode in DRAFTED else 0)
        keys = draw(st.one_of(st.integers(least, CONTEXT - STEPS), st.sampled_from([32, 64, 128])))
        new = draw(st.integers(1, min(keys, 12))) if mode in RAGGED else width_of(mode)
        found.append((row, keys, new))
    return found


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as a lane runs its steps."""
    with torch.inference_mode():
        yield


def attached(paged: LatentPages) -> tuple[TRTLLMMLABackend, CudaGraphBufferRegistry]:
    """Return a backend whose slots are registered, and their registry."""
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=MAX_BS, max_num_tokens=64)
    backend = paged.make()
    backend.attach(registry)
    return backend, registry


def shape_of(mode: ForwardMode, bs: int = MAX_BS) -> GraphShape:
    """Return the shape of ``bs`` requests; in a ragged mode, with room for any batch drawn here."""
    return GraphShape(mode, bs, 12 * bs if mode in RAGGED else bs * width_of(mode))


def dummy(paged: LatentPages, shape: GraphShape) -> ForwardBatch:
    """Return a batch of padding only, to capture ``shape``."""
    return paged.batch(shape.mode, [], padded_bs=shape.batch_size, padded_tokens=shape.num_tokens)


@EXAMPLES
@given(page_size=PAGE_SIZES, mode=MODES, data=st.data())
def test_eager_metadata_equals_a_loop(page_size: int, mode: ForwardMode, data: st.DataObject) -> None:
    """The tensors of any batch of any mode equal loops over its requests."""
    paged, requests = PAGES[page_size], data.draw(requests_of(mode))
    metadata = paged.make().init_metadata_eager(paged.batch(mode, requests), fill=-9)
    paged.check(metadata, mode, requests)
    if mode in RAGGED:  # bounds of this batch
        assert metadata.max_seq_len_q == max(new for _, _, new in requests)
        assert metadata.max_seq_len_k == max(keys for _, keys, _ in requests)


@EXAMPLES
@given(page_size=PAGE_SIZES, mode=MODES, data=st.data())
def test_replay_says_what_capture_would_say_whatever_came_before(
    page_size: int, mode: ForwardMode, data: st.DataObject
) -> None:
    """After any history, a replay's metadata equals the loops, padding rows included, and keeps the pact."""
    paged, shape = PAGES[page_size], shape_of(mode)
    backend, registry = attached(paged)
    view = dummy(paged, shape)
    captured = backend.init_metadata_capture(view, shape)
    pact = Pact.of(shape, registry, view=view, metadata=captured)
    for requests in data.draw(st.lists(requests_of(mode), min_size=1, max_size=4)):
        counts = {"padded_bs": MAX_BS, "padded_tokens": shape.num_tokens}
        batch = paged.batch(mode, requests, **counts)
        for slot in registry:  # the replay must not need contents of an earlier step
            assert slot.buffer is not None
            slot.buffer.fill_(-9)
        replayed = backend.init_metadata_replay(batch, shape, captured)
        assert replayed is captured
        pact.check(view=view, metadata=replayed)
        paged.check(replayed, mode, requests, MAX_BS)


@pytest.mark.parametrize("accepted", [*itertools.product(range(WIDTH + 1), repeat=2)])
def test_the_stride_of_draft_extend_is_uniform_whatever_was_accepted(
    accepted: tuple[int, ...],
) -> None:
    """No accepted length changes a query offset, at replay or in an eager step."""
    paged, shape = PAGES[64], shape_of(ForwardMode.DRAFT_EXTEND)
    backend, _ = attached(paged)
    captured = backend.init_metadata_capture(dummy(paged, shape), shape)
    requests = [(row, 60 + n + WIDTH, WIDTH) for row, n in zip((1, 2), accepted, strict=True)]
    batch = paged.batch(shape.mode, requests, padded_bs=MAX_BS, padded_tokens=MAX_BS * WIDTH)
    # The accepted lengths, as verified requests have them.
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = torch.tensor([*accepted, 0, 0])
    stride = [i * WIDTH for i in range(MAX_BS + 1)]
    for metadata in (
        backend.init_metadata_replay(batch, shape, captured),
        backend.init_metadata_eager(batch),
    ):
        assert metadata.cu_seqlens_q.tolist() == stride
        assert metadata.max_seq_len_q == WIDTH
        assert metadata.sum_seq_lens_q == MAX_BS * WIDTH


def test_modes_of_one_size_have_metadata_of_their_own() -> None:
    """Captured shapes of different uniform modes with one batch size have separate metadata."""
    paged = PAGES[64]
    backend, _ = attached(paged)
    captured = {}
    for mode in UNIFORM:
        shape = shape_of(mode)
        captured[mode] = backend.init_metadata_capture(dummy(paged, shape), shape)
    assert len({id(metadata) for metadata in captured.values()}) == len(UNIFORM)
    for mode in (*UNIFORM, *reversed(UNIFORM)):
        requests = [(3, 70, width_of(mode)), (5, 9, width_of(mode))]
        counts = {"padded_bs": MAX_BS, "padded_tokens": shape_of(mode).num_tokens}
        batch = paged.batch(mode, requests, **counts)
        backend.init_metadata_replay(batch, shape_of(mode), captured[mode])
        paged.check(captured[mode], mode, requests, MAX_BS)


def test_what_a_graph_records_is_all_that_a_replay_prepares() -> None:
    """If the graph fills the metadata, the replay hook writes nothing, and the recorded part writes all."""
    paged, shape = PAGES[32], shape_of(ForwardMode.MIXED)
    backend, registry = attached(paged)
    captured = backend.init_metadata_capture(dummy(paged, shape), shape)
    requests = [(2, 40, 5), (4, 33, 1)]
    batch = paged.batch(shape.mode, requests, padded_bs=MAX_BS, padded_tokens=shape.num_tokens)
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(-9)
    backend.records_metadata = True
    backend.init_metadata_replay(batch, shape, captured)
    assert bool((captured.cu_seqlens_q == -9).all())
    backend.record_metadata(batch, captured)
    paged.check(captured, shape.mode, requests, MAX_BS)


def test_every_slot_is_declared_with_owner_and_reason() -> None:
    """Slots are int32 with owner and reason; metadata is in slots; portable kernels have no workspace."""
    paged = PAGES[32]
    backend, registry = attached(paged)
    names = ["block_kv_indices", "seq_lens_k", "cu_seqlens_q"]
    numbered = [f"trtllm_mla.{n}{at}" for at in ("", ".step1", ".step2") for n in names]
    assert sorted(slot.name for slot in registry) == sorted(numbered)
    for slot in registry:
        assert slot.owner == "trtllm_mla"
        assert slot.reason
        assert slot.padding_policy is PaddingPolicy.KEEP_PAD
        assert slot.dtype is torch.int32
    shape = shape_of(ForwardMode.DECODE, 2)
    metadata = backend.init_metadata_capture(dummy(paged, shape), shape)
    owned = {s.buffer.untyped_storage().data_ptr() for s in registry if s.buffer is not None}
    assert all(getattr(metadata, n).untyped_storage().data_ptr() in owned for n in names)
    assert metadata.block_kv_indices.shape == (2, 8)
    assert metadata.workspace is None


def latents(seed: int, *shape: int) -> torch.Tensor:
    """Return a random tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", [*UNIFORM, *RAGGED])
def test_forward_writes_latents_and_attends_causally(mode: ForwardMode) -> None:
    """Latents are written to their slots only; queries attend causally; the output of padding is zero."""
    paged = LatentPages(32)
    backend = paged.make()
    new = 5 if mode in RAGGED else width_of(mode)
    requests = [(3, 70, new), (5, 9, new)]
    more = {"padded_bs": 3, "padded_tokens": 2 * new + 3} if mode in RAGGED else {}
    batch = paged.batch(mode, requests, **more)
    total = batch.num_tokens
    paged.kv.k[0].copy_(latents(1, *paged.kv.k[0].shape))
    q, k = latents(2, total, HEADS, RANK + ROPE), latents(3, total, 1, RANK + ROPE)
    metadata = backend.init_metadata_eager(batch)
    part, slots = metadata, batch.out_cache_loc
    if isinstance(metadata, DraftMetadata):
        part, slots = metadata.steps[0], batch.out_cache_loc[:, 0]
    before = paged.kv.k[0].clone()
    out = backend.forward(q, k, k[..., :RANK], paged.layer, part)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(paged.kv.k[0][untouched], before[untouched])
    assert torch.equal(paged.kv.k[0][slots[: 2 * new]], k[: 2 * new])
    at = 0
    for row, keys, count in requests:
        for position in range(keys - count, keys):
            seen = torch.tensor([paged.slot(row, p) for p in range(position + 1)])
            key = paged.kv.k[0][seen, 0].double()
            for head in range(HEADS):
                weights = torch.softmax(key @ q[at, head].double() * 0.3, 0)
                want = (weights @ key[:, :RANK]).float()
                torch.testing.assert_close(out[at, head], want, rtol=1e-5, atol=1e-5)
            at += 1
    assert not out[at:].any()


def test_an_idle_batch_does_nothing() -> None:
    """A batch without requests has empty metadata, and attention returns no rows."""
    paged = PAGES[32]
    backend = paged.make()
    metadata = backend.init_metadata_eager(paged.batch(ForwardMode.IDLE, []))
    assert metadata.cu_seqlens_q.tolist() == [0]
    assert metadata.seq_lens_k.shape == (0,)
    assert metadata.block_kv_indices.shape[0] == 0
    nothing = torch.zeros(0, 1, RANK + ROPE)
    out = backend.forward(nothing.expand(-1, HEADS, -1), nothing, nothing, paged.layer, metadata)
    assert out.shape == (0, HEADS, RANK)


def call(**changes: Any) -> None:
    """Call the portable kernel with two requests of two queries each, and ``changes``."""
    asked: dict[str, Any] = {
        "q": torch.zeros(4, HEADS, RANK + ROPE),
        "kv_cache": torch.zeros(3, 64, RANK + ROPE),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 6], dtype=torch.int32),
        "cum_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32),
        "max_q_len": 2,
        "max_seq_len": 100,
        "bmm1_scale": 1.0,
        "is_uniform": True,
        "out": torch.zeros(4, HEADS, RANK),
    }
    attend_latents(*(asked | changes).values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int32)}, r"blocks % \(128 / 64\)"),
        ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, "block_tables is torch.int64"),
        ({"seq_lens": torch.tensor([5, 6])}, "seq_lens is torch.int64"),
        ({"cum_seq_lens_q": torch.tensor([0, 2, 4])}, "cum_seq_lens_q is torch.int64"),
        (
            {"cum_seq_lens_q": torch.tensor([0, 1, 3], dtype=torch.int32)},
            r"\[0, 1, 3\]; the decode kernel takes 2 queries of each",
        ),
        ({"max_q_len": 3}, "4 rows for 2 requests of 3 queries"),
    ],
)
def test_portable_kernels_check_what_native_ones_do(changes: dict[str, Any], says: str) -> None:
    """Portable kernels check the block constraint, int32 and, in uniform steps, the stride of queries."""
    call()
    with pytest.raises(RuntimeError, match=says):
        call(**changes)
    if "takes 2 queries" in says:
        call(**changes, is_uniform=False)


def test_an_extend_batch_needs_its_lengths() -> None:
    """An extend without the number of new tokens of each request is refused."""
    paged = PAGES[32]
    batch = paged.batch(ForwardMode.EXTEND, [(1, 4, 2)])
    batch.extend_seq_lens = None
    with pytest.raises(EngineError, match="extend_seq_lens"):
        paged.make().init_metadata_eager(batch)


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE])
def test_drafts_that_branch_are_refused(mode: ForwardMode) -> None:
    """A tree mask, and a draft of two branches per request, are refused: the backend serves chains."""
    tokens = torch.zeros(2, dtype=torch.int64)
    is_verify = mode is ForwardMode.TARGET_VERIFY
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=1,
        input_ids=tokens,
        positions=tokens,
        out_cache_loc=tokens if is_verify else tokens[:, None],
        req_pool_indices=tokens[:1],
        seq_lens=tokens[:1] + 5,
        seq_lens_cpu=tokens[:1] + 5,
        tree_mask=torch.ones(2, 2, dtype=torch.bool) if is_verify else None,
    )
    with pytest.raises(EngineError, match="TRTLLMMLABackend supports chains only"):
        PAGES[32].make().init_metadata_eager(batch)


def test_declared_capabilities() -> None:
    """The backend declares MLA only, pages of 32 and 64, every mode in graphs; no windows, caps, branches."""
    declared = TRTLLMMLABackend.capabilities
    assert declared.modes == set(ForwardMode)
    assert declared.graph_support is GraphSupport.ALWAYS
    assert declared.head_layouts == {HeadLayout.MLA}
    assert declared.seq_len_fill_value == 1
    assert not declared.needs_host_plan
    asked: dict[str, Any] = {"mode": ForwardMode.DECODE, "dtype": torch.float32, "device": CPU}
    layer = PAGES[32].layer
    assert declared.missing([layer], page_size=32, **asked) == []
    wants = replace(layer, sliding_window=3, softcap=2.0, sinks=torch.ones(HEADS), kv_lora_rank=None)
    assert declared.missing([wants], page_size=16, topk=2, **asked) == [
        "page size 16 (has 32, 64)",
        "head layout gqa (has mla)",
        "attention feature sliding_window",
        "attention feature softcap",
        "attention feature sinks",
        "drafts with top-k 2",
    ]


# -- native kernels --------------------------------------------------------------------------------

BIG = LayerSpec(0, 5, 1, 576, 512, 0.07, kv_lora_rank=512)


# The arguments of FlashInfer 0.7.2's function, in order; those before `sparse_mla_top_k` have no default.
ARGUMENTS = [
    "query",
    "kv_cache",
    "workspace_buffer",
    "qk_nope_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "block_tables",
    "seq_lens",
    "max_seq_len",
    "sparse_mla_top_k",
    "out",
    "bmm1_scale",
    "bmm2_scale",
    "sinks",
    "skip_softmax_threshold_scale_factor",
    "enable_pdl",
    "backend",
    "is_var_seq",
    "uses_shared_paged_kv_idx",
    "lse",
    "return_lse",
    "cute_dsl_impl",
    "kv_scale_format",
    "cum_seq_lens_q",
    "max_q_len",
    "multi_ctas_kv_counter_buffer",
    "sparse_mla_top_k_lens",
    "enable_dcp",
    "cp_world",
    "cp_rank",
    "causal_seqlens_kv_global",
    "use_fp16_softmax",
    "return_lse_base",
]
SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if at < 9 else None,
        )
        for at, name in enumerate(ARGUMENTS)
    ]
)


def decode_of_flashinfer(*args: Any, **named: Any) -> torch.Tensor:
    """Stand in for FlashInfer's function: bind its signature, check the arguments, attend portably."""
    asked = SimpleNamespace(**SIGNATURE.bind(*args, **named).arguments)
    query, workspace = asked.query, asked.workspace_buffer
    assert asked.backend == "trtllm-gen"
    assert query.dtype is asked.kv_cache.dtype is torch.bfloat16
    assert query.shape[1:] == (BIG.num_q_heads, 576)
    assert asked.kv_cache.shape[1:] == (64, 576)
    assert (asked.kv_lora_rank, asked.qk_rope_head_dim) == (512, 64)
    assert workspace.dtype is torch.uint8
    assert workspace.numel() == 128 * 2**20
    assert not workspace.any()
    assert asked.bmm2_scale == 1.0
    answer = query.new_empty((*query.shape[:2], asked.kv_lora_rank))
    attend_latents(
        query,
        asked.kv_cache,
        asked.block_tables,
        asked.seq_lens,
        asked.cum_seq_lens_q,
        asked.max_q_len,
        asked.max_seq_len,
        asked.bmm1_scale,
        True,  # noqa: FBT003  operators are called by position
        answer,
    )
    return answer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has a GPU of compute capability 10.0, and FlashInfer."""
    mla = ModuleType("flashinfer.mla")
    mla.trtllm_batch_decode_with_kv_cache_mla = decode_of_flashinfer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (10, 0))


def big_context(**changes: Any) -> BackendContext:
    """Return a context that native kernels can serve, with ``changes``."""
    paged = PAGES[64]
    cache = torch.zeros(paged.num_slots, 1, 576, dtype=torch.bfloat16)
    made = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "layers": [BIG],
        "kv_cache": SimpleNamespace(k=[cache], v=[cache[..., :512]]),
    }
    return paged.context(**(made | changes))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("mode", UNIFORM)
def test_native_kernels_get_what_portable_ones_get(
    mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gets a zeroed workspace and the same arguments: its output equals the portable one."""
    anywhere = replace(NativeKernels.capabilities, devices=frozenset({"cpu"}))
    monkeypatch.setattr(NativeKernels, "capabilities", anywhere)
    monkeypatch.setattr(NativeKernels, "unavailable", lambda _: None)
    paged = PAGES[64]
    native, portable = (
        TRTLLMMLABackend(big_context(device=CPU, provider=provider)) for provider in ("native", "portable")
    )
    width = width_of(mode)
    batch = paged.batch(mode, [(3, 70, width), (5, 9, width)])
    q, k = (latents(4, batch.num_tokens, n, 576).bfloat16() for n in (BIG.num_q_heads, 1))
    answers = []
    for backend in (native, portable):
        metadata = backend.init_metadata_eager(batch)
        part = metadata.steps[0] if isinstance(metadata, DraftMetadata) else metadata
        answers.append(backend.forward(q, k, k, BIG, part))
        assert torch.equal(backend.forward(q, None, None, BIG, part), answers[-1])
    assert torch.equal(*answers)
    assert answers[0].abs().max() > 0
    (workspace,) = (s for s in native.declare_slots(paged.limits) if "workspace" in s.name)
    assert workspace.padding_policy is PaddingPolicy.FILL_ONCE
    assert workspace.initial_value == 0


def native_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> TRTLLMMLABackend:
    """Return a backend on native kernels, which run here on the stand-in."""
    anywhere = replace(NativeKernels.capabilities, devices=frozenset({"cpu"}))
    monkeypatch.setattr(NativeKernels, "capabilities", anywhere)
    monkeypatch.setattr(NativeKernels, "unavailable", lambda _: None)
    return TRTLLMMLABackend(big_context(device=CPU, provider="native"))


@pytest.mark.usefixtures("gpu")
def test_two_lanes_have_a_workspace_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes of one process have separate workspaces, each freed with its lane."""
    paged = PAGES[64]
    shape = GraphShape(ForwardMode.DECODE, 2, 2)
    kept, gone = [], []
    for _ in range(2):
        backend = native_on_a_cpu(monkeypatch)
        registry = CudaGraphBufferRegistry(device=CPU, max_bs=2, max_num_tokens=2)
        backend.attach(registry)
        batch = paged.batch(ForwardMode.DECODE, [(3, 70, 1), (5, 9, 1)])
        metadata = backend.init_metadata_capture(batch, shape)
        q, k = (latents(4, 2, n, 576).bfloat16() for n in (BIG.num_q_heads, 1))
        assert backend.forward(q, k, k, BIG, metadata).any()
        kept.append((backend, registry, metadata))
        gone.append(weakref.ref(metadata.workspace))
    assert kept[0][2].workspace.data_ptr() != kept[1][2].workspace.data_ptr()
    del backend, registry, metadata
    kept.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.usefixtures("gpu")
def test_eager_steps_of_a_lane_with_graphs_take_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a lane has attached the backend, eager steps allocate no workspace: they take the registry's."""
    backend = native_on_a_cpu(monkeypatch)
    batch = PAGES[64].batch(ForwardMode.DECODE, [(3, 70, 1), (5, 9, 1)])
    gone = weakref.ref(backend.init_metadata_eager(batch).workspace)  # of an earlier step
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=2, max_num_tokens=2)
    backend.attach(registry)
    assert gone() is None
    made = {backend.init_metadata_eager(batch).workspace.data_ptr() for _ in range(3)}
    assert made == {registry.get_slot(WORKSPACE).buffer.data_ptr()}


@pytest.mark.usefixtures("gpu")
def test_eager_steps_of_a_lane_without_graphs_have_one_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager steps share one workspace, which stays zero and is freed with the backend."""
    backend = native_on_a_cpu(monkeypatch)
    batch = PAGES[64].batch(ForwardMode.DECODE, [(3, 70, 1), (5, 9, 1)])
    with torch.inference_mode():
        made = [backend.init_metadata_eager(batch) for _ in range(3)]
    assert len({metadata.workspace.data_ptr() for metadata in made}) == 1
    assert not made[0].workspace.is_inference()
    backend.init_metadata_eager(batch, fill=1)  # ``fill`` does not apply to workspaces
    assert not made[0].workspace.any()
    gone = weakref.ref(made[0].workspace)
    made.clear()
    assert gone() is not None
    del backend
    gc.collect()
    assert gone() is None


def test_native_kernels_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing GPU, another GPU and a missing library give reasons; the last names the install command."""
    cuda = torch.device("cuda")
    assert "need a CUDA device" in str(NativeKernels.unavailable(CPU))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert "10.x; cuda has 9.0" in str(NativeKernels.unavailable(cuda))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (10, 3))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert 'pip install "graphpact-trtllm-mla[native]"' in str(NativeKernels.unavailable(cuda))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert NativeKernels.unavailable(cuda) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": ForwardMode.EXTEND}, "mode extend"),
        ({"dtype": torch.float16}, "dtype torch.float16"),
        ({"layers": [replace(BIG, num_q_heads=65)]}, "65 query heads"),
        ({"layers": [replace(BIG, num_q_heads=127)]}, "127 query heads"),
        ({"layers": [replace(BIG, kv_lora_rank=448)]}, "kv_lora_rank 448"),
        ({"layers": [replace(BIG, head_dim=320)]}, "head_dim 320"),
    ],
)
def test_what_native_kernels_lack_is_left_to_portable_ones(changes: dict[str, Any], says: str) -> None:
    """If native kernels lack a feature, ``auto`` uses others and records why; ``native`` is refused."""
    context = big_context(**changes)
    backend = TRTLLMMLABackend(context)
    assert backend.kernels.name == "portable"
    assert says in backend.passed_over["native"]
    with pytest.raises(ConfigError, match=says):
        TRTLLMMLABackend(replace(context, provider="native"))
    for heads in (1, 64, 128):
        fit = big_context(layers=[replace(BIG, num_q_heads=heads)])
        assert TRTLLMMLABackend(fit).kernels.name == "native"
