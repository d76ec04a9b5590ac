"""The attention backend's side of the contract.

    capabilities   what a backend declares, and what a model and an engine ask of it
    context        what a backend is built with, the KV cache among it
    providers      where a backend's kernels come from: the vendor's library, or torch alone
    backend        the base class: what it binds, refreshes and computes

Does not: choose shapes, pad batches or record graphs.
"""

from graphpact.attention.backend import (
    AttentionBackend,
    Buffers,
    DraftMetadata,
    SlotBuffers,
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
from graphpact.attention.context import BackendContext, KVBuffers, ProviderName, kv_tensors
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
    "KernelProvider",
    "LayerSpec",
    "Limits",
    "ProviderName",
    "SlotBuffers",
    "each_step",
    "kv_tensors",
    "new_kv",
]
