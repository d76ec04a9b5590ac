"""Graph-resident memory, declared: slots, their padding policies, and the registry that fills them.

Does not: know what the numbers in a slot mean; owners do.
"""

from graphpact.buffers.presets import build_decode_registry
from graphpact.buffers.registry import CudaGraphBufferRegistry
from graphpact.buffers.slots import FillContext, GraphSlot, PaddingPolicy

__all__ = [
    "CudaGraphBufferRegistry",
    "FillContext",
    "GraphSlot",
    "PaddingPolicy",
    "build_decode_registry",
]
