"""`V1Attention`: the KV slots of each request's keys as a table, and torch's own attention.

Does not: attend fast; each token gathers its own keys.
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
class V1Metadata:
    """The tensors of a step: ``table`` ``[T, max_context_len]`` and ``num_keys`` ``[T]``, both int64."""

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    num_keys: torch.Tensor


class V1Attention(AttentionBackend):
    """A backend for decode and prefill."""

    capabilities = Capabilities(
        modes=frozenset({ForwardMode.DECODE, ForwardMode.EXTEND}),
        graph_support=GraphSupport.UNIFORM_DECODE,
        dtypes=frozenset({torch.float32}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        seq_len_fill_value=1,
    )

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the two slots."""
        columns = limits.max_context_len
        table = metadata_slot(
            "v1.table", lambda _, tokens: (tokens, columns), torch.int64, role="table", axis="tokens"
        )
        num_keys = metadata_slot(
            "v1.num_keys", lambda _, tokens: (tokens,), torch.int64, role="lengths", axis="tokens"
        )
        return [table, num_keys]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> V1Metadata:
        """Return metadata in the memory of the slots."""
        del shape
        return V1Metadata(view.out_cache_loc, buffers("v1.table"), buffers("v1.num_keys"))

    def fill_metadata(self, view: ForwardBatch, metadata: V1Metadata) -> None:
        """Write every row in place."""
        row = torch.arange(view.num_tokens, device=view.device)
        ends = view.extend_seq_lens
        if ends is None:
            num_keys = view.seq_lens
        else:
            tokens, ends = row, ends.cumsum(0)
            row = torch.searchsorted(ends, tokens, right=True).clamp_(max=view.batch_size - 1)
            num_keys = (view.seq_lens[row] - ends[row] + tokens + 1) * (tokens < ends[-1:])
        seen = torch.arange(metadata.table.shape[1], device=view.device) < num_keys[:, None]
        table = self.context.req_to_token[view.req_pool_indices[row]]
        metadata.table.copy_(torch.where(seen, table, 0))
        metadata.num_keys.copy_(num_keys)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: V1Metadata,
    ) -> torch.Tensor:
        """Write new keys and values, then attend."""
        caches = self.context.kv_cache.k[layer.cache_layer], self.context.kv_cache.v[layer.cache_layer]
        for cache, new in zip(caches, new_kv(k, v, layer) or (), strict=False):
            cache.index_copy_(0, metadata.out_cache_loc, new)
        seen = torch.arange(metadata.table.shape[1], device=q.device) < metadata.num_keys[:, None]
        keys, values = (
            cache[metadata.table].masked_fill(~seen[:, :, None, None], 0).transpose(1, 2) for cache in caches
        )
        mask = seen[:, None, None]
        out = scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask, scale=layer.scaling, enable_gqa=True
        )
        return out[:, :, 0]
