"""Exhibits of the contents, the number and the effects of padding rows: GP03 to GP06.

Each is one edit of a correct attention backend. An edit finds live rows as a real engine does: by request
row 0, which is reserved for padding, or by the lengths on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.buffers import GraphSlot
from graphpact_museum.edits.backends import (
    AttentionCall,
    after_attention,
    with_slots,
    workspace,
    workspace_memory,
)
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit


def _live(view: Any, rows: int) -> torch.Tensor:
    """Return ``[rows]`` bool: whether each row, of a request or of a token, belongs to a live request."""
    live: torch.Tensor = view.req_pool_indices > 0
    return live.repeat_interleave(rows // max(len(live), 1), output_size=rows)


def _on_rows(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows with as many dimensions as ``like``."""
    return mask.view(-1, *[1] * (like.dim() - 1))


# -- GP03: stale rows --------------------------------------------------------------------------------


def _skips_padded(
    base: type[Any], *names: str, part: Callable[[Any], Any] = lambda metadata: metadata
) -> type[Any]:
    """Return a backend that does not write the padding rows of the named tensors."""

    def fill_metadata(_: Any, right: Any, view: Any, metadata: Any) -> None:
        tensors = [getattr(part(metadata), name) for name in names]
        before = [t.clone() for t in tensors]
        right(view, metadata)
        for tensor, old in zip(tensors, before, strict=True):
            live = _live(view, len(tensor))
            tensor.copy_(torch.where(_on_rows(live, tensor), tensor, old))

    return override(base, fill_metadata)


def _with_new_tokens(view: Any) -> int:
    return int((view.extend_seq_lens_cpu > 0).sum())


def _copies_the_head(base: type[Any], *names: str) -> type[Any]:
    """Return a backend whose replay hook writes only the live rows of the named tensors."""

    def init_metadata_replay(_: Any, right: Any, view: Any, shape: Any, captured: Any) -> Any:
        real = _with_new_tokens(view)
        tails = [getattr(captured, name)[real:] for name in names]
        before = [t.clone() for t in tails]
        fresh = right(view, shape, captured)
        for tail, old in zip(tails, before, strict=True):
            tail.copy_(old)
        return fresh

    return override(base, init_metadata_replay, fill_is_device_only=False)


@exhibit("GP03", "SJTU-DENG-Lab/Diffulex#44", on="flashinfer", lanes="mixed")
@overrides("fill_metadata")
def flashinfer_kv_indices_keep_their_tail(_: Any, right: Any, view: Any, metadata: Any) -> None:
    """kv_indices is not cleared after the live pages, where the pages of the fake request are."""
    sets = [metadata, *metadata.windows.values()] if view.batch_size else []
    before = [each.kv_indices.clone() for each in sets]
    right(view, metadata)
    for each, old in zip(sets, before, strict=True):
        at = torch.arange(len(old), device=old.device)
        kept = torch.where(at < each.kv_indptr[-2], each.kv_indices, old)
        each.kv_indices.copy_(kept)


@exhibit("GP03", "sgl-project/sglang#23037", on="reference", lanes="extend")
@overrides("fill_request")
def reference_owners_of_padded_tokens_are_kept(_: Any, right: Any, view: Any, request: torch.Tensor) -> None:
    """Padding tokens keep the request index of an earlier batch."""
    before = request.clone()
    right(view, request)
    at = torch.arange(len(request), device=request.device)
    request.copy_(torch.where(at < view.extend_seq_lens.sum(), request, before))


@exhibit("GP03", "SJTU-DENG-Lab/Diffulex#44", on="fa3", lanes="decode")
def fa3_page_table_skips_padded_requests(base: type[Any]) -> type[Any]:
    """Rows of the page table that belong to no request keep the pages of an earlier batch."""
    return _skips_padded(base, "page_table")


