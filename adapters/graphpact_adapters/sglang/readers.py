"""What the kernels of SGLang's attention backends read from their metadata.

    pages     ``page_table``, ``cache_seqlens_int32``, ``cu_seqlens_q``: FlashAttention-3, TRT-LLM
              with ``swa_page_table`` and ``swa_out_cache_loc`` also those of layers with a window, whose keys
              are in a pool with a numbering of its own
    blocks    ``block_kv_indices``, ``seq_lens_k``: the MLA family of TRT-LLM. Without ``cu_seqlens_q`` the
              number of queries of each request comes from the batch
    slots     ``kv_indptr``, ``kv_indices``: Triton. With ``qo_indptr`` the list holds only the prefix, and
              the new keys of a request follow it

A kernel uses the address of a tensor and the lengths, not the shape of a view. A view that a capture made for
a dummy batch may be shorter than the data of a replay, so readers widen such views to the end of their
memory.

Does not: read the metadata of other kernels; their authors write a reader.
"""

from dataclasses import replace
from typing import Any

import torch

from graphpact.errors import ConfigError
from graphpact_adapters.kernel_reads import IndexedReads, PagedReads, Part, Reads


def pages(metadata: Any, batch: Any) -> PagedReads:
    """Return the reads of a kernel with a page table."""
    tokens = len(batch.out_cache_loc)
    part = Part(
        seq_lens=metadata.cache_seqlens_int32,
        block_table=metadata.page_table,
        query_start_loc=metadata.cu_seqlens_q,
        num_tokens=tokens,
        max_query_len=metadata.max_seq_len_q,
        names={
            "seq_lens": "cache_seqlens_int32",
            "block_table": "page_table",
            "query_start_loc": "cu_seqlens_q",
            "max_query_len": "max_seq_len_q",
        },
    )
    return PagedReads((part,), batch.out_cache_loc, tokens)


def window_pages(metadata: Any, batch: Any) -> tuple[PagedReads, PagedReads]:
    """Return the reads of a kernel with a page table, of layers without a window and of those with one."""
    slots = getattr(metadata, "swa_out_cache_loc", None)
    if slots is None:
        raise ConfigError(
            f"{type(metadata).__name__} has swa_page_table and no swa_out_cache_loc",
            hint="keep the slots of new keys in the window pool in the metadata, or write a reader",
        )
    full = pages(metadata, batch)
    (part,) = full.parts
    names = {**part.names, "block_table": "swa_page_table"}
    window = replace(part, block_table=metadata.swa_page_table, names=names)
    return full, PagedReads((window,), slots, full.num_tokens)


def blocks(metadata: Any, batch: Any) -> PagedReads:
    """Return the reads of a kernel for latents, with a table of blocks."""
    tokens = len(batch.out_cache_loc)
    offsets = getattr(metadata, "cu_seqlens_q", None)
    part = Part(
        seq_lens=metadata.seq_lens_k,
        block_table=metadata.block_kv_indices,
        query_start_loc=offsets,
        query_len=None if offsets is not None else tokens // batch.batch_size,
        num_tokens=tokens,
        names={
            "seq_lens": "seq_lens_k",
            "block_table": "block_kv_indices",
            "query_start_loc": "cu_seqlens_q",
        },
    )
    return PagedReads((part,), batch.out_cache_loc, tokens)


def slots(metadata: Any, batch: Any) -> IndexedReads:
    """Return the reads of a kernel with a list of KV slots and offsets."""
    offsets = getattr(metadata, "qo_indptr", None)
    extends = offsets is not None
    if extends and _lists_new_keys(metadata.kv_indptr, batch):
        raise ConfigError(
            f"{type(metadata).__name__}.kv_indptr counts all keys of each request, as FlashInfer's lists do;"
            " the default reader takes lists of cached keys alone, as Triton's, and lets the new keys follow",
            hint="list the cached keys alone, or write a reader that returns IndexedReads without"
            " appends_new: Backends(make, read=...)",
        )
    return IndexedReads(
        kv_indptr=metadata.kv_indptr,
        kv_indices=widened(metadata.kv_indices),
        slot_mapping=batch.out_cache_loc,
        qo_indptr=offsets,
        appends_new=extends,
        custom_mask=getattr(metadata, "custom_mask", None) if extends else None,
        mask_indptr=getattr(metadata, "mask_indptr", None) if extends else None,
        max_query_len=getattr(metadata, "max_extend_len", None) if extends else None,
    )


def _lists_new_keys(kv_indptr: torch.Tensor, batch: Any) -> bool:
    """Return whether the lists of an extend contain the new keys too."""
    prefixes = batch.extend_prefix_lens
    if prefixes is None or not batch.forward_mode.is_extend():
        return False  # a capture, or a draft extend
    counts = kv_indptr[: len(prefixes) + 1].diff()
    return torch.equal(counts.long(), batch.seq_lens.long())


def widened(view: torch.Tensor) -> torch.Tensor:
    """Return a view from the first number of a list to the end of its memory, which a kernel can read."""
    size = view.untyped_storage().nbytes() // view.element_size() - view.storage_offset()
    return view.as_strided((size,), (1,))


_FORMS = (("page_table", pages), ("block_kv_indices", blocks), ("kv_indptr", slots))


def read_sglang_metadata(metadata: Any, batch: Any) -> Reads | tuple[Reads, ...]:
    """Return the reads of metadata by the names of its fields; for two pools those of each.

    Args:
        metadata: The captured metadata of the backend.
        batch: The batch of the capture. Its ``out_cache_loc`` is the runner's buffer, or in a draft decode
            the slots of the step.

    Raises:
        ConfigError: The fields match no known kernel.
    """
    if getattr(metadata, "swa_page_table", None) is not None:
        return window_pages(metadata, batch)
    for name, reader in _FORMS:
        if getattr(metadata, name, None) is not None:
            return reader(metadata, batch)
    there = ", ".join(sorted(getattr(metadata, "__dict__", {}))) or "none"
    raise ConfigError(
        f"{type(metadata).__name__} has no page_table, block_kv_indices or kv_indptr; its fields are {there}",
        hint="write a reader for it: Backends(make, read=...)",
    )
