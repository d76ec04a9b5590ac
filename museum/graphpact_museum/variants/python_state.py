"""Correct plugins that change host state in Python while the region runs, which a replay skips.

    counts      they count steps and keep sizes, which no result depends on
    buffers     a turn of two buffers changes in the region, but every step fills both

Does not: contain bugs; see `graphpact_museum.python_state`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import BackendContext, Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.shapes import GraphShape
from graphpact.step import Attend, Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.override import override
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import TableBackend, TableMetadata, lengths_slot, table_slot
from graphpact_museum.variants.slots import own_slot


@dataclass
class _InTurn(TableMetadata):
    """With ``ring``, two buffers ``[bs]`` of lengths."""

    ring: Sequence[torch.Tensor]


class RingOfLengths(TableBackend):
    """A backend with two buffers of lengths; the last layer of each step in Python chooses the next one."""

    fill_is_device_only = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.turn = self.filled = self.calls = 0
        self.sizes: dict[int, int] = {}

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of both buffers and the table."""
        return [lengths_slot("variant.lens"), lengths_slot("variant.lens1"), table_slot(limits)]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _InTurn:
        """Return the slots."""
        plain = super().allocate_metadata(view, shape, buffers)
        ring = [plain.lens, buffers("variant.lens1")]
        return _InTurn(plain.out_cache_loc, plain.lens, plain.table, ring)

    def fill_metadata(self, view: ForwardBatch, metadata: TableMetadata) -> None:
        """Count keys into the buffers, and copy rows of the page table."""
        assert isinstance(metadata, _InTurn)  # noqa: S101  of `allocate_metadata`
        self.filled = self.turn
        for at in self.to_fill():
            metadata.ring[at].copy_(view.seq_lens)
        self.fill_table(view, metadata.table)

    def to_fill(self) -> Sequence[int]:
        """Return the buffers that a step fills."""
        return range(2)

    def keys_of(self, metadata: TableMetadata, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table, cut by the lengths of the buffer that was filled last."""
        assert isinstance(metadata, _InTurn)  # noqa: S101  of `allocate_metadata`
        found = super().keys_of(replace(metadata, lens=metadata.ring[self.filled]), layer)
        self.calls += 1
        self.sizes[len(metadata.out_cache_loc)] = self.calls
        if layer is self.context.layers[-1]:
            self.turn = 1 - self.turn
        return found


@variant(on="reference", lanes=("decode", "idle"))
def turn_of_two_filled_buffers(_: type[Any]) -> type[Any]:
    """The region counts calls and takes two buffers in turn in Python; every step fills both buffers."""
    return RingOfLengths


def second_positions(base: type[Any]) -> type[Any]:
    """Return a runner with two slots of positions, of which its region takes one by a count of steps."""

    def slots(_: Any, right: Any) -> Sequence[GraphSlot]:
        second = own_slot(
            "positions1",
            lambda _, tokens: (tokens,),
            torch.int64,
            axis="tokens",
            padding_policy=PaddingPolicy.ZERO,
        )
        return [*right(), second]

    def populate(
        _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> None:
        right(registry, batch, shape)
        first, second = both_positions(registry, shape)
        second.copy_(first)

    def compose(self: Any, right: Any, forward: Forward, step: RegionContext) -> Region:
        positions = step.view.positions
        if step.registry is not None:
            positions = both_positions(step.registry, step.shape)[self.steps % 2]

        def in_turn(batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
            return forward(replace(batch, positions=positions), metadata, attend)

        region: Region = right(in_turn, step)

        def counted() -> StepOutputs:
            self.steps += 1
            return region()

        return counted

    return override(base, slots, populate, compose, steps=0)


def both_positions(registry: CudaGraphBufferRegistry, shape: GraphShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both slots of positions."""
    first, second = (
        registry.get_slot(name).slice_for(shape.batch_size, shape.num_tokens)
        for name in ("positions", "variant.positions1")
    )
    return first, second


@variant(on="cuda_graph", lanes=("decode", "target_verify"))
def turn_of_two_filled_slots(base: type[Any]) -> type[Any]:
    """The region counts its steps and takes two slots of positions in turn; every step fills both."""
    return second_positions(base)