@exhibit("GP03", "vllm-project/vllm#21196", on="fa3", lanes="extend")
def fa3_replay_hook_copies_as_many_rows_as_requests(base: type[Any]) -> type[Any]:
    """The replay hook writes page table and lengths only for live requests, and no padding row."""
    return _copies_the_head(base, "page_table", "cache_seqlens")


@exhibit("GP03", "sgl-project/sglang#25512", on="fa3", lanes="draft_decode_tree")
def fa3_tree_rows_skip_padded_tokens(base: type[Any]) -> type[Any]:
    """Rows of padded tokens in the drafts' page table keep the slots of the drafts of an earlier batch."""
    return _skips_padded(base, "page_table", part=lambda m: m.tree.drafts)


@exhibit("GP03", "sgl-project/sglang#10892", on="flashinfer", lanes="extend")
def flashinfer_last_page_lengths_skip_padded_requests(base: type[Any]) -> type[Any]:
    """kv_last_page_len is written only for live requests, and for no padding row."""
    return _copies_the_head(base, "kv_last_page_len")


@exhibit("GP03", "SJTU-DENG-Lab/Diffulex#44", on="trtllm_mla", lanes="draft_extend")
def trtllm_block_table_skips_padded_requests(base: type[Any]) -> type[Any]:
    """Rows of the block table that belong to no request keep the pages of an earlier batch."""
    return _skips_padded(base, "block_kv_indices")


@exhibit("GP03", "sgl-project/sglang#18647", on="trtllm_mla", lanes="draft_decode")
def trtllm_key_lengths_skip_padded_requests(base: type[Any]) -> type[Any]:
    """seq_lens_k of padding requests keeps the lengths of an earlier batch."""
    return _skips_padded(base, "seq_lens_k")


# -- GP04: sentinels ---------------------------------------------------------------------------------


