"""`attend`, `KVBackend`, `DecodeBackend`, `TableBackend`: common parts of backends written from scratch."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import (
    AttentionBackend,
    Buffers,
    Capabilities,
    GraphSupport,
    HeadLayout,
    LayerSpec,
    Limits,
    new_kv,
)
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.shapes import GraphShape

UNIFORM_MODES = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE})
"""The modes of steps with equally many tokens per request, and of idle steps."""


def capabilities(**changes: Any) -> Capabilities:
    """Return the capabilities of a backend for decode on a CPU, with ``changes``."""
    declared: dict[str, Any] = {
        "modes": frozenset({ForwardMode.DECODE, ForwardMode.IDLE}),
        "graph_support": GraphSupport.UNIFORM_DECODE,
        "dtypes": frozenset({torch.float32, torch.bfloat16}),
        "devices": frozenset({"cpu"}),
        "head_layouts": frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        "seq_len_fill_value": 1,
    }
    return Capabilities(**(declared | changes))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    seen: torch.Tensor,
    layer: LayerSpec,
) -> torch.Tensor:
    """Return ``[T, num_q_heads, v_head_dim]``: attention of each query to its own keys, in float32.

    Args:
        q: ``[T, num_q_heads, head_dim]``.
        k: ``[S, num_kv_heads, head_dim]``: the KV cache.
        v: ``[S, num_kv_heads, v_head_dim]``.
        slots: ``[T, n]`` int64: KV slots of the keys; any number where ``seen`` is false.
        seen: ``[T, n]`` bool: whether the query sees the key.
        layer: The layer, for its numbers of heads and its scale.
    """
    group = layer.num_q_heads // layer.num_kv_heads
    at = torch.where(seen, slots, 0)

    def gather(cache: torch.Tensor) -> torch.Tensor:
        rows = cache[at].masked_fill(~seen[:, :, None, None], 0)  # scratch may hold NaN
        return rows.float().repeat_interleave(group, dim=2)

    scores = torch.einsum("thd,tnhd->thn", q.float(), gather(k)) * layer.scaling
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=2)
    return torch.einsum("thn,tnhd->thd", weights, gather(v)).to(q.dtype)


def lengths_slot(name: str = "variant.lens", dtype: torch.dtype = torch.int64) -> GraphSlot:
    """Return a slot ``[bs]`` of lengths."""
    return metadata_slot(name, lambda bs, _: (bs,), dtype, role="lengths", axis="bs")


def table_slot(limits: Limits, name: str = "variant.table") -> GraphSlot:
    """Return a slot ``[bs, max_context_len]`` int64 of KV slots by position."""
    return metadata_slot(
        name, lambda bs, _: (bs, limits.max_context_len), torch.int64, role="table", axis="bs"
    )


class KVBackend(AttentionBackend, abc.ABC):
    """A backend for decode that reads and writes the KV cache."""

    capabilities = capabilities()

    def fill_table(self, view: ForwardBatch, table: torch.Tensor) -> None:
        """Write the KV slots of each request by position."""
        table.copy_(self.context.req_to_token[view.req_pool_indices])

    def write(
        self, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, where: torch.Tensor
    ) -> None:
        """Write new keys and values, if there are any, to the KV slots ``where``."""
        new = new_kv(k, v, layer)
        if new is not None:
            for cache, rows in zip(self.caches(layer), new, strict=True):
                cache.index_copy_(0, where, rows)

    def caches(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of a layer's cache."""
        cache = self.context.kv_cache
        return cache.k[layer.cache_layer], cache.v[layer.cache_layer]


class DecodeBackend(KVBackend, abc.ABC):
    """A backend that writes new keys and attends to the keys that `keys_of` names."""

    fill_is_device_only = True

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of the lengths and the table."""
        return [lengths_slot(), table_slot(limits)]

    @abc.abstractmethod
    def keys_of(self, metadata: Any, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, n]`` KV slots of the keys of each query, and ``[T, n]`` whether it sees them."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Any,
    ) -> torch.Tensor:
        """Write, then attend."""
        self.write(k, v, layer, metadata.out_cache_loc)
        return attend(q, *self.caches(layer), *self.keys_of(metadata, layer), layer)


@dataclass
class TableMetadata:
    """``out_cache_loc`` ``[T]``; ``lens`` ``[bs]``, the keys of each request; ``table`` ``[bs, n]``."""

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor


class TableBackend(DecodeBackend):
    """A backend with a table of KV slots and the number of keys of each request."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> TableMetadata:
        """Return the slots."""
        del shape
        return TableMetadata(view.out_cache_loc, buffers("variant.lens"), buffers("variant.table"))

    def fill_metadata(self, view: ForwardBatch, metadata: TableMetadata) -> None:
        """Count keys, and copy rows of the page table."""
        metadata.lens.copy_(view.seq_lens + view.uncounted_keys)
        self.fill_table(view, metadata.table)

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table, cut by lengths, for one query per request."""
        del layer
        at = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        return metadata.table, at < metadata.lens[:, None]
