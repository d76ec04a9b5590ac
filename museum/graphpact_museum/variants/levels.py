"""Correct backends for each level of graph support, with a kernel for the level and a loop for the rest.

The kernel is device work. The loop runs on the host, over requests, and reads lengths from the device. It
must not be captured, and it is not.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from graphpact.attention import Buffers, GraphSupport, LayerSpec, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import (
    DecodeBackend,
    capabilities,
    lengths_slot,
    table_slot,
)

_MODES = frozenset(
    {
        ForwardMode.DECODE,
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
        ForwardMode.TARGET_VERIFY,
        ForwardMode.IDLE,
    }
)
_LANES = ("decode", "extend", "extend_segments", "mixed", "target_verify", "idle")


@dataclass
class _Offsets:
    """The metadata of a step.

    Args:
        out_cache_loc: ``[T]`` int64.
        lens: ``[bs]`` int64: keys of each request, new ones included.
        table: ``[bs, n]`` int64: KV slots by position.
        cu_seqlens: ``[bs + 1]`` int32: the first new token of each request, and the end.
        width: New tokens of each request; None if they differ.
    """

    out_cache_loc: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    cu_seqlens: torch.Tensor
    width: int | None


class _NeverBackend(DecodeBackend):
    """A backend that loops over requests on the host in all batches."""

    capabilities = capabilities(modes=_MODES, graph_support=GraphSupport.NEVER)

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of lengths, table and offsets."""
        offsets = metadata_slot(
            "variant.cu_seqlens",
            lambda bs, _: (bs + 1,),
            torch.int32,
            role="offsets",
            axis="bs",
            extra_rows=1,
        )
        return [lengths_slot(), table_slot(limits), offsets]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Offsets:
        """Return the slots, and the width of a batch that has one."""
        del shape
        lens, table, offsets = (buffers(f"variant.{name}") for name in ("lens", "table", "cu_seqlens"))
        # An idle batch in a lane of prefill has the metadata of that lane.
        width = None if self.context.mode.is_ragged else view.tokens_per_request
        return _Offsets(view.out_cache_loc, lens, table, offsets, width)

    def fill_metadata(self, view: ForwardBatch, metadata: _Offsets) -> None:
        """Count keys and new tokens."""
        metadata.lens.copy_(view.seq_lens + view.uncounted_keys)
        self.fill_table(view, metadata.table)
        new = view.extend_seq_lens
        if new is None:
            new = torch.full_like(view.seq_lens, view.tokens_per_request)
        metadata.cu_seqlens[:1].zero_()
        metadata.cu_seqlens[1:].copy_(new.cumsum(0))

    def keys_of(self, metadata: _Offsets, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Loop over requests on the host; padding tokens see only the first slot of scratch."""
        del layer
        tokens, device = len(metadata.out_cache_loc), metadata.table.device
        slots = torch.zeros(tokens, metadata.table.shape[1], dtype=torch.int64, device=device)
        seen = torch.zeros_like(slots, dtype=torch.bool)
        seen[:, 0] = True
        ends, lens = metadata.cu_seqlens.tolist(), metadata.lens.tolist()
        for row, (begin, end) in enumerate(pairwise(ends)):
            for token in range(begin, end):
                slots[token] = metadata.table[row]
                seen[token] = torch.arange(slots.shape[1], device=device) < lens[row] - (end - 1 - token)
        return slots, seen


@variant(on="reference", lanes=_LANES)
def support_never(_: type[Any]) -> type[Any]:
    """Attention is a loop on the host, which no graph contains."""
    return _NeverBackend


class _UniformDecodeBackend(_NeverBackend):
    """A backend with a kernel for batches with one token per request."""

    capabilities = capabilities(modes=_MODES, graph_support=GraphSupport.UNIFORM_DECODE)
    widest: int | None = 1

    def keys_of(self, metadata: _Offsets, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the keys on the device if the level covers the batch."""
        width = metadata.width
        if width is None or (self.widest is not None and width > self.widest):
            return super().keys_of(metadata, layer)
        lens, at = metadata.lens, torch.arange(metadata.table.shape[1], device=metadata.table.device)
        back = torch.arange(width - 1, -1, -1, device=lens.device)  # tokens of the request after each one
        last = (lens[:, None] - 1 - back).flatten()
        return metadata.table.repeat_interleave(width, dim=0), at <= last[:, None]


@variant(on="reference", lanes=_LANES)
def support_uniform_decode(_: type[Any]) -> type[Any]:
    """Graphs hold batches with one token per request; other batches need a loop on the host."""
    return _UniformDecodeBackend


class _UniformBackend(_UniformDecodeBackend):
    """A backend with a kernel for batches with equally many tokens per request."""

    capabilities = capabilities(modes=_MODES, graph_support=GraphSupport.UNIFORM)
    widest = None


@variant(on="reference", lanes=_LANES)
def support_uniform(_: type[Any]) -> type[Any]:
    """Graphs hold batches with equally many tokens per request; ragged batches need a loop on the host."""
    return _UniformBackend


class _AlwaysBackend(_UniformBackend):
    """A backend with a kernel for batches of every kind."""

    capabilities = capabilities(modes=_MODES, graph_support=GraphSupport.ALWAYS)

    def keys_of(self, metadata: _Offsets, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the request of each token; padding tokens of a ragged batch come after the last request."""
        if metadata.width is not None:
            return super().keys_of(metadata, layer)
        bs, device = len(metadata.lens), metadata.table.device
        token = torch.arange(len(metadata.out_cache_loc), device=device)
        request = torch.searchsorted(metadata.cu_seqlens[1:].long(), token, right=True)
        own, is_live = request.clamp(max=bs - 1), request < bs
        back = metadata.cu_seqlens[1:][own] - 1 - token
        last = torch.where(is_live, metadata.lens[own] - 1 - back, 0)
        slots = metadata.table[own].masked_fill(~is_live[:, None], 0)
        return slots, torch.arange(slots.shape[1], device=device) <= last[:, None]


@variant(on="reference", lanes=_LANES)
def support_always(_: type[Any]) -> type[Any]:
    """Graphs hold batches of every kind."""
    return _AlwaysBackend


class _PaddedRowsBackend(_NeverBackend):
    """A backend that takes exactly as many queries as its shape has tokens, and refuses any other number."""

    capabilities = replace(_NeverBackend.capabilities, eager_rows="padded")


@variant(on="reference", lanes=_LANES)
def support_never_with_padded_rows(_: type[Any]) -> type[Any]:
    """Attention is a loop on the host over all rows of the shape."""
    return _PaddedRowsBackend


class _PlannedBackend(_AlwaysBackend):
    """A backend with a plan from the host: the length of each request, rounded up to a multiple of 16."""

    capabilities = replace(_AlwaysBackend.capabilities, needs_host_plan=True)

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Add a slot for the plan."""
        plan = metadata_slot("variant.plan", lambda bs, _: (bs,), torch.int64, role="plan", axis="bs")
        return [*super().declare_slots(limits), plan]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        """Return the metadata and the plan."""
        return _WithPlan(
            **vars(super().allocate_metadata(view, shape, buffers)), plan=buffers("variant.plan")
        )

    def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Copy a plan from new host memory, which is not written again."""
        plan = (view.seq_lens_cpu + view.uncounted_keys + 15) // 16 * 16
        if self.driver is None:
            metadata.plan.copy_(plan)
        else:
            self.driver.copy_async(metadata.plan, plan)

    def keys_of(self, metadata: Any, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut the keys by the plan."""
        slots, seen = super().keys_of(metadata, layer)
        token = torch.arange(len(slots), device=slots.device)
        request = torch.searchsorted(metadata.cu_seqlens[1:].long(), token, right=True)
        planned = torch.cat([metadata.plan, metadata.plan.new_ones(1)])[request]
        return slots, seen & (torch.arange(slots.shape[1], device=slots.device) < planned[:, None])


@variant(on="reference", lanes=_LANES)
def support_always_with_a_host_plan(_: type[Any]) -> type[Any]:
    """Graphs hold batches of every kind, each with a plan from the host."""
    return _PlannedBackend


@dataclass
class _WithPlan(_Offsets):
    """`_Offsets`, and ``plan`` ``[bs]`` int64: the most keys of each request."""

    plan: torch.Tensor
