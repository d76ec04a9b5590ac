"""Trees of containers: the tensors in the arguments and results of a call.

Does not: know what a call does with them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Arguments of operators are mostly tensors, numbers, and tuples and lists of them. Walking these here makes
# captures a third faster. Torch's pytree walks all other types.
NO_CONTAINERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of arguments that contain nothing."""


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree of containers, in order: tensors, and values of other types."""
    kind = type(tree)
    if kind is dict:
        parts = tree.values()
    elif kind is tuple or kind is list:
        parts = tree
    else:
        is_leaf = isinstance(tree, torch.Tensor) or kind in NO_CONTAINERS
        return [tree] if is_leaf else list(pytree.tree_leaves(tree))
    found: list[Any] = []
    for part in parts:
        if (
            isinstance(part, torch.Tensor) or type(part) in NO_CONTAINERS
        ):  # most leaves are; a recursive call would cost more
            found.append(part)
        else:
            found += leaves_of(part)
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors in a tree that is no tensor; without the other leaves, captures are faster."""
    kind = type(tree)
    if kind is dict:
        parts = tree.values()
    elif kind is tuple or kind is list:
        parts = tree
    else:
        parts = () if kind in NO_CONTAINERS else pytree.tree_leaves(tree)
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif type(part) not in NO_CONTAINERS and part is not tree:  # torch's leaf may be the tree itself
            _add_tensors(part, found)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a copy of a tree of containers, with ``fn(tensor)`` for each tensor."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    kind = type(tree)
    if kind in NO_CONTAINERS:
        return tree
    if kind is tuple or kind is list:
        return kind([p if type(p) in NO_CONTAINERS else map_tensors(fn, p) for p in tree])
    if kind is dict:
        return {name: map_tensors(fn, part) for name, part in tree.items()}
    return pytree.tree_map_only(torch.Tensor, fn, tree)
