"""The declaration of one slot: valid arguments, derived properties, and slices."""

from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from graphpact.buffers import (
    BoundSlot,
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SlotRole,
    metadata_slot,
)
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


def _registry(lane: str | None = None) -> CudaGraphBufferRegistry:
    return CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8, lane=lane)


def _registered(**changes: Any) -> BoundSlot:
    return _registry().register_slot(_slot(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"axis": "rows"}, "unknown axis 'rows'"),
        ({"padding_policy": P.FILL_SENTINEL}, "FILL_SENTINEL without a pad_value"),
        ({"padding_policy": P.FILL_ONCE}, "FILL_ONCE without a pad_value"),
        ({"role": "lenghts"}, "unknown role 'lenghts'"),
    ],
)
def test_a_bad_declaration_is_refused(changes: dict[str, Any], says: str) -> None:
    """An unknown axis or role, or a missing pad value, is refused with slot, owner and help."""
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
        {"name": "a.b"},
        {"name": "a.b", "copy_from_fb": False},
        {"name": "a.b", "source_fn": lambda *_: None},
        {"axis": "none"},
    ],
)
def test_what_is_allowed(changes: dict[str, Any]) -> None:
    """A pad value of 0 or False, a dotted name with any source, and axis none are valid."""
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
    """A pad value that the dtype would round or wrap is refused at the declaration."""
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
    """Any pad value that the dtype can hold is exact in a new buffer and in reset padding rows."""
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8)
    slot = registry.register_slot(_slot(dtype=dtype, padding_policy=P.FILL_SENTINEL, pad_value=value))
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [value] * 4
    slot.buffer.zero_()
    registry.fill_from(None, raw_bs=1, padded_bs=3, raw_num_tokens=1, padded_num_tokens=3)
    assert slot.buffer.tolist() == [0, value, value, 0]


def test_slot_errors_are_value_errors() -> None:
    """A SlotError is a ValueError, as in the original, and also a usage error."""
    assert issubclass(SlotError, ValueError)
    assert issubclass(SlotError, UsageError)
    with pytest.raises(ValueError, match="axis"):
        _slot(axis="rows")


def test_a_slot_without_a_buffer_has_no_slices() -> None:
    """A slice of a disabled slot is an error that names the slot."""
    slot = _registered(enabled=False)
    with pytest.raises(UnallocatedSlotError, match=r"'lengths' of somebody has no buffer") as error:
        slot.slice_for(1, 1)
    assert isinstance(error.value, RuntimeError)
    assert isinstance(error.value, SlotError)
    assert "help: declare it with enabled=True" in str(error.value)


def test_the_defaults_are_the_originals() -> None:
    """Name, shape and dtype declare a token slot that copies its batch field and keeps its tail."""
    slot = GraphSlot("input_ids", lambda _, max_tokens: (max_tokens,), torch.int64)
    assert (slot.axis, slot.padding_policy, slot.pad_value) == ("tokens", P.FOREACH_COPY, None)
    assert (slot.enabled, slot.copy_from_fb, slot.optional) == (True, True, False)
    assert [slot.role, slot.device, slot.owner, slot.reason] == [None] * 4


def test_the_order_of_arguments_is_the_originals() -> None:
    """Positional arguments have the original's order; our additions are keyword-only.

    The original's last argument, ``buffer``, is not part of a declaration: use ``register_slot(bind=...)``.
    """
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
    ]
    assert {f.name for f in given if f.kw_only} == {
        "owner",
        "reason",
        "optional",
        "role",
        "narrows",
        "contents",
        "extra_rows",
    }


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
    """ZERO and FILL_SENTINEL reset padding rows; FILL_SENTINEL and FILL_ONCE have a pad value."""
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
    """The declaration determines if views contain the slot, lanes may share it, and a reason is required."""
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
    """A context returns raw and padded rows by axis, and None for axis none."""
    context = FillContext(1, 2, 3, 4)
    assert context.rows("bs") == (1, 2)
    assert context.rows("tokens") == (3, 4)
    assert context.rows("none") is None
    assert context.pp_proxy_tensors is None


