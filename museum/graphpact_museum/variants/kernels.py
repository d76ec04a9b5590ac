"""Correct backends, written from scratch, whose kernels do other work, such as sorting queries.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import BackendContext, Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import (
    DecodeBackend,
    TableBackend,
    TableMetadata,
    attend,
    capabilities,
    lengths_slot,
)


class _OnlineSoftmax(TableBackend):
    """A backend that attends to chunks of 16 positions with a running maximum, over the whole table."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Add up the chunks; scale the sum whenever the maximum changes."""
        self.write(k, v, layer, metadata.out_cache_loc)
        caches, group = self.caches(layer), layer.num_q_heads // layer.num_kv_heads
        slots, seen = self.keys_of(metadata, layer)
        most = q.new_full(q.shape[:2], -1e30, dtype=torch.float32)
        total = torch.zeros_like(most)
        out = q.new_zeros(*q.shape[:2], layer.v_head_dim, dtype=torch.float32)
        for begin in range(0, slots.shape[1], 16):
            at, sees = slots[:, begin : begin + 16], seen[:, begin : begin + 16]
            keys, values = (
                cache[torch.where(sees, at, 0)]
                .masked_fill(~sees[:, :, None, None], 0)
                .float()
                .repeat_interleave(group, dim=2)
                for cache in caches
            )
            scores = torch.einsum("thd,tnhd->thn", q.float(), keys) * layer.scaling
            scores = scores.masked_fill(~sees[:, None], -1e30)
            now = torch.maximum(most, scores.amax(dim=2))
            weights = (scores - now[:, :, None]).exp().masked_fill(~sees[:, None], 0)
            factor = (most - now).exp()
            total = total * factor + weights.sum(dim=2)
            out = out * factor[:, :, None] + torch.einsum("thn,tnhd->thd", weights, values)
            most = now
        return (out / total[:, :, None]).to(q.dtype)


@variant(on="reference", lanes=("decode", "idle"))
def online_softmax(_: type[Any]) -> type[Any]:
    """Attention runs over chunks of keys with a running maximum."""
    return _OnlineSoftmax


@dataclass
class _Sorted:
    """`TableMetadata` with requests sorted by length; ``order`` ``[bs]`` is the batch row of each."""

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    order: torch.Tensor


