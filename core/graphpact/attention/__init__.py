"""The attention backend's side of the contract.

    capabilities   what a backend supports, and what models and engines require
    context        the constructor argument of a backend, with the KV cache
    providers      sets of kernels: the vendor's library, or torch only
    backend        the base class

Does not: choose shapes, pad batches or record graphs.
"""

from graphpact.attention.backend import (
    AttentionBackend,
    Buffers,
    DraftMetadata,
    PlanInvariant,
    each_step,
    new_kv,
)
from graphpact.attention.capabilities import (
    Capabilities,
    DraftLimits,
    GraphSupport,
    HeadLayout,
    LayerSpec,
    Limits,
)
from graphpact.attention.context import BackendContext, KernelName, KVBuffers, ProviderName, kv_tensors
from graphpact.attention.providers import KernelProvider

__all__ = [
    "AttentionBackend",
    "BackendContext",
    "Buffers",
    "Capabilities",
    "DraftLimits",
    "DraftMetadata",
    "GraphSupport",
    "HeadLayout",
    "KVBuffers",
    "KernelName",
    "KernelProvider",
    "LayerSpec",
    "Limits",
    "PlanInvariant",
    "ProviderName",
    "each_step",
    "kv_tensors",
    "new_kv",
]