def test_a_context_is_its_counts() -> None:
    """Contexts with equal counts are equal, whatever the proxy tensors, and are immutable."""
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
            "its source_fn is never called",
        ),
    ],
)
def test_an_argument_of_another_kind_is_refused(changes: dict[str, Any], says: str) -> None:
    """An argument of another type, or one without effect, is refused at the declaration."""
    with pytest.raises(SlotError, match=says) as error:
        _slot(**changes)
    assert "\n  help: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("buffer", torch.zeros(4, dtype=torch.int64)), ("pad_value", 3), ("enabled", False)],
)
def test_a_slot_does_not_change(name: str, value: object) -> None:
    """Declared and bound slots are immutable, since graphs and fill plans depend on them."""
    declared = _slot()
    for slot in (declared, _registry().register_slot(declared)):
        before = getattr(slot, name, None)
        with pytest.raises(FrozenInstanceError):
            setattr(slot, name, value)
        assert getattr(slot, name, None) is before


def test_a_bound_slot_says_what_its_declaration_says() -> None:
    """A bound slot has every field of its declaration, and a buffer."""
    declared = _slot(padding_policy=P.FILL_SENTINEL, pad_value=7, reason="a test", role="lengths")
    bound = _registry("decode").register_slot(declared)
    assert {f.name: getattr(bound, f.name) for f in fields(GraphSlot)} == {
        f.name: getattr(declared, f.name) for f in fields(GraphSlot)
    }
    assert bound.label == declared.label
    assert bound.buffer is not None
    assert bound.buffer.tolist() == [7] * 4


# -- slots of a backend ----------------------------------------------------------------------------

DEVICE_ROLES: list[SlotRole] = ["offsets", "lengths", "table", "plan", "mask"]


def _rows(bs: int, _: int) -> tuple[int, ...]:
    return (bs,)


@pytest.mark.parametrize("role", get_args(SlotRole))
def test_every_role_is_a_slot_that_its_owner_fills(role: SlotRole) -> None:
    """A metadata slot has the given role, the prefix of its name as owner, and no fill writes it."""
    slot = metadata_slot("acme.rows", _rows, torch.int32, role=role, axis="bs")
    assert (slot.role, slot.owner, slot.name) == (role, "acme", "acme.rows")
    assert not slot.copy_from_fb
    assert (slot.post_fill, slot.source_fn) == (None, None)
    registry = _registry("decode")  # a lane requires an owner, and reasons
    buffer = registry.register_slot(slot).buffer
    assert buffer is not None
    buffer.fill_(7)
    registry.fill_from(None, raw_bs=1, padded_bs=3, raw_num_tokens=1, padded_num_tokens=3)
    assert buffer.tolist() == [7] * 4


@pytest.mark.parametrize("role", DEVICE_ROLES)
def test_a_backend_writes_every_row(role: SlotRole) -> None:
    """A metadata slot on the device keeps its padding rows: its owner writes every row in every step."""
    slot = metadata_slot("acme.rows", _rows, torch.int32, role=role)
    assert (slot.padding_policy, slot.device) == (P.KEEP_PAD, None)
    assert slot.reason == "every row of the padded extent is written in every step"


def test_a_workspace_is_filled_once() -> None:
    """A workspace holds its pad value from the start, and needs no reason."""
    slot = metadata_slot("acme.work", _rows, torch.float32, role="workspace", pad_value=-1.0)
    assert (slot.padding_policy, slot.pad_value, slot.reason) == (P.FILL_ONCE, -1.0, None)
    buffer = _registry("decode").register_slot(slot).buffer
    assert buffer is not None
    assert buffer.tolist() == [-1.0] * 4


def test_staging_is_in_host_memory() -> None:
    """A staging slot is in host memory, whatever the registry's device is."""
    slot = metadata_slot("acme.staging", _rows, torch.int32, role="staging", axis="bs")
    registry = CudaGraphBufferRegistry(device="meta", max_bs=4, max_num_tokens=8, lane="decode")
    buffer = registry.register_slot(slot).buffer
    assert buffer is not None
    assert buffer.device.type == "cpu"


@pytest.mark.parametrize("extra_rows", [0, 1, 2])
def test_extra_rows_are_in_every_slice(extra_rows: int) -> None:
    """With ``extra_rows`` a slice has that many more rows than its axis, and begins at the buffer's start."""
    slot = metadata_slot(
        "acme.indptr",
        lambda bs, _: (bs + extra_rows,),
        torch.int32,
        role="offsets",
        axis="bs",
        extra_rows=extra_rows,
    )
    bound = _registry("decode").register_slot(slot)
    assert bound.buffer is not None
    assert [len(bound.slice_for(n, 8)) for n in (1, 4)] == [1 + extra_rows, 4 + extra_rows]
    assert bound.slice_for(1, 8).data_ptr() == bound.buffer.data_ptr()