class _SortsQueries(DecodeBackend):
    """A backend that sorts requests and queries by length, and restores the order of its outputs."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Add a slot for the order."""
        return [*super().declare_slots(limits), lengths_slot("variant.order")]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Sorted:
        """Return the slots."""
        del shape
        names = ("lens", "table", "order")
        return _Sorted(view.out_cache_loc, *(buffers(f"variant.{name}") for name in names))

    def fill_metadata(self, view: ForwardBatch, metadata: _Sorted) -> None:
        """Sort requests by length, and fill the slots in that order."""
        lens, order = view.seq_lens.sort(descending=True, stable=True)
        metadata.lens.copy_(lens)
        metadata.order.copy_(order)
        metadata.table.copy_(self.context.req_to_token[view.req_pool_indices[order]])

    def keys_of(self, metadata: _Sorted, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table, in the order of lengths."""
        del layer
        at = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        return metadata.table, at < metadata.lens[:, None]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Write, sort queries, attend, and restore the order."""
        self.write(k, v, layer, metadata.out_cache_loc)
        found = attend(q[metadata.order], *self.caches(layer), *self.keys_of(metadata, layer), layer)
        return torch.empty_like(found).index_copy_(0, metadata.order, found)


@variant(on="reference", lanes=("decode", "idle"))
def queries_sorted_by_length(_: type[Any]) -> type[Any]:
    """Queries are sorted by length, and the order of outputs is restored."""
    return _SortsQueries


class _PadsQueries(DecodeBackend):
    """A backend that pads queries to a multiple of 8 in a workspace, and cuts its outputs."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Add the workspace."""
        heads = max(layer.num_q_heads for layer in self.context.layers)
        width = max(layer.head_dim for layer in self.context.layers)
        work = metadata_slot(
            "variant.queries",
            lambda _, tokens: (-(-tokens // 8) * 8, heads, width),
            self.context.dtype,
            role="workspace",
        )
        return [*super().declare_slots(limits), work]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> dict[str, Any]:
        """Return the slots in a dict."""
        eights = -(-shape.num_tokens // 8) * 8
        names = ("lens", "table")
        made: dict[str, Any] = {name: buffers(f"variant.{name}") for name in names}
        work = buffers("variant.queries")
        return made | {"out_cache_loc": view.out_cache_loc, "queries": work[:eights]}

    def fill_metadata(self, view: ForwardBatch, metadata: dict[str, Any]) -> None:
        """Fill lengths and table."""
        metadata["lens"].copy_(view.seq_lens)
        self.fill_table(view, metadata["table"])

    def keys_of(self, metadata: dict[str, Any], layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table with rows for the padding queries, which see only KV slot 0."""
        del layer
        table, lens = metadata["table"], metadata["lens"]
        more = len(metadata["queries"]) - len(lens)
        table = torch.cat([table, table.new_zeros(more, table.shape[1])])
        lens = torch.cat([lens, lens.new_ones(more)])
        return table, torch.arange(table.shape[1], device=table.device) < lens[:, None]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: dict[str, Any],
    ) -> torch.Tensor:
        """Write, pad, attend, and cut."""
        self.write(k, v, layer, metadata["out_cache_loc"])
        work: torch.Tensor = metadata["queries"][:, : q.shape[1], : q.shape[2]]
        work[: len(q)].copy_(q)
        work[len(q) :].zero_()
        return attend(work, *self.caches(layer), *self.keys_of(metadata, layer), layer)[: len(q)]


@variant(on="reference", lanes=("decode", "idle"))
def queries_in_eights(_: type[Any]) -> type[Any]:
    """Queries are padded to a multiple of 8 in a workspace."""
    return _PadsQueries


_Kernel = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _CompilesByShape(TableBackend):
    """A backend that makes a kernel for each size of a step on first use, and keeps it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.compiled: dict[tuple[int, ...], _Kernel] = {}

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the kernel for this size."""
        del layer
        key = tuple(metadata.table.shape)
        if key not in self.compiled:
            self.compiled[key] = self._compile(*key)
        return self.compiled[key](metadata.table, metadata.lens)

    def _compile(self, rows: int, columns: int) -> _Kernel:
        def kernel(table: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at = torch.arange(columns, device=table.device).expand(rows, columns)
            return table, at < lens[:, None]

        return kernel


@variant(on="reference", lanes=("decode", "idle"))
def kernel_by_shape(_: type[Any]) -> type[Any]:
    """A kernel for each size is made on first use, and kept."""
    return _CompilesByShape


class _FoldedConstants(TableBackend):
    """A backend that makes a tensor of the windows of all layers when it is built, and casts sinks on use."""

    capabilities = capabilities(sinks=True, sliding_window=True)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        longest = context.limits.max_context_len
        windows = [layer.sliding_window or longest for layer in context.layers]
        self.windows = torch.tensor(windows, device=context.device)
        self.at = {layer.layer_id: at for at, layer in enumerate(context.layers)}

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table, cut by lengths and by the layer's window."""
        lens = metadata.lens[:, None]
        at = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        return metadata.table, (at < lens) & (at >= lens - self.windows[self.at[layer.layer_id]])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Attend, and scale the output by the share that the sink leaves."""
        self.write(k, v, layer, metadata.out_cache_loc)
        slots, seen = self.keys_of(metadata, layer)
        found = attend(q, *self.caches(layer), slots, seen, layer)
        keys = self.caches(layer)[0][torch.where(seen, slots, 0)].float()
        keys = keys.masked_fill(~seen[:, :, None, None], 0)
        keys = keys.repeat_interleave(layer.num_q_heads // layer.num_kv_heads, dim=2)
        scores = torch.einsum("thd,tnhd->thn", q.float(), keys) * layer.scaling
        total = scores.masked_fill(~seen[:, None], float("-inf")).logsumexp(dim=2)
        share = 1 if layer.sinks is None else torch.sigmoid(total - layer.sinks.float())[:, :, None]
        return (found.float() * share).to(q.dtype)


@variant(on="reference", lanes=("decode", "idle"))
def folded_constants(_: type[Any]) -> type[Any]:
    """Windows of all layers become a tensor when the backend is built, and sinks are cast on use."""
    return _FoldedConstants
