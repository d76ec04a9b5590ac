"""The declaration of one slot: what it needs, what it says of itself, and which view it gives."""

from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpact.buffers import CudaGraphBufferRegistry, FillContext, GraphSlot, PaddingPolicy
from graphpact.errors import SlotError, UnallocatedSlotError, UsageError

P = PaddingPolicy


def _slot(**changes: Any) -> GraphSlot:
    declared: dict[str, Any] = {
        "name": "lengths",
        "shape_fn": lambda max_bs, _: (max_bs,),
        "dtype": torch.int64,
        "axis": "bs",
        "owner": "somebody",
    }
    return GraphSlot(**(declared | changes))


def _registered(**changes: Any) -> GraphSlot:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    return registry.register_slot(_slot(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"axis": "rows"}, "unknown axis 'rows'"),
        ({"padding_policy": P.FILL_SENTINEL}, "FILL_SENTINEL without a pad_value"),
        ({"padding_policy": P.FILL_ONCE}, "FILL_ONCE without a pad_value"),
        ({"name": "lengths.of.it"}, "a dotted name is no batch field"),
    ],
)
def test_a_bad_declaration_is_refused(changes: dict[str, Any], says: str) -> None:
    """A slot that lacks what its policy or name needs is refused where it is declared, with help."""
    with pytest.raises(SlotError) as error:
        _slot(**changes)
    for part in (says, "'lengths", "of somebody", "help: "):
        assert part in str(error.value)
    with pytest.raises(SlotError, match="of an unnamed owner"):
        _slot(owner=None, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"padding_policy": P.FILL_SENTINEL, "pad_value": 0},
        {"padding_policy": P.FILL_ONCE, "pad_value": False},
        {"name": "a.b", "copy_from_fb": False},
        {"name": "a.b", "source_fn": lambda *_: None},
        {"axis": "none"},
    ],
)
def test_what_is_allowed(changes: dict[str, Any]) -> None:
    """A pad value that is false is one, and a dotted name stands where something else fills it."""
    _slot(**changes)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 1.5),
        (torch.int64, 2**63),
        (torch.int64, float("nan")),
        (torch.int32, float("-inf")),
        (torch.int8, 300),
        (torch.uint8, -1),
        (torch.bool, 7),
        (torch.float16, 1e6),
        (torch.bfloat16, -1e39),
    ],
)
def test_a_pad_value_that_the_dtype_lacks_is_refused(dtype: torch.dtype, value: float) -> None:
    """A value that would be rounded or wrapped is refused where the slot is declared."""
    for policy in (P.FILL_SENTINEL, P.FILL_ONCE):
        with pytest.raises(SlotError, match=r"'lengths' of somebody: .* cannot hold its pad_value"):
            _slot(dtype=dtype, padding_policy=policy, pad_value=value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 2**62 + 1),
        (torch.int64, -(2**63)),
        (torch.int8, -128),
        (torch.uint8, 255),
        (torch.int32, 3.0),
        (torch.bool, 1),
        (torch.float32, float("-inf")),
        (torch.float32, 0.5),
    ],
)
def test_a_pad_value_is_held_exactly(dtype: torch.dtype, value: float) -> None:
    """The extremes of a dtype are pad values, and a new buffer and a tail that is reset hold them."""
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    slot = registry.register_slot(
        _slot(dtype=dtype, padding_policy=P.FILL_SENTINEL, pad_value=value)
    )
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [value] * 4
    slot.buffer.zero_()
    registry.fill_from(None, raw_bs=1, padded_bs=3, raw_num_tokens=1, padded_num_tokens=3)
    assert slot.buffer.tolist() == [0, value, value, 0]


def test_slot_errors_are_value_errors() -> None:
    """A program that catches what the original raises catches ours, and ours are usage errors too."""
    assert issubclass(SlotError, ValueError)
    assert issubclass(SlotError, UsageError)
    with pytest.raises(ValueError, match="axis"):
        _slot(axis="rows")


def test_a_slot_without_a_buffer_has_no_slices() -> None:
    """A slot that no registry holds names itself instead of slicing nothing."""
    with pytest.raises(UnallocatedSlotError, match=r"'lengths' of somebody has no buffer") as error:
        _slot().slice_for(1, 1)
    assert isinstance(error.value, RuntimeError)
    assert isinstance(error.value, SlotError)
    assert "help: register it" in str(error.value)


def test_the_defaults_are_the_originals() -> None:
    """Name, shape and dtype declare a token slot that copies its batch field and keeps its tail."""
    slot = GraphSlot("input_ids", lambda _, max_tokens: (max_tokens,), torch.int64)
    assert (slot.axis, slot.padding_policy, slot.pad_value) == ("tokens", P.FOREACH_COPY, None)
    assert (slot.enabled, slot.copy_from_fb, slot.optional) == (True, True, False)
    assert [slot.buffer, slot.device, slot.owner, slot.reason] == [None] * 4


def test_the_order_of_arguments_is_the_originals() -> None:
    """What may be given by position comes in the original's order; what is ours goes by name."""
    given = [f for f in fields(GraphSlot) if f.init]
    names = [f.name for f in given if not f.kw_only]
    assert names == [
        "name",
        "shape_fn",
        "dtype",
        "axis",
        "device",
        "padding_policy",
        "pad_value",
        "enabled",
        "copy_from_fb",
        "post_fill",
        "slice_fn",
        "source_fn",
        "buffer",
    ]
    assert {f.name for f in given if f.kw_only} == {"owner", "reason", "optional", "narrows"}


