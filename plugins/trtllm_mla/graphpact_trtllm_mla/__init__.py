"""The ``trtllm_mla`` attention backend: TensorRT-LLM's latent attention (MLA) over a compressed KV cache.

    backend     fills metadata, one body for every mode
    metadata    what a step reads
    providers   the kernels: TensorRT-LLM's through FlashInfer, and portable ones
    operators   what the portable kernels are made of

Does not: import a heavy library before its kernels are in use.
"""

from graphpact_trtllm_mla.backend import TRTLLMMLABackend
from graphpact_trtllm_mla.metadata import TRTLLMMLAMetadata
from graphpact_trtllm_mla.providers import NativeKernels, PortableKernels

__all__ = ["NativeKernels", "PortableKernels", "TRTLLMMLABackend", "TRTLLMMLAMetadata"]
