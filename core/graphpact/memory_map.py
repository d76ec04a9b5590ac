"""`MemoryMap`: what a tensor around a lane's graphs is: a slot, a KV cache, the page table, the backend's.

Does not: list memory, or know weights and pools; see `graphpact_engine.memory`.
"""

from collections.abc import Collection
from typing import Any

import torch

from graphpact.attention import AttentionBackend, kv_tensors
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry
from graphpact.tensors import storage_id


class MemoryMap:
    """Names and owners of the memory that the graphs of one lane use.

    Args:
        registry: Of the lane's slots; None for a lane without.
        backend: The lane's. What it holds is looked up anew each time: a name may be bound to another
            tensor later.
    """

    def __init__(self, registry: CudaGraphBufferRegistry | None, backend: AttentionBackend) -> None:
        self._registry, self._backend = registry, backend
        caches = kv_tensors(backend.context.kv_cache)
        self._engines = {storage_id(tensor): name for name, tensor in caches.items()}
        self._engines[storage_id(backend.context.req_to_token)] = "req_to_token"

    def slot_of(self, tensor: Any) -> BoundSlot | None:
        """Return the slot in whose memory a tensor begins; None for another one, or no tensor."""
        if self._registry is None or not isinstance(tensor, torch.Tensor):
            return None
        return self._registry.slot_of(tensor)

    def is_engines(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is memory of the KV cache or the page table."""
        return storage_id(tensor) in self._engines

    def is_declared(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is memory of a slot, the KV cache or the page table."""
        return self.is_engines(tensor) or self.slot_of(tensor) is not None

    def attributes(self, storages: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the tensors in attributes of the backend that lie in storages, given by identity."""
        return {
            name: value
            for name, value in vars(self._backend).items()
            if isinstance(value, torch.Tensor) and storage_id(value) in storages
        }

    def attribute_of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return name and value of the first attribute of the backend in the storage of a tensor."""
        found = self.attributes({storage_id(tensor)})
        for name, value in found.items():
            return f"{type(self._backend).__name__}.{name}", value
        return None

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return what messages call a tensor; None where nothing declares or holds it."""
        slot = self.slot_of(tensor)
        if slot is not None:
            return slot.label
        held = self.attribute_of(tensor)
        return held[0] if held is not None else self._engines.get(storage_id(tensor))
