"""`RegistryDescription`: the contents of a registry as data, one `SlotRow` for each slot.

    json.dumps(registry.describe().to_dict())

Does not: read buffers, or print. ``graphpact doctor --memory`` prints the memory of an engine, and finds
memory that no slot declares.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from graphpact.buffers.slots import Axis, BoundSlot


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The description of one slot.

    ``name``, ``owner``, ``axis``, ``keeps_tail`` and ``reason`` are those of the `GraphSlot`.

    Args:
        enabled: Whether the slot has memory. Otherwise ``shape``, ``device`` and ``nbytes`` are None.
        shape: Shape of the whole buffer.
        dtype: Element type, without ``torch.``.
        device: Device of the buffer.
        policy: A value of `PaddingPolicy`.
        pad_value: The pad value, or None if the policy has none. Numbers that JSON cannot represent are
            strings, such as ``"-inf"``.
        nbytes: Bytes of the buffer.
    """

    name: str
    owner: str | None
    enabled: bool
    shape: tuple[int, ...] | None
    dtype: str
    device: str | None
    axis: Axis
    policy: str
    pad_value: int | float | bool | str | None
    keeps_tail: bool
    reason: str | None
    nbytes: int | None

    @classmethod
    def of(cls, slot: BoundSlot) -> "SlotRow":
        """Return the row of ``slot``."""
        buffer = slot.buffer if slot.enabled else None
        value: float | str | None = slot.pad_value if slot.padding_policy.has_pad_value else None
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        return cls(
            name=slot.name,
            owner=slot.owner,
            enabled=slot.enabled,
            shape=None if buffer is None else tuple(buffer.shape),
            dtype=str(slot.dtype).removeprefix("torch."),
            device=None if buffer is None else str(buffer.device),
            axis=slot.axis,
            policy=slot.padding_policy.value,
            pad_value=value,
            keeps_tail=slot.keeps_tail,
            reason=slot.reason,
            nbytes=None if buffer is None else buffer.nbytes,
        )

    @property
    def padding(self) -> str:
        """Policy and pad value in words, such as ``fill_sentinel 1``."""
        return self.policy if self.pad_value is None else f"{self.policy} {self.pad_value}"


@dataclass(frozen=True, slots=True)
class RegistryDescription:
    """The contents of a registry at one point in time.

    Attributes:
        lane: The lane of the registry, or None.
        device: The default device of its slots.
        max_bs: Largest request count of a captured shape.
        max_num_tokens: Largest token count of a captured shape.
        slots: Every slot in the order of registration, disabled ones included.
        nbytes: Bytes of all buffers.
        allocated_nbytes: Bytes that the registry allocated, not counting adopted and shared buffers.
    """

    lane: str | None
    device: str
    max_bs: int
    max_num_tokens: int
    slots: tuple[SlotRow, ...]
    nbytes: int
    allocated_nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the description as a dict for JSON."""
        return asdict(self)
