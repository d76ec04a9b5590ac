"""Edits of graph drivers that several modules use."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from graphpact_museum.edits.override import named_after, override
from graphpact_museum.exhibit import Make

__tracebackhide__ = True  # these are parts of drivers: errors name the line of their caller

RecordedRegion: TypeAlias = Callable[[], Any]
"""The function that a driver records."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def edits_graphs(edit: Callable[[Any, Any], None]) -> Make:
    """Make an edit of drivers that runs ``edit(driver, graph)`` on each captured graph."""

    def capture(self: Any, right: Any, fn: RecordedRegion, **more: Any) -> Any:
        graph = right(fn, **more)
        edit(self, graph)
        return graph

    return named_after(edit, lambda base: override(base, capture))
