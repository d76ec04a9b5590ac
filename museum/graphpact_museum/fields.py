"""Exhibits of optional fields: multimodal positions, encoder lengths, recurrent states, counts of tokens.

Each is right in lanes without these fields, except for the one about ranks that gather.
"""

from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, FillContext, GraphSlot, fills
from graphpact.parallel import local_num_token_non_padded
from graphpact.shapes import GraphShape
from graphpact_conformance.draws.fields import COUNT, GATHERED, MROPE
from graphpact_museum.edits.override import overrides, replaces
from graphpact_museum.edits.runners import after_fill
from graphpact_museum.exhibit import exhibit

# -- multimodal positions ----------------------------------------------------------------------------


@exhibit(
    "GP02",
    "sgl-project/sglang#39088",
    on="cuda_graph",
    lanes="decode",
    values=("fields",),
    prefix="cuda-graph",
)
@exhibit(
    "GP02",
    "sgl-project/sglang#39088",
    on="eagle_draft",
    lanes="draft_decode",
    values=("fields",),
    prefix="eagle-draft",
)
@after_fill
def misses_multimodal_positions(
    runner: Any, registry: CudaGraphBufferRegistry, _: ForwardBatch, shape: GraphShape
) -> None:
    """Multimodal positions of a decode stay those of the capture."""
    if not registry.has_slot(MROPE):
        return
    whole = registry.get_slot(MROPE).slice_for(shape.batch_size, shape.num_tokens)
    kept = vars(runner).setdefault("positions_of_captures", {})
    whole.copy_(kept.setdefault(shape, whole.clone()))


# -- requests ----------------------------------------------------------------------------------------


@exhibit(
    "GP02",
    "sgl-project/sglang#21161",
    on="reference_runner",
    lanes="decode",
    values=("fields",),
    site="registry",
)
@replaces(fills._Head, "pair")  # noqa: SLF001  the registry is edited in place
def registry_keeps_encoder_lengths(right: Any, copied: Any, batch: ForwardBatch, context: FillContext) -> Any:
    """Requests without an encoder input keep the encoder lengths of an earlier batch."""
    found = right(copied, batch, context)
    return None if getattr(batch, copied.slot.name, None) is None else found


@exhibit("GP04", "sgl-project/sglang#38997", on="reference_runner", lanes="decode", values=("fields",))
@after_fill
def runner_pads_by_the_last_recurrent_state(
    runner: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """Padding rows keep their recurrent state at the last index, which a request may own."""
    if not registry.has_slot("mamba_track_indices"):
        return
    for name, value in (("mamba_track_indices", runner.context.limits.max_bs), ("mamba_track_mask", 1)):
        registry.get_slot(name).slice_for(shape.batch_size, shape.num_tokens)[batch.batch_size :] = value


# -- counts ------------------------------------------------------------------------------------------


@exhibit("GP05", "vllm-project/vllm#25906", on="reference_runner", lanes="decode")
@overrides("slots")
def runner_gathers_live_tokens(_: Any, right: Any) -> list[GraphSlot]:
    """The counts of gathered tokens count only live tokens, but ranks gather padding tokens too."""

    def post_fill(buffer: torch.Tensor, _: ForwardBatch, context: FillContext) -> None:
        buffer.fill_(context.raw_num_tokens)

    return [replace(slot, post_fill=post_fill) if slot.name in GATHERED else slot for slot in right()]


@exhibit("GP05", "sgl-project/sglang#35588", on="cuda_graph", lanes="decode", values=("fields",))
@overrides("slots")
def cuda_graph_counts_tokens_where_ranks_gather(self: Any, right: Any) -> list[GraphSlot]:
    """The count of live tokens has a slot only where ranks gather, but layers need it elsewhere too."""
    gathers = self.context.require_gathered_buffer
    return [slot for slot in right() if slot.name != COUNT or gathers]


@exhibit("GP17", "sgl-project/sglang#22404", on="cuda_graph", lanes="decode", values=("fields",))
@after_fill
def cuda_graph_shares_a_count_that_is_not_gathered(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """The count of live tokens is the share of a rank, even where each rank has all tokens."""
    if registry.has_slot(COUNT) and batch.num_token_non_padded_cpu is not None:
        share = local_num_token_non_padded(batch.num_token_non_padded_cpu, shape.num_tokens)
        registry.get_slot(COUNT).slice_for(0, 0).fill_(share)
