"""A registry as a picture."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.buffers.description import RegistryDescription
from graphpact_engine.picture import draw, format_bytes
from registry_kit import CPU, HOSTILE, declared, padding, registries, small, spelled
from svg_kit import SCHEMES, Scheme, contrast, written

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
        GraphSlot(text, lambda bs, _: (bs,), torch.int8, copy_from_fb=False, owner=text, reason=text)
    )
    (title,) = titles(draw([registry.describe()]))
    if text:
        assert title.count(spelled(text)) == 3


def lanes_of_sizes(*lanes: Sequence[int]) -> list[RegistryDescription]:
    """Return registries with a slot of each size, in bytes; each lane's slots have their own owner."""
    described = []
    for at, sizes in enumerate(lanes):
        lane = f"lane{at}"
        registry = CudaGraphBufferRegistry(device=CPU, max_bs=1, max_num_tokens=1, lane=lane)
        for n, size in enumerate(sizes):
            registry.register_slot(
                GraphSlot(
                    f"s{n}",
                    lambda _bs, _t, size=size: (size,),
                    torch.int8,
                    axis="none",
                    padding_policy=PaddingPolicy.ZERO,
                    copy_from_fb=False,
                    owner=f"owner {at}",
                )
            )
        described.append(registry.describe())
    return described


sizes = st.lists(st.integers(0, 2**14), max_size=5)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(one=sizes, other=sizes)
def test_bars_are_linear_in_bytes_on_one_scale_that_is_printed(one: list[int], other: list[int]) -> None:
    """In a picture of two registries every bar ends at its bytes on the scale, or is 2 pixels long."""
    root = ET.fromstring(draw(lanes_of_sizes(one, other)))  # noqa: S314  our own
    ticks = [
        float(element.attrib["x"]) for element in root.iter(f"{SVG}rect") if element.get("class") == "gp-tick"
    ]
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    labels = [word for word in words if re.fullmatch(r"[\d.]+ (B|KiB)", word)]
    assert len(labels) == len(ticks)
    largest = max([*one, *other], default=0)
    assert words.count("0 B") == sum(map(bool, (one, other)))
    if not largest:
        return
    zero, ratio = min(ticks), 320 / largest
    for x, label in zip(ticks, labels, strict=True):
        number, unit = label.split()
        nbytes = float(number) * {"B": 1, "KiB": 1024}[unit]
        assert x == pytest.approx(zero + ratio * nbytes, abs=0.1 + 0.051 * 1024 * ratio)
    for group, nbytes in zip(root.iter(f"{SVG}g"), [*one, *other], strict=True):
        bar = group.find(f"{SVG}rect")
        assert (bar is None) == (nbytes == 0)
        if bar is not None:
            assert float(bar.attrib["x"]) == pytest.approx(zero, abs=0.1)
            length = max(2, ratio * nbytes)
            assert float(bar.attrib["width"]) == pytest.approx(length, abs=0.1)


def test_the_legend_has_each_owner_in_the_colour_of_its_bars() -> None:
    """Before the bars, a square in the colour of an owner's bars stands beside the owner's name."""
    root = ET.fromstring(draw(lanes_of_sizes([8, 16], [32])))  # noqa: S314  our own
    top = [element for element in root if element.tag in (f"{SVG}rect", f"{SVG}text")][1:5]
    legend = {top[1].text: top[0].get("fill"), top[3].text: top[2].get("fill")}
    bars = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    colours = [bar.get("fill") for bar in bars if bar is not None]
    assert colours == [legend["owner 0"], legend["owner 0"], legend["owner 1"]]
    assert len(set(colours)) == 2


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(registry=registries())
def test_every_text_is_on_the_page_and_can_be_read(scheme: Scheme, registry: CudaGraphBufferRegistry) -> None:
    """For any slots, every text is inside the page, with a contrast of 4.5, and no bar is below it."""
    for text in written(draw([registry.describe(), *lanes_of_sizes([2**12, 1])]), scheme):
        assert contrast(text.colour, text.below.colour) >= 4.5
        if text.text.isascii():  # the width of others is unknown
            assert 0 <= text.left < text.right <= text.below.right
        assert 0 <= text.top < text.bottom <= text.below.bottom


def test_kept_tails_are_hatched_and_reset_ones_are_not() -> None:
    """Bars are hatched exactly for slots whose tail can hold rows of an earlier batch; the legend says so."""
    registry = small()
    picture = draw([registry.describe()])
    root = ET.fromstring(picture)  # noqa: S314  our own
    hatched = [len(group.findall(f"{SVG}rect[@fill='url(#gp-kept)']")) == 1 for group in root.iter(f"{SVG}g")]
    expected = [slot.enabled and slot.keeps_tail for slot in declared(registry)]
    assert hatched == expected
    assert {True, False} <= set(hatched)
    assert "hatched: rows of an earlier batch" in picture
    assert "hatched" not in draw(lanes_of_sizes([8, 16]))


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
