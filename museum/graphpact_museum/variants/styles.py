"""Correct backends, written from scratch in styles of other engines: tables, state, types of metadata.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from graphpact.attention import BackendContext, Buffers, GraphSupport, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.graphs import Event
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import Variant
from graphpact_museum.variants.attention import (
    UNIFORM_MODES,
    DecodeBackend,
    Keys,
    TableBackend,
    capabilities,
    lengths_slot,
    of_its_own,
    table_slot,
)

# -- constants and tables ----------------------------------------------------------------------------


class _ConstantsByLimits(TableBackend):
    """Keeps an arange of requests and a causal mask outside the registry, sized by the limits."""

    capabilities = capabilities(modes=UNIFORM_MODES, graph_support=GraphSupport.UNIFORM)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        most, device = context.limits, context.device
        self.requests = torch.arange(most.max_bs + 1, device=device)
        self.causal = torch.ones(most.max_context_len, most.max_context_len, device=device).bool().tril()

    def keys_of(self, metadata: Keys, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the request of each token from the arange, and the keys that it sees from the mask."""
        del layer
        bs, tokens = len(metadata.lens), len(metadata.out_cache_loc)
        width = tokens // max(bs, 1)
        begins = self.requests[: bs + 1] * width  # cu_seqlens
        request = torch.searchsorted(begins, begins.new_ones(tokens).cumsum(0) - 1, right=True) - 1
        back = (request + 1) * width - begins.new_ones(tokens).cumsum(0)  # tokens after this one
        return metadata.table[request], self.causal[metadata.lens[request] - 1 - back]


@dataclass
class _Pages:
    """``out_cache_loc`` ``[bs]``, ``lens`` ``[bs]``, and ``pages`` ``[n, bs]`` int32: page ids by column."""

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    pages: torch.Tensor


