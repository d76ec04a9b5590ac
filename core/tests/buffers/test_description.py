"""Descriptions of a registry: as a table, and as JSON."""

import json

import pytest
import torch
from hypothesis import given, settings

from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.buffers.description import SlotRow
from registry_kit import declared, padding, registries, small, spelled


@settings(derandomize=True, max_examples=150)
@given(registry=registries())
def test_the_table_has_one_aligned_line_a_slot(registry: CudaGraphBufferRegistry) -> None:
    """With any names, each slot has one printable line, with its cells under their headings."""
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
    """The table shows owner, shape, policy with its value, reason, and the totals last."""
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
        f"8 slots and 1 disabled, {registry.nbytes:,} bytes; {registry.allocated_nbytes:,} bytes allocated"
    )


# -- JSON ------------------------------------------------------------------------------------------


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
    seen = str(before)
    registry.register_slot(GraphSlot("more", lambda bs, _: (bs,), torch.int8, axis="bs"))
    assert str(before) == seen
    assert len(registry.describe().slots) == len(before.slots) + 1
    with pytest.raises(AttributeError):
        before.slots[0].name = "other"  # type: ignore[misc]


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_says_nothing_of_memory_that_is_not_there() -> None:
    """A slot that has no memory has a row without shape, device and bytes."""
    row = SlotRow.of(GraphSlot("a", lambda bs, _: (bs,), torch.int8).bound(None))
    assert (row.shape, row.device, row.nbytes, row.padding) == (None, None, None, "foreach_copy")
