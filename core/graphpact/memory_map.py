"""`MemoryMap`: finds the slot, KV cache, ``req_to_token`` or backend attribute to which a tensor belongs.

`declared_memory` sorts the memory of a lane by its use, for the driver.

Does not: list memory, or know weights and pools; see `graphpact_engine.memory`.
"""

from collections.abc import Collection
from typing import Any

import torch

from graphpact.attention import AttentionBackend, kv_tensors
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry, PaddingPolicy
from graphpact.graphs import DeclaredMemory
from graphpact.tensors import storage_id


class MemoryMap:
    """Names and owners of the memory that the graphs of one lane use.

    The attributes of the lane's ``backend`` are read at every call, because they may be rebound.
    """

    def __init__(self, registry: CudaGraphBufferRegistry | None, backend: AttentionBackend) -> None:
        self._registry, self._backend = registry, backend
        caches = kv_tensors(backend.context.kv_cache)
        self._engines = {storage_id(tensor): name for name, tensor in caches.items()}
        self._engines[storage_id(backend.context.req_to_token)] = "req_to_token"

    def slot_of(self, tensor: Any) -> BoundSlot | None:
        """Return the slot in whose memory ``tensor`` begins, or None."""
        if self._registry is None or not isinstance(tensor, torch.Tensor):
            return None
        return self._registry.slot_of(tensor)

    def is_engines(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is memory of the KV cache or ``req_to_token``."""
        return storage_id(tensor) in self._engines

    def is_declared(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is memory of a slot, the KV cache or ``req_to_token``."""
        return self.is_engines(tensor) or self.slot_of(tensor) is not None

    def attributes(self, storages: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the backend's attributes that are tensors in ``storages``, given by `storage_id`."""
        return {
            name: value
            for name, value in vars(self._backend).items()
            if isinstance(value, torch.Tensor) and storage_id(value) in storages
        }

    def attribute_of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return name and value of the backend's first attribute in the storage of ``tensor``, or None."""
        for name, value in self.attributes({storage_id(tensor)}).items():
            return f"{type(self._backend).__name__}.{name}", value
        return None

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of ``tensor`` for messages, or None for undeclared memory."""
        slot = self.slot_of(tensor)
        if slot is not None:
            return slot.label
        held = self.attribute_of(tensor)
        return held[0] if held is not None else self._engines.get(storage_id(tensor))


def declared_memory(registry: CudaGraphBufferRegistry, backend: AttentionBackend) -> DeclaredMemory:
    """Return the memory outside a lane's graphs, by use, without constants, because nothing writes them."""
    caches = kv_tensors(backend.context.kv_cache)
    slots = {s.name: s.buffer for s in registry if s.buffer is not None and s.role != "constant"}
    once = {slot.name for slot in registry if slot.padding_policy is PaddingPolicy.FILL_ONCE}
    host = [slot for slot in registry if slot.device == torch.device("cpu")]
    host_memory = [*(slot.buffer for slot in host), *map(registry.template_of, host)]
    return DeclaredMemory(
        refreshed=[t for name, t in slots.items() if name not in once],
        workspaces=[t for name, t in slots.items() if name in once],
        caches=[*caches.values()],
        host=[t for t in host_memory if t is not None],
        name_of=MemoryMap(registry, backend).name_of,
    )
