"""The ``trtllm_mla`` attention backend: TensorRT-LLM's latent attention (MLA) over a compressed KV cache.

    backend     fills the metadata, with one function for every mode
    metadata    the tensors and host numbers that kernels read
    providers   the kernels: TensorRT-LLM's through FlashInfer, compiled and portable ones
    operators   the operators of graphpact's own kernels

Does not: import a heavy library before its kernels are used.
"""

from graphpact_trtllm_mla.backend import TRTLLMMLABackend
from graphpact_trtllm_mla.metadata import TRTLLMMLAMetadata
from graphpact_trtllm_mla.providers import NativeKernels, PortableKernels

__all__ = ["NativeKernels", "PortableKernels", "TRTLLMMLABackend", "TRTLLMMLAMetadata"]
