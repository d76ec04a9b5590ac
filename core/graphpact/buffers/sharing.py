"""Memory that registries share: `SharedBuffers`, and the original's `share_input_buffer` (SGLang PR 26742).

Lanes that never run at the same time may use one buffer for the same input: each fill writes everything that
its replay reads. This holds only for slots that every fill refreshes, and only with equal values in padding
rows. So a pool excludes slots that keep rows between fills, never writes existing memory, and refuses a slot
that would need other contents.

Does not: share anything by itself; the caller gives a pool to a registry.
"""

import math
from dataclasses import dataclass

import torch

from graphpact.buffers.arenas import Arenas
from graphpact.buffers.slots import GraphSlot, PaddingPolicy
from graphpact.errors import SlotError

_Key = tuple[str, int, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class _Shared:
    """A shared buffer, the slot that it was made for, and what that slot's padding rows hold."""

    buffer: torch.Tensor
    owner: str
    padding: str | None  # None for a tensor of `share_input_buffer`, because its contents are not known


class SharedBuffers:
    """A pool of buffers by name, number of elements, dtype and device.

    Requests with the same key get the same memory, in any order. Requests of different sizes have different
    keys and different memory, so no buffer grows or moves.
    """

    def __init__(self) -> None:
        self.arenas = Arenas()
        self._buffers: dict[_Key, _Shared] = {}

    def buffer_for(
        self, slot: GraphSlot, shape: tuple[int, ...], device: torch.device, lane: str | None
    ) -> torch.Tensor:
        """Return memory for ``slot``: the shared buffer of its key, or a new one with the initial value.

        Raises:
            SlotError: The shared buffer has another shape, or other contents in padding rows.
        """
        owner = slot.label if lane is None else f"{slot.label} in lane {lane!r}"
        key = (slot.name, math.prod(shape), slot.dtype, device)
        once = slot.padding_policy is PaddingPolicy.FILL_ONCE
        value = torch.tensor(slot.initial_value, dtype=slot.dtype).item()  # False is 0; NaN is the text "nan"
        padding = f"{value!r}{' from the start' if once else ''} in padding rows"
        shared = self._buffers.get(key)
        if shared is None:
            shared = self._buffers[key] = _Shared(self.arenas.allocate(slot, shape, device), owner, padding)
        differences = []
        if tuple(shared.buffer.shape) != shape:
            differences.append((f"is {shape}", f"is {tuple(shared.buffer.shape)}"))
        if shared.padding is None:
            if once and bool((shared.buffer != slot.initial_value).any()):
                differences.append((f"holds {padding}", "holds other values"))
        elif shared.padding != padding:
            differences.append((f"holds {padding}", f"holds {shared.padding}"))
        for own, other in differences:
            raise SlotError(
                f"{owner} {own}, but shares its memory with {shared.owner}, which {other}",
                hint="declare both slots alike, or give one of the registries no pool",
            )
        return shared.buffer

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shared buffer of this name and size in the shape of ``tensor``, or share ``tensor``.

        Raises:
            SlotError: The buffer has another shape and is not contiguous.
        """
        key = (name, tensor.numel(), tensor.dtype, tensor.device)
        shared = self._buffers.setdefault(key, _Shared(tensor, f"{name!r} of share_input_buffer()", None))
        if shared.buffer.shape == tensor.shape:
            return shared.buffer
        if not shared.buffer.is_contiguous():
            raise SlotError(
                f"{name!r} as {tuple(tensor.shape)} cannot share the memory of {shared.owner},"
                f" which is {tuple(shared.buffer.shape)} and not contiguous",
                hint="use the shape of the shared buffer",
            )
        return shared.buffer.as_strided(tensor.size(), tensor.stride())

    def clear(self) -> None:
        """Remove every buffer from the pool. Registries keep the buffers that they have."""
        self._buffers.clear()
        self.arenas = Arenas()


PROCESS_WIDE = SharedBuffers()
"""The process-wide pool, used by ``share_pool=True`` and `share_input_buffer`."""


def share_input_buffer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Share ``tensor`` process-wide by (name, numel, dtype, device), and return the shared buffer.

    The first tensor of a key is shared, and later calls return a view of it. The order of sizes makes no
    difference.
    """
    return PROCESS_WIDE.adopt(name, tensor)
