"""The ``fa3`` attention backend: FlashAttention-3's page tables and schedule, for every mode.

    metadata    the tensors and host numbers that kernels read
    tree        index tensors of drafts with branches (top-k > 1)
    kernels     the kernel providers: portable and compiled
    native      FlashAttention's own kernels
    backend     fills the metadata and calls the kernels

Does not: serve MLA.
"""

from graphpact_fa3.backend import FA3Backend
from graphpact_fa3.kernels import FA3Kernels, PortableKernels
from graphpact_fa3.metadata import FA3Metadata, KeyRows, TreeMetadata
from graphpact_fa3.native import NativeKernels

__all__ = [
    "FA3Backend",
    "FA3Kernels",
    "FA3Metadata",
    "KeyRows",
    "NativeKernels",
    "PortableKernels",
    "TreeMetadata",
]
