"""`write`: writes a tensor of any layout in place, also a view whose elements share memory (it `repeats`).

torch refuses to write an expanded view, or one of overlapping windows. A plugin may hold both.

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
    once = tuple(slice(None if step else 1) for step in target.stride())  # of an expanded axis the first
    target, value = target[once], value[once]
    if not repeats(target):
        target.copy_(value)
        return
    for part, new in zip(target, value, strict=True):  # of overlapping windows one after another
        write(part, new)


def repeats(tensor: torch.Tensor) -> bool:
    """Return whether two elements of ``tensor`` may share memory: a stride is smaller than what it skips."""
    reach = 0  # of the last element along the axes with smaller strides
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False