TOO_FEW_ROWS: list[tuple[Any, dict[str, Any], str]] = [
    (lambda bs, _: (bs,), {"extra_rows": 1}, "has up to {bs} in lane 'decode', and extra_rows is 1"),
    (lambda *_: (), {}, "has 0 rows; its axis 'bs' has up to {bs}"),
    (lambda *_: (0,), {"axis": "tokens"}, "has 0 rows; its axis 'tokens' has up to {tokens}"),
]


@pytest.mark.parametrize(("rows", "more", "says"), TOO_FEW_ROWS)
@pytest.mark.parametrize("most", [(4, 8), (1, 2), (1, 1)])
def test_a_slot_with_too_few_rows_is_refused(
    rows: Any, more: dict[str, Any], says: str, most: tuple[int, int]
) -> None:
    """A slot with fewer rows than its axis and its extra rows is refused at registration, with the remedy."""
    slot = metadata_slot("acme.rows", rows, torch.int32, role="table", **({"axis": "bs"} | more))
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=most[0], max_num_tokens=most[1], lane="decode")
    with pytest.raises(SlotError) as error:
        registry.register_slot(slot)
    for part in (says.format(bs=most[0], tokens=most[1]), "slot 'acme.rows' of acme", "shape_fn"):
        assert part in str(error.value)


@pytest.mark.parametrize("more", [{}, {"slice_fn": _rows, "axis": "bs"}, {"extra_rows": -1, "axis": "bs"}])
def test_extra_rows_that_nothing_would_add_are_refused(more: dict[str, Any]) -> None:
    """Extra rows without an axis, together with a slice_fn, or below 0 are refused at the declaration."""
    with pytest.raises(SlotError, match=r"acme\.rows' of acme: extra_rows=-?1"):
        metadata_slot("acme.rows", _rows, torch.int32, role="table", **({"extra_rows": 1} | more))


@pytest.mark.parametrize("name", ["rows", ".rows", "acme.", ""])
def test_a_metadata_slot_without_an_owner_is_refused(name: str) -> None:
    """A name that is not ``owner.what`` is refused, and the error shows this form."""
    with pytest.raises(SlotError, match=r"a metadata slot is named owner\.what"):
        metadata_slot(name, _rows, torch.int32, role="table")


# -- constants -------------------------------------------------------------------------------------


def _counted(name: str = "acme.index", **more: Any) -> GraphSlot:
    """Return the slot of a constant: the index of each token."""
    contents = {"contents": lambda new: torch.arange(len(new), out=new)}
    return metadata_slot(
        name,
        lambda _, tokens: (tokens,),
        torch.int64,
        role="constant",
        axis="tokens",
        **(contents | more),
    )


def test_a_constant_is_written_when_it_is_registered_and_never_after() -> None:
    """A constant holds its contents, or its pad value, from the start; no fill writes it."""
    registry = _registry("decode")
    bound = registry.register_slot(_counted())
    ones = registry.register_slot(_counted("acme.ones", contents=None, pad_value=1))
    for _ in range(2):
        assert bound.slice_for(2, 5).tolist() == [0, 1, 2, 3, 4]
        assert ones.slice_for(2, 3).tolist() == [1, 1, 1]
        registry.fill_from(SimpleNamespace(), raw_bs=1, padded_bs=2, raw_num_tokens=1, padded_num_tokens=2)
    assert (bound.padding_policy, bound.reason) == (P.FILL_ONCE, None)


def test_contents_that_raise_name_their_slot() -> None:
    """An exception of the function is a `SlotError` with slot and owner, and nothing is registered."""
    registry = _registry("decode")
    with pytest.raises(SlotError, match=r"slot 'acme.index' of acme: its contents raised KeyError"):
        registry.register_slot(_counted(contents=lambda _: {}["absent"]))
    assert not registry.has_slot("acme.index")


def test_contents_that_make_another_tensor_are_refused() -> None:
    """A function that returns a new tensor and does not change the buffer is a `SlotError`."""
    registry = _registry("decode")
    with pytest.raises(SlotError, match="its contents returned another tensor") as raised:
        registry.register_slot(_counted(contents=lambda new: torch.arange(len(new))))
    assert "out=t" in str(raised.value.hint)
    assert not registry.has_slot("acme.index")
    registry.register_slot(_counted(contents=lambda new: new[:1].fill_(3)))
