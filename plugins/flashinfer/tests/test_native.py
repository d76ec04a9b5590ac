"""The native kernels, on a stand-in with the signature of FlashInfer's wrapper, without a GPU.

Like FlashInfer's wrapper, it keeps its buffers in graph mode for its lifetime, and the host numbers of its
plan. It attends by plain loops over its buffers.
"""

import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_kernels import COMPILED
from graphpact import (
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    LayerSpec,
    Limits,
    PaddingPolicy,
)
from graphpact.attention import DraftLimits
from graphpact.buffers import CudaGraphBufferRegistry, build_decode_registry
from graphpact.errors import ConfigError, PactBreach
from graphpact.pact import Pact
from graphpact_flashinfer import FlashInferBackend
from graphpact_flashinfer.native import NativeKernels
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
CONTEXT, ROWS = 32, 3


class Wrapper:
    """A stand-in for ``BatchPrefillWithPagedKVCacheWrapper`` of flashinfer-python 0.7.2."""

    made: list["Wrapper"] = []  # noqa: RUF012  emptied by the fixture

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,  # noqa: FBT001, FBT002  its signature
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,  # noqa: FBT001, FBT002  its signature
    ) -> None:
        assert kv_layout == "NHD"
        self.use_cuda_graph = use_cuda_graph
        self.float_workspace = float_workspace_buffer
        self.int_workspace = torch.zeros(32, dtype=torch.uint8)
        self.qo_indptr, self.kv_indptr = qo_indptr_buf, paged_kv_indptr_buf
        self.kv_indices, self.last_page_len = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self.mask, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self.planned: dict[str, Any] = {}
        self.num_planned = 0
        self._plan_info: list[int] | None = None
        self.made.append(self)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Set the workspaces."""
        self.float_workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,  # noqa: FBT001, FBT002  its signature
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,  # noqa: FBT001, FBT002  its signature
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,  # noqa: FBT001, FBT002  its signature
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        """Plan from host offsets: copy them into the buffers in graph mode, otherwise into new ones."""
        assert custom_mask is None
        if not self.use_cuda_graph:
            self.qo_indptr, self.kv_indptr = qo_indptr.clone(), paged_kv_indptr.clone()
            self.kv_indices = paged_kv_indices
            self.last_page_len = paged_kv_last_page_len.clone()
            self.mask, self._mask_indptr_buf = packed_custom_mask, None
            if packed_custom_mask is not None:
                num_kv = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
                bits = qo_indptr.diff() * num_kv
                assert len(packed_custom_mask) == int((-(-bits // 8)).sum())
                self._mask_indptr_buf = torch.nn.functional.pad(bits.cumsum(0), (1, 0))
        else:
            assert packed_custom_mask is None  # the mask is in its buffer already
            assert len(paged_kv_indices) == 0
        for host, buffer in (
            (qo_indptr, self.qo_indptr),
            (paged_kv_indptr, self.kv_indptr),
            (paged_kv_last_page_len, self.last_page_len),
        ):
            assert buffer is not None
            assert host.shape == buffer.shape
            assert host.dtype is torch.int32
            buffer.copy_(host)
        self.planned = {
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "page_size": page_size,
            "causal": causal,
            "scale": sm_scale,
            "window_left": window_left,
            "cap": logits_soft_cap,
        }
        self.num_planned += 1
        self._plan_info = [len(qo_indptr) - 1, num_qo_heads]

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *args: Any
    ) -> torch.Tensor:
        """Return the attention over the buffers, by loops."""
        keys, values = paged_kv_cache
        size, plan = self.planned["page_size"], self.planned
        assert keys.shape[1] == size
        assert self.qo_indptr is not None
        assert self.kv_indptr is not None
        assert self.kv_indices is not None
        assert self.last_page_len is not None
        out = torch.zeros(q.shape[0], q.shape[1], values.shape[3], dtype=q.dtype)
        for r, last in enumerate(self.last_page_len.tolist()):
            begin, end = self.qo_indptr[r : r + 2].tolist()
            pages = self.kv_indices[self.kv_indptr[r] : self.kv_indptr[r + 1]].long()
            length = (len(pages) - 1) * size + last
            k, v = keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]
            for row in range(begin, end):
                at = length - (end - begin) + row - begin
                seen = torch.arange(length) <= at if plan["causal"] else torch.ones(length).bool()
                if plan["window_left"] >= 0:
                    seen &= torch.arange(length) >= at - plan["window_left"]
                if self.mask is not None and self._mask_indptr_buf is not None:
                    bit = (row - begin) * length + torch.arange(length)
                    seen &= (self.mask[self._mask_indptr_buf[r] + bit // 8] >> (bit % 8) & 1).bool()
                for head in range(q.shape[1]):
                    own = head * keys.shape[2] // q.shape[1]
                    weights = torch.softmax(k[seen, own] @ q[row, head] * plan["scale"], 0)
                    out[row, head] = weights @ v[seen, own]
        return out


class OnACPU(NativeKernels):
    """The native kernels, allowed on a CPU."""

    capabilities: Capabilities | None = None  # type: ignore[misc]

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return None: the stand-in runs anywhere."""
        return None


