"""Poison: values that mark memory which no step may read, so that such reads can be detected.

Does not: choose which memory is poisoned.
"""

import torch

# The poison of indices is far below every index. Multiplied by a page size it is still so in 32 bits. It is
# odd, so that multiplying by a power of two cannot turn it into an index.
_BY_DTYPE: dict[torch.dtype, int] = {
    torch.int64: -(2**24) - 43,
    torch.int32: -(2**24) - 43,
    torch.int16: -21555,
    torch.int8: -101,
    torch.uint8: 0xA5,
    torch.bool: 1,
}


def poison_of(dtype: torch.dtype) -> int | float:
    """Return the poison of ``dtype``: NaN, or a number that is not a valid index or length."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return _BY_DTYPE[dtype] if dtype in _BY_DTYPE else torch.iinfo(dtype).max - 42


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with poison."""
    tensor.fill_(poison_of(tensor.dtype))


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor of the shape of ``tensor``, true where ``tensor`` is poison."""
    value = poison_of(tensor.dtype)
    return tensor.isnan() if isinstance(value, float) else tensor == value
