"""Comparison and memory location of tensors.

    same, equal            comparison; NaN equals NaN
    tolerance_of           allowed rounding error
    storage_id             identity of the storage
    extent_of              byte range within the storage
    address_range          address range

Does not: know slots, owners or names; see `graphpact.memory_map`.
"""

from typing import Literal

import torch

_TOLERANCE = {
    "attention": {  # inputs of scale 1
        torch.float64: 1e-9,
        torch.float32: 1e-5,
        torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
        torch.float16: 4 * torch.finfo(torch.float16).eps,
    },
    "model": {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3},
}
_DEFAULT_TOLERANCE = 1e-1  # of any other dtype


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return elementwise whether two tensors hold the same value; NaN equals NaN."""
    equal_values = a == b
    if a.dtype.is_floating_point or a.dtype.is_complex:
        equal_values |= a.isnan() & b.isnan()
    return equal_values


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and values; NaN equals NaN."""
    return a.shape == b.shape and bool(same(a, b).all())


def tolerance_of(dtype: torch.dtype, of: Literal["attention", "model"] = "model") -> float:
    """Return the allowed relative error of a result of ``dtype``.

    Args:
        dtype: Dtype of the result.
        of: ``attention``: one or two layers against float64. ``model``: a whole model on other kernels,
            which sum in another order.
    """
    return _TOLERANCE[of].get(dtype, _DEFAULT_TOLERANCE)


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, unique while a strong or weak reference holds it."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  no public name


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the byte range ``[begin, end)`` of a tensor in its storage, gaps between rows included."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return begin * size, begin * size
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range ``[begin, end)`` of a tensor."""
    begin, end = extent_of(tensor)
    first = tensor.data_ptr()
    return first, first + end - begin
