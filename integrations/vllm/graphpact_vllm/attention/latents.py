"""`LatentBackend`: an attention backend of vLLM for latents (MLA), whose decode steps can be recorded.

vLLM's own backends for latents on a CPU have no graphs: the one for all CPUs reads on the host whether a slot
is padding, and its kernel takes one width of latents. Here decode steps attend by a kernel of
`graphpact_kernels` that takes every width. Prefill is vLLM's own.

Does not: capture batches with a prefill, or serve sparse attention or quantized caches.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from graphpact_kernels import PageTableCall, PageTableRows, ScoreOptions, page_table_attention
from graphpact_vllm import ATTENTION_BACKEND
from graphpact_vllm.attention.paged import write_slots


@dataclass
class LatentMetadata(MLACommonMetadata[MLACommonDecodeMetadata]):
    """vLLM's metadata for latents."""

    def __post_init__(self) -> None:
        """Take latents of every width; vLLM's own class takes those of its kernels."""


class LatentMetadataBuilder(MLACommonMetadataBuilder[LatentMetadata]):
    """vLLM's builder, whose metadata has views of vLLM's own tensors only."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, LatentMetadata)


class LatentImpl(CPUMLAImpl):
    """The attention of one layer over latents."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend from the queries of decode requests to the cache.

        Args:
            q: ``[T, num_heads, kv_lora_rank + qk_rope_head_dim]``, or its two parts.
            kv_c_and_k_pe_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]``.
            attn_metadata: The metadata of the step.
            layer: Unused.

        Returns:
            ``[T, num_heads, kv_lora_rank]``, and no log-sum-exp.
        """
        del layer
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        decode, cache = attn_metadata.decode, kv_c_and_k_pe_cache
        rows = PageTableRows(
            cu_seqlens_q=attn_metadata.query_start_loc[: attn_metadata.num_decodes + 1],
            cache_seqlens=decode.seq_lens,
            page_table=decode.block_table,
            page_size=cache.shape[1],
            max_seqlen_q=attn_metadata.max_query_len,
        )
        keys = cache.flatten(0, 1)[:, None]
        call = PageTableCall(q, keys, keys[..., : self.kv_lora_rank], rows, ScoreOptions(self.scale))
        return page_table_attention(call)[0], None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the latents of the new tokens to their KV slots.

        Args:
            kv_c_normed: ``[T, kv_lora_rank]``.
            k_pe: ``[T, 1, qk_rope_head_dim]``.
            kv_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]``, written.
            slot_mapping: ``[<= T]`` int64: the KV slot of each token, -1 for padding.
            kv_cache_dtype: That of the model.
            k_scale: Unused.
        """
        del kv_cache_dtype, k_scale
        if kv_cache.numel():  # vLLM's first run has no cache
            slots = kv_cache.flatten(0, 1)
            rank = self.kv_lora_rank
            write_slots(kv_c_normed, k_pe.squeeze(1), slots[:, :rank], slots[:, rank:], slot_mapping)


class LatentBackend(CPUMLABackend):
    """Attention over vLLM's block table of latents."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return an empty list: latents of every width."""
        return []

    @staticmethod
    def get_name() -> str:
        """Return the name by which it is chosen."""
        return ATTENTION_BACKEND

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        """Return the class of a layer's attention."""
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """Return the class that makes metadata."""
        return LatentMetadataBuilder
