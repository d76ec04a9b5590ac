"""`TRTLLMMLABackend`: the metadata of TensorRT-LLM's latent attention, for every mode.

In uniform modes (decode, target verify, draft decode, draft extend), queries have a uniform stride at capture
and at replay. They are never packed by the number of accepted tokens.

Does not: serve drafts with top-k > 1, or models with expanded latents. See `graphpact_trtllm_mla.providers`
for the kernels.
"""

from collections.abc import Sequence

import torch

from graphpact import (
    AttentionBackend,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    GraphSlot,
    LayerSpec,
    Limits,
    metadata_slot,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout, new_kv
from graphpact_kernels import fill_page_table, write_indptr
from graphpact_trtllm_mla.metadata import TRTLLMMLAMetadata
from graphpact_trtllm_mla.operators import BLOCK_KEYS
from graphpact_trtllm_mla.providers import WORKSPACE, CompiledKernels, NativeKernels, PortableKernels


class TRTLLMMLABackend(AttentionBackend):
    """The attention backend with TensorRT-LLM's MLA metadata, on native or portable kernels."""

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
        head_layouts=frozenset({HeadLayout.MLA}),
        page_sizes=frozenset({32, 64}),
        # A padding row has one key, in scratch.
        seq_len_fill_value=1,
    )
    # TensorRT-LLM's kernels take no other page sizes; the portable kernels do, but that has no use.
    claims = {"page_size 1": "unsupported", "page_size 16": "unsupported"}  # noqa: RUF012  a ClassVar there
    providers = (NativeKernels, CompiledKernels, PortableKernels)
    fill_is_device_only = True

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of the index tensors, int32 as TRT-LLM requires, and of the kernels."""
        blocks = -(-limits.max_context_len // BLOCK_KEYS) * (BLOCK_KEYS // limits.page_size)

        return [
            metadata_slot(
                "trtllm_mla.block_kv_indices",
                lambda bs, _: (bs, blocks),
                torch.int32,
                role="table",
                axis="bs",
            ),
            metadata_slot(
                "trtllm_mla.seq_lens_k", lambda bs, _: (bs,), torch.int32, role="lengths", axis="bs"
            ),
            metadata_slot(
                "trtllm_mla.cu_seqlens_q",
                lambda bs, _: (bs + 1,),
                torch.int32,
                role="offsets",
                axis="bs",
                extra_rows=1,
            ),
            *self.kernels.declare_slots(),
        ]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> TRTLLMMLAMetadata:
        """Return the metadata of ``shape``; its tensors are slices of the declared slots.

        The bounds of a graph hold for every batch of its shape. The bounds of an eager batch come
        from its host lengths.
        """
        max_q, max_k = view.tokens_per_request, self.context.limits.max_context_len
        if shape.mode.is_ragged:
            max_q = shape.num_tokens
        if not buffers.in_graph and view.batch_size:
            max_k = int(view.seq_lens_cpu.max()) + view.uncounted_keys
            if shape.mode.is_ragged:
                max_q = int(view.required_extend_lens()[1].max())
        return TRTLLMMLAMetadata(
            out_cache_loc=view.out_cache_loc,
            block_kv_indices=buffers("trtllm_mla.block_kv_indices"),
            seq_lens_k=buffers("trtllm_mla.seq_lens_k"),
            cu_seqlens_q=buffers("trtllm_mla.cu_seqlens_q"),
            max_seq_len_q=max_q,
            sum_seq_lens_q=shape.num_tokens,
            max_seq_len_k=max_k,
            is_uniform=not shape.mode.is_ragged,
            workspace=buffers(WORKSPACE) if self.kernels.has_workspace else None,
        )

    def fill_metadata(self, view: ForwardBatch, metadata: TRTLLMMLAMetadata) -> None:
        """Fill all index tensors from lengths and request rows, on the device."""
        offsets, stride = metadata.cu_seqlens_q, metadata.max_seq_len_q
        if metadata.is_uniform:
            torch.arange(0, offsets.shape[0] * stride, stride, out=offsets)
        else:
            write_indptr(view.required_extend_lens()[0], out=offsets)
        fill_page_table(
            self.context.req_to_token,
            view.req_pool_indices,
            view.seq_lens,
            uncounted=view.uncounted_keys,
            page_size=self.context.limits.page_size,
            cache_seqlens=metadata.seq_lens_k,
            page_table=metadata.block_kv_indices,
            compiled=self.kernels.compiled,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: TRTLLMMLAMetadata,
    ) -> torch.Tensor:
        """Write new latents to their KV slots, if any, and return the attention over the pages."""
        latents = self.context.kv_cache.k[layer.cache_layer]
        new = new_kv(k, v, layer)
        if new is not None:  # the value is the first part of the key
            latents.index_copy_(0, metadata.out_cache_loc, new[0])
        if q.shape[0] == 0:  # an idle batch
            return q.new_empty((0, q.shape[1], layer.v_head_dim))
        pages = latents.view(-1, self.context.limits.page_size, layer.head_dim)
        out: torch.Tensor = self.kernels.attend(q, pages, layer, metadata)
        return out
