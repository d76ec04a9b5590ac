"""Pictures as a viewer sees them: every text with its colour, its background and its extent, light and dark.

Reads what our own pictures use: classes, ``fill`` and ``font-size`` as attributes or in the style, flat
colours, rectangles, texts that are not transformed, and blocks for ``prefers-color-scheme: dark``.

Does not: render; the extent of a text is an estimate for wide fonts.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
_SVG = "{http://www.w3.org/2000/svg}"
_MEDIA = re.compile(r"@media\s*([^{}]*?)\s*\{((?:[^{}]*\{[^{}]*\})*)\s*\}")
_DARK = "(prefers-color-scheme: dark)"
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
# of a character, in font sizes: those of DejaVu, the widest of the usual fonts
_WIDTHS = {"monospace": (0.61, 0.61), "sans-serif": (0.32, 0.62)}
_NARROW = "ijl.,:;()'| "
_INHERITED = ("fill", "font-size", "font-family", "font-weight", "text-anchor")


@dataclass(frozen=True)
class Box:
    """A rectangle with its flat colour."""

    left: float
    top: float
    right: float
    bottom: float
    colour: str


@dataclass(frozen=True)
class Written:
    """A text: its estimated extent, its colour, and the last rectangle drawn below its anchor."""

    text: str
    size: float
    left: float
    right: float
    top: float
    bottom: float
    colour: str
    below: Box


def stylesheet(css: str, scheme: Scheme) -> dict[str, dict[str, str]]:
    """Return the properties of every selector of ``css`` on a wide screen in a colour scheme."""
    dark = "".join(body for media, body in _MEDIA.findall(css) if media == _DARK)
    found: dict[str, dict[str, str]] = {}
    for part in (_MEDIA.sub("", css), dark if scheme == "dark" else ""):
        for selectors, body in _RULE.findall(part):
            pairs = (pair.partition(":")[::2] for pair in body.split(";") if ":" in pair)
            properties = {name.strip(): value.strip() for name, value in pairs}
            for selector in selectors.split(","):
                found.setdefault(selector.strip(), {}).update(properties)
    return found


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours ``#rrggbb``, by WCAG 2."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(share: float, one: str, other: str) -> str:
    """Return ``color-mix(in srgb, one share, other)``."""
    parts = zip(_channels(one), _channels(other), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


def written(picture: str, scheme: Scheme) -> Iterator[Written]:
    """Yield every text of a picture as it is drawn in a colour scheme.

    Raises:
        AssertionError: A text has no colour, or nothing is drawn below it.
    """
    root = ET.fromstring(picture)  # noqa: S314  our own
    rules = stylesheet("".join(e.text or "" for e in root.iter(f"{_SVG}style")), scheme)
    boxes: list[Box] = []
    for element, has in _styled(root, rules, {}):
        place = {name: float(value) for name, value in element.attrib.items() if name in _PLACE}
        if element.tag == f"{_SVG}rect" and has.get("fill", "none").startswith("#"):
            x, y = place.get("x", 0.0), place.get("y", 0.0)
            boxes.append(Box(x, y, x + place["width"], y + place["height"], has["fill"]))
        elif element.tag == f"{_SVG}text":
            text, x, y = "".join(element.itertext()), place["x"], place["y"]
            size = float(has["font-size"].removesuffix("px"))
            narrow, usual = _WIDTHS[has["font-family"].rpartition(",")[2].strip()]
            width = size * sum(narrow if c in _NARROW else usual for c in text)
            width *= 1.08 if has.get("font-weight", "400") >= "600" else 1
            left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[has.get("text-anchor", "start")]
            middle = y - size / 3
            below = [b for b in boxes if b.left <= x <= b.right and b.top <= middle <= b.bottom]
            assert below, f"nothing is drawn below {text!r}"
            assert has.get("fill", "").startswith("#"), f"{text!r} has no colour"
            yield Written(text, size, left, left + width, y - size, y + size / 4, has["fill"], below[-1])


_PLACE = ("x", "y", "width", "height")


def _styled(
    element: ET.Element, rules: dict[str, dict[str, str]], inherited: dict[str, str]
) -> Iterator[tuple[ET.Element, dict[str, str]]]:
    """Yield elements in the order in which they are drawn, with their properties."""
    if element.tag == f"{_SVG}defs":
        return
    has = dict(inherited)
    has |= {name: value for name, value in element.attrib.items() if name in _INHERITED}
    has.setdefault("font-size", "16")
    for name in element.get("class", "").split():
        has |= {k: v for k, v in rules.get(f".{name}", {}).items() if k in _INHERITED}
    yield element, has
    for child in element:
        yield from _styled(child, rules, has)


def _channels(colour: str) -> tuple[int, ...]:
    assert re.fullmatch("#[0-9a-f]{6}", colour), colour
    return tuple(bytes.fromhex(colour[1:]))


def _luminance(colour: str) -> float:
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