def _writes(base: type[Any], to: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[Any]:
    """Return a backend in which padding tokens, those of KV slot 0, write another slot."""

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        slots = metadata.out_cache_loc
        routed = torch.where(slots == 0, to(self, slots), slots)
        routed = replace(metadata, out_cache_loc=routed)
        return right(q, k, v, layer, routed)

    return override(base, forward)


def _last_slot(backend: Any, slots: torch.Tensor) -> torch.Tensor:
    num_slots: int = backend.context.kv_cache.k[0].shape[0]
    return torch.full_like(slots, -1) % num_slots


def _slot_of_the_first_token(backend: Any, slots: torch.Tensor) -> torch.Tensor:
    del backend
    return slots[:1].expand_as(slots)


def _reads(base: type[Any], of: Callable[[Any, Any, torch.Tensor], torch.Tensor], name: str) -> type[Any]:
    """Return a backend that gives padding requests another row of a table."""

    def fill_metadata(self: Any, right: Any, view: Any, metadata: Any) -> None:
        right(view, metadata)
        table = getattr(metadata, name)
        live = _on_rows(_live(view, len(table)), table)
        table.copy_(torch.where(live, table, of(self, view, table)))

    return override(base, fill_metadata)


def _last_page(backend: Any, view: Any, table: torch.Tensor) -> torch.Tensor:
    del view
    pages: int = backend.context.kv_cache.k[0].shape[0] // backend.context.limits.page_size
    return torch.full_like(table, -1) % pages


def _row_of_the_first_request(backend: Any, view: Any, table: torch.Tensor) -> torch.Tensor:
    del backend, view
    return table[:1].expand_as(table)


@overrides("fill_metadata")
def _gathers_the_last_row(_: Any, right: Any, view: Any, metadata: Any) -> None:
    rows = torch.where(view.req_pool_indices > 0, view.req_pool_indices, -1)
    right(replace(view, req_pool_indices=rows), metadata)


@exhibit("GP04", "NVIDIA/TensorRT-LLM#9873", on="flashinfer", lanes="draft_decode_tree")
@overrides("fill_metadata")
def flashinfer_padded_branches_repeat_the_first_request(_: Any, right: Any, view: Any, metadata: Any) -> None:
    """Padded requests have the first request's row of req_to_token."""
    rows = view.req_pool_indices
    right(replace(view, req_pool_indices=torch.where(rows > 0, rows, rows[:1])), metadata)


@exhibit("GP04", "vllm-project/vllm#43810", on="fa3", lanes="decode")
def fa3_padded_tokens_write_the_last_slot(base: type[Any]) -> type[Any]:
    """-1 stands for no slot, but as an index it is the last KV slot."""
    return _writes(base, _last_slot)


@exhibit("GP04", "m0at/rvllm#32", on="flashinfer", lanes="target_verify")
def flashinfer_padded_tokens_write_a_live_slot(base: type[Any]) -> type[Any]:
    """Padded tokens write to the KV slot of the first token of the batch."""
    return _writes(base, _slot_of_the_first_token)


@exhibit("GP04", "sgl-project/sglang#38997", on="trtllm_mla", lanes="extend")
def trtllm_padded_tokens_write_a_live_slot(base: type[Any]) -> type[Any]:
    """Padded tokens of a prefill write to the KV slot of the first token of the batch."""
    return _writes(base, _slot_of_the_first_token)


@exhibit("GP04", "sgl-project/sglang#1469", on="flashinfer", lanes="decode")
def flashinfer_fill_length_0(base: type[Any]) -> type[Any]:
    """seq_len_fill_value is 0, but a causal row needs at least as many keys as queries."""
    return override(base, capabilities=replace(base.capabilities, seq_len_fill_value=0))


@exhibit("GP04", "vllm-project/vllm#35969", on="trtllm_mla", lanes="target_verify")
def trtllm_block_table_of_padding_is_the_last_page(base: type[Any]) -> type[Any]:
    """The block table of padded requests is -1, which wraps around to the last page."""
    return _reads(base, _last_page, "block_kv_indices")


@exhibit("GP04", "vllm-project/vllm#43810", on="fa3", lanes="idle")
def fa3_idle_rank_gathers_row_minus_one(base: type[Any]) -> type[Any]:
    """On an idle rank all requests are padding; marked by -1, they gather the last row."""
    return _gathers_the_last_row(base)


@exhibit("GP04", "NVIDIA/TensorRT-LLM#9873", on="fa3", lanes="draft_extend")
def fa3_padded_requests_repeat_the_first(base: type[Any]) -> type[Any]:
    """Padded requests have the page table of the first request."""
    return _reads(base, _row_of_the_first_request, "page_table")


@exhibit("GP04", "vllm-project/vllm#43810", on="reference", lanes="draft_decode")
def reference_padded_requests_gather_row_minus_one(base: type[Any]) -> type[Any]:
    """-1 stands for no request, and gathers the last row of req_to_token."""
    return _gathers_the_last_row(base)


# -- GP05: extents -----------------------------------------------------------------------------------


@exhibit("GP05", "sgl-project/sglang#21452", on="flashinfer", lanes="extend")
@overrides("_fill_ragged_queries")
def flashinfer_extend_without_the_fake_request(_: Any, right: Any, view: Any, metadata: Any) -> Any:
    """qo_indptr[-1] counts only real tokens, but q has rows for padded tokens too."""
    num_q: torch.Tensor = right(view, metadata)
    metadata.qo_indptr[-1:].copy_(metadata.qo_indptr[-2:-1])
    return torch.cat([num_q[:-1], torch.zeros_like(num_q[-1:])])


@exhibit("GP05", "sgl-project/sglang#21452", on="flashinfer", lanes="mixed")
@overrides("_fill_ragged_queries")
def flashinfer_fake_request_has_queries_and_no_keys(_: Any, right: Any, view: Any, metadata: Any) -> Any:
    """The fake request is counted in qo_indptr, but has no page in kv_indptr."""
    num_q: torch.Tensor = right(view, metadata)
    return torch.cat([num_q[:-1], torch.zeros_like(num_q[-1:])])


@exhibit("GP05", "ROCm/ATOM#1595", on="flashinfer", lanes="target_verify")
@overrides("init_metadata_replay", fill_is_device_only=False)
def flashinfer_verify_counts_live_queries(_: Any, right: Any, view: Any, shape: Any, captured: Any) -> Any:
    """qo_indptr counts only the queries of live requests, but q has queries of padded requests too."""
    fresh = right(view, shape, captured)
    real = (view.req_pool_indices > 0).sum() * view.tokens_per_request
    fresh.qo_indptr.clamp_(max=real)
    return fresh


def _cut_by_the_batch(base: type[Any], name: str, more: int = 0) -> type[Any]:
    """Return a backend that slices a tensor at replay to the rows of the batch."""

    def init_metadata_replay(_: Any, right: Any, view: Any, shape: Any, captured: Any) -> Any:
        fresh = right(view, shape, captured)
        rows = _with_new_tokens(view) + more
        return replace(fresh, **{name: getattr(fresh, name)[:rows]})

    return override(base, init_metadata_replay, fill_is_device_only=False)


@exhibit("GP05", "sgl-project/sglang#1789", on="reference", lanes="extend")
@overrides("last_of")
def reference_positions_count_from_the_last_row(_: Any, right: Any, view: Any, request: torch.Tensor) -> Any:
    """Positions of the last request are counted back from the padded number of tokens."""
    new = view.extend_seq_lens
    rest = view.num_tokens - new[:-1].sum()
    last: torch.Tensor = right(replace(view, extend_seq_lens=torch.cat([new[:-1], rest[None]])), request)
    return last.clamp(min=0)


@exhibit("GP05", "vllm-project/vllm#28202", on="fa3", lanes="mixed")
def fa3_offsets_cut_by_real_requests(base: type[Any]) -> type[Any]:
    """The replay hook returns cu_seqlens_q only for the real requests, but the graph has padded ones too."""
    return _cut_by_the_batch(base, "cu_seqlens_q", 1)


@exhibit("GP05", "vllm-project/vllm#25265", on="trtllm_mla", lanes="extend")
def trtllm_key_lengths_cut_by_real_requests(base: type[Any]) -> type[Any]:
    """The replay hook returns seq_lens_k only for the real requests, but the graph has padded ones too."""
    return _cut_by_the_batch(base, "seq_lens_k")


@exhibit("GP05", "vllm-project/vllm-ascend#7460", on="trtllm_mla", lanes="mixed")
@overrides("fill_metadata")
def trtllm_padded_tokens_are_the_last_request_s(_: Any, right: Any, view: Any, metadata: Any) -> None:
    """cu_seqlens_q ends at the padded count, so that all padded tokens belong to the last request."""
    right(view, metadata)
    metadata.cu_seqlens_q[-1:].fill_(view.num_tokens)


# -- GP06: leaks -------------------------------------------------------------------------------------


def _quantized_by_the_largest(out: torch.Tensor) -> torch.Tensor:
    """Return the rows divided and multiplied by their largest value, as per-tensor quantization does."""
    scale = out.abs().amax()
    return (out / scale) * scale


@exhibit("GP06", "vllm-project/vllm#37442", on="fa3", lanes="decode")
@after_attention
def fa3_empty_output_and_one_scale(_: Any, call: AttentionCall) -> torch.Tensor:
    """The output is allocated by empty(), not written in padding rows, and scaled by its maximum."""
    written = _tokens_of(call.metadata.page_table[:, 0] > 0, call)
    return _quantized_by_the_largest(_written_where(written, call.out))


@exhibit("GP06", "vllm-project/vllm#37442", on="fa3", lanes=("decode", "target_verify"))
@after_attention
def fa3_output_of_padding_is_unwritten(_: Any, call: AttentionCall) -> torch.Tensor:
    """The kernel does not write the rows of padding requests, but a model that computes one scale of all rows
    reads them.
    """
    return _written_where(_tokens_of(call.metadata.page_table[:, 0] > 0, call), call.out)


@exhibit("GP06", "vllm-project/vllm#56922", on="fa3", lanes="extend")
@after_attention
def fa3_rows_past_the_last_offset_are_unwritten(_: Any, call: AttentionCall) -> torch.Tensor:
    """Rows after the last offset are left uninitialised, and a sum over rows includes them."""
    written = torch.arange(len(call.q), device=call.q.device) < call.metadata.cu_seqlens_q[-1]
    rows = _written_where(written, call.out)
    total = rows.abs().sum()
    return torch.where(total.isfinite(), rows, total)


def _tokens_of(requests: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return the value of ``requests`` for each token; all requests have equally many tokens."""
    rows = len(call.out)
    return requests.repeat_interleave(rows // len(requests), output_size=rows)


def _written_where(mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory with ``out`` written where ``mask`` is set."""
    empty = torch.empty_like(out)
    return empty.copy_(torch.where(_on_rows(mask, out), out, empty))


def _an_output(backend: Any) -> Sequence[GraphSlot]:
    """Return the slot of an output buffer, which is zeroed only at the start."""
    layer, most = backend.context.layers[0], backend.context.limits.max_num_tokens
    shape = (most, layer.num_q_heads, layer.v_head_dim)
    return [workspace("output", *shape, dtype=backend.context.dtype)]


@exhibit("GP06", "vllm-project/vllm#37442", on="trtllm_mla", lanes="target_verify")
@with_slots(_an_output)
@after_attention
def trtllm_output_buffer_keeps_padded_rows(backend: Any, call: AttentionCall) -> torch.Tensor:
    """An output buffer keeps earlier values in padding rows, and the output is scaled by its maximum."""
    out = call.out
    if backend._registry is None or len(out) > len(workspace_memory(backend, "output")):  # noqa: SLF001  as workspace_memory()
        return out
    live = _tokens_of(call.metadata.block_kv_indices[:, 0] > 0, call)
    kept = workspace_memory(backend, "output")[: len(out)]
    kept.copy_(torch.where(_on_rows(live, out), out, kept))
    return _quantized_by_the_largest(kept)


@exhibit("GP06", "sgl-project/sglang#35766", on="flashinfer", lanes="draft_decode_tree")
@after_attention
def flashinfer_mean_over_all_branches(_: Any, call: AttentionCall) -> torch.Tensor:
    """The mean over rows includes padding branches."""
    mean = call.out.mean(dim=0)
    return (call.out - mean) + mean


def _scaled(_: Any, call: AttentionCall) -> torch.Tensor:
    return _quantized_by_the_largest(call.out)


@exhibit("GP06", "vllm-project/vllm#39391", on="flashinfer", lanes="mixed")
@after_attention
def flashinfer_one_bad_padded_row_spoils_all(_: Any, call: AttentionCall) -> torch.Tensor:
    """A sum over all rows spreads the NaN of a padding row."""
    total = call.out.sum()
    return torch.where(total.isfinite(), call.out, total)


@exhibit("GP06", "vllm-project/vllm#37442", on="trtllm_mla", lanes="draft_extend")
def trtllm_one_scale_for_all_rows(base: type[Any]) -> type[Any]:
    """Live rows are quantized by one scale of all rows, including padding rows."""
    return after_attention(_scaled)(base)


@exhibit("GP06", "sgl-project/sglang#31838", on="reference", lanes="target_verify_tree")
def reference_one_scale_for_all_drafts(base: type[Any]) -> type[Any]:
    """Drafts of all requests, including padding requests, are quantized by one scale."""
    return after_attention(_scaled)(base)
