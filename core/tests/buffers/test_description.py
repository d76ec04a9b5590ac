"""What a registry says of itself: as a table, as JSON, as a picture."""

import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.buffers import (
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
)
from graphpact.buffers.description import SlotRow, draw, in_words

CPU = torch.device("cpu")
SVG = "{http://www.w3.org/2000/svg}"
ELEMENTS = {"svg", "title", "desc", "style", "defs", "pattern", "path", "rect", "text", "g"}
HOSTILE = [
    "<script>alert(1)</script>",
    "a\"b'c&amp;<&>]]>",
    "two\nlines\r\n\tand a tab",
    "\x00\x07\x1b[31mred",
    "\ud800 alone",
    "right\u202eleft",
    "[bold]markup[/bold]",
    "émoji 🙂 名前",
    "x" * 300,
]

_NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1, max_size=12))
_WORDS = st.one_of(st.none(), st.just(""), _NAMES)
_VALUES = {
    torch.int64: st.integers(-(2**40), 2**40),
    torch.float32: st.floats(width=32),
    torch.bool: st.booleans(),
}


@st.composite
def registries(draw: Any) -> CudaGraphBufferRegistry:
    """Return a registry of up to six slots with any names, owners, reasons, policies and shapes."""
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=4, max_num_tokens=9)
    for name in draw(st.lists(_NAMES, unique=True, max_size=6)):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from(list(_VALUES)))
        registry.register_slot(
            GraphSlot(
                name,
                lambda _bs, _tokens, shape=shape: shape,
                dtype,
                axis=draw(st.sampled_from(["bs", "tokens", "none"])),
                padding_policy=draw(st.sampled_from(PaddingPolicy)),
                pad_value=draw(_VALUES[dtype]),
                enabled=draw(st.sampled_from([True, True, True, False])),
                copy_from_fb=False,
                owner=draw(_WORDS),
                reason=draw(_WORDS),
            )
        )
    return registry


def declared(registry: CudaGraphBufferRegistry) -> list[GraphSlot]:
    """Return every slot, those that are not enabled too."""
    return list(registry._slots.values())


def padding(slot: GraphSlot) -> str:
    """Return the policy in words, worked out here."""
    about_a_value = slot.padding_policy in (PaddingPolicy.FILL_ONCE, PaddingPolicy.FILL_SENTINEL)
    return slot.padding_policy.value + (f" {slot.pad_value}" if about_a_value else "")


def spelled(text: str) -> str:
    """Return ``text`` with Python's escapes for what does not print."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def small() -> CudaGraphBufferRegistry:
    """Return the inputs of decode and one slot that is not enabled."""
    registry = build_decode_registry(
        device=CPU, max_bs=4, max_num_token=8, seq_len_fill_value=1, enable_mrope=False
    )
    registry.register_slot(
        GraphSlot("later", lambda bs, _: (bs,), torch.int8, enabled=False, owner="nobody yet")
    )
    return registry


# -- the table -------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(registry=registries())
def test_the_table_has_one_aligned_line_a_slot(registry: CudaGraphBufferRegistry) -> None:
    """Whatever slots are called, each has one line, printable, with its cells under their headings."""
    slots = declared(registry)
    _, heading, *lines, _ = str(registry.describe()).split("\n")
    assert len(lines) == len(slots)
    at = {word: heading.index(word) for word in ("shape", "dtype", "axis", "policy", "reason")}
    end = heading.index("bytes") + len("bytes")
    for slot, line in zip(slots, lines, strict=True):
        assert line.isprintable()
        shape = "disabled" if slot.buffer is None else str(list(slot.buffer.shape))
        assert line[at["shape"] :].startswith(f"{shape} ")
        assert line[at["dtype"] :].startswith(f"{str(slot.dtype).removeprefix('torch.')} ")
        assert line[at["axis"] :].startswith(f"{slot.axis} ")
        assert line[at["policy"] :].startswith(padding(slot))
        size = "" if slot.buffer is None else f"{slot.buffer.nbytes:,}"
        assert line[:end].endswith(f" {size}") or not size
        assert line.startswith(spelled(slot.name).rstrip())
        assert line[at["reason"] :] == spelled(slot.reason or "").rstrip()


def test_the_table_of_a_decode_registry() -> None:
    """A reader sees name, owner, shape, policy with its value, reason, and the totals last."""
    lines = str(small().describe()).splitlines()
    assert lines[0] == "registry of no lane on cpu: at most 4 requests, 8 tokens"
    cells = {line.split("  ")[0]: line for line in lines}
    assert "any token of an earlier batch" in cells["input_ids"]
    assert "decode inputs" in cells["seq_lens"]
    assert "fill_sentinel 1" in cells["seq_lens"]
    assert "[4]" in cells["seq_lens"]
    assert "disabled" in cells["later"]
    registry = small()
    assert lines[-1] == (
        f"8 slots and 1 disabled, {registry.nbytes:,} bytes;"
        f" {registry.allocated_nbytes:,} bytes allocated"
    )


# -- JSON ------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(registry=registries())
def test_json_says_all_of_it_and_totals_are_right(registry: CudaGraphBufferRegistry) -> None:
    """Every slot's declaration survives strict JSON, and the totals are those of the buffers."""
    said = json.loads(json.dumps(registry.describe().to_dict(), allow_nan=False))
    assert len(said["slots"]) == len(declared(registry))
    for slot, row in zip(declared(registry), said["slots"], strict=True):
        assert (row["name"], row["owner"], row["reason"]) == (slot.name, slot.owner, slot.reason)
        assert (row["axis"], row["policy"]) == (slot.axis, slot.padding_policy.value)
        assert row["enabled"] is slot.enabled
        assert row["keeps_tail"] is slot.keeps_tail
        assert f"torch.{row['dtype']}" == str(slot.dtype)
        if slot.padding_policy.has_pad_value:
            assert str(row["pad_value"]) == str(slot.pad_value)
        else:
            assert row["pad_value"] is None
        if slot.enabled:
            assert slot.buffer is not None
            assert tuple(row["shape"]) == tuple(slot.buffer.shape)
            assert (row["device"], row["nbytes"]) == ("cpu", slot.buffer.nbytes)
        else:
            assert (row["shape"], row["device"], row["nbytes"]) == (None, None, None)
    assert said["nbytes"] == sum(row["nbytes"] or 0 for row in said["slots"]) == registry.nbytes
    assert said["allocated_nbytes"] == registry.allocated_nbytes >= said["nbytes"]


