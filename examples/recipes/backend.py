"""`AcmeBackend`: a complete attention backend for decode, as small as possible.

Its kernel reads one index tensor, a table of KV slots. Everything else that it reads is in the view.

Does not: serve prefill or drafts, or attend fast; `forward` is where a real backend calls its kernel.
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
class AcmeMetadata:
    """The index tensors of a decode step of ``bs`` requests.

    Args:
        out_cache_loc: ``[bs]`` int64: KV slot of each new token; 0 is scratch. A tensor of the view.
        num_keys: ``[bs]`` int64: keys of each request, the new one included. A tensor of the view.
        table: ``[bs, max_context_len]`` int64: KV slot of each key; 0 past a request's last key.
    """

    out_cache_loc: torch.Tensor
    num_keys: torch.Tensor
    table: torch.Tensor


class AcmeBackend(AttentionBackend):
    """A backend for decode, with MHA or GQA heads and pages of any size."""

    capabilities = Capabilities(
        modes=frozenset({ForwardMode.DECODE, ForwardMode.IDLE}),
        graph_support=GraphSupport.UNIFORM_DECODE,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        seq_len_fill_value=1,  # a padding request has one key, in scratch
    )
    fill_is_device_only = True  # no host read and no host number, so a graph may record it

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return every buffer that graphs read: here only the table, with a row for each request."""
        width = limits.max_context_len
        return [metadata_slot("acme.table", lambda bs, _: (bs, width), torch.int64, role="table", axis="bs")]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> AcmeMetadata:
        """Bind tensors of the view and slices of the slots for one shape."""
        del shape  # `buffers` slices for it
        return AcmeMetadata(view.out_cache_loc, view.seq_lens, buffers("acme.table"))

    def fill_metadata(self, view: ForwardBatch, metadata: AcmeMetadata) -> None:
        """Write every row of the table in place, padding rows too, without a host read."""
        rows = self.context.req_to_token[view.req_pool_indices, : metadata.table.shape[1]]
        position = torch.arange(rows.shape[1], device=view.device)
        metadata.table.copy_(torch.where(position < view.seq_lens[:, None], rows, 0))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: AcmeMetadata,
    ) -> torch.Tensor:
        """Write new keys and values, if any, to the KV cache, and attend."""
        caches = (
            self.context.kv_cache.k[layer.cache_layer],
            self.context.kv_cache.v[layer.cache_layer],
        )
        for cache, new in zip(caches, new_kv(k, v, layer) or (), strict=False):
            cache.index_copy_(0, metadata.out_cache_loc, new)
        position = torch.arange(metadata.table.shape[1], device=q.device)
        seen = position < metadata.num_keys[:, None]
        # Slots that a request does not own may hold NaN, and NaN times a weight of zero is NaN.
        keys, values = (
            cache[metadata.table].masked_fill(~seen[:, :, None, None], 0).transpose(1, 2) for cache in caches
        )
        return self.attend(q, keys, values, seen, layer.scaling)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Return the attention of each request's query; this stands for the kernel.

        Args:
            q: ``[bs, num_q_heads, head_dim]``.
            keys: ``[bs, num_kv_heads, n, head_dim]``.
            values: ``[bs, num_kv_heads, n, v_head_dim]``.
            seen: ``[bs, n]`` bool: the keys of each request.
            scaling: Factor on the scores.
        """
        out = scaled_dot_product_attention(
            q[:, :, None],
            keys,
            values,
            attn_mask=seen[:, None, None],
            scale=scaling,
            enable_gqa=True,
        )
        return out[:, :, 0]
