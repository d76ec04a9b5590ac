"""Stand-ins for FlashInfer's wrappers: they keep the data that a plan gives the kernel.

A backend constructs a wrapper over its buffers and calls ``plan`` (or ``begin_forward``) before each
step. A captured kernel then reads those buffers, and the schedule that the plan wrote into the wrapper's
workspace. Here the schedule is the offsets that were planned with, in tensors that are refreshed in place.

Fast plans of FlashInfer and SGLang skip copies into the buffers, and call ``_cached_module.plan`` with host
arrays. So a stale buffer, or a plan by other lengths than the buffers hold, stays visible.

Does not: attend, or choose tiles; a plan covers exactly the keys of its offsets.
"""

from typing import Any

import torch
from torch import Tensor

made: list[dict[str, Any]] = []
"""The attributes of every wrapper: among them memory that a captured kernel reads."""


class _Module:
    """The compiled module that a wrapper keeps: its ``plan`` writes the wrapper's schedule."""

    def __init__(self, wrapper: "_Wrapper") -> None:
        self._wrapper = wrapper

    def plan(self, _float: Any, _int: Any, _pinned: Any, *args: Any) -> list[int]:
        """Write the schedule from host arrays: query offsets, key offsets and key lengths, where given."""
        self._wrapper.schedule(*args[: self._wrapper.host_arrays])
        return []


class _Wrapper:
    """A wrapper over a workspace and, for graphs, over the caller's buffers.

    Attributes:
        planned: What the last plan scheduled, by name: int32 tensors on the device, refreshed in place.

    """

    host_arrays = 0

    def __init__(self, workspace: Tensor, *_: Any, use_cuda_graph: bool = False, **buffers: Any) -> None:
        self.device = workspace.device
        self._use_cuda_graph = use_cuda_graph
        self._backend = "fa2"
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._cached_module: _Module | None = None
        self._max_total_num_rows: int | None = None
        self.planned: dict[str, Tensor] = {}
        self.begin_forward = self.plan
        made.append(vars(self))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper plans into the caller's buffers."""
        return self._use_cuda_graph

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Copy the arguments into the buffers, and write the schedule."""
        raise NotImplementedError

    def _planned(self, **arrays: Tensor) -> None:
        self._cached_module = _Module(self)
        for name, array in arrays.items():
            value = array.to(self.device, torch.int32)
            kept = self.planned.get(name)
            if kept is None or kept.shape != value.shape:
                self.planned[name] = value.clone()
            else:
                kept.copy_(value)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query token per request; the buffers are ``paged_kv_{indptr,indices,last_page_len}_buffer``."""

    def __init__(self, workspace: Tensor, layout: str = "NHD", **kwargs: Any) -> None:
        super().__init__(workspace, **kwargs)
        self._paged_kv_indptr_buf = kwargs.get("paged_kv_indptr_buffer")
        self._paged_kv_indices_buf = kwargs.get("paged_kv_indices_buffer")
        self._paged_kv_last_page_len_buf = kwargs.get("paged_kv_last_page_len_buffer")

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *_: Any, **__: Any) -> None:
        """Copy the offsets, the indices and the lengths of last pages, and plan with the offsets."""
        if self._use_cuda_graph:
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
            self._paged_kv_last_page_len_buf = last_page_len
        self._planned(kv_indptr=indptr)


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *_: Any,
    global_override_indptr_cpu: Tensor | None = None,
    **__: Any,
) -> None:
    """Copy offsets, lengths, and indices that are not in the buffer; plan with the host's offsets."""
    wrapper._paged_kv_indptr_buf.copy_(indptr)
    wrapper._paged_kv_last_page_len_buf.copy_(last_page_len)
    buffer = wrapper._paged_kv_indices_buf
    if indices.data_ptr() != buffer.data_ptr():
        buffer[: len(indices)].copy_(indices)
    wrapper._planned(kv_indptr=indptr if global_override_indptr_cpu is None else global_override_indptr_cpu)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Several query tokens per request; a custom mask is used only if its buffer was given."""

    host_arrays = 3

    def __init__(self, workspace: Tensor, layout: str = "NHD", **kwargs: Any) -> None:
        super().__init__(workspace, **kwargs)
        self._qo_indptr_buf = kwargs.get("qo_indptr_buf")
        self._paged_kv_indptr_buf = kwargs.get("paged_kv_indptr_buf")
        self._paged_kv_indices_buf = kwargs.get("paged_kv_indices_buf")
        self._paged_kv_last_page_len_buf = kwargs.get("paged_kv_last_page_len_buf")
        self._custom_mask_buf = kwargs.get("custom_mask_buf")
        self._mask_indptr_buf = kwargs.get("mask_indptr_buf")
        self.mask: Tensor | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        *_: Any,
        custom_mask: Tensor | None = None,
        **__: Any,
    ) -> None:
        """Copy every argument into its buffer, and plan with the offsets."""
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr, kv_indptr
            self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = kv_indices, last_page_len
        if custom_mask is not None:  # FlashInfer packs the bits; one byte per bit is equivalent
            if self.mask is None or self.mask.numel() < custom_mask.numel():
                self.mask = torch.zeros(custom_mask.numel(), dtype=torch.bool)
            self.mask[: custom_mask.numel()].copy_(custom_mask)
        self._planned(qo_indptr=qo_indptr, kv_indptr=kv_indptr)

    def schedule(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor) -> None:
        """Write the schedule of a fast plan."""
        self._planned(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Attention over only the new tokens; no graph of a decode step reads it."""

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, *_: Any, **__: Any) -> None:
        """Plan with the offsets."""
        self._planned(qo_indptr=qo_indptr, kv_indptr=kv_indptr)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """Latent attention: its kernel reads offsets and lengths from the schedule, indices from a buffer."""

    host_arrays = 3

    def __init__(self, workspace: Tensor, **kwargs: Any) -> None:
        super().__init__(workspace, **kwargs)
        self._qo_indptr_buf = kwargs.get("qo_indptr")
        self._kv_indptr_buf = kwargs.get("kv_indptr")
        self._kv_indices_buf = kwargs.get("kv_indices")
        self._kv_len_arr_buf = kwargs.get("kv_len_arr")

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor, *_: Any
    ) -> None:
        """Copy every argument into its buffer, and plan with the offsets and lengths."""
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr)
            self._kv_indptr_buf.copy_(kv_indptr)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
            self._kv_len_arr_buf.copy_(kv_lens)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
            self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_lens
        self._planned(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens)

    def schedule(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_lens: Tensor) -> None:
        """Write the schedule of a fast plan."""
        self._planned(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens)
