"""Correct backends that keep something of requests from step to step: keys in order, rows of a table.

What they keep is used only where it is equal to the engine's memory. So it does not matter whose it was.

Does not: contain bugs; see `graphpact_museum.whole_requests`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    lengths_slot,
    table_slot,
)


@dataclass
class _WithCopies(TableMetadata):
    """With ``rows`` ``[bs]``, request rows, and by layer copies ``[rows, positions, heads, width]``."""

    rows: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


class CopiesKeys(TableBackend):
    """A backend with a second copy of the keys and values of each request in the order of their positions.

    Of earlier tokens a copy is used where its key and its value begin like those in the cache.
    """

    fill_is_device_only = False

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return workspaces for the copies of each layer too."""
        in_order = self.context.req_to_token.shape

        def copies(name: str, cache: torch.Tensor) -> GraphSlot:
            shape = *in_order, *cache.shape[1:]
            return metadata_slot(f"variant.{name}", lambda *_: shape, cache.dtype, role="workspace")

        kv = self.context.kv_cache
        return [
            *super().declare_slots(limits),
            _rows_slot(),
            *(copies(f"keys{layer}", cache) for layer, cache in enumerate(kv.k)),
            *(copies(f"values{layer}", cache) for layer, cache in enumerate(kv.v)),
        ]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _WithCopies:
        """Return the slots."""
        plain, layers = super().allocate_metadata(view, shape, buffers), range(len(self.context.kv_cache.k))
        keys, values = ([buffers(f"variant.{name}{n}") for n in layers] for name in ("keys", "values"))
        rows = buffers("variant.rows")
        return _WithCopies(plain.out_cache_loc, plain.lens, plain.table, rows, keys, values)

    def fill_metadata(self, view: ForwardBatch, metadata: TableMetadata) -> None:
        """Copy the request rows too."""
        super().fill_metadata(view, metadata)
        if isinstance(metadata, _WithCopies):
            metadata.rows.copy_(view.req_pool_indices)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: _WithCopies,
    ) -> torch.Tensor:
        """Attend by the copies that are valid; then copy the new keys and values."""
        self.write(k, v, layer, metadata.out_cache_loc)
        at, (slots, seen) = layer.cache_layer, self.keys_of(metadata, layer)
        keys, values = metadata.keys[at], metadata.values[at]
        cached_keys, cached_values = (cache[torch.where(seen, slots, 0)] for cache in self.caches(layer))
        earlier = torch.arange(seen.shape[1], device=seen.device) < metadata.lens[:, None] - 1
        same = self.is_valid(keys[metadata.rows], cached_keys, values[metadata.rows], cached_values)
        same = same & earlier[:, :, None, None]
        merged_keys = torch.where(same, keys[metadata.rows], cached_keys).flatten(0, 1)
        merged_values = torch.where(same, values[metadata.rows], cached_values).flatten(0, 1)
        in_order = torch.arange(seen.numel(), device=seen.device).view(seen.shape)
        out = attend(q, merged_keys, merged_values, in_order, seen, layer)
        if k is not None and v is not None:
            new = metadata.rows, metadata.lens - 1
            keys.index_put_(new, k)
            self.copy_values(values, new, v)
        return out

    def copy_values(
        self, copies: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor
    ) -> None:
        """Write new values into a copy."""
        copies.index_put_(new, values)

    def is_valid(self, *pairs: torch.Tensor) -> torch.Tensor:
        """Return ``[bs, n, 1, 1]``: whether a copy of keys, and one of values, begins like the cache's."""
        keys, cached_keys, values, cached_values = (each[:, :, :1, :1] for each in pairs)
        return (keys == cached_keys) & (values == cached_values)


@variant(on="reference", lanes=("decode", "idle"))
def second_copy_of_keys(_: type[object]) -> type[object]:
    """Keys and values are also kept by request, and read from there where the copy is equal to the cache."""
    return CopiesKeys


def _rows_slot() -> GraphSlot:
    """Return a slot ``[bs]`` of request rows."""
    return metadata_slot("variant.rows", lambda bs, _: (bs,), torch.int64, role="table", axis="bs")


@dataclass
class _WithRows(TableMetadata):
    """With ``rows``: which request row each request has, and what is kept of each request row."""

    rows: torch.Tensor
    kept: torch.Tensor
    kept_lens: torch.Tensor


class KeepsRows(DecodeBackend):
    """A backend that keeps the KV slots of each request row, and adds one to those of a request that goes on.

    A request goes on if it has one key more than its row had, and the same KV slots before it.
    """

    fill_is_device_only = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rows, width = context.req_to_token.shape
        self._sizes = rows, width

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return workspaces for what is kept too."""
        (rows, width), wide = self._sizes, torch.int64
        return [
            lengths_slot(),
            table_slot(limits),
            _rows_slot(),
            metadata_slot("variant.kept", lambda *_: (rows, width), wide, role="workspace"),
            metadata_slot("variant.kept_lens", lambda *_: (rows,), wide, role="workspace"),
        ]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _WithRows:
        """Return the slots."""
        del shape
        names = ("lens", "table", "rows", "kept", "kept_lens")
        return _WithRows(view.out_cache_loc, *(buffers(f"variant.{name}") for name in names))

    def fill_metadata(self, view: ForwardBatch, metadata: _WithRows) -> None:
        """Add a KV slot to the rows of requests that go on, and copy those of all others."""
        rows, lens = view.req_pool_indices, view.seq_lens
        metadata.rows.copy_(rows)
        metadata.lens.copy_(lens)
        asked = self.context.req_to_token[rows].long()
        kept = metadata.kept[rows]
        goes_on = (metadata.kept_lens[rows] == lens - 1) & self.are_same(kept, asked, lens)
        last = (lens - 1).clamp(min=0)[:, None]
        longer = kept.scatter(1, last, self.next_slot(kept, view))
        metadata.table.copy_(torch.where(goes_on[:, None], longer, asked))
        metadata.kept[rows] = metadata.table
        metadata.kept_lens[rows] = lens

    def are_same(self, kept: torch.Tensor, asked: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Return ``[bs]``: whether the KV slots of the keys before the last are the kept ones."""
        at = torch.arange(kept.shape[1], device=kept.device)
        return ((kept == asked) | (at >= lens[:, None] - 1)).all(dim=1)

    def next_slot(self, kept: torch.Tensor, view: ForwardBatch) -> torch.Tensor:
        """Return ``[bs, 1]``: the KV slot of each new token."""
        del kept
        return view.out_cache_loc[:, None]

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table, cut by lengths."""
        del layer
        at = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        return metadata.table, at < metadata.lens[:, None]


@variant(on="reference", lanes=("decode", "idle"))
def rows_kept_for_requests_that_go_on(_: type[object]) -> type[object]:
    """The KV slots of a request that goes on are kept in its row, and the one of the new token is added."""
    return KeepsRows
