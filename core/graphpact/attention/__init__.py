"""The attention backend's side of the contract.

    capabilities   what a backend declares, and what a model and an engine ask of it
    providers      where a backend's kernels come from: the vendor's library, or torch alone
    backend        the base class: what it binds, refreshes and computes

Does not: choose shapes, pad batches or record graphs.
"""

from graphpact.attention.backend import (
    AttentionBackend,
    BackendContext,
    Buffers,
    DraftMetadata,
    KVBuffers,
    SlotBuffers,
    each_step,
    kv_tensors,
)
from graphpact.attention.capabilities import (
    Capabilities,
    DraftLimits,
    GraphSupport,
    HeadLayout,
    LayerSpec,
    Limits,
    require_capabilities,
)
from graphpact.attention.providers import KernelProvider, ProviderName

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
    "KernelProvider",
    "LayerSpec",
    "Limits",
    "ProviderName",
    "SlotBuffers",
    "each_step",
    "kv_tensors",
    "require_capabilities",
]
