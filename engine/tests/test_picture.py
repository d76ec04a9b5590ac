"""A registry as a picture."""

import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact_engine.picture import draw, format_bytes
from registry_kit import CPU, HOSTILE, declared, padding, registries, small, spelled

SVG = "{http://www.w3.org/2000/svg}"
ELEMENTS = {"svg", "title", "desc", "style", "defs", "pattern", "path", "rect", "text", "g"}


def titles(picture: str) -> list[str]:
    """Check that the document has only allowed elements; return the title of each slot's group."""
    root = ET.fromstring(picture)  # noqa: S314  our own
    kinds = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert kinds <= ELEMENTS
    names = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in names if "href" in name or name.startswith("on")]
    assert "url(http" not in picture
    assert "@import" not in picture
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title")
    return [str(group.findtext(f"{SVG}title")) for group in root.iter(f"{SVG}g")]


@settings(derandomize=True, max_examples=150)
@given(registry=registries())
def test_the_picture_is_one_safe_document_with_every_slot(
    registry: CudaGraphBufferRegistry,
) -> None:
    """For any slots, the picture is valid XML without scripts and links, and names each slot in full."""
    slots = declared(registry)
    picture = draw([registry.describe()])
    for slot, title in zip(slots, titles(picture), strict=True):
        for text in (slot.name, slot.owner, slot.reason, slot.axis, padding(slot)):
            assert spelled(text or "") in title
        if slot.buffer is not None:
            assert f"bytes: {slot.buffer.nbytes:,}" in title


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_spelled_out(text: str) -> None:
    """Markup and unprintable text in names, owners and reasons appear escaped in the picture."""
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=1, max_num_tokens=1)
    registry.register_slot(
        GraphSlot(
            text, lambda bs, _: (bs,), torch.int8, copy_from_fb=False, owner=text, reason=text
        )
    )
    (title,) = titles(draw([registry.describe()]))
    if text:
        assert title.count(spelled(text)) == 3


def test_bars_grow_with_bytes_on_one_scale() -> None:
    """In one picture of two registries, a slot with four times the bytes has a bar of twice the length."""
    both = []
    for lane, sizes in (("one", [100, 400]), ("two", [1600])):
        registry = CudaGraphBufferRegistry(device=CPU, max_bs=1, max_num_tokens=1, lane=lane)
        for size in sizes:
            registry.register_slot(
                GraphSlot(
                    f"s{size}",
                    lambda _bs, _t, size=size: (size,),
                    torch.int8,
                    axis="none",
                    padding_policy=PaddingPolicy.ZERO,
                    copy_from_fb=False,
                    owner=lane,
                )
            )
        both.append(registry.describe())
    picture = draw(both)
    assert [title.split("; ")[0] for title in titles(picture)] == [
        "slot: s100",
        "slot: s400",
        "slot: s1600",
    ]
    root = ET.fromstring(picture)  # noqa: S314  our own
    bars = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    widths = [float(bar.attrib["width"]) for bar in bars if bar is not None]
    assert widths == pytest.approx([widths[0], 2 * widths[0], 4 * widths[0]])
    colours = [bar.attrib["fill"] for bar in bars if bar is not None]
    assert colours[0] == colours[1] != colours[2]
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert {"one", "two"} <= set(words)  # the legend
    assert any(word.startswith("lane two: 1 slot") for word in words)
    assert any("square root of bytes" in word for word in words)


def test_kept_tails_are_hatched_and_reset_ones_are_not() -> None:
    """Bars are hatched exactly for slots whose padding rows can hold rows of an earlier batch."""
    registry = small()
    root = ET.fromstring(draw([registry.describe()]))  # noqa: S314  our own
    hatched = [
        len(group.findall(f"{SVG}rect[@fill='url(#gp-kept)']")) == 1
        for group in root.iter(f"{SVG}g")
    ]
    expected = [slot.enabled and slot.keeps_tail for slot in declared(registry)]
    assert hatched == expected
    assert {True, False} <= set(hatched)


def test_no_registry_is_a_picture_too() -> None:
    """The picture of no registries is a document that says so."""
    assert titles(draw([])) == []
    assert "No registry." in draw([])


# -- words -----------------------------------------------------------------------------------------


@given(nbytes=st.integers(0, 2**50))
def test_bytes_in_words_are_near(nbytes: int) -> None:
    """A size in words differs by at most 0.051 of its unit, and is below 1024 except in GiB."""
    number, unit = format_bytes(nbytes).replace(",", "").split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * scale - nbytes) <= 0.051 * scale
    assert float(number) < 1024 or unit == "GiB"
