"""Memory that registries share: `SharedBuffers`, and the original's `share_input_buffer`.

Lanes that never run at the same time may use one buffer for the same input: each fill writes everything that
its replay reads. This is safe only for slots that every fill refreshes, and only with equal pad values. So a
pool names its lanes, excludes slots that keep rows between fills, never writes existing memory, and refuses
a slot that would need other contents.

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
    owner: str
    content: tuple[bool, int | float | bool] | None
    """Whether it is written only once, and the value; None for a buffer of `share_input_buffer`."""


class SharedBuffers:
    """A pool of buffers by (name, numel, dtype, device), for the registries that are given it.

    Requests with the same key get the same memory, in any order. Requests of different sizes have different
    keys and memory: no buffer grows or moves. ``lanes`` are those whose registries may use the pool; None:
    all registries, also without a lane.
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
        """Return the memory of ``slot``: the shared buffer of its key, or a new one with its initial value.

        Raises:
            SlotError: The lane may not use the pool, or the shared buffer has another pad value or shape.
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
            content = (content[0], math.nan)  # one object: NaN differs from other NaN objects
        owner = slot.label if lane is None else f"{slot.label} in lane {lane!r}"
        key = (slot.name, math.prod(shape), slot.dtype, device)
        shared = self._buffers.get(key)
        if shared is None:
            buffer = self.arenas.allocate(slot, shape, device)
            self._buffers[key] = _Shared(buffer, owner, content)
            return buffer
        if shared.content is not None:
            differs, holds = content != shared.content, _in_words(shared.content)
        else:  # a value that is written only once must be in the buffer already
            once, value = content
            differs, holds = once and bool((shared.buffer != value).any()), "other values"
        if differs:
            own, other = f"holds {_in_words(content)} in padding rows", f"holds {holds}"
            remedy = "give both the same pad value, or one of the registries no pool"
        elif (there := tuple(shared.buffer.shape)) != shape:
            own, other = f"is {shape}", f"is {there}"
            remedy = "declare one shape, or give one of the registries no pool"
        else:
            return shared.buffer
        message = f"{owner} {own}, but shares its memory with {shared.owner}, which {other}"
        raise SlotError(message, hint=remedy)

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer ``name`` of the size of ``tensor``, in its shape; ``tensor`` if there is none.

        Raises `SlotError` if the buffer has another shape and is not contiguous.
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
                f"{name!r} as {tuple(tensor.shape)} cannot share the memory of {shared.owner},"
                f" which is {tuple(shared.buffer.shape)} and not contiguous",
                hint="use the shape of the shared buffer",
            )
        return shared.buffer.as_strided(tensor.size(), tensor.stride())

    def clear(self) -> None:
        """Remove every buffer from the pool; registries keep theirs."""
        self._buffers.clear()
        self.arenas = Arenas()


def _in_words(content: tuple[bool, int | float | bool]) -> str:
    once, value = content
    return f"{value!r} from the start" if once else f"{value!r}"


PROCESS_WIDE = SharedBuffers()
"""The pool of ``share_pool=True`` and `share_input_buffer`."""


def share_input_buffer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Share ``tensor`` process-wide by (name, numel, dtype, device), and return the shared buffer.

    The first tensor of a key is shared; later calls return a view of it. The result does not depend on the
    order of sizes (SGLang PR 26742).
    """
    return PROCESS_WIDE.adopt(name, tensor)
