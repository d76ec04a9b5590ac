"""`RegistryDescription`: what a registry holds, as a table, JSON or a picture.

    print(registry.describe())              which slots, whose, how large, which policy
    json.dumps(registry.describe().to_dict())
    Path("slots.svg").write_text(registry.describe().svg())

Does not: look at what buffers hold, or at memory that nobody declared; `graphpact_engine.memory` does
the latter.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from graphpact.buffers.slots import Axis, BoundSlot

_COLUMNS = ("slot", "owner", "shape", "dtype", "device", "axis", "policy", "bytes", "reason")
_UNNAMED = "unnamed owner"

# The picture. Each colour stands out from a white page and from a dark one.
_COLOURS = (
    "#3b82c4",
    "#d0741c",
    "#2f9868",
    "#b55a9e",
    "#8f8427",
    "#cf5060",
    "#2f95a3",
    "#8b72c8",
)
_CHARACTER, _LINE, _MARGIN, _BAR = 7.3, 22, 24, 320  # pixels
_LONGEST_NAME, _LONGEST_LABEL = 44, 96  # characters; all of them are in the bar's title
_STYLE = """
.gp-page{fill:#ffffff} .gp-word{fill:#0f172a} .gp-soft{fill:#526075} .gp-head{font-weight:600}
.gp-gap{stroke:#ffffff;stroke-width:3}
@media (prefers-color-scheme: dark){
.gp-page{fill:#0f172a} .gp-word{fill:#f1f5f9} .gp-soft{fill:#9fb0c6} .gp-gap{stroke:#0f172a}
}
"""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """What there is to say about one slot.

    Args:
        name: The slot's name.
        owner: Who declared it, if that was said.
        enabled: Whether it has memory; all that depends on it is None where it has none.
        shape: Of the whole buffer.
        dtype: Element type, without ``torch.``.
        device: Where it lies.
        axis: Which count its rows follow.
        policy: What unused rows hold: a value of `PaddingPolicy`.
        pad_value: The value that the policy is about; None for a policy that is about none. A number
            that JSON lacks is spelled: ``"-inf"``.
        keeps_tail: Whether rows of an earlier batch can be left in the tail.
        reason: Why they mislead nobody, if that was said.
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
        value: int | float | bool | str | None = None
        if slot.padding_policy.has_pad_value:
            value = slot.pad_value
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
    """What a registry held when it was looked at.

    Args:
        lane: Whose registry it is, if a lane's.
        device: Where slots lie unless they say otherwise.
        max_bs: Most requests that a captured shape may have.
        max_num_tokens: Most tokens that a captured shape may have.
        slots: Every slot in the order of registration, those that are not enabled too.
        nbytes: Bytes of all buffers.
        allocated_nbytes: Bytes that the registry allocated itself: not what it adopted or shares.
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
        """Whose registry it is, in words."""
        return "registry of no lane" if self.lane is None else f"lane {self.lane}"

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_cells(row) for row in self.slots)]
        rows = [tuple(_plain(cell) for cell in row) for row in rows]
        widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
        right = _COLUMNS.index("bytes")
        lines = [
            "  ".join(
                cell.rjust(width) if at == right else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        head = (
            f"{_plain(self.label)} on {self.device}: at most {self.max_bs:,} requests,"
            f" {self.max_num_tokens:,} tokens"
        )
        return "\n".join([head, *lines, self.totals])

    @property
    def totals(self) -> str:
        """How many slots have how many bytes, and how many were allocated for them."""
        enabled = sum(row.enabled for row in self.slots)
        disabled = len(self.slots) - enabled
        return (
            f"{enabled} slot{'' if enabled == 1 else 's'}"
            + (f" and {disabled} disabled" if disabled else "")
            + f", {self.nbytes:,} bytes; {self.allocated_nbytes:,} bytes allocated"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return asdict(self)

    def svg(self) -> str:
        """Return a picture of it: one SVG document that needs nothing else; see `draw`."""
        return draw([self])


def draw(descriptions: Iterable[RegistryDescription]) -> str:
    """Return one picture of registries: a bar a slot, coloured by owner, hatched where tails are kept.

    An SVG document without scripts or outside resources. Bars are as long as the square root of their
    bytes, on one scale for all registries; the bytes stand beside them.
    """
    descriptions = list(descriptions)
    rows = [row for one in descriptions for row in one.slots]
    owners = list(dict.fromkeys(_plain(row.owner or _UNNAMED) for row in rows))
    colours = {owner: _COLOURS[at % len(_COLOURS)] for at, owner in enumerate(owners)}
    largest = max((row.nbytes or 0 for row in rows), default=0)
    left = _MARGIN + _CHARACTER * max((len(_short(row.name)) for row in rows), default=0) + 12
    captions = (
        f"length: square root of bytes; the longest is {in_words(largest)}",
        "hatched: rows of an earlier batch can be left in the tail",
    )

    body: list[str] = []
    y = _MARGIN
    widest = left + _BAR
    for one in descriptions:
        heading = f"{_plain(one.label)}: {one.totals}"
        body.append(_text(_MARGIN, y + 14, heading, "gp-word gp-head"))
        widest = max(widest, _MARGIN + _CHARACTER * len(heading))
        y += _LINE + 4
        for row in one.slots:
            colour = colours[_plain(row.owner or _UNNAMED)]
            label, length = _label(row), _length(row.nbytes, largest)
            body.append(_bar(row, label, colour, left=left, y=y, length=length))
            widest = max(widest, left + length + 8 + _CHARACTER * len(label))
            y += _LINE
        y += 10
    for owner in owners:
        body.append(_text(_MARGIN + 20, y + 14, _short(owner), "gp-soft"))
        body.append(_rect(_MARGIN, y + 4, 12, 12, f'fill="{colours[owner]}"'))
        y += _LINE
    for caption in captions:
        body.append(_text(_MARGIN, y + 14, caption, "gp-soft"))
        widest = max(widest, _MARGIN + _CHARACTER * len(caption))
        y += _LINE
    return _document(descriptions, body, math.ceil(widest) + _MARGIN, y + _MARGIN)


def in_words(nbytes: int) -> str:
    """Return a number of bytes in words: ``512 B``, ``1.5 KiB``, ``2.0 GiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = nbytes / 1024, ["GiB", "MiB", "KiB"]
    while len(units) > 1 and round(size, 1) >= 1024:
        size /= 1024
        units.pop()
    return f"{size:,.1f} {units[-1]}"


# -- the table -----------------------------------------------------------------------------------


def _cells(row: SlotRow) -> tuple[str, ...]:
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


def _plain(text: str) -> str:
    """Return ``text`` with everything that does not print spelled out, so that a line stays one."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


# -- the picture ---------------------------------------------------------------------------------


def _short(name: str, most: int = _LONGEST_NAME) -> str:
    name = _plain(name)
    return name if len(name) <= most else name[: most - 1] + "…"


def _label(row: SlotRow) -> str:
    size = "disabled" if row.nbytes is None else in_words(row.nbytes)
    return _short(f"{size}, {row.padding}, {row.owner or _UNNAMED}", _LONGEST_LABEL)


def _length(nbytes: int | None, largest: int) -> float:
    if not nbytes:
        return 0.0
    return max(2.0, _BAR * math.sqrt(nbytes / largest))


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" {more}/>'


def _bar(row: SlotRow, label: str, colour: str, *, left: float, y: float, length: float) -> str:
    """Return a slot's line: its name, its bar, what the bar stands for, and all of it as a title."""
    parts = [_text(left - 12, y + 14, _short(row.name), "gp-word", "end")]
    if length:
        parts.append(_rect(left, y + 3, length, 14, f'fill="{colour}"'))
        if row.keeps_tail:
            parts.append(_rect(left, y + 3, length, 14, 'fill="url(#gp-kept)"'))
    parts.append(_text(left + length + 8, y + 14, label, "gp-soft"))
    heads = dict(zip(_COLUMNS, _cells(row), strict=True))
    told = "; ".join(f"{name}: {value}" for name, value in heads.items() if value)
    return f"<g><title>{escape(_plain(told))}</title>{''.join(parts)}</g>"


def _document(
    descriptions: Sequence[RegistryDescription], body: Sequence[str], width: int, height: int
) -> str:
    def told() -> Iterator[str]:
        for one in descriptions:
            yield f"{_plain(one.label)}: {one.totals}."
        if not descriptions:
            yield "No registry."

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img" aria-labelledby="gp-title gp-what"'
        ' font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">'
    )
    hatching = (
        '<defs><pattern id="gp-kept" width="7" height="7" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)"><path class="gp-gap" d="M0 0V7"/></pattern></defs>'
    )
    return "\n".join(
        [
            head,
            '<title id="gp-title">Graph-resident buffers by owner, size and padding policy</title>',
            f'<desc id="gp-what">{escape(" ".join(told()))}</desc>',
            f"<style>{_STYLE}</style>",
            hatching,
            f'<rect class="gp-page" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )
