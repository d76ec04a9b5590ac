"""The ``flashinfer`` attention backend: FlashInfer's paged metadata for every mode.

    backend    the index tensors, and what fills them
    metadata   what the kernels read
    rows       what is counted on the host, the fake request of an extend among it
    kernels    what a provider does, and the portable one
    native     FlashInfer's own kernels

Does not: capture anything; a runner does.
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
