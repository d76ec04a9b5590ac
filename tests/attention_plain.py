"""`PlainBackend`: attention in every mode, in plain torch operations, unlike any kernel library's.

Its metadata is a table of the slots of all positions of every request, and for each token whose it is and
how far it sees; what drafts see beyond that comes in columns of their own. No custom kernel, no pages.

Does not: run fast: every query looks at a whole context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphpact import (
    AttentionBackend,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    LayerSpec,
    Limits,
    PaddingPolicy,
)
from graphpact.attention import GraphSupport, HeadLayout


@dataclass(slots=True)
class PlainMetadata:
    """What one step reads.

    Args:
        out_cache_loc: ``[T]`` int64: where each token's key is written.
        table: ``[bs, max_context_len]`` int64: slot of each position of each request.
        request: ``[T]`` int64: whose token it is.
        last: ``[T]`` int64: the last position of the table that the token sees.
        drafts: ``[T, n]`` int64: slots of drafts that it may see too.
        draft_mask: ``[T, n]`` bool: which of them it sees; None for all.
    """

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    request: torch.Tensor
    last: torch.Tensor
    drafts: torch.Tensor
    draft_mask: torch.Tensor | None


class PlainBackend(AttentionBackend):
    """Every mode, every head layout, trees and windows."""

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset(HeadLayout),
        seq_len_fill_value=2,
        sliding_window=True,
        softcap=True,
        sinks=True,
        trees=True,
    )

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the four index tensors."""
        width = max(limits.draft.num_steps, limits.draft.num_draft_tokens)

        def slot(name: str, *row: int, by_request: bool = False) -> GraphSlot:
            return GraphSlot(
                f"plain.{name}",
                lambda bs, tokens: (bs if by_request else tokens, *row),
                torch.int64,
                axis="bs" if by_request else "tokens",
                owner="plain",
                padding_policy=PaddingPolicy.KEEP_PAD,
                reason="every row of the padded extent is written in every step",
                copy_from_fb=False,
            )

        return [
            slot("table", limits.max_context_len, by_request=True),
            slot("request"),
            slot("last"),
            slot("drafts", width),
        ]

    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Callable[[str], torch.Tensor]
    ) -> PlainMetadata:
        """Return the slots' slices, as many columns of drafts as the step has."""
        columns = 0
        if view.draft_step is not None:
            columns = view.draft_step + 1
        elif view.tree_mask is not None:
            columns = view.tree_mask.shape[1]
        return PlainMetadata(
            out_cache_loc=view.out_cache_loc,
            table=buffers("plain.table"),
            request=buffers("plain.request"),
            last=buffers("plain.last"),
            drafts=buffers("plain.drafts")[:, :columns],
            draft_mask=view.tree_mask,
        )

    def fill_metadata(self, view: ForwardBatch, metadata: PlainMetadata) -> None:
        """Derive all four tensors on the device."""
        metadata.table.copy_(self.context.req_to_token[view.req_pool_indices])
        self.fill_request(view, metadata.request)
        metadata.last.copy_(self.last_of(view, metadata.request))
        if metadata.drafts.shape[1]:
            metadata.drafts.copy_(self.drafts_of(view))

    def fill_request(self, view: ForwardBatch, request: torch.Tensor) -> None:
        """Write whose every token is; what no request brought counts as the last one's."""
        torch.arange(view.num_tokens, out=request)
        if view.extend_seq_lens is None:
            request.div_(view.tokens_per_request, rounding_mode="floor")
        else:
            ends = view.extend_seq_lens.cumsum(0)
            request.copy_(torch.searchsorted(ends, request.clone(), right=True))
            request.clamp_(max=view.batch_size - 1)

    def last_of(self, view: ForwardBatch, request: torch.Tensor) -> torch.Tensor:
        """Return ``[T]``: the last position that each token sees in its request's table."""
        lens = view.seq_lens[request]
        at = torch.arange(view.num_tokens, device=view.device)
        if view.extend_seq_lens is not None:
            ends = view.extend_seq_lens.cumsum(0)[request]
            return torch.minimum(lens - ends + at, lens - 1)
        if view.draft_step is not None or view.tree_mask is not None:
            return lens - 1
        width = view.tokens_per_request
        return lens + view.uncounted_keys - width + at % width

    def drafts_of(self, view: ForwardBatch) -> torch.Tensor:
        """Return ``[T, n]``: the slots of a branch so far, or of all drafts of a request."""
        if view.draft_cache_loc is not None and view.draft_step is not None:
            return view.draft_cache_loc[:, : view.draft_step + 1]
        assert view.tree_mask is not None
        width = view.tree_mask.shape[1]  # an idle batch has no tokens to tell it by
        return view.out_cache_loc.view(-1, width).repeat_interleave(width, dim=0)

    def metadata_in_graph(self, view: ForwardBatch, metadata: PlainMetadata) -> None:
        """Do the same as `fill_metadata`: it is device work alone."""
        self.fill_metadata(view, metadata)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        metadata: PlainMetadata,
    ) -> torch.Tensor:
        """Write keys and values, gather what every token sees, attend in float32."""
        cache = self.context.kv_cache
        k_cache, v_cache = cache.k[layer.layer_id], cache.v[layer.layer_id]
        k_cache.index_copy_(0, metadata.out_cache_loc, k)
        if layer.kv_lora_rank is None:
            v_cache.index_copy_(0, metadata.out_cache_loc, v)
        slots, seen = self.keys_of(metadata)
        if layer.sliding_window is not None:
            seen = seen & (seen.flip(1).cumsum(1).flip(1) <= layer.sliding_window)
        slots = torch.where(seen, slots, metadata.out_cache_loc[:, None])
        group = layer.num_q_heads // layer.num_kv_heads
        keys = k_cache[slots].float().repeat_interleave(group, dim=2)
        values = v_cache[slots].float().repeat_interleave(group, dim=2)
        scores = torch.einsum("thd,tkhd->thk", q.float(), keys) * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.float()[None, :, None].expand(q.shape[0], -1, 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = torch.softmax(scores, dim=2)[:, :, : slots.shape[1]]
        return torch.einsum("thk,tkhd->thd", weights, values).to(q.dtype)

    def keys_of(self, metadata: PlainMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, n]`` twice: the slots of all keys in their order, and whether a token sees them."""
        position = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        seen = position <= metadata.last[:, None]
        mask = metadata.draft_mask
        if mask is None:
            mask = torch.ones_like(metadata.drafts, dtype=torch.bool)
        slots = torch.cat([metadata.table[metadata.request], metadata.drafts], dim=1)
        return slots, torch.cat([seen, mask], dim=1)
