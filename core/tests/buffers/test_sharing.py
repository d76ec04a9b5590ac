"""Shared memory of lanes: which lanes and slots share it; registering a slot does not write it."""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

from graphpact.buffers import (
    BoundSlot,
    CudaGraphBufferRegistry,
    GraphSlot,
    PaddingPolicy,
    SharedBuffers,
    build_decode_registry,
    share_input_buffer,
    sharing,
)
from graphpact.errors import SlotError
from support import fill, make_slot

P = PaddingPolicy
I64 = torch.int64


@pytest.fixture(autouse=True)
def _process_wide() -> Iterator[None]:
    """Clear the process-wide pool before and after each test."""
    sharing.PROCESS_WIDE.clear()
    yield
    sharing.PROCESS_WIDE.clear()


_slot = functools.partial(make_slot, reason="nobody reads it")


def _registry(pool: SharedBuffers | Literal[True, False], lane: str | None = None) -> CudaGraphBufferRegistry:
    return CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=8, share_pool=pool, lane=lane)


def _address(slot: BoundSlot) -> int:
    assert slot.buffer is not None
    return slot.buffer.data_ptr()


def _pair(pool: SharedBuffers, one: GraphSlot, other: GraphSlot) -> tuple[int, int]:
    """Return the addresses of these slots in two lanes of one pool."""
    first = _registry(pool, "decode").register_slot(one)
    second = _registry(pool, "draft").register_slot(other)
    return _address(first), _address(second)  # both slots are alive: no address is reused


# -- which slots -----------------------------------------------------------------------------------


def test_registries_of_a_pool_share() -> None:
    """Registries of any lane, and without a lane, share the memory of a slot, even for different owners."""
    pool = SharedBuffers()
    owners = {"decode": "one", "draft": "another", None: "a third"}
    slots = [_registry(pool, lane).register_slot(_slot(owner=owner)) for lane, owner in owners.items()]
    assert len({_address(slot) for slot in slots}) == 1


def test_without_a_pool_nothing_is_shared() -> None:
    """Registries without a pool, or with different pools, do not share memory."""
    pools = (False, False, SharedBuffers(), SharedBuffers(), True)
    slots = [_registry(pool).register_slot(_slot()) for pool in pools]
    assert len({_address(slot) for slot in slots}) == len(pools)


def test_adopted_memory_is_not_shared() -> None:
    """A bound tensor is not shared, even if the pool has a buffer with that name."""
    pool, memory = SharedBuffers(), torch.zeros(4, dtype=I64)
    shared = _registry(pool).register_slot(_slot())
    bound = _registry(pool).register_slot(_slot(), bind=memory)
    assert bound.buffer is memory
    assert _address(_registry(pool).register_slot(_slot())) == _address(shared)


