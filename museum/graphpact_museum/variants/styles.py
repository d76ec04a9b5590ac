"""Correct backends, written from scratch, whose metadata has the types of other engines.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from graphpact.attention import BackendContext, Buffers, GraphSupport, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import (
    UNIFORM_MODES,
    DecodeBackend,
    capabilities,
    lengths_slot,
    table_slot,
)

# -- types of metadata -------------------------------------------------------------------------------


@dataclass
class _Common:
    """``lens`` ``[bs]`` and ``table`` ``[bs, n]``, and values derived from them."""

    lens: torch.Tensor
    table: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """The number of requests of the shape."""
        return len(self.lens)

    @cached_property
    def index(self) -> torch.Tensor:
        """``[n]``: positions, made on first use; the same for every batch."""
        return torch.arange(self.table.shape[1], device=self.table.device)


@dataclass
class _Decode:
    """The metadata for decodes; ``common`` is shared by the whole step."""

    common: _Common
    scale: float


@dataclass
class _Nested:
    """``out_cache_loc``, metadata for decodes, and metadata for prefills, which these steps lack."""

    out_cache_loc: torch.Tensor
    decode: _Decode
    prefill: _Decode | None = None

    @property
    def is_decode(self) -> bool:
        """Whether there are no prefills."""
        return self.prefill is None


class _NestedMetadata(DecodeBackend):
    """A backend whose metadata is nested dataclasses with properties, one of them computed once."""

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Nested:
        """Return the parts."""
        del shape
        common = _Common(buffers("variant.lens"), buffers("variant.table"))
        _ = common.index  # outside any graph
        return _Nested(view.out_cache_loc, _Decode(common, 1.0))

    def fill_metadata(self, view: ForwardBatch, metadata: _Nested) -> None:
        """Fill the common part."""
        metadata.decode.common.lens.copy_(view.seq_lens)
        self.fill_table(view, metadata.decode.common.table)

    def keys_of(self, metadata: _Nested, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the common part."""
        del layer
        common = metadata.decode.common
        assert metadata.is_decode  # noqa: S101  no step has prefills
        return common.table[: common.num_reqs], common.index < common.lens[:, None]


@variant(on="reference", lanes=("decode", "idle"))
def nested_metadata(_: type[Any]) -> type[Any]:
    """Metadata is nested dataclasses with properties, one of them computed once."""
    return _NestedMetadata


class _NoMetadata(DecodeBackend):
    """A backend without metadata: every layer reads the view, and recomputes positions and tables."""

    capabilities = capabilities(modes=UNIFORM_MODES, graph_support=GraphSupport.UNIFORM)

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return nothing."""
        del limits
        return []

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> ForwardBatch:
        """Return the view."""
        del shape, buffers
        return view

    def fill_metadata(self, view: ForwardBatch, metadata: ForwardBatch) -> None:
        """Do nothing."""

    def keys_of(self, metadata: ForwardBatch, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the last position of every token."""
        del layer
        width = metadata.tokens_per_request
        token = torch.arange(metadata.num_tokens, device=metadata.device)
        request = token // max(width, 1)
        last = metadata.seq_lens[request] + metadata.uncounted_keys - width + token % max(width, 1)
        table = self.context.req_to_token[metadata.req_pool_indices[request]]
        return table, torch.arange(table.shape[1], device=table.device) <= last[:, None]


@variant(on="reference", lanes=("decode", "target_verify", "idle"))
def metadata_is_the_view(_: type[Any]) -> type[Any]:
    """The view is the metadata: every layer recomputes positions and tables in the graph."""
    return _NoMetadata


@dataclass
class _Narrow:
    """``lens`` int16, ``is_live`` bool, ``group`` uint8 and ``scale`` float8, each ``[bs]``, and a table."""

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    is_live: torch.Tensor
    group: torch.Tensor
    scale: torch.Tensor


