"""`MemoryNames`: the names of memory around a graph, for `DeclaredMemory`, by the objects that hold it.

An integration claims the memory of an engine's objects, use after use:

    names = MemoryNames()
    names.claim({"model": dict(model.named_parameters())})
    caches = names.claim({"kv_cache": kv_cache})
    workspaces = names.claim({"Backend": backend})  # which may hold a cache too
    DeclaredMemory(caches=caches, workspaces=workspaces, name_of=names.name_of)

Does not: know the memory of a lane; `graphpact.memory_map` does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphpact.pact import walk
from graphpact.tensors import storage_id


class MemoryNames:
    """The names of memory. Memory with two uses has the first one that claims it."""

    def __init__(self) -> None:
        self._by_storage: dict[int, str] = {}

    def claim(self, roots: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors under ``roots`` in memory that has no name yet, and name it.

        Args:
            roots: Objects by name; see `graphpact.pact.walk`.
        """
        found = {path: tensor for path, tensor in tensors_under(roots) if self.name_of(tensor) is None}
        for path, tensor in found.items():
            self._by_storage.setdefault(storage_id(tensor), path)
        return [*found.values()]

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the memory of ``tensor``, or None."""
        return self._by_storage.get(storage_id(tensor))


def tensors_under(roots: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors under ``roots`` by path, without empty ones, which have no memory."""
    for path, leaf in walk(roots):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            yield path, leaf
