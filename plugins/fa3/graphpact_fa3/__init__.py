"""The ``fa3`` attention backend: FlashAttention-3's page tables and schedule, for every mode.

    metadata    what a step's kernels read
    tree        index tensors of drafts that are trees
    kernels     portable ones, and FlashAttention's own
    backend     fills the one and calls the other

Does not: serve latents (MLA).
"""

from graphpact_fa3.backend import FA3Backend
from graphpact_fa3.kernels import FA3Kernels, NativeKernels, PortableKernels
from graphpact_fa3.metadata import FA3Metadata, KeyRows, TreeMetadata

__all__ = [
    "FA3Backend",
    "FA3Kernels",
    "FA3Metadata",
    "KeyRows",
    "NativeKernels",
    "PortableKernels",
    "TreeMetadata",
]
