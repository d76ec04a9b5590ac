"""Declared graph-resident memory: slots, their padding policies, and the registry that fills them.

    slots.py         `GraphSlot`: one declaration; `BoundSlot`: with its memory
    registry.py      `CudaGraphBufferRegistry`: the slots of one lane, and the fill of a step
    fills.py         `FillPlan`: the work of a fill for one set of counts, compiled
    arenas.py        `Arenas`: slots in one allocation, so that one copy resets their padding rows
    sharing.py       memory that lanes share
    inputs.py        the declared inputs of every mode
    description.py   a registry's contents as data

Does not: know what the numbers in a slot mean; only the owner of a slot does.
"""

from graphpact.buffers.inputs import build_decode_registry, build_prefill_registry, input_slots
from graphpact.buffers.registry import CudaGraphBufferRegistry
from graphpact.buffers.sharing import SharedBuffers, share_input_buffer
from graphpact.buffers.slots import (
    Axis,
    BoundSlot,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SlotRole,
    metadata_slot,
)
from graphpact.parallel import (
    compute_local_num_token_non_padded,
    get_attention_tp_rank,
    get_attention_tp_size,
    get_parallel,
)

__all__ = [
    "Axis",
    "BoundSlot",
    "CudaGraphBufferRegistry",
    "FillContext",
    "GraphSlot",
    "PaddingPolicy",
    "SharedBuffers",
    "SlotRole",
    "build_decode_registry",
    "build_prefill_registry",
    "compute_local_num_token_non_padded",
    "get_attention_tp_rank",
    "get_attention_tp_size",
    "get_parallel",
    "input_slots",
    "metadata_slot",
    "share_input_buffer",
]
