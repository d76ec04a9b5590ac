"""Correct backends, written from scratch, that keep constants, staging memory and state as other engines do.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import BackendContext, Buffers, GraphSupport, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.graphs import Event
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import (
    UNIFORM_MODES,
    DecodeBackend,
    TableBackend,
    TableMetadata,
    capabilities,
    lengths_slot,
    table_slot,
)

# -- constants and tables ----------------------------------------------------------------------------


class _ConstantsByLimits(TableBackend):
    """A backend with an arange of requests and a causal mask outside the registry, sized by the limits."""

    capabilities = capabilities(modes=UNIFORM_MODES, graph_support=GraphSupport.UNIFORM)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        most, device = context.limits, context.device
        self.requests = torch.arange(most.max_bs + 1, device=device)
        self.causal = torch.ones(most.max_context_len, most.max_context_len, device=device).bool().tril()

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the request of each token from the arange, and the keys that it sees from the mask."""
        del layer
        bs, tokens = len(metadata.lens), len(metadata.out_cache_loc)
        width = tokens // max(bs, 1)
        begins = self.requests[: bs + 1] * width  # cu_seqlens
        request = torch.searchsorted(begins, begins.new_ones(tokens).cumsum(0) - 1, right=True) - 1
        back = (request + 1) * width - begins.new_ones(tokens).cumsum(0)  # tokens after this one
        return metadata.table[request], self.causal[metadata.lens[request] - 1 - back]


@variant(on="reference", lanes=("decode", "target_verify", "idle"))
def constants_by_limits(_: type[Any]) -> type[Any]:
    """An arange of `max_bs + 1` and a causal mask of `max_context_len` are kept outside the registry."""
    return _ConstantsByLimits


@dataclass
class _Pages:
    """``out_cache_loc`` ``[bs]``, ``lens`` ``[bs]``, and ``pages`` ``[n, bs]`` int32: page ids by column."""

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    pages: torch.Tensor


class _TransposedTable(DecodeBackend):
    """A backend with a table of page ids, int32, with a column for each request."""

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


@variant(on="reference", lanes=("decode", "idle"))
def transposed_table(_: type[Any]) -> type[Any]:
    """A table of page ids has a column for each request."""
    return _TransposedTable


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
    """A backend that counts in lists on the host, and copies all numbers at once from two buffers in turn."""

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
        if not metadata.staging:  # these numbers are not written again
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


@variant(on="reference", lanes=("decode", "idle"))
def double_buffered_staging(_: type[Any]) -> type[Any]:
    """Lists on the host become one packed tensor, copied from two host buffers in turn."""
    return _DoubleBuffered


# -- state -------------------------------------------------------------------------------------------


class _StatePerShape(_ConstantsByLimits):
    """A backend that keeps the metadata of every shape in a dict; `forward` ignores its argument."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.by_shape: dict[GraphShape, TableMetadata] = {}
        self.current: TableMetadata | None = None

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> TableMetadata:
        """Make the metadata of a shape, and keep it."""
        made: TableMetadata = super().init_metadata_capture(view, shape)
        self.current = self.by_shape[shape] = made
        return made

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: TableMetadata
    ) -> TableMetadata:
        """Refresh the metadata that is kept for the shape."""
        del captured
        self.current = self.by_shape[shape]
        found: TableMetadata = super().init_metadata_replay(view, shape, self.current)
        return found

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> TableMetadata:
        """Make new metadata, and make it the current one."""
        made: TableMetadata = super().init_metadata_eager(batch, fill=fill)
        self.current = made
        return made

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Attend by the current metadata."""
        del metadata
        return super().forward(q, k, v, layer, self.current)


@variant(on="reference", lanes=("decode", "target_verify"))
def state_per_shape(_: type[Any]) -> type[Any]:
    """The backend keeps the metadata of every shape in a dict, and `forward` reads the current one."""
    return _StatePerShape


class _OneObject(_ConstantsByLimits):
    """A backend with one metadata object for all shapes; its fields are the views of the current shape."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.only: TableMetadata | None = None
        self.views: dict[GraphShape, TableMetadata] = {}

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> TableMetadata:
        """Make the views of a shape, and put them into the object."""
        self.views[shape] = super().init_metadata_capture(view, shape)
        return self._showing(shape)

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: TableMetadata
    ) -> TableMetadata:
        """Put the views of a shape into the object, and refresh them."""
        del captured
        found: TableMetadata = super().init_metadata_replay(view, shape, self._showing(shape))
        return found

    def _showing(self, shape: GraphShape) -> TableMetadata:
        views = self.views[shape]
        self.only = self.only or replace(views)
        vars(self.only).update(vars(views))
        return self.only


@variant(on="reference", lanes=("decode", "target_verify"))
def one_object_for_all_shapes(_: type[Any]) -> type[Any]:
    """One metadata object serves all shapes: its fields become the views of the shape of each step."""
    return _OneObject


class _BoundAnew(_ConstantsByLimits):
    """A backend with a constant for every batch size; each step binds its constant to an attribute."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        sizes = range(context.limits.max_bs + 1)
        self.by_size = [torch.arange(size + 1, device=context.device) for size in sizes]

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> TableMetadata:
        """Bind the constant of the shape."""
        self.requests = self.by_size[shape.batch_size]
        made: TableMetadata = super().init_metadata_capture(view, shape)
        return made

    @hookimpl
    def init_metadata_replay(
        self, view: ForwardBatch, shape: GraphShape, captured: TableMetadata
    ) -> TableMetadata:
        """Bind the constant of the shape."""
        self.requests = self.by_size[shape.batch_size]
        found: TableMetadata = super().init_metadata_replay(view, shape, captured)
        return found

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> TableMetadata:
        """Bind the constant of the batch."""
        self.requests = self.by_size[batch.batch_size]
        made: TableMetadata = super().init_metadata_eager(batch, fill=fill)
        return made


@variant(on="reference", lanes=("decode", "target_verify"))
def constants_bound_by_size(_: type[Any]) -> type[Any]:
    """Each step, even an eager one, binds an attribute to the constant of its size; all of these are kept."""
    return _BoundAnew


class _Module(TableBackend, torch.nn.Module):
    """A backend that is a torch module, with its constants as buffers."""

    def __init__(self, context: BackendContext) -> None:
        torch.nn.Module.__init__(self)
        TableBackend.__init__(self, context)
        self.index: torch.Tensor
        self.register_buffer("index", torch.arange(context.limits.max_context_len, device=context.device))

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the buffer with the lengths."""
        del layer
        return metadata.table, self.index < metadata.lens[:, None]


@variant(on="reference", lanes=("decode", "idle"))
def backend_that_is_a_module(_: type[Any]) -> type[Any]:
    """The backend is a torch module with buffers."""
    return _Module
