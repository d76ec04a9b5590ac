"""Exhibits of optional fields: each is right in lanes without them, except those of ranks that gather.

Multimodal positions, encoder lengths, indices of recurrent states, and counts of tokens.

Does not: run exhibits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, FillContext, GraphSlot, fills
from graphpact.parallel import local_num_token_non_padded
from graphpact.shapes import GraphShape
from graphpact_conformance.world.fields import COUNT, GATHERED, MROPE
from graphpact_museum.exhibit import Exhibit, Make
from graphpact_museum.runners import after_fill


def _with_slots(change: Callable[[Any, GraphSlot], GraphSlot | None]) -> Make:
    """Return a factory of runners that declare other slots; None leaves a slot out."""

    def make(base: type[Any]) -> type[Any]:
        class WithSlots(base):  # type: ignore[misc]
            """A runner with other slots."""

            def slots(self) -> Sequence[GraphSlot]:
                """Return the changed slots."""
                changed = (change(self, slot) for slot in super().slots())
                return [slot for slot in changed if slot is not None]

        return WithSlots

    return make


# -- multimodal positions ----------------------------------------------------------------------------


def _positions_of_the_capture(
    runner: Any, registry: CudaGraphBufferRegistry, _: ForwardBatch, shape: GraphShape
) -> None:
    if not registry.has_slot(MROPE):
        return
    whole = registry.get_slot(MROPE).slice_for(shape.batch_size, shape.num_tokens)
    kept = vars(runner).setdefault("positions_of_captures", {})
    whole.copy_(kept.setdefault(shape, whole.clone()))


# -- requests ----------------------------------------------------------------------------------------


_Head = fills._Head  # noqa: SLF001  the registry is edited in place
_pair = _Head.pair


def _no_copy_of_absent(copied: Any, batch: ForwardBatch, context: FillContext) -> Any:
    """Return what a fill copies to a slot, and nothing for a field that the batch lacks."""
    found = _pair(copied, batch, context)
    return None if getattr(batch, copied.slot.name, None) is None else found


def _last_index(
    runner: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """Give padding rows the last index, and set their mask."""
    if not registry.has_slot("mamba_track_indices"):
        return
    for name, value in (("mamba_track_indices", runner.context.limits.max_bs), ("mamba_track_mask", 1)):
        registry.get_slot(name).slice_for(shape.batch_size, shape.num_tokens)[batch.batch_size :] = value


# -- counts ------------------------------------------------------------------------------------------


def _live_counts(_: Any, slot: GraphSlot) -> GraphSlot:
    def post_fill(buffer: torch.Tensor, _: ForwardBatch, context: FillContext) -> None:
        buffer.fill_(context.raw_num_tokens)

    return replace(slot, post_fill=post_fill) if slot.name in GATHERED else slot


def _counted_where_gathered(runner: Any, slot: GraphSlot) -> GraphSlot | None:
    return None if slot.name == COUNT and not runner.context.require_gathered_buffer else slot


def _always_a_share(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    if registry.has_slot(COUNT) and batch.num_token_non_padded_cpu is not None:
        share = local_num_token_non_padded(batch.num_token_non_padded_cpu, shape.num_tokens)
        registry.get_slot(COUNT).slice_for(0, 0).fill_(share)


EXHIBITS = (
    *(
        Exhibit(
            name=f"{base.replace('_', '-')}-misses-multimodal-positions",
            rule="GP02",
            thread="sgl-project/sglang#39088",
            planted="Multimodal positions of a decode are those of the capture.",
            base=base,
            lanes=(lane,),
            make=after_fill(_positions_of_the_capture),
            values=("fields",),
            site="runner",
        )
        for base, lane in (("cuda_graph", "decode"), ("eagle_draft", "draft_decode"))
    ),
    Exhibit(
        name="registry-keeps-encoder-lengths",
        rule="GP02",
        thread="sgl-project/sglang#21161",
        planted="Requests without an encoder input keep the encoder lengths of an earlier batch.",
        base="reference_runner",
        lanes=("decode",),
        around=lambda: patch.object(_Head, "pair", _no_copy_of_absent),
        values=("fields",),
        site="registry",
    ),
    Exhibit(
        name="runner-pads-by-the-last-recurrent-state",
        rule="GP04",
        thread="sgl-project/sglang#38997",
        planted="Padding rows keep their recurrent state at the last index, which a request may own.",
        base="reference_runner",
        lanes=("decode",),
        make=after_fill(_last_index),
        values=("fields",),
        site="runner",
    ),
    Exhibit(
        name="runner-gathers-live-tokens",
        rule="GP05",
        thread="vllm-project/vllm#25906",
        planted="The counts of gathered tokens are those of live tokens, and ranks gather padded ones.",
        base="reference_runner",
        lanes=("decode",),
        make=_with_slots(_live_counts),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-counts-tokens-where-ranks-gather",
        rule="GP05",
        thread="sgl-project/sglang#35588",
        planted="The count of live tokens has a slot only where ranks gather, and layers need it elsewhere.",
        base="cuda_graph",
        lanes=("decode",),
        make=_with_slots(_counted_where_gathered),
        values=("fields",),
        site="runner",
    ),
    Exhibit(
        name="cuda-graph-shares-a-count-that-is-not-gathered",
        rule="GP17",
        thread="sgl-project/sglang#22404",
        planted="The count of live tokens is a rank's share, also where each rank has all tokens.",
        base="cuda_graph",
        lanes=("decode",),
        make=after_fill(_always_a_share),
        values=("fields",),
        site="runner",
    ),
)
"""The exhibits of this room."""
