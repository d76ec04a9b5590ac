"""Readers for kernels of vLLM 0.33 whose metadata the distribution's readers do not support.

Each reader names the function of the wheel whose reads it repeats, below ``vllm/v1/attention/backends``.

    Rows            a launch that finds pages and length by the query token
    Selected        sparse attention: an indexer has chosen the keys, and pages are found by the query token
    Slots           attention over a list of KV slots for each query token
    FlexBlocks      flex attention: blocks of the cache, and a mask over physical positions

All of them attend in the end with `graphpact_adapters.kernel_reads.PagedReads`.

Does not: quantize a cache, as some of these kernels do; or read a launch for prefills, but for TurboQuant's.
"""

from dataclasses import dataclass
from typing import Any

import torch

from graphpact.attention import KVBuffers, LayerSpec
from graphpact_adapters.kernel_reads import PagedReads, Part
from graphpact_kernels import define_kernel

# -- reads ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """A launch whose metadata has one row for each query token.

    Args:
        request: ``[T]`` int32: the row of ``block_table``, not read where there are no keys; None where all
            rows have as many tokens.
        num_keys: ``[T]`` int32: the keys that the token sees.
        block_table: ``[n, blocks]`` int32.
        slot_mapping: ``[T]`` int64.
        num_tokens: The tokens, padding ones included.
    """

    request: torch.Tensor | None
    num_keys: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Attend with one request for each token; see `PagedReads.attend`."""
        if self.request is None:
            each = self.num_tokens // len(self.block_table)
            request = torch.arange(self.num_tokens, device=q.device) // each
        else:
            request = torch.where(self.num_keys > 0, self.request, 0).long()
        part = Part(
            seq_lens=self.num_keys,
            block_table=self.block_table[request],
            query_len=1,
            num_tokens=self.num_tokens,
            max_query_len=1,
        )
        reads = PagedReads((part,), self.slot_mapping, self.num_tokens)
        return reads.attend(q, k, v, layer, cache, page_size)


@dataclass(frozen=True)
class Selected:
    """Sparse attention: pages by the query token, and keys that an indexer has chosen.

    The indexer is another layer with separate metadata. In this model it chooses every key that the token
    may see: as many as ``seq_lens`` and ``query_start_loc`` say, which the runner writes.

    Args:
        req_id_per_token: ``[T]`` int32: the row of ``block_table``.
        block_table: ``[n, blocks]`` int32.
        seq_lens: ``[n]`` int32.
        query_start_loc: ``[n + 1]`` int32.
        slot_mapping: ``[T]`` int64.
        num_tokens: The tokens, padding ones included.
    """

    req_id_per_token: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Count the keys of each token, and attend; see `Rows.attend`."""
        token = torch.arange(self.num_tokens, dtype=torch.int32, device=q.device)
        ends = self.query_start_loc[1:]
        owner = torch.searchsorted(ends, token, right=True)
        live = owner < len(ends)
        owner = torch.where(live, owner, 0)
        keys = torch.where(live, self.seq_lens[owner] - ends[owner] + token + 1, 0).int()
        rows = Rows(self.req_id_per_token, keys, self.block_table, self.slot_mapping, self.num_tokens)
        return rows.attend(q, k, v, layer, cache, page_size)


@dataclass(frozen=True)
class Slots:
    """Attention over a list of KV slots for each query token.

    Args:
        slots: ``[T, W]`` int32: KV slots.
        num_keys: ``[T]`` int32: how many of them the token sees.
        slot_mapping: ``[T]`` int64.
        num_tokens: The tokens, padding ones included.
    """

    slots: torch.Tensor
    num_keys: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Attend to slots as to pages of one token; see `PagedReads.attend`."""
        del page_size
        part = Part(
            seq_lens=self.num_keys,
            block_table=self.slots,
            query_len=1,
            num_tokens=self.num_tokens,
            max_query_len=1,
        )
        reads = PagedReads((part,), self.slot_mapping, self.num_tokens)
        return reads.attend(q, k, v, layer, cache, 1)


