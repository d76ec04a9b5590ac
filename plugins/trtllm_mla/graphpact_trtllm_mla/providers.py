"""The kernel providers of the backend: TensorRT-LLM's kernels, from FlashInfer, and graphpact's own.

All read the same tensors of the metadata: block table, keys of each request, query offsets.

Does not: make metadata; see `graphpact_trtllm_mla.backend`.
"""

import importlib.util
from collections.abc import Callable
from typing import ClassVar

import torch

from graphpact import BackendContext, Capabilities, ForwardMode, GraphSlot, LayerSpec, metadata_slot
from graphpact.attention import GraphSupport, HeadLayout, KernelName, KernelProvider
from graphpact_kernels.compiled import CompiledProvider
from graphpact_trtllm_mla.metadata import TRTLLMMLAMetadata
from graphpact_trtllm_mla.operators import attend_latents, attend_latents_compiled

WORKSPACE, WORKSPACE_BYTES = "trtllm_mla.workspace", 128 * 2**20
_RANK, _ROPE = 512, 64
_RAGGED = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})


class PortableKernels(KernelProvider):
    """graphpact's own kernels: torch only, on any device, for any head_dim."""

    name: ClassVar[KernelName] = "portable"
    has_workspace = False
    compiled: ClassVar[bool] = False
    """Whether graphpact's kernels of this provider are the C++ ones."""
    _attend: ClassVar[Callable[..., None]] = attend_latents

    def declare_slots(self) -> list[GraphSlot]:
        """Return an empty list: these kernels need no slots."""
        return []

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: LayerSpec,
        metadata: TRTLLMMLAMetadata,
    ) -> torch.Tensor:
        """Return ``[T, heads, rank]``; see `NativeKernels.attend`."""
        out = q.new_empty((*q.shape[:2], layer.v_head_dim))
        self._attend(
            q,
            kv_cache,
            metadata.block_kv_indices,
            metadata.seq_lens_k,
            metadata.cu_seqlens_q,
            metadata.max_seq_len_q,
            metadata.max_seq_len_k,
            layer.scaling,
            metadata.is_uniform,
            out,
        )
        return out


class CompiledKernels(CompiledProvider, PortableKernels):
    """The portable kernels with attention in C++, on a CPU."""

    _attend = attend_latents_compiled


class NativeKernels(KernelProvider):
    """``flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla``, on GPUs of compute capability 10."""

    name = "native"
    has_workspace = True
    compiled = False
    capabilities = Capabilities(
        modes=frozenset(ForwardMode) - _RAGGED,
        graph_support=GraphSupport.UNIFORM,
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({"cuda"}),
        head_layouts=frozenset({HeadLayout.MLA}),
        page_sizes=frozenset({32, 64}),
        head_dims=frozenset({_RANK + _ROPE}),
        seq_len_fill_value=1,
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        from flashinfer.mla import (  # type: ignore[import-not-found]  # noqa: PLC0415  heavy, optional
            trtllm_batch_decode_with_kv_cache_mla,
        )

        self._decode: Callable[..., torch.Tensor] = trtllm_batch_decode_with_kv_cache_mla

    def declare_slots(self) -> list[GraphSlot]:
        """Return the slot of the workspace, with semaphores that every launch resets to 0."""
        return [metadata_slot(WORKSPACE, lambda *_: (WORKSPACE_BYTES,), torch.uint8, role="workspace")]

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why they cannot run on ``device`` (no such GPU, no library), or None."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return "TensorRT-LLM's kernels need a CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        if major != 10:
            return f"they need compute capability 10.x; {device} has {major}.{minor}"
        if importlib.util.find_spec("flashinfer") is None:
            return 'FlashInfer is not installed: pip install "graphpact-trtllm-mla[native]"'
        return None

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why they cannot serve ``context``, or None; checks kv_lora_rank and query heads too."""
        reason = super().refusal(context)
        if reason is not None:
            return reason
        for layer in context.layers:
            if layer.kv_lora_rank != _RANK:
                return f"they lack kv_lora_rank {layer.kv_lora_rank} (has {_RANK})"
            if 64 < layer.num_q_heads < 128:
                return f"they lack {layer.num_q_heads} query heads (has up to 64, and from 128)"
        return None

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: LayerSpec,
        metadata: TRTLLMMLAMetadata,
    ) -> torch.Tensor:
        """Attend causally over latents.

        Args:
            q: ``[T, heads, rank + rope]``, with ``max_seq_len_q`` queries of each request.
            kv_cache: ``[pages, page_size, rank + rope]``.
            layer: The layer, for its scaling.
            metadata: The index tensors of keys and queries.

        Returns:
            ``[T, heads, rank]``.
        """
        return self._decode(
            query=q,
            kv_cache=kv_cache,
            workspace_buffer=metadata.workspace,
            qk_nope_head_dim=128,  # of the expanded form; the kernels do not use it
            kv_lora_rank=_RANK,
            qk_rope_head_dim=_ROPE,
            block_tables=metadata.block_kv_indices,
            seq_lens=metadata.seq_lens_k,
            max_seq_len=metadata.max_seq_len_k,
            bmm1_scale=layer.scaling,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            cum_seq_lens_q=metadata.cu_seqlens_q,
            max_q_len=metadata.max_seq_len_q,  # if it is missing, the library reads the offsets on the host
        )
