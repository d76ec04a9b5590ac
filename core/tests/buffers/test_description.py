"""Descriptions of a registry as data."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy, build_decode_registry
from graphpact.buffers.description import SlotRow

CPU = torch.device("cpu")
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
    """Return every declared slot, including those that are not enabled."""
    return list(registry._slots.values())


def small() -> CudaGraphBufferRegistry:
    """Return the decode registry with one more slot, which is not enabled."""
    registry = build_decode_registry(
        device=CPU, max_bs=4, max_num_token=8, seq_len_fill_value=1, enable_mrope=False
    )
    registry.register_slot(
        GraphSlot("later", lambda bs, _: (bs,), torch.int8, enabled=False, owner="nobody yet")
    )
    return registry


@settings(derandomize=True, max_examples=150)
@given(registry=registries())
def test_json_says_all_of_it_and_totals_are_right(registry: CudaGraphBufferRegistry) -> None:
    """Strict JSON has every slot's declaration, and the totals are those of the buffers."""
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
    """A description is immutable and does not include a slot that is registered later."""
    registry = small()
    before = registry.describe()
    seen = before.to_dict()
    registry.register_slot(GraphSlot("more", lambda bs, _: (bs,), torch.int8, axis="bs"))
    assert before.to_dict() == seen
    assert len(registry.describe().slots) == len(before.slots) + 1
    with pytest.raises(AttributeError):
        before.slots[0].name = "other"  # type: ignore[misc]


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_says_nothing_of_memory_that_is_not_there() -> None:
    """A slot that has no memory has a row without shape, device and bytes."""
    row = SlotRow.of(GraphSlot("a", lambda bs, _: (bs,), torch.int8).bound(None))
    assert (row.shape, row.device, row.nbytes, row.padding) == (None, None, None, "foreach_copy")
