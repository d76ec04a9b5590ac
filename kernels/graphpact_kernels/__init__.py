"""Kernels, one operator each, so that a graph records each as one node; torch alone but for two modules.

    paged_attention         over FlashInfer's index tensors, mask and plan
    page_table_attention    over FlashAttention's page table and schedule, or latents
    indices, tree_mask      fill the index tensors and masks of a step
    paged_cache             writes keys and values to their KV slots
    _library                defines a kernel; plugins define theirs with it too
    compiled                the same kernels in C++, for a CPU
    _triton_indices         the kernels of `indices` in Triton, for a GPU

Does not: know any backend's metadata object; arguments are plain tensors and numbers.
"""

from graphpact_kernels._library import define_kernel, may_read
from graphpact_kernels.indices import (
    fill_page_table,
    fill_paged_indices,
    first_page,
    pack_kv_indices,
    write_indptr,
)
from graphpact_kernels.page_table_attention import (
    merge_states,
    page_table_attention,
    schedule_attention,
    schedule_size,
)
from graphpact_kernels.paged_attention import paged_attention
from graphpact_kernels.paged_cache import write_kv_cache
from graphpact_kernels.tree_mask import pack_tree_mask

__all__ = [
    "define_kernel",
    "fill_page_table",
    "fill_paged_indices",
    "first_page",
    "may_read",
    "merge_states",
    "pack_kv_indices",
    "pack_tree_mask",
    "page_table_attention",
    "paged_attention",
    "schedule_attention",
    "schedule_size",
    "write_indptr",
    "write_kv_cache",
]
