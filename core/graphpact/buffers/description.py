"""`RegistryDescription`: the contents of a registry, as a table or JSON.

    print(registry.describe())              slots, owners, sizes, policies
    json.dumps(registry.describe().to_dict())

Does not: read buffers. `graphpact_engine.memory` finds undeclared memory, `graphpact_engine.picture` draws.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from graphpact.buffers.slots import Axis, BoundSlot

COLUMNS = ("slot", "owner", "shape", "dtype", "device", "axis", "policy", "bytes", "reason")


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The description of one slot.

    ``name``, ``owner``, ``axis``, ``keeps_tail`` and ``reason`` are those of the `GraphSlot`.

    Args:
        enabled: Whether it has memory; without it ``shape``, ``device`` and ``nbytes`` are None.
        shape: Shape of the whole buffer.
        dtype: Element type, without ``torch.``.
        device: Device of the buffer.
        policy: A value of `PaddingPolicy`.
        pad_value: The pad value, or None if the policy has none. Numbers that JSON lacks are strings:
            ``"-inf"``.
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
    """The description of a registry at one point in time.

    ``lane``, ``device``, ``max_bs`` and ``max_num_tokens`` are those of the registry. ``slots`` are in the
    order of registration, disabled ones included. ``nbytes`` are the bytes of all buffers,
    ``allocated_nbytes`` those that the registry allocated, without adopted and shared buffers.
    """

    lane: str | None
    device: str
    max_bs: int
    max_num_tokens: int
    slots: tuple[SlotRow, ...]
    nbytes: int
    allocated_nbytes: int

    @property
    def label(self) -> str:
        """The lane in words."""
        return "registry of no lane" if self.lane is None else f"lane {self.lane}"

    def __str__(self) -> str:
        rows = [[plain_text(cell) for cell in row] for row in (COLUMNS, *map(slot_cells, self.slots))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = (">" if column == "bytes" else "<" for column in COLUMNS)
        layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        lines = [layout.format(*row).rstrip() for row in rows]
        most = f"at most {self.max_bs:,} requests, {self.max_num_tokens:,} tokens"
        return "\n".join([f"{plain_text(self.label)} on {self.device}: {most}", *lines, self.totals])

    @property
    def totals(self) -> str:
        """The counts of slots, their bytes, and the allocated bytes, in words."""
        enabled = sum(row.enabled for row in self.slots)
        disabled = len(self.slots) - enabled
        slots = f"{enabled} slot{'' if enabled == 1 else 's'}"
        more = f" and {disabled} disabled" if disabled else ""
        return f"{slots}{more}, {self.nbytes:,} bytes; {self.allocated_nbytes:,} bytes allocated"

    def to_dict(self) -> dict[str, Any]:
        """Return the description as a dict for JSON."""
        return asdict(self)


# -- the table -----------------------------------------------------------------------------------


def slot_cells(row: SlotRow) -> tuple[str, ...]:
    """Return the cells of a slot under `COLUMNS`."""
    return (
        row.name,
        row.owner or "",
        "disabled" if row.shape is None else str(list(row.shape)),
        row.dtype,
        row.device or "",
        row.axis,
        row.padding,
        "" if row.nbytes is None else f"{row.nbytes:,}",
        row.reason or "",
    )


def plain_text(text: str) -> str:
    """Return ``text`` with non-printable characters escaped, so that it stays one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
