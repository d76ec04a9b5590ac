"""Exhibits of the size, lifetime, owner and old contents of memory: GP13, GP14, GP15, GP18, GP19.

Each is one edit of a correct attention backend. Edits multiply outputs by tensors of ones, so that outputs
stay right until the memory of the ones is lost.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.buffers import GraphSlot, metadata_slot
from graphpact_museum.edits.backends import (
    AttentionCall,
    EditOutput,
    after_attention,
    with_slots,
    workspace,
    workspace_memory,
)
from graphpact_museum.edits.override import named_after, override, overrides
from graphpact_museum.exhibit import Make, exhibit

# -- GP13: too small ---------------------------------------------------------------------------------


def _resizes(name: str) -> Callable[[Callable[[Any, tuple[int, ...]], tuple[int, ...]]], Make]:
    """Return a decorator of ``(limits, shape) -> shape`` that makes an edit: the slot gets that shape."""

    def decorate(resize: Callable[[Any, tuple[int, ...]], tuple[int, ...]]) -> Make:
        def declare_slots(_: Any, right: Any, limits: Any) -> list[GraphSlot]:
            def resized(slot: GraphSlot) -> GraphSlot:
                return replace(slot, shape_fn=lambda *counts: resize(limits, slot.shape_fn(*counts)))

            return [resized(slot) if slot.name == name else slot for slot in right(limits)]

        return named_after(resize, lambda base: override(base, declare_slots))

    return decorate


@exhibit("GP13", "sgl-project/sglang#19016", on="fa3", lanes="target_verify")
@_resizes("fa3.page_table")
def fa3_page_table_without_draft_tokens(limits: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The page table has columns only for the whole pages of a sequence without its drafts."""
    return shape[0], (limits.max_context_len - limits.draft.num_draft_tokens) // limits.page_size


