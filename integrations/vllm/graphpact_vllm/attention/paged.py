"""`PagedBackend`: an attention backend of vLLM whose kernels run on any device, and can be recorded.

It serves decoders with MHA or GQA, windows, soft caps and sinks, and their cross attention to an encoder, in
batches of every kind. vLLM's own backend for CPUs makes new metadata memory in every step, so that it cannot
run in a graph.

Does not: serve latents (MLA), models that are only an encoder, quantized caches, or biases of positions.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from graphpact.errors import ConfigError
from graphpact_kernels import (
    PageTableCall,
    PageTableRows,
    ScoreOptions,
    define_kernel,
    page_table_attention,
)
from graphpact_vllm import ATTENTION_BACKEND


@dataclass
class PagedMetadata:
    """What the kernels read in one step. All tensors are vLLM's own.

    Args:
        query_start_loc: ``[requests + 1]`` int32: where the queries of each request begin.
        seq_lens: ``[requests]`` int32: keys of each request, 0 for padding. In cross attention they are the
            encoder's.
        block_table: ``[requests, pages]`` int32: page numbers.
        slot_mapping: ``[tokens]`` int64: the KV slot of each token, -1 for padding. In cross attention it has
            the new tokens of encoders.
        num_actual_tokens: Queries. An eager step may have more, which are padding.
        max_query_len: The most queries of a request.
        causal: Whether a query sees no key behind its own.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    causal: bool


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Takes the metadata of a step from what vLLM gives to all builders."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: FBT001, FBT002  vLLM's own
    ) -> PagedMetadata:
        """Return the metadata of a step.

        Raises:
            ConfigError: Causality differs from request to request.
        """
        del common_prefix_len, fast_build
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise ConfigError(
                f"the attention backend {ATTENTION_BACKEND!r} needs one causality for all requests",
                hint="choose another attention backend",
            )
        return PagedMetadata(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            common.num_actual_tokens,
            common.max_query_len,
            common.causal,
        )


def slots_of(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of a cache, each ``[slots, num_kv_heads, head_size]``.

    Args:
        kv_cache: ``[pages, num_kv_heads, page_size, 2 * head_size]``: keys, and behind them values.
        head_size: Numbers of a key.
    """
    slots = kv_cache.transpose(1, 2).flatten(0, 1)
    return slots[..., :head_size], slots[..., head_size:]


class PagedImpl(AttentionImpl[PagedMetadata]):
    """The attention of one layer.

    Args:
        num_heads: Query heads.
        head_size: Numbers of a key.
        scale: The factor of scores.
        num_kv_heads: Key heads; None for as many as query heads.
        alibi_slopes: None: biases of positions are not served.
        sliding_window: Keys that a query sees, its own included; None for all.
        kv_cache_dtype: The dtype of the cache, which is the model's.
        logits_soft_cap: The bound of scores; None for none.
        attn_type: The kind of attention: a decoder's, to itself or to an encoder.
        kv_sharing_target_layer_name: The layer whose cache is used; None for its own.
        sinks: ``[num_heads]`` logits of a virtual key, or None.

    Raises:
        ConfigError: The layer needs what this backend lacks.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or not PagedBackend.supports_attn_type(attn_type):
            lacks = "biases of positions" if alibi_slopes is not None else f"attention of type {attn_type!r}"
            raise ConfigError(
                f"the attention backend {ATTENTION_BACKEND!r} does not serve {lacks}",
                hint="choose another attention backend",
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._window, self._softcap, self._sinks = sliding_window or 0, logits_soft_cap or 0.0, sinks

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values of the new tokens to their KV slots."""
        del layer
        write_slots(key, value, *slots_of(kv_cache, self.head_size), slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, and write the result to ``output``. A warm-up has no metadata.

        Args:
            layer: The layer.
            query: ``[tokens, num_heads, head_size]``.
            key: Unused; it is in the cache. In cross attention it is None but in a request's first step.
            value: Unused, as ``key``.
            kv_cache: ``[pages, num_kv_heads, page_size, 2 * head_size]``: keys, and behind them values.
            attn_metadata: The metadata of the step.
            output: ``[tokens, num_heads, head_size]``, written.
            output_scale: None: outputs are not quantized.
            output_block_scale: None, as above.
        """
        del layer, key, value, output_scale, output_block_scale
        if attn_metadata is None:
            return output
        metadata = attn_metadata
        rows = PageTableRows(
            cu_seqlens_q=metadata.query_start_loc,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            page_size=kv_cache.shape[2],
            max_seqlen_q=metadata.max_query_len,
        )
        options = ScoreOptions(self.scale, self._window, self._softcap, self._sinks, metadata.causal)
        tokens = metadata.num_actual_tokens
        call = PageTableCall(query[:tokens], *slots_of(kv_cache, self.head_size), rows, options)
        page_table_attention(call, out=output[:tokens])
        return output


class PagedBackend(AttentionBackend):
    """Attention over vLLM's block table, with FlashAttention's arguments."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name by which it is chosen."""
        return ATTENTION_BACKEND

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Return the class of a layer's attention."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """Return the class that makes metadata."""
        return PagedMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the only layout: the heads of a slot lie together."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return whether the keys are a decoder's own or those of its encoder."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True."""
        return True


def _write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot, and nothing for the slot -1, as vLLM's kernels do."""
    is_live = slot_mapping >= 0
    slots, tokens = slot_mapping[is_live], len(slot_mapping)
    k_cache[slots] = key[:tokens][is_live]
    v_cache[slots] = value[:tokens][is_live]


write_slots = define_kernel(
    "write_slots(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping)"
    " -> ()",
    _write_slots,
    namespace="graphpact_vllm",
)
