"""`draw`: a picture of registries with one bar for each slot.

Does not: read the contents of buffers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from graphpact.buffers.description import (
    COLUMNS,
    RegistryDescription,
    SlotRow,
    plain_text,
    slot_cells,
)

_UNNAMED = "unnamed owner"

# Colours with contrast on a light and on a dark background.
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
_CHARACTER, _LINE, _MARGIN, _BAR, _THINNEST = 7.3, 22, 24, 320, 2.0  # pixels
_LONGEST_NAME, _LONGEST_LABEL = 44, 96  # characters; the bar's title has the full text
_TICKS = 4  # at most, besides zero
_STYLE = """
:root{color-scheme:light dark}
.gp-page{fill:#ffffff} .gp-word{fill:#0f172a} .gp-soft{fill:#526075} .gp-head{font-weight:600}
.gp-gap{stroke:#ffffff;stroke-width:3} .gp-tick{fill:#cbd5e1} .gp-any{fill:#94a3b8}
@media (prefers-color-scheme: dark){
.gp-page{fill:#0f172a} .gp-word{fill:#f1f5f9} .gp-soft{fill:#9fb0c6}
.gp-gap{stroke:#0f172a} .gp-tick{fill:#334155} .gp-any{fill:#64748b}
}
"""


def draw(descriptions: Iterable[RegistryDescription]) -> str:
    """Return one picture of registries: a bar per slot, coloured by owner, hatched if its tail is kept.

    The picture is an SVG document without scripts or external resources, readable on a light and on a dark
    page. Its legend has the owners. The length of a bar is its bytes, on one linear scale from zero for all
    registries; a bar too short to be seen is drawn longer. The bytes are printed beside it.
    """
    descriptions = list(descriptions)
    rows = [row for one in descriptions for row in one.slots]
    owners = list(dict.fromkeys(plain_text(row.owner or _UNNAMED) for row in rows))
    colours = {owner: _COLOURS[at % len(_COLOURS)] for at, owner in enumerate(owners)}
    largest = max((row.nbytes or 0 for row in rows), default=0)
    left = _MARGIN + _CHARACTER * max((len(_short(row.name)) for row in rows), default=0) + 12

    any_kept = any(row.keeps_tail and row.nbytes for row in rows)
    body, y, widest = _legend(colours, any_kept=any_kept)
    for one in descriptions:
        heading = f"{plain_text(one.label)}: {one.totals}"
        body.append(_text(_MARGIN, y + 14, heading, "gp-word gp-head"))
        widest = max(widest, _MARGIN + _CHARACTER * len(heading))
        y += _LINE + 4
        if one.slots:
            body += _scale(largest, left=left, y=y, lines=len(one.slots))
            y += _LINE
        for row in one.slots:
            colour = colours[plain_text(row.owner or _UNNAMED)]
            label, length = _label(row), _length(row.nbytes, largest)
            body.append(_bar(row, label, colour, left=left, y=y, length=length))
            widest = max(widest, left + _BAR + 16 + _CHARACTER * len(label))
            y += _LINE
        y += 10
    return _document(descriptions, body, math.ceil(widest) + _MARGIN, y + _MARGIN)


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes with its unit: ``512 B``, ``1.5 KiB``, ``2.0 GiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, units = nbytes / 1024, ["GiB", "MiB", "KiB"]
    while len(units) > 1 and round(size, 1) >= 1024:
        size /= 1024
        units.pop()
    return f"{size:,.1f} {units[-1]}"


# -- the picture ---------------------------------------------------------------------------------


def _short(name: str, most: int = _LONGEST_NAME) -> str:
    name = plain_text(name)
    return name if len(name) <= most else name[: most - 1] + "…"


def _label(row: SlotRow) -> str:
    size = "disabled" if row.nbytes is None else format_bytes(row.nbytes)
    return _short(f"{size}, {row.padding}, {row.owner or _UNNAMED}", _LONGEST_LABEL)


def _length(nbytes: int | None, largest: int) -> float:
    return max(_THINNEST, _BAR * nbytes / largest) if nbytes else 0.0


def _legend(colours: Mapping[str, str], *, any_kept: bool) -> tuple[list[str], int, float]:
    """Return the legend, the height of its end, and its right end."""
    entries = [(_short(owner), [f'fill="{colour}"']) for owner, colour in colours.items()]
    if any_kept:
        words = "hatched: rows of an earlier batch can be left in the tail"
        entries.append((words, ['class="gp-any"', 'fill="url(#gp-kept)"']))
    body, y, widest = [], _MARGIN, 0.0
    for words, fills in entries:
        body += [_rect(_MARGIN, y + 3, 14, 14, fill) for fill in fills]
        body.append(_text(_MARGIN + 22, y + 14, words, "gp-soft"))
        widest = max(widest, _MARGIN + 22 + _CHARACTER * len(words))
        y += _LINE
    return body, y + 10, widest


def _scale(largest: int, *, left: float, y: float, lines: int) -> Iterator[str]:
    """Yield the scale of bytes above the bars, with a line through them for each tick."""
    step = 1
    while step * _TICKS < largest:
        step *= 2
    for nbytes in range(0, largest + 1, step):
        x = left + _BAR * nbytes / max(1, largest)
        yield _text(x, y + 12, format_bytes(nbytes), "gp-soft", "middle" if nbytes else "start")
        yield _rect(x, y + 18, 1, lines * _LINE + 4, 'class="gp-tick"')


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" {more}/>'


def _bar(row: SlotRow, label: str, colour: str, *, left: float, y: float, length: float) -> str:
    """Return the line of a slot: name, bar and label, with all columns as a title."""
    parts = [_text(left - 12, y + 14, _short(row.name), "gp-word", "end")]
    if length:
        parts.append(_rect(left, y + 3, length, 14, f'fill="{colour}"'))
        if row.keeps_tail:
            parts.append(_rect(left, y + 3, length, 14, 'fill="url(#gp-kept)"'))
    parts.append(_text(left + _BAR + 16, y + 14, label, "gp-soft"))
    heads = dict(zip(COLUMNS, slot_cells(row), strict=True))
    title = "; ".join(f"{name}: {value}" for name, value in heads.items() if value)
    return f"<g><title>{escape(plain_text(title))}</title>{''.join(parts)}</g>"


def _document(
    descriptions: Sequence[RegistryDescription], body: Sequence[str], width: int, height: int
) -> str:
    def lines() -> Iterator[str]:
        for one in descriptions:
            yield f"{plain_text(one.label)}: {one.totals}."
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
            f'<desc id="gp-what">{escape(" ".join(lines()))}</desc>',
            f"<style>{_STYLE}</style>",
            hatching,
            f'<rect class="gp-page" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )
