"""A correct backend whose kernels are custom operators. Each is one node of a graph, like a kernel launch.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.graphs import declare_kernel
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.attention import (
    DecodeBackend,
    attend,
    lengths_slot,
    table_slot,
)

CHUNK = 16
"""The number of keys in a chunk, the unit of work."""


@declare_kernel
@torch.library.custom_op("graphpact_museum::write_kv", mutates_args=("k_cache", "v_cache"))
def _write_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write keys and values, except for rows with slot -1."""
    is_live = slots >= 0
    k_cache[slots[is_live]] = k[is_live]
    v_cache[slots[is_live]] = v[is_live]


@declare_kernel
@torch.library.custom_op("graphpact_museum::plan", mutates_args=("work",))
def _plan(lens: torch.Tensor, work: torch.Tensor) -> None:
    """List the chunks of all requests as pairs of request and chunk, longest requests first; fill with -1."""
    order = sorted(range(len(lens)), key=lambda row: -int(lens[row]))
    listed = [(row, chunk) for row in order for chunk in range(-(-int(lens[row]) // CHUNK))]
    work.fill_(-1)
    work[: len(listed)] = torch.tensor(listed, dtype=work.dtype).view(-1, 2)


@declare_kernel
@torch.library.custom_op("graphpact_museum::seen", mutates_args=("seen",))
def _seen(lens: torch.Tensor, work: torch.Tensor, seen: torch.Tensor) -> None:
    """Mark the keys of the listed chunks, up to the length of each request."""
    seen.zero_()
    for row, chunk in work.tolist():
        if row >= 0:
            seen[row, chunk * CHUNK : min((chunk + 1) * CHUNK, int(lens[row]))] = True


@dataclass
class _Work:
    """The metadata of a step.

    Args:
        slot_mapping: ``[bs]`` int64: the slot that each token writes; -1 for scratch.
        lens: ``[bs]`` int64.
        table: ``[bs, n]`` int64.
        work: ``[m, 2]`` int32: the chunks of this batch, then -1.
    """

    slot_mapping: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    work: torch.Tensor


class _CustomOps(DecodeBackend):
    """A backend that skips tokens with slot -1, and reads the chunks of a plan that the device makes."""

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return slots of lengths, table, slot mapping and plan."""
        most = -(-limits.max_context_len // CHUNK)
        work = metadata_slot(
            "variant.work", lambda bs, _: (bs * most, 2), torch.int32, role="plan", axis="none"
        )
        return [lengths_slot(), lengths_slot("variant.slot_mapping"), table_slot(limits), work]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Work:
        """Return the slots, and the part of the plan that the shape may need."""
        del view
        most = -(-self.context.limits.max_context_len // CHUNK)
        return _Work(
            buffers("variant.slot_mapping"),
            buffers("variant.lens"),
            buffers("variant.table"),
            buffers("variant.work")[: shape.batch_size * most],
        )

    def fill_metadata(self, view: ForwardBatch, metadata: _Work) -> None:
        """Mark tokens on scratch, count keys, and plan."""
        is_scratch = view.out_cache_loc < self.context.limits.page_size
        metadata.slot_mapping.copy_(view.out_cache_loc.masked_fill(is_scratch, -1))
        metadata.lens.copy_(view.seq_lens)
        self.fill_table(view, metadata.table)
        _plan(metadata.lens, metadata.work)

    def keys_of(self, metadata: _Work, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the planned chunks."""
        del layer
        seen = torch.empty(metadata.table.shape, dtype=torch.bool, device=metadata.table.device)
        _seen(metadata.lens, metadata.work, seen)
        return metadata.table, seen

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: _Work,
    ) -> torch.Tensor:
        """Write, attend, and clear padding rows if keys are written, because theirs are not."""
        k_cache, v_cache = self.caches(layer)
        if k is not None and v is not None:
            _write_kv(k_cache, v_cache, k, v, metadata.slot_mapping)
        slots, seen = self.keys_of(metadata, layer)
        out = attend(q, k_cache, v_cache, slots, seen, layer)
        if k is None:
            return out  # on a frozen cache live tokens have slot 0 too
        is_live = metadata.slot_mapping >= 0
        return torch.where(is_live[:, None, None], out, 0)


@variant(on="reference", lanes=("decode", "idle"))
def kernels_that_are_custom_ops(_: type[Any]) -> type[Any]:
    """Kernels are custom operators: one plans on the device, and one skips tokens with slot -1."""
    return _CustomOps