@pytest.mark.parametrize(
    ("changes", "initial"),
    [
        ({"padding_policy": P.FILL_SENTINEL, "pad_value": 7}, 7),
        ({"padding_policy": P.FILL_ONCE, "pad_value": 7}, 7),
        ({"padding_policy": P.ZERO, "pad_value": 7}, 0),
        ({"padding_policy": P.KEEP_PAD, "pad_value": 7}, 0),
        ({"padding_policy": P.FOREACH_COPY, "pad_value": 7}, 0),
    ],
)
def test_new_memory_holds_what_padding_holds(changes: dict[str, Any], initial: int) -> None:
    """A new buffer holds the pad value of a policy that has one, and zero for all others."""
    slot = _registered(**changes)
    assert slot.initial_value == initial
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [initial] * 4


def test_policies() -> None:
    """Two policies reset the tail in every padded fill, two are about a pad value, and one is both."""
    assert {p for p in P if p.resets_tail} == {P.ZERO, P.FILL_SENTINEL}
    assert {p for p in P if p.has_pad_value} == {P.FILL_ONCE, P.FILL_SENTINEL}


def _nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"padding_policy": P.ZERO}, (False, True, False)),
        ({"padding_policy": P.ZERO, "optional": True}, (False, False, False)),
        ({"padding_policy": P.ZERO, "copy_from_fb": False}, (True, False, False)),
        ({"copy_from_fb": False, "post_fill": _nothing}, (True, True, True)),
        ({"optional": True, "post_fill": _nothing}, (True, True, True)),
        ({"padding_policy": P.FOREACH_COPY}, (False, True, True)),
        ({"padding_policy": P.KEEP_PAD, "copy_from_fb": False}, (True, False, True)),
        ({"padding_policy": P.FILL_ONCE, "pad_value": 1}, (False, True, True)),
        (
            {"padding_policy": P.FILL_ONCE, "pad_value": 1, "copy_from_fb": False},
            (True, False, False),
        ),
        ({"axis": "none"}, (False, True, False)),
        ({"axis": "none", "source_fn": _nothing}, (False, True, True)),
    ],
)
def test_what_a_slot_says_of_itself(changes: dict[str, Any], says: tuple[bool, bool, bool]) -> None:
    """Whether views show it, whether lanes may share it and whether it owes a reason follow from it."""
    slot = _slot(**changes)
    assert (slot.is_computed, slot.is_refreshed, slot.keeps_tail) == says


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"axis": "bs"}, (3,)),
        ({"axis": "tokens", "shape_fn": lambda _, tokens: (tokens,)}, (5,)),
        ({"axis": "none", "shape_fn": lambda *_: (7,)}, (7,)),
        ({"axis": "none", "shape_fn": lambda *_: ()}, ()),
        ({"shape_fn": lambda bs, _: (bs, 2)}, (3, 2)),
        ({"shape_fn": lambda bs, _: (bs + 1,), "slice_fn": lambda b, n: b[: n + 1]}, (4,)),
        (
            {
                "axis": "tokens",
                "shape_fn": lambda _, tokens: (3, tokens),
                "slice_fn": lambda b, n: b[:, :n],
            },
            (3, 5),
        ),
        (
            {"axis": "none", "shape_fn": lambda *_: (6,), "slice_fn": lambda b, n: b[: n // 2]},
            (3,),
        ),
    ],
    ids=["bs", "tokens", "none", "scalar", "wide", "one more", "last axis", "none with slice_fn"],
)
def test_slices(changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    """A slice for 3 requests and 5 tokens has the rows of its axis and begins where the buffer does."""
    slot = _registered(**changes)
    view = slot.slice_for(3, 5)
    assert slot.buffer is not None
    assert tuple(view.shape) == shape
    assert view.data_ptr() == slot.buffer.data_ptr()


def test_rows_of_a_context() -> None:
    """A context answers raw and padded rows by axis, and None where nothing is padded."""
    context = FillContext(1, 2, 3, 4)
    assert context.rows("bs") == (1, 2)
    assert context.rows("tokens") == (3, 4)
    assert context.rows("none") is None
    assert context.pp_proxy_tensors is None


def test_a_context_is_its_counts() -> None:
    """Contexts of equal counts are equal whatever a pipeline stage sent, and none can be changed."""
    context = FillContext(1, 2, 3, 4, pp_proxy_tensors=SimpleNamespace(tensors={}))
    assert context == FillContext(1, 2, 3, 4)
    with pytest.raises(FrozenInstanceError):
        context.raw_bs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "int64"}, "dtype is 'int64', a str"),
        ({"padding_policy": "zero"}, "padding_policy is 'zero', a str"),
        ({"pad_value": "-1"}, "pad_value is '-1', a str"),
        ({"owner": 3}, "owner is 3, a int"),
        ({"reason": ["no"]}, "reason is"),
        ({"name": ""}, "without a name"),
        (
            {"source_fn": lambda *_: None, "copy_from_fb": False},
            "its source_fn would never be called",
        ),
    ],
)
def test_an_argument_of_another_kind_is_refused(changes: dict[str, Any], says: str) -> None:
    """What would be noticed late, or never, is refused where the slot is declared."""
    with pytest.raises(SlotError, match=says) as error:
        _slot(**changes)
    assert "\n  help: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("buffer", torch.zeros(4, dtype=torch.int64)), ("pad_value", 3), ("enabled", False)],
)
def test_a_registered_slot_does_not_change(name: str, value: object) -> None:
    """Graphs read a slot's memory and fills were made for it, so nothing of it can be replaced."""
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    for enabled in (True, False):
        slot = registry.register_slot(_slot(name=f"slot{enabled}", enabled=enabled))
        before = getattr(slot, name)
        with pytest.raises(SlotError, match=f"is registered, so its '{name}' cannot change"):
            setattr(slot, name, value)
        assert getattr(slot, name) is before