class _TransposedTable(DecodeBackend):
    """Has a table of page ids, int32, with a column for each request."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of lengths and of the table, which grows along its second axis."""
        pages = metadata_slot(
            "variant.pages",
            lambda bs, _: (limits.max_pages_per_request, bs),
            torch.int32,
            role="table",
            axis="bs",
            slice_fn=lambda buffer, n: buffer[:, :n],
        )
        return [lengths_slot(), pages]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Pages:
        """Return the slots."""
        del shape
        return _Pages(view.out_cache_loc, buffers("variant.lens"), buffers("variant.pages"))

    def fill_metadata(self, view: ForwardBatch, metadata: _Pages) -> None:
        """Take the first slot of every page, and divide it by the page size."""
        page = self.context.limits.page_size
        metadata.lens.copy_(view.seq_lens)
        metadata.pages.copy_((self.context.req_to_token[view.req_pool_indices, ::page] // page).T)

    def keys_of(self, metadata: _Pages, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots of all pages."""
        del layer
        page = self.context.limits.page_size
        within = torch.arange(page, device=metadata.pages.device)
        slots = (metadata.pages.T.long()[:, :, None] * page + within).flatten(1)
        at = torch.arange(slots.shape[1], device=slots.device)
        return slots, at < metadata.lens[:, None]


@dataclass
class _Packed:
    """``out_cache_loc``, ``table``, and views of one tensor ``packed`` int32: offsets and lengths of keys."""

    out_cache_loc: torch.Tensor
    table: torch.Tensor
    packed: torch.Tensor
    cu_seqlens: torch.Tensor
    lens: torch.Tensor
    staging: tuple[torch.Tensor, ...]


class _DoubleBuffered(DecodeBackend):
    """Counts in lists on the host, and copies all numbers at once from two host buffers in turn."""

    capabilities = capabilities(needs_host_plan=True)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.turn = 0
        self.copied: list[Event | None] = [None, None]

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of the table, of the packed numbers, and of two host buffers."""

        def packed(name: str, role: Any) -> GraphSlot:
            return metadata_slot(
                f"variant.{name}",
                lambda bs, _: (2 * bs + 1,),
                torch.int32,
                role=role,
                axis="bs",
                slice_fn=lambda buffer, n: buffer[: 2 * n + 1],
            )

        buffers = [packed(f"staging{n}", "staging") for n in range(2)]
        return [table_slot(limits), packed("packed", "offsets"), *buffers]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Packed:
        """Return two views of the packed numbers."""
        bs, packed = shape.batch_size, buffers("variant.packed")
        staging = (buffers("variant.staging0"), buffers("variant.staging1")) if buffers.in_graph else ()
        return _Packed(
            view.out_cache_loc, buffers("variant.table"), packed, packed[: bs + 1], packed[bs + 1 :], staging
        )

    def fill_metadata(self, view: ForwardBatch, metadata: _Packed) -> None:
        """Copy rows of the page table; the numbers come from the host."""
        self.fill_table(view, metadata.table)

    def plan_metadata(self, view: ForwardBatch, metadata: _Packed) -> None:
        """Count, and copy from the host buffer whose turn it is."""
        lens = view.seq_lens_cpu.tolist()
        ends = [sum(lens[:at]) for at in range(len(lens) + 1)]
        numbers = torch.tensor([*ends, *lens], dtype=torch.int32)
        if self.driver is None:
            metadata.packed.copy_(numbers)
            return
        if not metadata.staging:  # nobody writes these numbers again
            self.driver.copy_async(metadata.packed, numbers)
            return
        self.turn = 1 - self.turn
        event = self.copied[self.turn]
        if event is None:
            event = self.copied[self.turn] = self.driver.event()
        else:
            event.synchronize()
        metadata.staging[self.turn].copy_(numbers)
        self.driver.copy_async(metadata.packed, metadata.staging[self.turn])
        event.record()

    def keys_of(self, metadata: _Packed, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Count keys by the offsets."""
        del layer
        at = torch.arange(metadata.table.shape[1], device=metadata.table.device)
        return metadata.table, at < metadata.cu_seqlens.diff()[:, None]


# -- state -------------------------------------------------------------------------------------------


class _StatePerShape(_ConstantsByLimits):
    """Keeps the metadata of every shape in a dict; `forward` reads the current one and no argument."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.by_shape: dict[GraphShape, Keys] = {}
        self.current: Keys | None = None

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Keys:
        """Make the metadata of a shape, and keep it."""
        made: Keys = super().init_metadata_capture(view, shape)
        self.current = self.by_shape[shape] = made
        return made

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Keys) -> Keys:
        """Refresh the metadata that is kept for the shape."""
        del captured
        self.current = self.by_shape[shape]
        found: Keys = super().init_metadata_replay(view, shape, self.current)
        return found

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Keys:
        """Make new metadata, the current one from now on."""
        made: Keys = super().init_metadata_eager(batch, fill=fill)
        self.current = made
        return made

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Attend by the current metadata."""
        del metadata
        return super().forward(q, k, v, layer, self.current)


class _OneObject(_ConstantsByLimits):
    """Has one metadata object for all shapes, whose fields are the views of the shape of the step."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.only: Keys | None = None
        self.views: dict[GraphShape, Keys] = {}

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Keys:
        """Make the views of a shape, and show them."""
        self.views[shape] = super().init_metadata_capture(view, shape)
        return self._showing(shape)

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Keys) -> Keys:
        """Show the views of a shape, and refresh them."""
        del captured
        found: Keys = super().init_metadata_replay(view, shape, self._showing(shape))
        return found

    def _showing(self, shape: GraphShape) -> Keys:
        views = self.views[shape]
        self.only = self.only or replace(views)
        vars(self.only).update(vars(views))
        return self.only


class _BoundAnew(_ConstantsByLimits):
    """Keeps a constant for every batch size, and binds the one of the step to an attribute."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        sizes = range(context.limits.max_bs + 1)
        self.by_size = [torch.arange(size + 1, device=context.device) for size in sizes]

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Keys:
        """Bind the constant of the shape."""
        self.requests = self.by_size[shape.batch_size]
        made: Keys = super().init_metadata_capture(view, shape)
        return made

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Keys) -> Keys:
        """Bind the constant of the shape."""
        self.requests = self.by_size[shape.batch_size]
        found: Keys = super().init_metadata_replay(view, shape, captured)
        return found

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Keys:
        """Bind the constant of the batch."""
        self.requests = self.by_size[batch.batch_size]
        made: Keys = super().init_metadata_eager(batch, fill=fill)
        return made


class _Module(TableBackend, torch.nn.Module):
    """Is a module, whose constants are buffers."""

    def __init__(self, context: BackendContext) -> None:
        torch.nn.Module.__init__(self)
        TableBackend.__init__(self, context)
        self.index: torch.Tensor
        self.register_buffer("index", torch.arange(context.limits.max_context_len, device=context.device))

    def keys_of(self, metadata: Keys, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the buffer with the lengths."""
        del layer
        return metadata.table, self.index < metadata.lens[:, None]


# -- types of metadata -------------------------------------------------------------------------------


@dataclass
class _Common:
    """``lens`` ``[bs]`` and ``table`` ``[bs, n]``, and what follows from them."""

    lens: torch.Tensor
    table: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Requests of the shape."""
        return len(self.lens)

    @cached_property
    def index(self) -> torch.Tensor:
        """``[n]``: positions, made on first use; the same for every batch."""
        return torch.arange(self.table.shape[1], device=self.table.device)


@dataclass
class _Decode:
    """The decodes of a step; ``common`` is that of the step."""

    common: _Common
    scale: float


@dataclass
class _Nested:
    """``out_cache_loc``, the decodes, and prefills, which these steps lack."""

    out_cache_loc: torch.Tensor
    decode: _Decode
    prefill: _Decode | None = None

    @property
    def is_decode(self) -> bool:
        """Whether there are no prefills."""
        return self.prefill is None


class _NestedMetadata(DecodeBackend):
    """Has metadata of dataclasses in dataclasses, with properties and a property that is made once."""

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
        assert metadata.is_decode  # noqa: S101  of every step
        return common.table[: common.num_reqs], common.index < common.lens[:, None]


class _NoMetadata(DecodeBackend):
    """Has no metadata: every layer reads the view, and recomputes positions and tables in the graph."""

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
    """Has metadata of narrow types: int16, uint8, bool and float8."""

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
        """Fill each; groups are those of 16 keys, and scales are powers of two."""
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
        """Scale queries, attend, and clear padding rows."""
        metadata: _Narrow = args[-1]
        out = super().forward(q * metadata.scale.to(q.dtype)[:, None, None], *args)
        return out.masked_fill(~metadata.is_live[:, None, None], 0)


@dataclass
class _Expanded:
    """`Keys`, and ``first`` ``[bs]``: one number of a slot, for every request."""

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    first: torch.Tensor


class _ExpandedViews(DecodeBackend):
    """Holds expanded views and overlapping windows: a field of metadata, and attributes."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        most, device = context.limits, context.device
        self.ones = torch.ones(1, 1, device=device, dtype=torch.bool).expand(
            most.max_bs, most.max_context_len
        )
        self.windows = torch.arange(most.max_context_len + most.max_bs, device=device).unfold(
            0, most.max_context_len, 1
        )  # row i has the numbers from i on

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Add a slot of one number."""
        first = metadata_slot("variant.first", lambda *_: (1,), torch.int64, role="offsets")
        return [*super().declare_slots(limits), first]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Expanded:
        """Return the slots, one of them expanded."""
        first = buffers("variant.first").expand(shape.batch_size)
        return _Expanded(view.out_cache_loc, buffers("variant.lens"), buffers("variant.table"), first)

    def fill_metadata(self, view: ForwardBatch, metadata: _Expanded) -> None:
        """Fill all; the first key is the same for every request."""
        metadata.lens.copy_(view.seq_lens)
        self.fill_table(view, metadata.table)
        metadata.first[:1].zero_()

    def keys_of(self, metadata: _Expanded, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare positions, which are windows of an arange, less the row."""
        del layer
        bs = len(metadata.lens)
        at = self.windows[:bs] - self.windows[:bs, :1]
        seen = (at >= metadata.first[:, None]) & (at < metadata.lens[:, None]) & self.ones[:bs]
        return metadata.table, seen


VARIANTS: list[Variant] = [
    of_its_own(
        "constants-by-limits",
        "An arange of `max_bs + 1` and a causal mask of `max_context_len` lie outside the registry.",
        _ConstantsByLimits,
        "decode",
        "target_verify",
        "idle",
    ),
    of_its_own("transposed-table", "A table of page ids has a column for each request.", _TransposedTable),
    of_its_own(
        "double-buffered-staging",
        "Lists on the host become one packed tensor, copied from two host buffers in turn.",
        _DoubleBuffered,
    ),
    of_its_own(
        "state-per-shape",
        "The backend keeps the metadata of every shape in a dict, and `forward` reads the current one.",
        _StatePerShape,
        "decode",
        "target_verify",
    ),
    of_its_own(
        "one-object-for-all-shapes",
        "One metadata object serves all shapes: its fields become the views of the shape of each step.",
        _OneObject,
        "decode",
        "target_verify",
    ),
    of_its_own(
        "constants-bound-by-size",
        "An attribute is bound to another constant in each step, also by eager steps; all of them are kept.",
        _BoundAnew,
        "decode",
        "target_verify",
    ),
    of_its_own("backend-that-is-a-module", "The backend is a torch module with buffers.", _Module),
    of_its_own(
        "nested-metadata",
        "Metadata is nested dataclasses with properties, one of them computed once.",
        _NestedMetadata,
    ),
    of_its_own(
        "metadata-is-the-view",
        "The view is the metadata: every layer recomputes positions and tables in the graph.",
        _NoMetadata,
        "decode",
        "target_verify",
        "idle",
    ),
    of_its_own("metadata-of-narrow-types", "Metadata is int16, uint8, bool and float8.", _NarrowTypes),
    of_its_own(
        "expanded-views",
        "A field of the metadata is an expanded view of a slot; constants are expanded or overlap.",
        _ExpandedViews,
    ),
]