class Backend(FlashInferBackend):
    """The backend with the native kernels as its only provider."""

    providers = (OnACPU,)


@pytest.fixture(autouse=True)
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the stand-in as ``flashinfer``, with small workspaces, and run the test in inference mode."""
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("graphpact_flashinfer.native._FLOAT_BYTES", 64)
    monkeypatch.setattr("graphpact_flashinfer.native._INT_BYTES", 32)
    Wrapper.made.clear()
    with torch.inference_mode():
        yield


def _context(*windows: int | None, draft: DraftLimits | None = None) -> BackendContext:
    layers = [LayerSpec(i, 2, 1, 4, 4, 0.5, sliding_window=w) for i, w in enumerate(windows)]
    table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
    table[1:] = torch.arange(CONTEXT, CONTEXT * (ROWS + 1)).view(ROWS, CONTEXT)
    generator = torch.Generator().manual_seed(0)

    def caches() -> list[torch.Tensor]:
        shape = (CONTEXT * (ROWS + 1), 1, 4)
        return [torch.randn(shape, generator=generator) for _ in windows]

    kv = SimpleNamespace(k=caches(), v=caches())
    limits = Limits(ROWS, 16, CONTEXT, 4, draft or DraftLimits())
    return BackendContext(CPU, torch.float32, layers, limits, table, kv)


def _batch(mode: ForwardMode, lengths: list[int], new: list[int], **more: Any) -> ForwardBatch:
    lens, tokens = torch.tensor(lengths), sum(new)
    is_draft = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE)
    locations = torch.cat(
        [
            torch.arange(n, n + count) + CONTEXT * (r + 1) - (0 if is_draft else count)
            for r, (n, count) in enumerate(zip(lengths, new, strict=True))
        ]
    )
    fields: dict[str, Any] = {"out_cache_loc": locations}
    if mode.is_ragged:
        fields |= {"extend_seq_lens": torch.tensor(new), "extend_seq_lens_cpu": torch.tensor(new)}
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(lengths),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(1, len(lengths) + 1),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        **(fields | more),
    )


TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]] * 2).bool()


@pytest.mark.parametrize(
    ("mode", "lengths", "new", "more"),
    [
        (ForwardMode.DECODE, [9, 3], [1, 1], {}),
        (ForwardMode.EXTEND, [9, 7], [4, 7], {}),
        (ForwardMode.MIXED, [9, 7], [1, 7], {}),
        (ForwardMode.TARGET_VERIFY, [9, 7], [3, 3], {}),
        (ForwardMode.TARGET_VERIFY, [9, 7], [3, 3], {"tree_mask": TREE}),
        (ForwardMode.DRAFT_EXTEND, [9, 7], [3, 3], {}),
    ],
    ids=["decode", "extend", "mixed", "verify", "verify a tree", "draft extend"],
)
def test_native_and_portable_kernels_read_the_same_metadata(
    mode: ForwardMode, lengths: list[int], new: list[int], more: dict[str, Any]
) -> None:
    """In each of these modes, with and without a window, native and portable kernels give equal outputs."""
    context = _context(None, 5, draft=DraftLimits(1, 2, 3))
    native, portable = Backend(context), FlashInferBackend(context)
    batch = _batch(mode, lengths, new, **more)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(sum(new), heads, 4, generator=generator) for heads in (2, 1, 1))
    for layer in context.layers:
        results = [
            backend.forward(q, k, v, layer, backend.init_metadata_eager(batch))
            for backend in (native, portable)
        ]
        torch.testing.assert_close(*results)
        again = native.forward(q, None, None, layer, native.init_metadata_eager(batch))
        assert torch.equal(again, results[0])  # attends to the written keys
    assert len(Wrapper.made) == 2  # one for each window: every step returned it


@pytest.mark.parametrize("topk", [1, 2])
def test_native_and_portable_kernels_agree_in_every_draft_step(topk: int) -> None:
    """In each step of a draft decode, with one branch or two, and a window or none, outputs are equal."""
    context = _context(None, 5, draft=DraftLimits(num_steps=3, topk=topk))
    native, portable = Backend(context), FlashInferBackend(context)
    first = torch.tensor([CONTEXT + 9, 2 * CONTEXT + 3])[:, None, None]  # after each sequence
    slots = first + torch.arange(topk * 3).view(topk, 3)
    batch = _batch(ForwardMode.DRAFT_DECODE, [9, 3], [topk, topk], out_cache_loc=slots.flatten(0, 1))
    metadata = [backend.init_metadata_eager(batch).steps for backend in (native, portable)]
    assert [len(steps) for steps in metadata] == [3, 3]
    generator = torch.Generator().manual_seed(1)
    for parts in zip(*metadata, strict=True):
        q, k, v = (torch.randn(2 * topk, n, 4, generator=generator) for n in (2, 1, 1))
        for layer in context.layers:
            results = [
                backend.forward(q, k, v, layer, part)
                for backend, part in zip((native, portable), parts, strict=True)
            ]
            torch.testing.assert_close(*results)
            again = native.forward(q, None, None, layer, parts[0])
            assert torch.equal(again, results[0])  # attends to the written keys


@pytest.mark.parametrize("mode", [*ForwardMode])
def test_native_kernels_of_an_idle_rank_return_no_rows(mode: ForwardMode) -> None:
    """In every mode, attention by native kernels returns no rows for a batch without requests."""
    context = _context(None, 5)
    native, portable = Backend(context), FlashInferBackend(context)
    empty = torch.zeros(0, dtype=torch.int64)
    locations = empty.view(0, 1) if mode is ForwardMode.DRAFT_DECODE else empty
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=0,
        input_ids=empty,
        positions=empty,
        out_cache_loc=locations,
        req_pool_indices=empty,
        seq_lens=empty,
        seq_lens_cpu=empty,
        extend_seq_lens=empty,
        extend_seq_lens_cpu=empty,
    )
    q, kv = torch.zeros(0, 2, 4), torch.zeros(0, 1, 4)
    for backend in (native, portable):
        metadata = backend.init_metadata_eager(batch)
        part = metadata.steps[0] if mode is ForwardMode.DRAFT_DECODE else metadata
        for layer in context.layers:
            assert backend.forward(q, kv, kv, layer, part).shape == (0, 2, 4)


def test_every_set_of_indices_is_planned_in_a_workspace_of_its_own() -> None:
    """Each set of indices has its own int workspace; all share one workspace for partial results."""
    backend = Backend(_context(None, 5))
    names = {slot.name: slot for slot in backend.declare_slots(backend.context.limits)}
    backend.init_metadata_eager(_batch(ForwardMode.DECODE, [3], [1]))
    first, second = Wrapper.made
    assert first.int_workspace.data_ptr() != second.int_workspace.data_ptr()
    assert {"flashinfer.int_workspace", "flashinfer.window5.int_workspace"} <= names.keys()
    assert names["flashinfer.float_workspace"].padding_policy is PaddingPolicy.FILL_ONCE
    assert sum("float_workspace" in name for name in names) == 1


class Allocations(TorchDispatchMode):
    """A dispatch mode that counts new tensors of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.count = nbytes, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; count it if it takes no tensor and returns one of that size."""
        out = func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if isinstance(out, torch.Tensor) and not given and out.nbytes == self.nbytes:
            self.count += 1
        return out


@pytest.mark.parametrize("attached_at", [None, 0, 3])
def test_eager_steps_share_wrappers_and_workspaces(
    attached_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager steps of several modes and sizes share a wrapper per window and mask, and one workspace.

    After the backend is attached, the workspace is the registry's, and the earlier one is freed.
    """
    monkeypatch.setattr("graphpact_flashinfer.native._FLOAT_BYTES", 7919)
    context = _context(None, 5, draft=DraftLimits(1, 2, 3))
    native, portable = Backend(context), FlashInferBackend(context)
    steps: list[tuple[ForwardMode, list[int], list[int], dict[str, Any]]] = [
        (ForwardMode.DECODE, [9, 3], [1, 1], {}),
        (ForwardMode.DECODE, [10, 4, 1], [1, 1, 1], {}),
        (ForwardMode.EXTEND, [9, 7], [4, 7], {}),
        (ForwardMode.TARGET_VERIFY, [9, 7], [3, 3], {"tree_mask": TREE}),
        (ForwardMode.DECODE, [11], [1], {}),
        (ForwardMode.TARGET_VERIFY, [13, 2], [3, 3], {"tree_mask": TREE}),
    ]
    generator = torch.Generator().manual_seed(1)
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=ROWS, max_num_tokens=16)
    before: list[weakref.ref[torch.Tensor]] = []
    with Allocations(7919) as allocations:
        for step, (mode, lengths, new, more) in enumerate([*steps, *steps]):
            if step == attached_at:
                before = [weakref.ref(wrapper.float_workspace) for wrapper in Wrapper.made]
                native.attach(registry)
                Wrapper.made.clear()
            batch = _batch(mode, lengths, new, **more)
            q, k, v = (torch.randn(sum(new), n, 4, generator=generator) for n in (2, 1, 1))
            for layer in context.layers:
                given = [
                    backend.forward(q, k, v, layer, backend.init_metadata_eager(batch))
                    for backend in (native, portable)
                ]
                torch.testing.assert_close(*given)
    assert allocations.count == (2 if attached_at else 1)
    assert len(Wrapper.made) == 4  # two windows, with and without a mask
    assert not any(wrapper.use_cuda_graph for wrapper in Wrapper.made)
    workspaces = {wrapper.float_workspace.data_ptr() for wrapper in Wrapper.made}
    if attached_at is None:
        assert len(workspaces) == 1
        assert {w.num_planned for w in Wrapper.made} == {2 * 4 * 2, 2 * 2 * 2}
    else:
        assert workspaces == {registry.get_slot("flashinfer.float_workspace").buffer.data_ptr()}
        assert not any(ref() is not None for ref in before)