@dataclass(frozen=True)
class FlexBlocks:
    """Flex attention: a group of query tokens visits blocks of the cache, and a mask selects query-key pairs.

    Args:
        kv_num_blocks: ``[groups]`` int32: the blocks that a group visits.
        kv_indices: ``[groups, columns]`` int32: their ids, over the whole row of the builder's memory: the
            kernel goes by its stride, and may read past the view of a capture.
        doc_ids: ``[T]`` int32: the request of each token.
        physical_to_logical: ``[requests, blocks]`` int64: a block's position in a request; -1 for no block.
        seq_lens: ``[requests]`` int32.
        query_start_loc: ``[requests + 1]`` int32.
        decode_offset: ``[requests]`` int32: the position of a request's first query.
        slot_mapping: ``[T]`` int64.
        num_tokens: The tokens, padding ones included.
        q_block_size: Tokens of a group.
        kv_block_size: Positions of a block.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    doc_ids: torch.Tensor
    physical_to_logical: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    decode_offset: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    q_block_size: int
    kv_block_size: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Select the keys of each token by its blocks and the mask; then see `Slots.attend`."""
        most = self.kv_indices.shape[1] * self.kv_block_size
        slots = torch.zeros(self.num_tokens, most, dtype=torch.int32, device=q.device)
        keys = torch.zeros(self.num_tokens, dtype=torch.int32, device=q.device)
        _select(
            *(self.kv_num_blocks, self.kv_indices, self.doc_ids, self.physical_to_logical),
            *(self.seq_lens, self.query_start_loc, self.decode_offset),
            *(self.q_block_size, self.kv_block_size, slots, keys),
        )
        rows = Slots(slots, keys, self.slot_mapping, self.num_tokens)
        return rows.attend(q, k, v, layer, cache, page_size)


def _select_keys(
    kv_num_blocks: torch.Tensor,
    kv_indices: torch.Tensor,
    doc_ids: torch.Tensor,
    physical_to_logical: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    decode_offset: torch.Tensor,
    q_block_size: int,
    kv_block_size: int,
    slots: torch.Tensor,
    num_keys: torch.Tensor,
) -> None:
    within = torch.arange(kv_block_size)
    for token in range(len(slots)):
        group, request = token // q_block_size, int(doc_ids[token])
        blocks = kv_indices[group, : int(kv_num_blocks[group])].long()
        logical = physical_to_logical[request, blocks][:, None] * kv_block_size + within
        here = blocks[:, None] * kv_block_size + within
        query = token - int(query_start_loc[request]) + int(decode_offset[request])
        seen = (logical >= 0) & (logical < seq_lens[request]) & (logical <= query)
        found = here[seen]
        slots[token, : len(found)] = found.int()
        num_keys[token] = len(found)


_select = define_kernel(
    "flex_select(Tensor kv_num_blocks, Tensor kv_indices, Tensor doc_ids, Tensor physical_to_logical,"
    " Tensor seq_lens, Tensor query_start_loc, Tensor decode_offset, int q_block_size, int kv_block_size,"
    " Tensor(a!) slots, Tensor(b!) num_keys) -> ()",
    _select_keys,
    namespace="graphpact_peers",
)

# -- readers ----------------------------------------------------------------------------------------------


