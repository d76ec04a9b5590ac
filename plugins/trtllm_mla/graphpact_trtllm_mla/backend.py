"""`TRTLLMMLABackend`: the metadata of TensorRT-LLM's latent attention, for every mode.

Where every request brings as many tokens (decode, target verify, draft decode, draft extend), queries lie
at a uniform stride, at replay as at capture: never packed by the lengths that were accepted.

Does not: serve drafts that branch, or models whose latents are expanded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    PaddingPolicy,
)
from graphpact.attention import Buffers, GraphSupport, HeadLayout
from graphpact_kernels import write_indptr
from graphpact_trtllm_mla.operators import BLOCK_KEYS, pack_block_table
from graphpact_trtllm_mla.providers import NativeKernels, PortableKernels

_REBUILT = "fill_metadata writes every row of the padded extent in every step"


@dataclass(slots=True)
class TRTLLMMLAMetadata:
    """What TRT-LLM's kernels read for one step of ``bs`` requests.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        block_kv_indices: ``[bs, blocks]`` int32: page numbers, 0 past a request's keys; room for a multiple
            of 128 keys.
        seq_lens_k: ``[bs]`` int32: keys of each request, drafts included.
        cu_seqlens_q: ``[bs + 1]`` int32: where each request's queries begin.
        max_seq_len_q: Queries of each request; a bound on them where requests differ.
        sum_seq_lens_q: Rows of queries.
        max_seq_len_k: Bound on the keys of a request.
        is_uniform: Whether every request brings ``max_seq_len_q`` queries.
        workspace: The native kernels' memory; None for portable ones.
    """

    out_cache_loc: torch.Tensor
    block_kv_indices: torch.Tensor
    seq_lens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seq_len_q: int
    sum_seq_lens_q: int
    max_seq_len_k: int
    is_uniform: bool
    workspace: torch.Tensor | None


class TRTLLMMLABackend(AttentionBackend):
    """TRT-LLM-shaped metadata on native or portable kernels."""

    capabilities = Capabilities(
        modes=frozenset(ForwardMode),
        graph_support=GraphSupport.ALWAYS,
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
        head_layouts=frozenset({HeadLayout.MLA}),
        page_sizes=frozenset({32, 64}),
        # A padded row has one key, in scratch.
        seq_len_fill_value=1,
    )
    # TensorRT-LLM's kernels take no other pages; that portable ones would, is of use to nobody.
    claims = {"page_size 1": "unsupported", "page_size 16": "unsupported"}  # noqa: RUF012  a ClassVar there
    providers = (NativeKernels, PortableKernels)

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the three index tensors, int32 as TRT-LLM requires, and what the kernels need."""
        blocks = -(-limits.max_context_len // BLOCK_KEYS) * (BLOCK_KEYS // limits.page_size)

        def slot(name: str, *columns: int, extra_rows: int = 0) -> GraphSlot:
            return GraphSlot(
                name=f"trtllm_mla.{name}",
                shape_fn=lambda bs, _: (bs + extra_rows, *columns),
                dtype=torch.int32,
                axis="bs",
                slice_fn=lambda buffer, n: buffer[: n + extra_rows],
                owner="trtllm_mla",
                padding_policy=PaddingPolicy.KEEP_PAD,
                reason=_REBUILT,
                copy_from_fb=False,
            )

        return [
            slot("block_kv_indices", blocks),
            slot("seq_lens_k"),
            slot("cu_seqlens_q", extra_rows=1),
            *self.kernels.slots,
        ]

    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Buffers
    ) -> TRTLLMMLAMetadata:
        """Return the metadata of ``shape``, its tensors slices of the declared slots.

        The bounds of what a graph reads hold for every batch of its shape; those of an eager batch are its
        own, from the lengths on the host.
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
            workspace=buffers("trtllm_mla.workspace") if self.kernels.slots else None,
        )

    def fill_metadata(self, view: ForwardBatch, metadata: TRTLLMMLAMetadata) -> None:
        """Derive all index tensors from lengths and request rows, on the device."""
        offsets, stride = metadata.cu_seqlens_q, metadata.max_seq_len_q
        if metadata.is_uniform:
            torch.arange(0, offsets.shape[0] * stride, stride, out=offsets)
        else:
            write_indptr(view.required_extend_lens()[0], out=offsets)
        metadata.seq_lens_k.copy_(view.seq_lens + view.uncounted_keys)
        pack_block_table(
            self.context.req_to_token,
            view.req_pool_indices,
            metadata.seq_lens_k,
            self.context.limits.page_size,
            metadata.block_kv_indices,
        )

    def metadata_in_graph(self, view: ForwardBatch, metadata: TRTLLMMLAMetadata) -> None:
        """Do the same as `fill_metadata`, which is device work alone."""
        self.fill_metadata(view, metadata)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        metadata: TRTLLMMLAMetadata,
    ) -> torch.Tensor:
        """Write the latents to their slots, then attend over the pages."""
        del v  # a part of the key
        latents = self.context.kv_cache.k[layer.layer_id]
        latents.index_copy_(0, metadata.out_cache_loc, k)
        if q.shape[0] == 0:  # an idle batch
            return q.new_empty((0, q.shape[1], layer.v_head_dim))
        pages = latents.view(-1, self.context.limits.page_size, layer.head_dim)
        out: torch.Tensor = self.kernels.attend(q, pages, layer, metadata)
        return out
