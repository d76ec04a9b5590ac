"""Kernels that attention backends share. Each is one torch operator, so that a graph records it as one node.

    call                    the arguments of one call of an attention kernel
    paged_attention         attention over FlashInfer's index tensors, mask and plan
    page_table_attention    attention over FlashAttention's page table and schedule, or over latents
    indices, tree_mask      fill the index tensors and masks of a step
    schedule                the layout of a schedule
    paged_cache             writes keys and values to their KV slots
    _library                defines a kernel; plugins define theirs with it too
    compiled                the same kernels in C++, for a CPU
    _triton_indices         the kernels of `indices` in Triton, for a GPU
    interpreter             records launches of Triton's interpreter, on a CPU; for those who import it

Does not: know any backend's metadata; calls and operators take tensors and numbers.
"""

from graphpact_kernels._library import define_kernel, may_read
from graphpact_kernels.call import AttendCall, ScoreOptions
from graphpact_kernels.indices import (
    fill_page_table,
    fill_paged_indices,
    first_page,
    pack_kv_indices,
    schedule_attention,
    write_indptr,
)
from graphpact_kernels.page_table_attention import (
    PageTableCall,
    PageTableRows,
    merge_states,
    page_table_attention,
)
from graphpact_kernels.paged_attention import PagedRows, paged_attention
from graphpact_kernels.paged_cache import write_kv_cache
from graphpact_kernels.schedule import schedule_size
from graphpact_kernels.tree_mask import pack_tree_mask

__all__ = [
    "AttendCall",
    "PageTableCall",
    "PageTableRows",
    "PagedRows",
    "ScoreOptions",
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
