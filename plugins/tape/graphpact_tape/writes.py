"""`write`: writes a tensor of any layout in place, even a view whose elements share memory (see `repeats`).

Torch refuses to write an expanded view, or a view of overlapping windows. A plugin may have both.

Does not: choose what is written.
"""

import torch


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` into ``target`` in place.

    Args:
        target: A tensor of any strides.
        value: The new contents, of the shape of ``target``. Where elements of ``target`` share memory, those
            of ``value`` are expected to be equal; the memory then holds one of them.
    """
    if not repeats(target):
        target.copy_(value)
        return
    once = tuple(
        slice(None if step else 1) for step in target.stride()
    )  # the first index of an expanded axis
    target, value = target[once], value[once]
    if not repeats(target):
        target.copy_(value)
        return
    for part, new in zip(target, value, strict=True):  # overlapping windows one after another
        write(part, new)


def repeats(tensor: torch.Tensor) -> bool:
    """Return whether two elements of ``tensor`` may share memory.

    They may if a stride is smaller than the extent of the axes with smaller strides.
    """
    reach = 0  # offset of the last element along the axes with smaller strides
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False