class _NarrowTypes(DecodeBackend):
    """A backend with metadata of narrow types: int16, uint8, bool and float8."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return a slot of each type."""
        types = {
            "lens": torch.int16,
            "is_live": torch.bool,
            "group": torch.uint8,
            "scale": torch.float8_e4m3fn,
        }
        return [table_slot(limits), *(lengths_slot(f"variant.{n}", dtype) for n, dtype in types.items())]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Narrow:
        """Return the slots."""
        del shape
        names = ("table", "lens", "is_live", "group", "scale")
        return _Narrow(view.out_cache_loc, *(buffers(f"variant.{name}") for name in names))

    def fill_metadata(self, view: ForwardBatch, metadata: _Narrow) -> None:
        """Fill all slots: a group is 16 keys, and the scale is 1."""
        self.fill_table(view, metadata.table)
        metadata.lens.copy_(view.seq_lens)
        metadata.is_live.copy_(view.out_cache_loc >= self.context.limits.page_size)
        metadata.group.copy_((view.seq_lens + 15) // 16)
        metadata.scale.copy_(torch.ones_like(view.seq_lens, dtype=torch.float32))

    def keys_of(self, metadata: _Narrow, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut first by groups, then by lengths."""
        del layer
        at = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        seen = (at < metadata.group.long()[:, None] * 16) & (at < metadata.lens.long()[:, None])
        return metadata.table, seen

    def forward(self, q: torch.Tensor, *args: Any) -> torch.Tensor:
        """Scale queries, attend, and clear padding rows if keys are written."""
        metadata: _Narrow = args[-1]
        out = super().forward(q * metadata.scale.to(q.dtype)[:, None, None], *args)
        if args[0] is None:
            return out  # on a frozen cache live tokens have slot 0 too
        return out.masked_fill(~metadata.is_live[:, None, None], 0)


@variant(on="reference", lanes=("decode", "idle"))
def metadata_of_narrow_types(_: type[Any]) -> type[Any]:
    """Metadata is int16, uint8, bool and float8."""
    return _NarrowTypes


@dataclass
class _Expanded:
    """`TableMetadata`, and ``first`` ``[bs]``: one number in a slot, expanded to all requests."""

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    first: torch.Tensor


class _ExpandedViews(DecodeBackend):
    """A backend with expanded views and overlapping windows as a field of metadata and as attributes."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        most, device = context.limits, context.device
        self.ones = torch.ones(1, 1, device=device, dtype=torch.bool).expand(
            most.max_bs, most.max_context_len
        )
        self.windows = torch.arange(most.max_context_len + most.max_bs, device=device).unfold(
            0, most.max_context_len, 1
        )  # row i holds the numbers from i on

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Add a slot of one number."""
        first = metadata_slot("variant.first", lambda *_: (1,), torch.int64, role="offsets")
        return [*super().declare_slots(limits), first]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Expanded:
        """Return the slots, one of them expanded."""
        first = buffers("variant.first").expand(shape.batch_size)
        return _Expanded(view.out_cache_loc, buffers("variant.lens"), buffers("variant.table"), first)

    def fill_metadata(self, view: ForwardBatch, metadata: _Expanded) -> None:
        """Fill all slots; the first key is the same for every request."""
        metadata.lens.copy_(view.seq_lens)
        self.fill_table(view, metadata.table)
        metadata.first[:1].zero_()

    def keys_of(self, metadata: _Expanded, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare positions: the windows of an arange, minus their first numbers."""
        del layer
        bs = len(metadata.lens)
        at = self.windows[:bs] - self.windows[:bs, :1]
        seen = (at >= metadata.first[:, None]) & (at < metadata.lens[:, None]) & self.ones[:bs]
        return metadata.table, seen


@variant(on="reference", lanes=("decode", "idle"))
def expanded_views(_: type[Any]) -> type[Any]:
    """A field of the metadata is an expanded view of a slot; constants are expanded or overlap."""
    return _ExpandedViews
