"""Poison: what memory holds that nobody may read, so that whoever reads it is found out.

Does not: choose what is poisoned.
"""

import torch

# Far below every index, and times a page size still so in 32 bits; odd, so that no power of two undoes it.
_BY_DTYPE: dict[torch.dtype, int] = {
    torch.int64: -(2**24) - 43,
    torch.int32: -(2**24) - 43,
    torch.int16: -21555,
    torch.int8: -101,
    torch.uint8: 0xA5,
    torch.bool: 1,
}


def poison_of(dtype: torch.dtype) -> int | float:
    """Return the poison of ``dtype``: NaN, or a number that is no index and no length."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return _BY_DTYPE[dtype] if dtype in _BY_DTYPE else torch.iinfo(dtype).max - 42


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with poison."""
    tensor.fill_(poison_of(tensor.dtype))


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where ``tensor`` holds poison, as a bool tensor of its shape."""
    value = poison_of(tensor.dtype)
    return tensor.isnan() if isinstance(value, float) else tensor == value