# -- which slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {}),
        ({}, {"padding_policy": P.KEEP_PAD}),
        ({"padding_policy": P.FOREACH_COPY}, {}),
        ({}, {"padding_policy": P.FILL_SENTINEL, "pad_value": 0}),
        (
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 5},
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 5},
        ),
        (
            {"padding_policy": P.FILL_ONCE, "pad_value": 5},
            {"padding_policy": P.FILL_ONCE, "pad_value": 5},
        ),
        ({}, {"post_fill": lambda *_: None, "optional": True}),
        ({}, {"post_fill": lambda *_: None, "copy_from_fb": False}),
    ],
)
def test_equal_empty_rows_share(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Slots share memory if their padding values are equal and every fill of both writes the live rows."""
    first, second = _pair(SharedBuffers(), _slot(**one), _slot(**other))
    assert first == second


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 5},
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 6},
            ("holds 6 in padding rows", "which holds 5"),
        ),
        (
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 5},
            {},
            ("holds 0 in padding rows", "which holds 5"),
        ),
        (
            {"padding_policy": P.KEEP_PAD},
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 5},
            ("holds 5 in padding rows", "which holds 0"),
        ),
        (
            {"padding_policy": P.FILL_SENTINEL, "pad_value": 5},
            {"padding_policy": P.FILL_ONCE, "pad_value": 5},
            ("holds 5 from the start in padding rows", "which holds 5 in padding rows\n"),
        ),
        (
            {"padding_policy": P.FILL_ONCE, "pad_value": 0},
            {},
            ("holds 0 in padding rows", "which holds 0 from the start"),
        ),
    ],
)
def test_another_sentinel_is_refused(
    one: dict[str, Any], other: dict[str, Any], says: tuple[str, str]
) -> None:
    """A slot with another padding value is refused with both slots and values, and nothing is written."""
    pool = SharedBuffers()
    first = _registry(pool, "decode").register_slot(_slot(owner="an owner", **one))
    assert first.buffer is not None
    first.buffer.copy_(torch.tensor([7, 8, 9, 10]))
    registry = _registry(pool, "draft")
    with pytest.raises(SlotError) as error:
        registry.register_slot(_slot(**other))
    names = (
        "slot 'lengths' of somebody in lane 'draft'",
        "slot 'lengths' of an owner in lane 'decode'",
    )
    for part in (*names, *says, "\n  help: "):
        assert part in str(error.value)
    assert first.buffer.tolist() == [7, 8, 9, 10]
    assert registry.slot_names() == []


@pytest.mark.parametrize(("policy", "pad_value"), [(P.ZERO, None), (P.FILL_SENTINEL, 5), (P.FILL_ONCE, 5)])
def test_joining_writes_nothing(policy: PaddingPolicy, pad_value: int | None) -> None:
    """A slot that joins shared memory does not initialise it again."""
    pool = SharedBuffers()
    slots = []
    for lane in ("decode", "draft", "prefill"):
        declared = _slot(padding_policy=policy, pad_value=pad_value)
        slot = _registry(pool, lane).register_slot(declared)
        slots.append(slot)
        assert slot.buffer is not None
        if lane == "decode":
            assert slot.buffer.tolist() == [pad_value or 0] * 4
            slot.buffer.copy_(torch.tensor([7, 8, 9, 10]))
        assert slot.buffer.tolist() == [7, 8, 9, 10]
    assert len({_address(slot) for slot in slots}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"optional": True},
        {"copy_from_fb": False},
        {"copy_from_fb": False, "padding_policy": P.FILL_ONCE, "pad_value": 0},
        {"optional": True, "source_fn": lambda *_: None},
    ],
    ids=["optional", "its owner's", "written once", "optional source"],
)
def test_what_a_fill_may_leave_is_not_shared(changes: dict[str, Any]) -> None:
    """A slot that a fill may leave unwritten has its own memory in every lane."""
    one, other = _pair(SharedBuffers(), _slot(**changes), _slot(**changes))
    assert one != other


def test_what_an_owner_left_is_still_there_after_another_lane() -> None:
    """Fills of another lane do not change an optional field, or a slot that only its owner writes."""
    pool = SharedBuffers()
    registries = [_registry(pool, lane) for lane in ("decode", "draft")]
    for registry in registries:
        registry.register_slot(_slot(optional=True))
        registry.register_slot(_slot("table", copy_from_fb=False))
    mine = registries[0].get_slot("table").buffer
    assert mine is not None
    mine.copy_(torch.tensor([1, 2, 3, 4]))
    fill(registries[0], 2, 2, lengths=torch.tensor([5, 6]))
    fill(registries[1], 0, 4)
    fill(registries[1], 4, 4, lengths=torch.full((4,), 9))
    assert registries[0].get_slot("lengths").slice_for(2, 2).tolist() == [5, 6]
    assert mine.tolist() == [1, 2, 3, 4]
    fill(registries[0], 2, 2)
    assert registries[0].get_slot("lengths").slice_for(2, 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.int32},
        {"shape_fn": lambda bs, _: (2 * bs,)},
        {"shape_fn": lambda bs, _: (bs - 1,)},
    ],
    ids=["dtype", "larger", "smaller"],
)
@pytest.mark.parametrize("order", [1, -1])
def test_another_key_is_other_memory(changes: dict[str, Any], order: int) -> None:
    """Slots of one name with different sizes or dtypes do not share memory, in either order."""
    pool = SharedBuffers()
    declared = [{}, changes][::order]
    slots = [_registry(pool).register_slot(_slot(**more)) for more in declared]
    assert _address(slots[0]) != _address(slots[1])
    again = [_registry(pool).register_slot(_slot(**more)) for more in declared]
    assert [_address(slot) for slot in again] == [_address(slot) for slot in slots]


def test_one_size_in_two_shapes_is_refused() -> None:
    """A slot with the size of the shared one and another shape is refused with both shapes."""
    pool = SharedBuffers()
    first = _registry(pool, "decode").register_slot(_slot(shape_fn=lambda *_: (6, 2)))
    registry = _registry(pool, "draft")
    with pytest.raises(SlotError) as error:
        registry.register_slot(_slot(shape_fn=lambda *_: (4, 3)))
    for part in ("lane 'draft' is (4, 3)", "lane 'decode', which is (6, 2)", "\n  help: "):
        assert part in str(error.value)
    assert registry.slot_names() == []
    assert first.buffer is not None
    assert (first.buffer == 0).all()


# -- alternating lanes -----------------------------------------------------------------------------


def test_lanes_in_turn_see_their_own_batch() -> None:
    """After a fill, a lane reads its batch and padding, whatever other lanes filled before."""
    pool = SharedBuffers()
    slots = []
    for lane in ("decode", "draft"):
        registry = _registry(pool, lane)
        registry.register_slot(_slot(padding_policy=P.FILL_SENTINEL, pad_value=5))
        registry.register_slot(_slot("wide", shape_fn=lambda bs, _: (bs, 2)))
        slots.append(registry)
    for step, (raw, padded) in enumerate([(4, 4), (1, 3), (3, 4), (0, 2), (2, 2), (1, 4)] * 2):
        registry = slots[step % 2]
        lengths = torch.arange(raw) + 10 * step
        fill(registry, raw, padded, lengths=lengths, wide=lengths[:, None].expand(raw, 2))
        expected = [*lengths.tolist(), *[5] * (padded - raw)]
        assert registry.get_slot("lengths").slice_for(padded, padded).tolist() == expected
        rows = [[n, n] for n in lengths.tolist()] + [[0, 0]] * (padded - raw)
        assert registry.get_slot("wide").slice_for(padded, padded).tolist() == rows


def test_presets_share() -> None:
    """Two decode registries of one pool share exactly the slots that every fill refreshes."""
    pool = SharedBuffers()
    registries = [
        build_decode_registry(
            device="cpu",
            max_bs=4,
            max_num_token=8,
            seq_len_fill_value=1,
            lane=lane,
            share_pool=pool,
        )
        for lane in ("decode", "draft")
    ]
    for slot in registries[0]:
        is_one = _address(slot) == _address(registries[1].get_slot(slot.name))
        assert is_one == slot.is_refreshed


def test_presets_of_another_length_are_refused() -> None:
    """A lane with another ``seq_len_fill_value`` is refused in the same pool."""
    pool = SharedBuffers()
    common: dict[str, Any] = {"device": "cpu", "max_bs": 4, "max_num_token": 8, "share_pool": pool}
    build_decode_registry(seq_len_fill_value=1, lane="decode", **common)
    with pytest.raises(SlotError, match="'seq_lens' of decode inputs in lane 'draft' holds 0 "):
        build_decode_registry(seq_len_fill_value=0, lane="draft", **common)


def test_a_pool_that_forgets() -> None:
    """After clear() existing slots keep their memory, and new slots get other memory."""
    pool = SharedBuffers()
    registry = _registry(pool)
    old = registry.register_slot(_slot(padding_policy=P.FILL_SENTINEL, pad_value=5))
    fill(registry, 1, 4, lengths=torch.tensor([1]))
    pool.clear()
    other = _registry(pool)
    new = other.register_slot(_slot(padding_policy=P.FILL_SENTINEL, pad_value=6))
    assert old.buffer is not None
    assert new.buffer is not None
    storages = [buffer.untyped_storage().data_ptr() for buffer in (old.buffer, new.buffer)]
    assert storages[0] != storages[1]
    fill(registry, 1, 3, lengths=torch.tensor([2]))
    fill(other, 2, 3, lengths=torch.tensor([3, 4]))
    assert old.buffer.tolist() == [2, 5, 5, 5]
    assert new.buffer.tolist() == [3, 4, 6, 6]


# -- share_input_buffer ----------------------------------------------------------------------------


def test_the_first_tensor_is_everybodys() -> None:
    """For an equal name, size, dtype and device the first tensor is returned, unchanged."""
    first = torch.full((4,), 7)
    assert share_input_buffer("ids", first) is first
    assert share_input_buffer("ids", torch.zeros(4, dtype=I64)) is first
    assert first.tolist() == [7] * 4


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("other", torch.zeros(4, dtype=I64)),
        ("ids", torch.zeros(4, dtype=torch.int32)),
        ("ids", torch.zeros(3, dtype=I64)),
        ("ids", torch.zeros(8, dtype=I64)),
        ("ids", torch.zeros(4, dtype=I64, device="meta")),
    ],
    ids=["name", "dtype", "smaller", "larger", "device"],
)
def test_any_part_of_the_key_parts(name: str, tensor: torch.Tensor) -> None:
    """A tensor with another name, size, dtype or device is not shared."""
    first = share_input_buffer("ids", torch.zeros(4, dtype=I64))
    assert share_input_buffer(name, tensor) is tensor
    assert share_input_buffer("ids", torch.ones(4, dtype=I64)) is first


def test_another_shape_is_a_view() -> None:
    """The shared memory is returned with the shape and strides of the given tensor."""
    first = share_input_buffer("table", torch.arange(6))
    view = share_input_buffer("table", torch.zeros(2, 3, dtype=I64))
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    turned = share_input_buffer("table", torch.zeros(3, 2, dtype=I64).t())
    assert turned.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert view.data_ptr() == turned.data_ptr() == first.data_ptr()


def test_what_is_not_contiguous_is_not_seen_in_another_shape() -> None:
    """Memory that is not contiguous is shared only in the same shape."""
    gaps = torch.zeros(4, 2, dtype=I64)[:, 0]
    assert share_input_buffer("gaps", gaps) is gaps
    assert share_input_buffer("gaps", torch.zeros(4, dtype=I64)) is gaps
    with pytest.raises(SlotError, match=r"'gaps' as \(2, 2\) cannot share .* not contiguous"):
        share_input_buffer("gaps", torch.zeros(2, 2, dtype=I64))


def test_registries_share_with_input_buffers() -> None:
    """``share_pool=True`` uses the pool of share_input_buffer, in both directions."""
    first = share_input_buffer("lengths", torch.zeros(4, dtype=I64))
    slot = _registry(pool=True).register_slot(_slot())
    assert slot.buffer is first
    other = _registry(pool=True).register_slot(_slot("other"))
    assert share_input_buffer("other", torch.zeros(4, dtype=I64)) is other.buffer
    reset = _slot(padding_policy=P.FILL_SENTINEL, pad_value=5)
    assert _registry(pool=True).register_slot(reset).buffer is first
    assert first.tolist() == [0] * 4  # registering writes nothing; a fill resets padding rows


@pytest.mark.parametrize("held", [5, 0])
def test_what_is_written_once_must_be_there(held: int) -> None:
    """A FILL_ONCE slot shares memory of share_input_buffer only if it already holds the pad value."""
    once = _slot(padding_policy=P.FILL_ONCE, pad_value=5)
    first = share_input_buffer("lengths", torch.full((4,), held))
    if held == 5:
        assert _registry(pool=True).register_slot(once).buffer is first
    else:
        with pytest.raises(SlotError, match="shares its memory with 'lengths' of share_input_buffer"):
            _registry(pool=True).register_slot(once)
    assert first.tolist() == [held] * 4


def test_not_a_number_is_a_sentinel_like_another() -> None:
    """Slots with NaN as their pad value share memory, although NaN is not equal to itself."""
    pool, slots = SharedBuffers(), []
    for _ in range(2):
        registry = CudaGraphBufferRegistry(device="cpu", max_bs=2, max_num_tokens=2, share_pool=pool)
        slot = GraphSlot(
            "scores",
            lambda max_bs, _: (max_bs,),
            torch.float32,
            axis="bs",
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=float("nan"),
        )
        slots.append(registry.register_slot(slot))
    assert slots[0].buffer is not None
    assert slots[1].buffer is not None
    assert slots[0].buffer.data_ptr() == slots[1].buffer.data_ptr()