def test_a_description_does_not_change_with_the_registry() -> None:
    """It is what was seen: a slot that is registered later is not in it, and nobody can write it."""
    registry = small()
    before = registry.describe()
    seen = str(before)
    registry.register_slot(GraphSlot("more", lambda bs, _: (bs,), torch.int8, axis="bs"))
    assert str(before) == seen
    assert len(registry.describe().slots) == len(before.slots) + 1
    with pytest.raises(AttributeError):
        before.slots[0].name = "other"  # type: ignore[misc]


# -- the picture -----------------------------------------------------------------------------------


def titles(picture: str) -> list[str]:
    """Return the title of each slot's group, having held the document to what it may contain."""
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


@settings(derandomize=True, deadline=None, max_examples=150)
@given(registry=registries())
def test_the_picture_is_one_safe_document_with_every_slot(
    registry: CudaGraphBufferRegistry,
) -> None:
    """Whatever slots are called, the picture parses, runs and loads nothing, and names each in full."""
    slots = declared(registry)
    picture = registry.describe().svg()
    for slot, title in zip(slots, titles(picture), strict=True):
        for text in (slot.name, slot.owner, slot.reason, slot.axis, padding(slot)):
            assert spelled(text or "") in title
        if slot.buffer is not None:
            assert f"bytes: {slot.buffer.nbytes:,}" in title


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_spelled_out(text: str) -> None:
    """A name, owner or reason that is markup or no text is in the picture as the text that it is."""
    registry = CudaGraphBufferRegistry(device=CPU, max_bs=1, max_num_tokens=1)
    registry.register_slot(
        GraphSlot(
            text, lambda bs, _: (bs,), torch.int8, copy_from_fb=False, owner=text, reason=text
        )
    )
    (title,) = titles(registry.describe().svg())
    if text:
        assert title.count(spelled(text)) == 3


def test_bars_grow_with_bytes_on_one_scale() -> None:
    """In the picture of two registries a slot with four times the bytes has a bar of twice the length."""
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
    """The hatch lies on the bars of slots whose tails can hold rows of an earlier batch, and no other."""
    registry = small()
    root = ET.fromstring(registry.describe().svg())  # noqa: S314  our own
    hatched = [
        len(group.findall(f"{SVG}rect[@fill='url(#gp-kept)']")) == 1
        for group in root.iter(f"{SVG}g")
    ]
    expected = [slot.enabled and slot.keeps_tail for slot in declared(registry)]
    assert hatched == expected
    assert {True, False} <= set(hatched)


def test_no_registry_is_a_picture_too() -> None:
    """An engine whose lanes capture nothing gets a document that says so."""
    assert titles(draw([])) == []
    assert "No registry." in draw([])


# -- words -----------------------------------------------------------------------------------------


@given(nbytes=st.integers(0, 2**50))
def test_bytes_in_words_are_near(nbytes: int) -> None:
    """A size in words is at most a twentieth of its unit away from the number, and below 1024 of it."""
    number, unit = in_words(nbytes).replace(",", "").split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * scale - nbytes) <= 0.051 * scale
    assert float(number) < 1024 or unit == "GiB"


def test_a_row_says_nothing_of_memory_that_is_not_there() -> None:
    """A slot that has no memory has a row without shape, device and bytes."""
    row = SlotRow.of(GraphSlot("a", lambda bs, _: (bs,), torch.int8).bound(None))
    assert (row.shape, row.device, row.nbytes, row.padding) == (None, None, None, "foreach_copy")