def turboquant(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of ``turboquant_attn.py: TurboQuantAttentionImpl.forward``.

    Decodes are one launch over device tensors (``_decode_attention``). A batch with more queries in a request
    has a loop over requests on the host (``_prefill_attention``), which takes offsets and lengths from
    ``query_start_loc_cpu`` and ``seq_lens_cpu``. A request whose queries are all its keys attends to them
    directly; the model reads them from the pages to which they were just written.
    """
    decodes, tokens = metadata.num_decodes, metadata.num_actual_tokens
    first = metadata.num_decode_tokens
    if not metadata.is_prefill:
        decodes, first = len(metadata.seq_lens), tokens
    parts = []
    if first:
        parts.append(
            Part(
                seq_lens=metadata.seq_lens[:decodes],
                block_table=metadata.block_table[:decodes],
                query_len=1,
                num_tokens=first,
            )
        )
    if metadata.is_prefill:
        starts = [start - first for start in metadata.query_start_loc_cpu[decodes:].tolist()]
        parts.append(
            Part(
                seq_lens=tuple(metadata.seq_lens_cpu[decodes:].tolist()),
                block_table=metadata.block_table[decodes:],
                query_start_loc=tuple(starts),
                first_token=first,
                num_tokens=tokens - first,
            )
        )
    return PagedReads(tuple(parts), slot_mapping, tokens)


def flashinfer(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of ``flashinfer.py: FlashInferImpl.forward``, decodes by TRT-LLM's kernels.

    All requests have equally many queries unless ``q_cu_seq_lens`` is given.
    """
    decode, tokens = metadata.decode, metadata.num_decode_tokens
    ragged = decode.q_cu_seq_lens is not None
    part = Part(
        seq_lens=decode.seq_lens,
        block_table=decode.block_tables,
        query_start_loc=decode.q_cu_seq_lens,
        query_len=None if ragged else tokens // metadata.num_decodes,
        num_tokens=tokens,
        max_query_len=decode.q_len_per_req if ragged else None,
        max_seq_len=decode.max_seq_len,
        causal=metadata.causal,
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def rocm_aiter_flash_attention(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of ``rocm_aiter_fa.py: AiterFlashAttentionImpl.forward`` for decodes.

    One query per request uses ``paged_attention_v1``; several use ``unified_attention`` with offsets.
    """
    n, tokens, most = (
        metadata.num_decodes,
        metadata.num_decode_tokens,
        metadata.decode_metadata.max_query_len,
    )
    part = Part(
        seq_lens=metadata.seq_lens[:n],
        block_table=metadata.block_table[:n],
        query_start_loc=metadata.query_start_loc[: n + 1] if most > 1 else None,
        query_len=None if most > 1 else 1,
        num_tokens=tokens,
        max_query_len=most,
        max_seq_len=metadata.max_seq_len,
        causal=metadata.causal,
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def rocm_octave(metadata: Any, slot_mapping: torch.Tensor) -> Rows:
    """Return the reads of ``rocm_octave_attn.py: RocmOctaveAttentionImpl._decode``: steps of at most 128."""
    return Rows(
        request=metadata.q_to_req,
        num_keys=metadata.q_to_klen,
        block_table=metadata.block_table,
        slot_mapping=slot_mapping,
        num_tokens=metadata.num_actual_tokens,
    )


def flex(metadata: Any, slot_mapping: torch.Tensor) -> FlexBlocks:
    """Return the reads of ``flex_attention.py: FlexAttentionImpl.forward`` with ``get_paged_mask_mod``."""
    groups = metadata.block_mask.kv_num_blocks.shape[-1]
    return FlexBlocks(
        kv_num_blocks=metadata.block_mask.kv_num_blocks[0, 0],
        kv_indices=metadata.persistent_kv_indices[:groups],
        doc_ids=metadata.persistent_doc_ids[: metadata.num_actual_tokens],
        physical_to_logical=metadata.physical_to_logical,
        seq_lens=metadata.seq_lens,
        query_start_loc=metadata.query_start_loc,
        decode_offset=metadata.decode_offset,
        slot_mapping=slot_mapping,
        num_tokens=metadata.num_actual_tokens,
        q_block_size=metadata.q_block_size,
        kv_block_size=metadata.kv_block_size,
    )


def sparse_mla(metadata: Any, slot_mapping: torch.Tensor) -> Selected:
    """Return the reads of ``mla/flashmla_sparse.py: FlashMLASparseImpl._forward_bf16_kv``, and of its like.

    ``triton_convert_req_index_to_global_index`` turns the indexer's choice into KV slots, by
    ``req_id_per_token`` and ``block_table``.
    """
    return Selected(
        req_id_per_token=metadata.req_id_per_token,
        block_table=metadata.block_table,
        seq_lens=metadata.seq_lens,
        query_start_loc=metadata.query_start_loc,
        slot_mapping=slot_mapping,
        num_tokens=metadata.num_actual_tokens,
    )


def sparse_swa(metadata: Any, slot_mapping: torch.Tensor) -> Slots:
    """Return the reads of ``vllm/models/deepseek_v4/nvidia/flashmla.py: _forward_decode`` of the window.

    The lanes' window is the longest sequence: a token sees all keys before it.
    """
    return Slots(
        slots=metadata.decode_swa_indices.flatten(1),
        num_keys=metadata.decode_swa_lens,
        slot_mapping=slot_mapping,
        num_tokens=metadata.num_decode_tokens,
    )


def indexer(metadata: Any, slot_mapping: torch.Tensor) -> Rows:
    """Return the reads of ``sparse_attn_indexer`` (``vllm/model_executor/layers``), decodes of a graph.

    It scores all keys of a row's pages; the model attends to them instead, with the same reads. A row of the
    table is a query token, or a request with two: the suite's lanes have no DeepGEMM, so more are flattened.
    """
    decode = metadata.decode
    return Rows(
        request=None,
        num_keys=decode.seq_lens.flatten(),
        block_table=decode.block_table,
        slot_mapping=slot_mapping,
        num_tokens=metadata.num_decode_tokens,
    )
