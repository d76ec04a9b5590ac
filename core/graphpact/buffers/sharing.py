"""Memory that registries share: `SharedBuffers`, and the original's `share_input_buffer`.

Lanes that never run at the same time may use one buffer for the same input, because each fill writes
all that its replay reads. That holds only for slots that every fill refreshes, and only if nobody's
sentinel is another's content; so a pool says which lanes may take part, takes no slot that keeps rows
between fills, never writes memory that is there already, and refuses a slot that would have to.

Does not: share anything by itself; a registry is given a pool.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from graphpact.buffers.arenas import Arenas
from graphpact.buffers.slots import GraphSlot, PaddingPolicy
from graphpact.errors import SlotError

_Key = tuple[str, int, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class _Shared:
    buffer: torch.Tensor
    whose: str
    content: tuple[bool, int | float | bool] | None
    """Whether it is written once, and what with; None where `share_input_buffer` gave it."""


class SharedBuffers:
    """Buffers by (name, numel, dtype, device), for the registries that are given this pool.

    Registries that ask with the same key get the same memory, whoever asks first. A request that
    differs in size has a key, and memory, of its own: no buffer ever grows or moves.

    Args:
        lanes: The lanes whose registries may take part; None for any, and for registries of no lane.
    """

    def __init__(self, lanes: Collection[str] | None = None) -> None:
        if isinstance(lanes, str):
            raise SlotError(f"lanes is the text {lanes!r}", hint=f"give a collection: [{lanes!r}]")
        self.lanes = None if lanes is None else frozenset(lanes)
        self.arenas = Arenas()
        self._buffers: dict[_Key, _Shared] = {}

    def buffer_for(
        self, slot: GraphSlot, shape: tuple[int, ...], device: torch.device, lane: str | None
    ) -> torch.Tensor:
        """Return the memory of ``slot``: a sharer's where there is one, else new and initialised.

        Raises:
            SlotError: The lane may not take part, or the slot's empty rows are not the sharer's.
        """
        if self.lanes is not None and lane not in self.lanes:
            raise SlotError(
                f"{slot.label}: lane {lane!r} may not share it; lanes that may:"
                f" {', '.join(sorted(self.lanes)) or 'none'}",
                hint="give the registry its lane (in a runner: lane=self.context.lane), name the lane in"
                " SharedBuffers(lanes=...), or give the registry no pool",
            )
        content = (slot.padding_policy is PaddingPolicy.FILL_ONCE, slot.initial_value)
        if isinstance(content[1], float) and math.isnan(content[1]):
            content = (content[0], math.nan)  # one object, which is its own equal
        whose = slot.label if lane is None else f"{slot.label} in lane {lane!r}"
        key = (slot.name, math.prod(shape), slot.dtype, device)
        shared = self._buffers.get(key)
        if shared is None:
            buffer = self.arenas.allocate(slot, shape, device)
            self._buffers[key] = _Shared(buffer, whose, content)
            return buffer
        if shared.content is not None:
            differs, holds = content != shared.content, _say(shared.content)
        else:  # only what is written once has to be there by now
            once, value = content
            differs, holds = once and bool((shared.buffer != value).any()), "other values"
        if differs:
            raise SlotError(
                f"{whose} holds {_say(content)} where no row is, but shares its memory with"
                f" {shared.whose}, which holds {holds}",
                hint="give both the same pad value, or one of the registries no pool",
            )
        if tuple(shared.buffer.shape) != shape:
            raise SlotError(
                f"{whose} is {shape}, but shares its memory with {shared.whose},"
                f" which is {tuple(shared.buffer.shape)}",
                hint="declare one shape, or give one of the registries no pool",
            )
        return shared.buffer

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer called ``name`` that is as large as ``tensor``; ``tensor`` if there is none.

        What is there is returned in the shape of ``tensor``.

        Raises:
            SlotError: What is there cannot be seen in that shape.
        """
        key = (name, tensor.numel(), tensor.dtype, tensor.device)
        shared = self._buffers.get(key)
        if shared is None:
            shared = _Shared(tensor, f"{name!r} of share_input_buffer()", None)
            self._buffers[key] = shared
        if shared.buffer.shape == tensor.shape:
            return shared.buffer
        if not shared.buffer.is_contiguous():
            raise SlotError(
                f"{name!r} as {tuple(tensor.shape)} cannot share the memory of {shared.whose},"
                f" which is {tuple(shared.buffer.shape)} and not contiguous",
                hint="ask for the shape that is there",
            )
        return shared.buffer.as_strided(tensor.size(), tensor.stride())

    def clear(self) -> None:
        """Forget every buffer; who has one keeps it."""
        self._buffers.clear()
        self.arenas = Arenas()


def _say(content: tuple[bool, int | float | bool]) -> str:
    once, value = content
    return f"{value!r} from the start" if once else f"{value!r}"


PROCESS_WIDE = SharedBuffers()
"""What ``share_pool=True`` and `share_input_buffer` use."""


def share_input_buffer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Share ``tensor`` process-wide by (name, numel, dtype, device), and return what is shared.

    The first tensor of a key is everybody's; a later one comes back as a view of it. The outcome does
    not depend on the order in which sizes are asked for (SGLang PR 26742).
    """
    return PROCESS_WIDE.adopt(name, tensor)
