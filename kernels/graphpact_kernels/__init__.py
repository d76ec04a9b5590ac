"""Portable kernels: torch alone, one operator each, so that a graph records each as one node.

    paged_attention         over FlashInfer's index tensors, mask and plan
    page_table_attention    over FlashAttention's page table and schedule, or latents
    paged_cache, tree_mask  fill caches, indices and masks
    _library                defines a kernel; plugins define theirs with it too

Does not: know any backend's metadata object; arguments are plain tensors and numbers.
"""

from graphpact_kernels._library import define_kernel, may_read
from graphpact_kernels.page_table_attention import (
    merge_states,
    page_table_attention,
    schedule_attention,
    schedule_size,
    write_page_table,
)
from graphpact_kernels.paged_attention import paged_attention
from graphpact_kernels.paged_cache import pack_kv_indices, write_indptr, write_kv_cache
from graphpact_kernels.tree_mask import pack_tree_mask

__all__ = [
    "define_kernel",
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
    "write_page_table",
]
