"""`MyAttentionBackend`: a page table for the requests, two numbers for each token, PyTorch's own attention.

Each token needs the row of its request in the page table, and the number of keys that it sees. One function
computes both on the device from the batch, in the same way for capture, replay and eager steps.

Does not: attend fast. Every token gathers its own keys; a real backend calls its kernel in `forward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphpact import (
    AttentionBackend,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    LayerSpec,
    Limits,
    metadata_slot,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout, new_kv


@dataclass(slots=True)
class MyAttentionMetadata:
    """The index tensors of a step of ``bs`` requests and ``T`` tokens.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        page_table: ``[bs, pages]`` int32: page numbers, 0 past a request's last key.
        request: ``[T]`` int64: the row of ``page_table`` that each token reads.
        num_keys: ``[T]`` int64: keys that the token sees, its own included; 0 for padding tokens of no
            request.
    """

    out_cache_loc: torch.Tensor
    page_table: torch.Tensor
    request: torch.Tensor
    num_keys: torch.Tensor


class MyAttentionBackend(AttentionBackend):
    """A backend for decode and prefill, with MHA, GQA or MLA heads and pages of any size."""

    capabilities = Capabilities(
        modes=frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE}),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset(HeadLayout),
        # A padding request has one key, in scratch.
        seq_len_fill_value=1,
    )

    # -- memory: declared once, bound for each captured shape ------------------------------------

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of the three index tensors, sized for the largest step."""
        pages = limits.max_pages_per_request
        return [
            metadata_slot(
                "my_attention.page_table",
                lambda bs, _: (bs, pages),
                torch.int32,
                role="table",
                axis="bs",
            ),
            metadata_slot(
                "my_attention.request",
                lambda _, tokens: (tokens,),
                torch.int64,
                role="table",
                axis="tokens",
            ),
            metadata_slot(
                "my_attention.num_keys",
                lambda _, tokens: (tokens,),
                torch.int64,
                role="lengths",
                axis="tokens",
            ),
        ]

    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Buffers
    ) -> MyAttentionMetadata:
        """Return metadata whose tensors are slices of the slots, or new tensors in an eager step."""
        del shape  # `buffers` slices for it
        return MyAttentionMetadata(
            out_cache_loc=view.out_cache_loc,
            page_table=buffers("my_attention.page_table"),
            request=buffers("my_attention.request"),
            num_keys=buffers("my_attention.num_keys"),
        )

    # -- the fill, for capture, replay and eager steps -------------------------------------------

    def fill_metadata(self, view: ForwardBatch, metadata: MyAttentionMetadata) -> None:
        """Write every row in place, padding rows too, without a host read."""
        self._fill_page_table(view, metadata.page_table)
        tokens = torch.arange(view.num_tokens, device=view.device)
        if view.extend_seq_lens is None:  # decode: each request brings one token
            metadata.request.copy_(tokens)
            metadata.num_keys.copy_(view.seq_lens)
        else:
            ends = view.extend_seq_lens.cumsum(0)
            request = torch.searchsorted(ends, tokens, right=True).clamp_(max=view.batch_size - 1)
            num_keys = view.seq_lens[request] - ends[request] + tokens + 1
            metadata.request.copy_(request)
            metadata.num_keys.copy_(torch.where(tokens < ends[-1:], num_keys, 0))

    def _fill_page_table(self, view: ForwardBatch, page_table: torch.Tensor) -> None:
        """Compute page numbers from the first slot of each page; pages past a request's last key are 0."""
        page_size = self.context.limits.page_size
        pages = self.context.req_to_token[view.req_pool_indices, ::page_size] // page_size
        first_key = torch.arange(pages.shape[1], device=view.device) * page_size
        page_table.copy_(torch.where(first_key < view.seq_lens[:, None], pages, 0))

    # -- attention -------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: MyAttentionMetadata,
    ) -> torch.Tensor:
        """Write new keys and values, if any, to their slots; return the attention of each token."""
        caches = (
            self.context.kv_cache.k[layer.cache_layer],
            self.context.kv_cache.v[layer.cache_layer],
        )
        for cache, new in zip(caches, new_kv(k, v, layer) or (), strict=False):
            cache.index_copy_(0, metadata.out_cache_loc, new)
        keys, values = (self._gather(cache, metadata) for cache in caches)
        seen = torch.arange(keys.shape[1], device=q.device) < metadata.num_keys[:, None]
        # An invisible slot may hold NaN, and NaN times a weight of zero is NaN, so masked scores are not
        # enough.
        keys, values = (t.masked_fill(~seen[:, :, None, None], 0) for t in (keys, values))
        out = scaled_dot_product_attention(
            q[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen[:, None, None],
            scale=layer.scaling,
            enable_gqa=True,
        )
        return out[:, :, 0]

    def _gather(self, cache: torch.Tensor, metadata: MyAttentionMetadata) -> torch.Tensor:
        """Return ``[T, keys, heads, dim]``: for each token, all entries of its request's pages."""
        pages: torch.Tensor = cache.unflatten(0, (-1, self.context.limits.page_size))
        return pages[metadata.page_table].flatten(1, 2)[metadata.request]
