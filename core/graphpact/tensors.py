"""Comparison and memory location of tensors.

Does not: know slots, owners or names; see `graphpact.memory_map`.
"""

import torch

__tracebackhide__ = True  # so that a message names the line of the caller


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_DEFAULT_TOLERANCE = 1e-1  # of any other dtype
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def model_tolerance(dtype: torch.dtype) -> float:
    """Return the allowed relative error of a model of ``dtype`` on kernels that sum in another order."""
    return _TOLERANCE.get(dtype, _DEFAULT_TOLERANCE)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return elementwise whether two tensors have the same value. NaN equals NaN."""
    equal_values = a == b
    if a.dtype.is_floating_point or a.dtype.is_complex:
        equal_values |= a.isnan() & b.isnan()
    return equal_values


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and values; NaN equals NaN."""
    return a.shape == b.shape and (_has_equal_bits(a, b) or bool(same(a, b).all()))


def _has_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal bits, as most that are compared; one operation.

    Equal values may have other bits: those of 0.0 and -0.0, of two NaN, of two dtypes.
    """
    if a.dtype is not b.dtype:
        return False
    bits = _BITS.get(a.dtype)
    return torch.equal(a, b) if bits is None else torch.equal(a.view(bits), b.view(bits))


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, unique while a strong or weak reference holds it."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  no public name


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the byte range ``[begin, end)`` of a tensor in its storage, including gaps between rows."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return begin * size, begin * size
    if tensor.is_contiguous():
        return begin * size, (begin + tensor.numel()) * size
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range ``[begin, end)`` of a tensor."""
    begin, end = extent_of(tensor)
    first = tensor.data_ptr()
    return first, first + end - begin
