"""Portable kernels: torch only, one operator each, so that a graph holds each as one node.

Does not: know any backend's metadata object; arguments are plain tensors and numbers.
"""

from graphpact.kernels.page_table_attention import (
    merge_states,
    page_table_attention,
    schedule_attention,
    schedule_size,
)
from graphpact.kernels.paged_attention import paged_attention
from graphpact.kernels.paged_cache import pack_kv_indices, write_kv_cache
from graphpact.kernels.tree_mask import pack_tree_mask

__all__ = [
    "merge_states",
    "pack_kv_indices",
    "pack_tree_mask",
    "page_table_attention",
    "paged_attention",
    "schedule_attention",
    "schedule_size",
    "write_kv_cache",
]