@exhibit("GP13", "predibase/lorax#363", on="fa3", lanes="extend")
@_resizes("fa3.page_table")
def fa3_page_table_of_a_fixed_length(limits: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The page table is made for a fixed length, 64, instead of the longest context."""
    return shape[0], 64 // limits.page_size


@exhibit("GP13", "sgl-project/sglang#31012", on="flashinfer", lanes="mixed")
@_resizes("flashinfer.kv_indices")
def flashinfer_kv_indices_without_the_fake_request(limits: Any, _: tuple[int, ...]) -> tuple[int, ...]:
    """kv_indices has room for the pages of all requests, but not for those of the fake request."""
    return (limits.max_bs * limits.max_pages_per_request,)


@exhibit("GP13", "sgl-project/sglang#19016", on="flashinfer", lanes="draft_decode_tree")
@_resizes("flashinfer.kv_indices")
def flashinfer_kv_indices_without_topk(limits: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """kv_indices lacks the factor topk, although every branch has its own indices."""
    return (shape[0] // limits.draft.topk,)


@exhibit("GP13", "ModelTC/LightLLM#1583", on="trtllm_mla", lanes="target_verify")
@overrides("fill_metadata")
def trtllm_key_lengths_are_clamped(self: Any, right: Any, view: Any, metadata: Any) -> None:
    """Lengths are clamped to a table without room for drafts, so the last keys are not read."""
    right(view, metadata)
    limits = self.context.limits
    metadata.seq_lens_k.clamp_(max=limits.max_context_len - limits.draft.num_draft_tokens)


@exhibit("GP13", "ModelTC/LightLLM#1583", on="fa3", lanes="draft_extend")
@after_attention
def fa3_workspace_lacks_a_draft_token(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A workspace lacks one row per request, and indices past its end are clamped to the last row."""
    limits = backend.context.limits
    rows = limits.max_bs * (limits.draft.num_draft_tokens - 1)
    at = torch.arange(len(call.out), device=call.out.device).clamp_(max=rows - 1)
    return call.out[at]


@exhibit("GP13", "sgl-project/sglang#19016", on="reference", lanes="decode")
@overrides("fill_metadata")
def reference_table_without_the_last_column(self: Any, right: Any, view: Any, metadata: Any) -> None:
    """The table lacks its last column, and positions are clamped to the others."""
    right(view, metadata)
    metadata.last.clamp_(max=self.context.limits.max_context_len - 2)


# -- GP14: freed memory ------------------------------------------------------------------------------


def _ones(backend: Any, rows: int) -> torch.Tensor:
    return torch.ones(rows, 1, 1, device=backend.context.device, dtype=backend.context.dtype)


def _for_all_keys(scale: EditOutput) -> Make:
    """Make an edit of backends with a workspace of one element per key.

    Args:
        scale: Scales the output by ``backend.workspace``, which needs at least ``backend.needed`` ones.
    """

    def allocate_metadata(self: Any, right: Any, view: Any, shape: Any, buffers: Any) -> Any:
        self.needed = max(int(view.seq_lens_cpu.sum()), 1)
        return right(view, shape, buffers)

    scaled = after_attention(scale)
    return named_after(scale, lambda base: override(scaled(base), allocate_metadata, needed=1))


@exhibit("GP14", "intel/llm-scaler#505", on="fa3", lanes="target_verify")
@after_attention
def fa3_buffers_by_size_are_flushed(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A cache holds one buffer per number of tokens, and drops all of them when there are too many."""
    known = vars(backend).setdefault("sized", {})
    if len(call.out) not in known and not getattr(backend.driver, "is_capturing", False):
        if len(known) >= 2:
            known.clear()
        known[len(call.out)] = _ones(backend, len(call.out))
    scale: torch.Tensor = known[len(call.out)]
    return call.out * scale


@exhibit("GP14", "ROCm/aiter#5393", on="trtllm_mla", lanes="draft_decode")
def trtllm_lru_cache_of_tensors(base: type[Any]) -> type[Any]:
    """A tensor comes from a function under lru_cache(maxsize=2), which evicts it."""

    @functools.lru_cache(maxsize=2)
    def scale_of(rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(rows, 1, 1, dtype=dtype)

    class Cached(base):  # type: ignore[misc]  # no `override`, because the suite looks for caches in methods
        """A backend with a cache in the closure of a method."""

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and scale."""
            return super().forward(q, k, v, layer, metadata) * scale_of(len(q), q.dtype)

    return Cached


@exhibit("GP14", "vllm-project/vllm-ascend#13902", on="flashinfer", lanes="target_verify_tree")
def flashinfer_weights_are_laid_out_again(base: type[Any]) -> type[Any]:
    """An eager step runs self.weight = weight.contiguous() again, which allocates new memory."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.loaded = torch.ones(4, 2, device=context.device, dtype=context.dtype)
        self.weight = self.loaded.t().contiguous()

    def init_metadata_eager(self: Any, right: Any, batch: Any, **more: Any) -> Any:
        self.weight = self.loaded.t().contiguous()
        return right(batch, **more)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        return right(q, k, v, layer, metadata) * self.weight[0, 0]

    return override(base, init_metadata_eager, forward, __init__=init)


@exhibit("GP14", "PaddlePaddle/Paddle#78568", on="fa3", lanes="draft_extend")
@after_attention
def fa3_host_memory_of_a_copy_is_a_local(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A recorded copy reads host memory that was a local variable."""
    target = _ones(backend, 4)
    if backend.driver is None:
        return call.out * target[0]
    backend.driver.copy_async(target, torch.ones(4, 1, 1, dtype=target.dtype))
    return call.out * target[0]


@exhibit("GP14", "flashinfer-ai/flashinfer#4399", on="flashinfer", lanes="decode")
@_for_all_keys
def flashinfer_workspace_grows_in_an_eager_step(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A workspace is replaced by a larger one when an eager step has more keys."""
    if len(getattr(backend, "workspace", ())) < backend.needed:
        backend.workspace = _ones(backend, backend.needed)
    workspace: torch.Tensor = backend.workspace
    return call.out * workspace[0]


@exhibit("GP14", "flashinfer-ai/flashinfer#4399", on="trtllm_mla", lanes="extend")
@_for_all_keys
def trtllm_workspace_is_resized(backend: Any, call: AttentionCall) -> torch.Tensor:
    """An eager step with more keys resizes a workspace in place, which moves its memory."""
    if not hasattr(backend, "workspace"):
        backend.workspace = _ones(backend, 1)
    if len(backend.workspace) < backend.needed:
        backend.workspace.resize_(backend.needed, 1, 1).fill_(1)
    workspace: torch.Tensor = backend.workspace
    return call.out * workspace[0]


# -- GP15: memory of another graph -------------------------------------------------------------------


@exhibit("GP15", "ROCm/aiter#5393", on="flashinfer", lanes="decode")
@after_attention
def flashinfer_cache_by_stream(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A buffer is cached by stream, so that the first capture allocates it in its own pool."""
    known = vars(backend).setdefault("by_stream", {})
    stream = getattr(backend.driver, "is_capturing", False)
    if stream not in known:
        known[stream] = _ones(backend, backend.context.limits.max_num_tokens)
    scale: torch.Tensor = known[stream]
    return call.out * scale[: len(call.out)]


@exhibit("GP15", "sgl-project/sglang#22930", on="fa3", lanes="target_verify")
@overrides("fill_metadata", scratch=None)
def fa3_scratch_of_the_first_capture(self: Any, right: Any, view: Any, metadata: Any) -> None:
    """Recorded metadata work uses a scratch tensor that an earlier capture allocated."""
    right(view, metadata)
    lens = metadata.cache_seqlens
    if self.driver is None or not self.driver.is_capturing:
        return
    if self.scratch is None or len(self.scratch) < len(lens):
        self.scratch = torch.zeros_like(lens)
    self.scratch[: len(lens)].copy_(lens)
    lens.copy_(self.scratch[: len(lens)])


@exhibit("GP15", "sgl-project/sglang#22218", on="trtllm_mla", lanes="draft_extend")
@after_attention
def trtllm_begins_with_the_last_graph_s_output(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A graph reads an intermediate tensor of the graph that was captured before it."""
    kept = vars(backend).setdefault("kept", {})
    if not getattr(backend.driver, "is_capturing", False):
        return call.out
    before = kept.get(call.layer.layer_id)
    kept[call.layer.layer_id] = call.out
    return call.out if before is None else call.out + 0 * before[:1]


@exhibit("GP15", "sgl-project/sglang#22930", on="flashinfer", lanes="draft_decode")
@overrides("forward")
def flashinfer_output_buffer_of_the_first_capture(
    self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any
) -> Any:
    """All graphs return rows of one output buffer, which the first capture allocated."""
    out = right(q, k, v, layer, metadata)
    if not getattr(self.driver, "is_capturing", False):
        return out
    buffers = self.outputs = getattr(self, "outputs", {})
    buffer = buffers.setdefault((layer.layer_id, id(metadata) if not len(out) else 0), out)
    return buffer[: len(out)].copy_(out) if len(buffer) >= len(out) else out


# -- GP18: not armed ---------------------------------------------------------------------------------


def _semaphore(backend: Any) -> Sequence[GraphSlot]:
    del backend
    return [workspace("semaphore", 1, dtype=torch.int32)]


@exhibit("GP18", "ROCm/aiter#4916", on="trtllm_mla", lanes="decode")
@with_slots(_semaphore)
@after_attention
def trtllm_semaphore_is_not_re_armed(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A counter that a kernel expects to be zero is zeroed by the host, but not by a graph."""
    counter = workspace_memory(backend, "semaphore")
    if not getattr(backend.driver, "is_capturing", False):
        counter.zero_()
    out = call.out * (counter <= len(backend.context.layers)).to(call.out.dtype)
    counter.add_(1)
    return out


@exhibit("GP18", "NVIDIA/Megatron-LM#5697", on="flashinfer", lanes="target_verify")
def flashinfer_private_generator(base: type[Any]) -> type[Any]:
    """Random numbers come from a generator that is not registered with the graph, and never change."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.generator = torch.Generator(device=context.device).manual_seed(0)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        out = right(q, k, v, layer, metadata)
        noise = torch.rand(out.shape, generator=self.generator, device=out.device)
        return out + 1e-7 * noise.to(out.dtype)

    return override(base, forward, __init__=init)


def _accumulators(backend: Any) -> Sequence[GraphSlot]:
    layers, most = backend.context.layers, backend.context.limits.max_num_tokens
    row = (layers[0].num_q_heads, layers[0].v_head_dim)
    return [workspace("sums", len(layers), most, *row, dtype=backend.context.dtype)]


@with_slots(_accumulators)
@after_attention
def _accumulates(backend: Any, call: AttentionCall) -> torch.Tensor:
    sums = workspace_memory(backend, "sums")[call.layer.layer_id, : len(call.out)]
    return sums.add_(call.out).clone() if len(call.out) == len(sums) else call.out


@exhibit("GP18", "ROCm/aiter#4916", on="fa3", lanes="draft_extend")
def fa3_sums_are_zeroed_by_the_host(base: type[Any]) -> type[Any]:
    """Partial results are added to sums that the capture hook zeroes, but not the replay hook."""

    def _make_metadata(self: Any, right: Any, *arguments: Any) -> Any:
        workspace_memory(self, "sums").zero_()
        return right(*arguments)

    return override(_accumulates(base), _make_metadata)


def _flag(backend: Any) -> Sequence[GraphSlot]:
    del backend
    return [workspace("flag", 1, dtype=torch.int32), workspace("base", 1, value=0.0)]


@exhibit("GP18", "ROCm/aiter#4916", on="fa3", lanes="mixed")
@with_slots(_flag)
@after_attention
def fa3_flag_stays_up(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A flag marks that an offset was set in this launch; flag and offset are never reset."""
    flag, base = workspace_memory(backend, "flag"), workspace_memory(backend, "base")
    if not getattr(backend.driver, "is_capturing", False):
        flag.zero_()
    base.copy_(torch.where(flag == 0, call.q.float().mean(), base))
    flag.fill_(1)
    shift = base.to(call.out.dtype)
    return (call.out - shift) + shift


@exhibit("GP18", "pytorch/pytorch#172390", on="trtllm_mla", lanes="draft_extend")
@after_attention
def trtllm_host_seeds_in_the_region(backend: Any, call: AttentionCall) -> torch.Tensor:
    """The host seeds the generator while the graph is recorded, which a replay does not repeat."""
    del backend
    torch.manual_seed(17 + call.layer.layer_id)
    return call.out + 1e-7 * torch.rand_like(call.out)


# -- GP19: traces of a capture -----------------------------------------------------------------------


def _state(backend: Any) -> Sequence[GraphSlot]:
    rows, dim = backend.context.req_to_token.shape[0] * 2, backend.context.layers[0].head_dim
    return [workspace("state", rows, dim)]


@exhibit("GP19", "microsoft/onnxruntime#32243", on="flashinfer", lanes="draft_extend")
@with_slots(_state)
@after_attention
def flashinfer_state_advances_in_captures(backend: Any, call: AttentionCall) -> torch.Tensor:
    """Warm-up and capture advance a recurrent state in place, and it is not restored."""
    state = workspace_memory(backend, "state")
    state.mul_(0.5).add_(call.q.float().mean())
    return call.out


@exhibit("GP19", "microsoft/onnxruntime#32243", on="fa3", lanes="decode")
def fa3_counter_advances_in_captures(base: type[Any]) -> type[Any]:
    """Every run of the region, also a capture, advances a counter of the backend."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.served = torch.zeros(1, device=context.device)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        self.served.add_(1)
        return right(q, k, v, layer, metadata)

    return override(base, forward, __init__=init)


@exhibit("GP19", "ROCm/ATOM#2267", on="fa3", lanes="target_verify", prefix="fa3")
@exhibit("GP19", "ROCm/ATOM#2267", on="trtllm_mla", lanes="extend", prefix="trtllm")
def captures_through_dirty_write_indices(base: type[Any]) -> type[Any]:
    """A capture runs with the write indices of the last batch, and overwrites its KV slots."""

    def declare_slots(_: Any, right: Any, limits: Any) -> Any:
        slot = metadata_slot(
            "museum.write_indices",
            lambda _, tokens: (tokens,),
            torch.int64,
            role="table",
            axis="tokens",
        )
        return [*right(limits), slot]

    def allocate_metadata(_: Any, right: Any, view: Any, shape: Any, buffers: Any) -> Any:
        metadata = right(view, shape, buffers)
        metadata.out_cache_loc = buffers("museum.write_indices")
        return metadata

    def fill_metadata(self: Any, right: Any, view: Any, metadata: Any) -> None:
        right(view, metadata)
        if not self.binds:
            metadata.out_cache_loc.copy_(view.out_cache_loc)

    def init_metadata_capture(self: Any, right: Any, view: Any, shape: Any) -> Any:
        self.binds = True
        try:
            return right(view, shape)
        finally:
            self.binds = False

    return override(
        base,
        declare_slots,
        allocate_metadata,
        fill_metadata,
        init_metadata_capture,
        fill_is_device_only=False,
        binds=False,
    )


@exhibit("GP19", "ROCm/ATOM#2267", on="trtllm_mla", lanes="draft_decode")
@overrides("init_metadata_capture")
def trtllm_tunes_on_live_pages(self: Any, right: Any, view: Any, shape: Any) -> Any:
    """Kernel tuning before a capture clears pages that live requests own."""
    for cache in self.context.kv_cache.k:
        cache[self.context.limits.page_size :].zero_()
    return right(view, shape)


@exhibit("GP19", "ROCm/ATOM#2267", on="flashinfer", lanes="mixed")
@overrides("init_metadata_capture")
def flashinfer_capture_takes_a_request_row(self: Any, right: Any, view: Any, shape: Any) -> Any:
    """The capture hook zeroes a row of req_to_token that a live request may own."""
    self.context.req_to_token[-1].zero_()
    return right(view, shape)
