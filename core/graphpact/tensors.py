"""Tensors compared, and where they lie: one place for what many modules ask.

    same, equal            NaN is the same as NaN
    tolerance_of, excess   by how much rounding may part two results, and by how much two are apart
    storage_id             whose memory it is
    extent_of              which bytes of its storage a tensor covers
    address_range          at which addresses

Does not: know slots, owners or names; see `graphpact.memory_map`.
"""

from typing import Literal

import torch

_TOLERANCE = {
    # of one attention against float64, inputs of scale 1; of a whole model on two kernels
    torch.float64: (1e-9, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (4 * torch.finfo(torch.bfloat16).eps, 3e-2),
    torch.float16: (4 * torch.finfo(torch.float16).eps, 5e-3),
}
_COARSEST = 1e-1  # of any other dtype


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where two tensors hold the same value; NaN is the same as NaN."""
    equal_values = a == b
    if a.dtype.is_floating_point or a.dtype.is_complex:
        equal_values |= a.isnan() & b.isnan()
    return equal_values


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one shape and hold the same values; NaN is the same as NaN."""
    return a.shape == b.shape and bool(same(a, b).all())


def tolerance_of(dtype: torch.dtype, of: Literal["attention", "model"] = "model") -> float:
    """Return by what share of its size a result of ``dtype`` may be off.

    Args:
        dtype: Of the result that is looked at.
        of: ``attention``, one or two layers against float64; ``model``, a whole model on other kernels,
            whose sums are in another order.
    """
    return _TOLERANCE.get(dtype, (_COARSEST, _COARSEST))[of == "model"]


def excess(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return how far two tensors are apart, in shares of what is allowed; infinite where one is NaN.

    Allowed is the tolerance, of one more than the size of what is expected.
    """
    wide = expected.double()
    apart = (actual.double() - wide).abs() / (tolerance * (1 + wide.abs()))
    return apart.nan_to_num(nan=float("inf"))


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, unique for as long as it is held, weakly or not."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  no public name


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte that a tensor covers in its storage, and the byte behind the last.

    Gaps between the rows of a strided tensor are within it.
    """
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return begin * size, begin * size
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the address behind its last element."""
    begin, end = extent_of(tensor)
    first = tensor.data_ptr()
    return first, first + end - begin