def test_metadata_of_two_steps_may_be_alive_at_once() -> None:
    """Metadata of two steps keep their own plans; freed metadata returns its wrapper for reuse."""
    context = _context(None)
    native, portable = Backend(context), FlashInferBackend(context)
    batches = [_batch(ForwardMode.DECODE, lengths, [1] * len(lengths)) for lengths in ([9, 3], [20, 6, 4])]
    layer, generator = context.layers[0], torch.Generator().manual_seed(1)
    made = [native.init_metadata_eager(batch) for batch in batches]
    for at in (0, 1, 0):
        q, k, v = (torch.randn(at + 2, n, 4, generator=generator) for n in (2, 1, 1))
        expected = portable.forward(q, k, v, layer, portable.init_metadata_eager(batches[at]))
        torch.testing.assert_close(native.forward(q, k, v, layer, made[at]), expected)
    assert len(Wrapper.made) == 2
    made.clear()
    again = [native.init_metadata_eager(batch) for batch in batches]
    assert len(again) == len(Wrapper.made) == 2


def test_a_captured_wrapper_is_planned_again_before_every_replay() -> None:
    """Every replay plans the captured wrapper in the captured buffers; another plan_info breaks the pact."""
    backend = Backend(_context(None))
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
    backend.records_metadata = True
    shape = GraphShape(ForwardMode.DECODE, 2, 2)

    def view_of(lengths: list[int]) -> ForwardBatch:
        batch = _batch(ForwardMode.DECODE, lengths, [1, 1])
        registry.fill_from(batch, raw_bs=2, padded_bs=2, raw_num_tokens=2, padded_num_tokens=2)
        return registry.extract_buffer(padded_bs=2, padded_num_tokens=2, forward_batch_template=batch)

    view = view_of([1, 1])
    captured = backend.init_metadata_capture(view, shape)
    pact = Pact.of(shape, registry, view=view, metadata=captured)
    (wrapper,) = Wrapper.made
    for count, lengths in enumerate(([9, 20], [3, 4]), 2):
        view = view_of(lengths)
        pact.check(view=view, metadata=backend.init_metadata_replay(view, shape, captured))
        assert wrapper.num_planned == count
        assert captured.kv_indptr.diff().tolist() == [-(-n // 4) for n in lengths]
    wrapper.plan = lambda *args, **more: setattr(wrapper, "_plan_info", [2, 99])  # type: ignore[method-assign]
    replayed = backend.init_metadata_replay(view, shape, captured)
    with pytest.raises(PactBreach, match=r"metadata\.plan\.info\[1\]"):
        pact.check(view=view, metadata=replayed)
    assert len(Wrapper.made) == 1


def test_the_reason_why_it_cannot_run_is_reported() -> None:
    """On a CPU ``auto`` uses compiled kernels, or portable ones without a compiler; ``native`` is refused."""
    backend = FlashInferBackend(_context(None))
    assert backend.kernels.name == ("compiled" if COMPILED else "portable")
    assert backend.passed_over["native"] == "FlashInfer's kernels need a CUDA device"
    named = _context(None)
    object.__setattr__(named, "provider", "native")
    with pytest.raises(ConfigError, match="has no native kernels that can be used on cpu"):
        FlashInferBackend(named)


def test_layers_that_one_plan_cannot_serve_are_refused() -> None:
    """Layers of one window with other heads, scaling or softcap are refused: one plan cannot serve them.

    Layers of different windows may differ: each window has a plan.
    """
    for other in (
        LayerSpec(1, 4, 1, 4, 4, 0.5),
        LayerSpec(1, 2, 2, 4, 4, 0.5),
        LayerSpec(1, 2, 1, 4, 4, 0.25),
        LayerSpec(1, 2, 1, 4, 4, 0.5, softcap=3.0),
    ):
        context = _context(None, None)
        layers = [context.layers[0], other]
        object.__setattr__(context, "layers", layers)
        reason = OnACPU.refusal(context)
        assert reason is not None
        assert "layers differ in heads, head_dim, scaling or softcap" in reason
        layers[1] = replace(other, sliding_window=5)
        assert OnACPU.refusal(context) is None
