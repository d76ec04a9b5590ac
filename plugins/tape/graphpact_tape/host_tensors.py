"""Distinguish host tensors from device tensors on a CPU: `HostMemory`.

On a CPU both have the same ``device``, so torch cannot distinguish them. This module does it by origin: host
tensors are declared, or computed only from host tensors. All others are device tensors.

With ``strict``, tensors that a GPU program would have on the host are host tensors too: those made without
``device=``, from Python objects, or by numpy.

Only plain tensors are supported, which have one strided memory: see `kind_of`. If a subclass dispatches
operations on its parts, as a jagged tensor does, the parts are tracked.

Does not: refuse anything; see `graphpact_tape.host_guard`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphpact.tensors import extent_of, storage_id
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_functorch = torch._C._functorch  # noqa: SLF001  no public names


def kind_of(tensor: torch.Tensor) -> str | None:
    """Return a description of a tensor that is not plain; None if it is plain."""
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout}"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_nested:
        return "a nested tensor"
    # Autograd makes these in forward mode.
    return "a tensor of zeros without memory" if tensor._is_zerotensor() else None  # noqa: SLF001


def plain_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor`` without wrappers of ``torch.func``; None if that is not a plain tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor if kind_of(tensor) is None else None


def plain_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `plain_of` for each tensor, leaving out None."""
    return [plain for plain in map(plain_of, tensors) if plain is not None]


class WeakTensor:
    """A weak reference to a tensor's memory, with the layout that is needed to make the tensor again."""

    __slots__ = ("_device", "_dtype", "_flips", "_layout", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._device = tensor.dtype, tensor.device
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._flips = tensor.is_conj(), tensor.is_neg()

    def revive(self) -> torch.Tensor | None:
        """Return the tensor, or None if its memory was freed."""
        make = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001  no public name
        storage: torch.UntypedStorage | None = make(self.storage.cdata)
        if storage is None:
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=self._device)
        tensor.set_(storage, *self._layout)
        is_conj, is_neg = self._flips
        tensor = tensor.conj() if is_conj else tensor
        return tensor._neg_view() if is_neg else tensor  # noqa: SLF001  no public name


class HostMemory:
    """The set of host memory. A tensor is ``in`` the set if it is a host tensor.

    Args:
        declared: Tensors that are declared to be on the host.
        strict: Whether tensors made without ``device=`` are host tensors.
    """

    def __init__(self, declared: Iterable[torch.Tensor] = (), *, strict: bool = False) -> None:
        self.strict = strict
        self.depth = 0  # depth of nested calls that make host tensors
        self.call: Any = ()  # the arguments of the current call
        # Byte ranges of storages: on a CPU, one storage may hold host and device tensors. The weak references
        # keep a storage's id from being reused.
        self._host: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.add(declared)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare the memory of ``tensors`` as host memory."""
        for tensor in plain_tensors(tensors):
            reference = StorageWeakRef(tensor.untyped_storage())
            _, extents = self._host.setdefault(storage_id(tensor), (reference, []))
            extent = extent_of(tensor)
            if extent not in extents:
                extents.append(extent)

    def pin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare the memory of ``tensors`` as pinned host memory."""
        tensors = list(tensors)
        self.add(tensors)
        self._pinned |= {storage_id(t): StorageWeakRef(t.untyped_storage()) for t in tensors}

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in memory that was declared as pinned."""
        return storage_id(tensor) in self._pinned

    def prune(self) -> None:
        """Drop storages that were freed."""
        self._pinned = {key: known for key, known in self._pinned.items() if not known.expired()}
        self._host = {key: known for key, known in self._host.items() if not known[0].expired()}

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` contains host tensors."""
        return storage._cdata in self._host  # noqa: SLF001  no public name

    def __contains__(self, tensor: torch.Tensor) -> bool:
        try:
            known = self._host.get(storage_id(tensor))
        except NotImplementedError:  # the tensor has no storage
            plain = plain_of(tensor)
            return plain is not None and plain in self
        if known is None:
            return False
        begin, end = extent_of(tensor)
        return any(first <= begin and end <= last for first, last in known[1])

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a host number, which a kernel takes by value."""
        if tensor.dim():
            return False
        # If it is not among the caller's arguments, torch made it from a Python number.
        given = plain_tensors(tensors_of(self.call))
        return tensor in self or storage_id(tensor) not in set(map(storage_id, given))
