"""Acts that consist of one region. The region uses only the memory of the act.

Does not: change anything between capture and replays; see ``host`` and ``memory``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from graphpact_conformance.drivers.acts.act import Act, legal


def put_at(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """Write ``value`` at ``key``, and return the tensor."""
    tensor[key] = value
    return tensor


# A region gets an `ActMemory`. It is typed Any here, because the types of several calls are wrong on purpose.
_REGIONS: dict[str, Callable[[Any], Any]] = {
    "item": lambda w: w.x * w.start.item(),
    "tolist": lambda w: w.x * w.x.tolist()[0],
    "numpy": lambda w: w.x * float(w.x.cpu().numpy()[0]),
    "cpu": lambda w: w.x.cpu(),
    "to_cpu": lambda w: w.x.to("cpu"),
    "to_cpu_non_blocking": lambda w: w.x.to("cpu", non_blocking=True),
    "type_to_host_class": lambda w: w.x.type(torch.LongTensor),
    "bool_of_tensor": lambda w: w.x + bool(w.x[0]),
    "int_of_tensor": lambda w: w.x + int(w.start),
    "float_of_tensor": lambda w: w.x + float(w.x[0]),
    "python_index": lambda w: w.x + [5, 6, 7][w.start],
    "range_of_tensor": lambda w: [w.x + i for n in w.lengths for i in range(n)],
    "python_max": lambda w: max(w.x[0], w.x[1]) + 1,
    "print_tensor": lambda w: (w.x + 1, f"{w.x}"),
    "arange_of_tensor": lambda w: torch.arange(w.end, device=w.device),
    "slice_by_tensor": lambda w: w.x[w.start : w.end] + 1,
    "mask_read": lambda w: w.x[w.mask],
    "mask_write_tensor": lambda w: put_at(w.x, w.mask, w.y[:1]),
    "mask_write_number": lambda w: put_at(w.x, w.mask, 0),
    "masked_fill_number": lambda w: w.x.masked_fill_(w.mask, 0),
    "masked_fill_tensor": lambda w: w.x.masked_fill_(w.mask, w.y[0]),
    "masked_scatter": lambda w: w.x.masked_scatter_(w.mask, w.y),
    "where_three": lambda w: torch.where(w.mask, w.x, w.y),
    "where_one": lambda w: torch.where(w.mask),
    "nonzero": lambda w: torch.nonzero(w.mask),
    "nonzero_static": lambda w: torch.nonzero_static(w.mask, size=3),
    "masked_select": lambda w: torch.masked_select(w.x, w.mask),
    "repeat_interleave": lambda w: torch.repeat_interleave(w.x, w.lengths),
    "repeat_interleave_sized": lambda w: torch.repeat_interleave(w.x, w.lengths, output_size=4),
    "unique": lambda w: torch.unique(w.x),
    "unique_consecutive": lambda w: torch.unique_consecutive(w.x),
    "bincount": lambda w: torch.bincount(w.lengths, minlength=4),
    "torch_equal": lambda w: w.x + torch.equal(w.x, w.y),
    "torch_allclose": lambda w: w.x + torch.allclose(w.x, w.y),
    "tensor_split_by_tensor": lambda w: w.x.tensor_split(w.index),
    "dlpack": lambda w: from_dlpack(w.x) + 1,
    "storage_element": lambda w: w.x + w.x.untyped_storage()[0],
    "to_sparse": lambda w: w.x.to_sparse().to_dense(),
    "vmap": lambda w: torch.vmap(lambda row: row * row.sum())(w.x.view(2, 2)),
    "data_dependent_branch": lambda w: w.x + 1 if w.x.sum() > 0 else w.x - 1,
    "copy_into_pageable_host": lambda w: w.pageable.copy_(w.x),
    "copy_into_pinned_host_blocking": lambda w: w.pinned.copy_(w.x),
    "copy_into_pinned_host": lambda w: w.pinned.copy_(w.x, non_blocking=True),
    "tensor_from_python": lambda w: w.x[:2] + torch.tensor([1, 2], device=w.device),
    "pageable_to_device": lambda w: w.pageable.to(w.device) + 1,
    "pageable_to_device_non_blocking": lambda w: w.pageable.to(w.device, non_blocking=True) + 1,
    "pinned_to_device_blocking": lambda w: w.pinned.to(w.device) + 1,
    "pinned_to_device": lambda w: w.x.copy_(w.pinned, non_blocking=True),
    "index_by_cpu_tensor": lambda w: w.x[w.host_index],
    "index_by_list": lambda w: w.x[[0, 2]],
    "index_put_number": lambda w: put_at(w.x, w.index, 0),
    "element_put_number": lambda w: put_at(w.x, 0, 5),
    "slice_put_number": lambda w: put_at(w.x, slice(2, 4), 0),
    "stream_synchronize": lambda w: (w.x + 1, w.driver.current_stream().synchronize()),
    "device_synchronize": lambda w: (w.x + 1, w.driver.synchronize()),
    "device_allocation": lambda w: torch.empty(4, device=w.device).copy_(w.x),
    "empty_graph": lambda w: w.x,
}


_NOT_ON_A_GPU = {"tensor_split_by_tensor"}  # torch refuses it outside a capture too


def _act_of(name: str, region: Callable[[Any], Any]) -> Act:
    return Act(lambda w: legal(w, lambda: region(w)), region=region, gpu=name not in _NOT_ON_A_GPU)


ACTS = {name: _act_of(name, region) for name, region in _REGIONS.items()}
"""The acts by name."""
