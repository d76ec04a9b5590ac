"""The ``flashinfer`` attention backend: FlashInfer's paged metadata for every mode.

backend    declares and fills the index tensors
metadata   the tensors and host numbers that kernels read
rows       queries and keys counted on the host, with the fake request of an extend
kernels    the interface of a kernel provider, and the portable one
native     FlashInfer's own kernels
"""

from graphpact_flashinfer.backend import FlashInferBackend
from graphpact_flashinfer.metadata import FlashInferMetadata, PagedIndices, Plan, PlanArguments
from graphpact_flashinfer.rows import FakeRequest

__all__ = [
    "FakeRequest",
    "FlashInferBackend",
    "FlashInferMetadata",
    "PagedIndices",
    "Plan",
    "PlanArguments",
]
