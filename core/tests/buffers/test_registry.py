"""The registry: accepted and refused slots and batches. A refusal writes nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    PaddingPolicy,
    SharedBuffers,
    build_decode_registry,
    fills,
)
from graphpact.buffers import registry as registry_module
from graphpact.errors import SlotError, UnknownSlotError
from support import fill, make_slot

P = PaddingPolicy
I64, I32, F32 = torch.int64, torch.int32, torch.float32


def _registry(max_bs: int = 4, max_num_tokens: int = 8, lane: str | None = None) -> CudaGraphBufferRegistry:
    return CudaGraphBufferRegistry(device="cpu", max_bs=max_bs, max_num_tokens=max_num_tokens, lane=lane)


def _bytes(registry: CudaGraphBufferRegistry) -> dict[str, Any]:
    return {s.name: s.buffer.tolist() for s in registry if s.buffer is not None}


@contextmanager
def _refused(registry: CudaGraphBufferRegistry, *parts: str) -> Iterator[None]:
    """Expect a SlotError with ``parts`` and a hint, and an unchanged registry."""
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(77)  # makes a reset of padding rows visible
    names, lane, before = registry.slot_names(), registry.lane, _bytes(registry)
    with pytest.raises(SlotError) as error:
        yield
    for part in (*parts, "\n  help: "):
        assert part in str(error.value)
    assert registry.slot_names() == names
    assert registry.lane == lane
    assert _bytes(registry) == before


# -- registering -----------------------------------------------------------------------------------


def test_the_registry_lists_what_it_holds() -> None:
    """Names and slots come in the order of registration, and each slot is found by its name."""
    registry = _registry()
    slots = [registry.register_slot(make_slot(name)) for name in ("b", "a", "c")]
    assert registry.slot_names() == ["b", "a", "c"]
    assert list(registry) == slots
    assert registry.get_slot("a") is slots[1]
    assert registry.has_slot("a")
    assert not registry.has_slot("d")


def test_a_name_is_taken_once() -> None:
    """A second slot with the same name is refused with both owners, and the first slot stays."""
    registry = _registry()
    first = registry.register_slot(make_slot())
    with _refused(registry, "'lengths' of other is already registered by somebody"):
        registry.register_slot(make_slot(owner="other"))
    assert registry.get_slot("lengths") is first


def test_one_declaration_has_memory_in_each_registry() -> None:
    """A declaration, registered in two registries, has a buffer in each, and fills do not mix them."""
    declared = make_slot()
    first, second = _registry(), _registry(max_bs=3)
    slots = [registry.register_slot(declared) for registry in (first, second)]
    fill(first, 2, 4, lengths=torch.tensor([5, 6]))
    fill(second, 1, 3, lengths=torch.tensor([7]))
    assert [_bytes(registry)["lengths"] for registry in (first, second)] == [
        [5, 6, 0, 0],
        [7, 0, 0],
    ]
    assert slots[0].buffer is not slots[1].buffer
    assert not hasattr(declared, "buffer")


def test_a_bound_slot_is_a_declaration_too() -> None:
    """A bound slot of one registry can be registered in another one, and gets separate memory there."""
    first, second = _registry(), _registry()
    slot = first.register_slot(make_slot())
    other = second.register_slot(slot)
    assert other == slot
    assert other.buffer is not slot.buffer
    assert first.get_slot("lengths").buffer is slot.buffer


def test_a_disabled_slot_takes_its_name_and_nothing_else() -> None:
    """A slot that is not enabled has no memory, no fill and no view, but its name is taken."""
    registry = _registry()
    slot = registry.register_slot(make_slot(enabled=False))
    assert slot.buffer is None
    assert registry.slot_names() == []
    assert not registry.has_slot("lengths")
    assert registry.get_slot("lengths") is slot
    assert registry.nbytes == registry.allocated_nbytes == 0
    fill(registry, 1, 2, lengths=torch.tensor([1.5]))
    with _refused(registry, "already registered by somebody"):
        registry.register_slot(make_slot())


def test_an_unknown_slot_names_the_nearest() -> None:
    """The error for an unknown slot lists the registered slots and suggests the nearest name."""
    registry = _registry()
    with pytest.raises(UnknownSlotError, match="no slot 'x'; registered: none"):
        registry.get_slot("x")
    registry.register_slot(make_slot())
    with _refused(registry, "no slot 'length'; registered: lengths", "did you mean 'lengths'?"):
        registry.get_slot("length")
    with pytest.raises(KeyError):
        registry.get_slot("length")
    with pytest.raises(UnknownSlotError) as error:
        registry.get_slot("quite different")
    assert error.value.hint is None


def test_an_existing_tensor_is_adopted_as_it_is() -> None:
    """A bound tensor is the slot's buffer at its own address, and registering writes nothing to it."""
    for policy in P:
        registry, memory = _registry(), torch.full((4,), 6)
        slot = registry.register_slot(make_slot(padding_policy=policy, pad_value=9), bind=memory)
        assert slot.buffer is memory
        assert memory.tolist() == [6] * 4
        fill(registry, 2, 2, lengths=torch.tensor([3, 4]))
        assert memory.tolist() == [3, 4, 6, 6]


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (torch.zeros(5, dtype=I64), "bound ((5,), torch.int64"),
        (torch.zeros(4, 1, dtype=I64), "bound ((4, 1), torch.int64"),
        (torch.zeros(4, dtype=I32), "bound ((4,), torch.int32"),
        (torch.zeros(4, dtype=I64, device="meta"), "'meta')"),
    ],
    ids=["shape", "rank", "dtype", "device"],
)
def test_a_tensor_of_another_kind_is_not_adopted(memory: torch.Tensor, says: str) -> None:
    """A bound tensor must have the declared shape, dtype and device; otherwise no slot is registered."""
    registry = _registry()
    registry.register_slot(make_slot("there"))
    slot = make_slot()
    with _refused(registry, "'lengths' of somebody: declared ((4,), torch.int64", says):
        registry.register_slot(slot, bind=memory)
    registry.register_slot(slot)


def test_devices_are_compared_as_devices() -> None:
    """``cuda`` and ``cuda:0``, here ``cpu`` and ``cpu:0``, are one device to a registry."""
    registry = CudaGraphBufferRegistry(device="cpu:0", max_bs=4, max_num_tokens=4)
    registry.register_slot(make_slot(), bind=torch.zeros(4, dtype=I64))
    registry.register_slot(make_slot("host", device=torch.device("cpu")), bind=torch.zeros(4, dtype=I64))


def test_a_slot_may_lie_on_another_device() -> None:
    """The device of a slot takes precedence over the device of the registry."""
    registry = CudaGraphBufferRegistry(device="meta", max_bs=4, max_num_tokens=4)
    host = registry.register_slot(make_slot("host", device=torch.device("cpu")))
    there = registry.register_slot(make_slot("there", padding_policy=P.KEEP_PAD))
    assert host.buffer is not None
    assert there.buffer is not None
    assert (host.buffer.device.type, there.buffer.device.type) == ("cpu", "meta")


# -- the contract of a lane ------------------------------------------------------------------------

UNHELD: list[tuple[dict[str, Any], str]] = [
    ({"owner": None}, "lane 'decode' requires an owner for every slot"),
    ({"owner": ""}, "lane 'decode' requires an owner for every slot"),
    ({"padding_policy": P.KEEP_PAD}, "KEEP_PAD without a reason, which lane 'decode' requires"),
    ({"padding_policy": P.FOREACH_COPY}, "FOREACH_COPY without a reason"),
    ({"padding_policy": P.FOREACH_COPY, "reason": ""}, "FOREACH_COPY without a reason"),
    ({"padding_policy": P.FILL_ONCE, "pad_value": 1}, "FILL_ONCE without a reason"),
    ({"axis": "none", "source_fn": lambda *_: None}, "ZERO without a reason"),
]


@pytest.mark.parametrize(("changes", "says"), UNHELD)
def test_a_lane_refuses_a_slot_that_says_too_little(changes: dict[str, Any], says: str) -> None:
    """A lane's registry refuses a slot without an owner, or without the reason that its policy requires."""
    registry = _registry(lane="decode")
    registry.register_slot(make_slot("there"))
    with _refused(registry, "slot 'lengths' of", says):
        registry.register_slot(make_slot(**changes))


def test_what_a_lane_takes() -> None:
    """A lane requires no reason if padding rows are reset or were never live, or if the slot is disabled."""
    registry = _registry(lane="decode")
    registry.register_slot(make_slot("zero"))
    registry.register_slot(make_slot("sentinel", padding_policy=P.FILL_SENTINEL, pad_value=1))
    registry.register_slot(make_slot("once", padding_policy=P.FILL_ONCE, pad_value=1, copy_from_fb=False))
    registry.register_slot(make_slot("whole", axis="none"))
    registry.register_slot(make_slot("kept", padding_policy=P.KEEP_PAD, reason="nobody reads it"))
    registry.register_slot(make_slot("off", padding_policy=P.KEEP_PAD, owner=None, enabled=False))
    assert len(list(registry)) == 5  # only the enabled slots


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "the batch has no 'lengths', which slot 'lengths' of somebody copies"),
        ({"lengths": None}, "the batch has no 'lengths'"),
        ({"lengths": [1, 2]}, "the batch has a list instead of a tensor for 'lengths'"),
    ],
    ids=["no attribute", "None", "no tensor"],
)
def test_a_lane_refuses_a_batch_without_a_field(fields: dict[str, Any], says: str) -> None:
    """In a lane a copied field must be a tensor, and may be missing only if its slot is optional."""
    first = torch.tensor([1, 2])
    for lane, optional in (("decode", False), ("decode", True), (None, False)):
        registry = _registry(lane=lane)
        registry.register_slot(make_slot("first"))
        slot = registry.register_slot(make_slot(optional=optional))
        if lane and (not optional or isinstance(fields.get("lengths"), list)):
            with _refused(registry, says):
                fill(registry, 2, 4, first=first, **fields)
            continue
        assert slot.buffer is not None
        slot.buffer.fill_(7)
        fill(registry, 2, 4, first=first, **fields)
        head = [0, 0] if lane else [7, 7]  # in a lane no rows of an earlier batch are visible
        assert _bytes(registry) == {"first": [1, 2, 0, 0], "lengths": [*head, 0, 0]}


def test_a_lane_refuses_a_batch_that_lacks_a_field_again() -> None:
    """A missing field is refused even after several fills with the same counts that had it."""
    registry = _registry(lane="decode")
    registry.register_slot(make_slot())
    for _ in range(3):
        fill(registry, 1, 2, lengths=torch.tensor([5]))
    for fields in ({}, {"lengths": None}):
        with _refused(registry, "the batch has no 'lengths'"):
            fill(registry, 1, 2, **fields)


def test_a_lane_refuses_a_source_that_finds_nothing() -> None:
    """In a lane a source_fn must return a tensor unless its slot is optional; outside it may return None."""
    for lane, optional in (("decode", False), ("decode", True), (None, False)):
        registry = _registry(lane=lane)
        registry.register_slot(make_slot("first"))
        registry.register_slot(make_slot("a.b", source_fn=lambda *_: None, optional=optional))
        if lane and not optional:
            with _refused(registry, "the source_fn of slot 'a.b' of somebody found nothing"):
                fill(registry, 1, 2, first=torch.tensor([1]))
        else:
            fill(registry, 1, 2, first=torch.tensor([1]))
            assert _bytes(registry)["first"] == [1, 0, 0, 0]


@pytest.mark.parametrize("lane", ["decode", None])
def test_a_source_gives_tensors(lane: str | None) -> None:
    """A source_fn that returns neither a tensor nor None is refused, in a lane and outside."""
    registry = _registry(lane=lane)
    registry.register_slot(make_slot("first"))
    registry.register_slot(make_slot("a.b", source_fn=lambda *_: [1], optional=True))
    with _refused(registry, "slot 'a.b' of somebody found a list instead of a tensor"):
        fill(registry, 1, 2, first=torch.tensor([1]))


# -- invalid batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["decode", None])
@pytest.mark.parametrize("origin", ["field", "source_fn"])
@pytest.mark.parametrize("columns", [(), (2,)], ids=["flat", "wide"])
@pytest.mark.parametrize("rows", [0, 1, 3, 4])
def test_rows_are_exactly_the_batchs(
    rows: int, columns: tuple[int, ...], origin: str, lane: str | None
) -> None:
    """Too few rows, too many, and one row that would be broadcast are refused, and nothing is written.

    Outside a lane the tensor of a source_fn may have another number of rows.
    """
    registry = _registry(lane=lane)
    registry.register_slot(make_slot("first"))
    source: Any = None if origin == "field" else lambda batch, _: batch.lengths
    registry.register_slot(make_slot(shape_fn=lambda bs, _: (bs, *columns), source_fn=source))
    first = torch.tensor([1, 2])
    if origin == "source_fn" and lane is None:
        fill(registry, 2, 4, first=first, lengths=torch.ones(rows, *columns, dtype=I64))
        filled = torch.tensor(_bytes(registry)["lengths"]).flatten()
        assert filled.sum() == rows * filled.numel() // 4
        return
    says = f"slot 'lengths' of somebody takes {(2, *columns)} torch.int64 from this batch"
    with _refused(registry, says, f"which has {(rows, *columns)}"):
        fill(registry, 2, 4, first=first, lengths=torch.ones(rows, *columns, dtype=I64))
    fill(registry, 2, 4, first=first, lengths=torch.ones(2, *columns, dtype=I64))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), ()])
def test_another_rank_is_refused(shape: tuple[int, ...]) -> None:
    """A field of another rank is refused even where torch would broadcast it."""
    registry = _registry()
    registry.register_slot(make_slot())
    with _refused(registry, f"which has {shape}"):
        fill(registry, 2, 4, lengths=torch.ones(shape, dtype=I64))


@pytest.mark.parametrize(
    ("source", "target", "is_exact"),
    [
        (torch.int32, I64, True),
        (torch.uint32, I64, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, I64, True),
        (torch.bool, F32, True),
        (torch.int8, torch.bfloat16, True),
        (torch.int16, F32, True),
        (I32, torch.float64, True),
        (torch.bfloat16, F32, True),
        (F32, torch.complex64, True),
        (torch.int16, torch.complex64, True),
        (I64, I32, False),
        (torch.uint64, I64, False),
        (torch.int8, torch.uint8, False),
        (I64, torch.bool, False),
        (I32, F32, False),
        (I64, torch.float64, False),
        (I64, torch.complex64, False),
        (torch.int16, torch.bfloat16, False),
        (F32, I64, False),
        (F32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.complex64, F32, False),
    ],
)
def test_a_dtype_converts_exactly_or_not(source: torch.dtype, target: torch.dtype, *, is_exact: bool) -> None:
    """A fill converts a dtype only if the slot's dtype holds each of its values exactly."""
    assert fills.converts_exactly(source, target) is is_exact
    registry = _registry()
    slot = registry.register_slot(make_slot(dtype=target))
    batch = {"lengths": torch.ones(2, dtype=source)}
    if is_exact:
        fill(registry, 2, 2, **batch)
        assert slot.slice_for(2, 2).tolist() == torch.ones(2, dtype=target).tolist()
    else:
        with _refused(registry, f"which has (2,) {source}"):
            fill(registry, 2, 2, **batch)


@pytest.mark.parametrize("columns", [1, 3])
def test_columns_are_exactly_the_slots(columns: int) -> None:
    """A wide field must be as wide as the slot: one column is not broadcast."""
    registry = _registry()
    registry.register_slot(make_slot(shape_fn=lambda bs, _: (bs, 2)))
    with _refused(registry, f"which has (2, {columns})"):
        fill(registry, 2, 4, lengths=torch.ones(2, columns, dtype=I64))


@pytest.mark.parametrize("length", [1, 2])
def test_a_source_of_no_axis_has_its_own_length(length: int) -> None:
    """A source_fn for axis none fills as many rows as it returns, at most all rows of the buffer."""
    registry = _registry()
    slot = registry.register_slot(
        make_slot(axis="none", shape_fn=lambda *_: (2,), source_fn=lambda batch, _: batch.lengths)
    )
    assert slot.buffer is not None
    slot.buffer.fill_(7)
    fill(registry, 1, 4, lengths=torch.arange(length))
    assert slot.buffer.tolist() == [0, 1][:length] + [7] * (2 - length)
    for bad in (torch.arange(3), torch.tensor(3), torch.ones(1, 2, dtype=I64)):
        with _refused(registry, "slot 'lengths' of somebody takes"):
            fill(registry, 1, 4, lengths=bad)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, I64),
        (torch.float64, I64),
        (I64, I32),
        (I64, F32),
        (I32, F32),
        (torch.int16, torch.bfloat16),
        (torch.int16, torch.float16),
        (I64, torch.float64),
        (torch.float64, F32),
        (torch.float16, torch.bfloat16),
        (I32, torch.bool),
        (F32, torch.bool),
        (torch.uint8, torch.int8),
        (torch.int8, torch.uint8),
        (torch.complex64, F32),
        (torch.uint64, I64),
    ],
)
def test_conversions_that_lose(source: torch.dtype, target: torch.dtype) -> None:
    """A field whose dtype has values that the slot's dtype lacks is refused, whatever values it holds."""
    registry = _registry()
    registry.register_slot(make_slot("first"))
    registry.register_slot(make_slot(dtype=target))
    with _refused(registry, f"takes (2,) {target} from this batch, which has (2,) {source}"):
        fill(registry, 2, 4, first=torch.tensor([1, 2]), lengths=torch.ones(2, dtype=source))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (I32, I64),
        (torch.bool, I64),
        (torch.bool, F32),
        (torch.int8, F32),
        (torch.int16, F32),
        (torch.uint8, torch.float16),
        (I32, torch.float64),
        (torch.int8, torch.bfloat16),
        (torch.bfloat16, F32),
        (torch.float16, F32),
        (F32, torch.float64),
        (torch.uint8, I32),
    ],
)
def test_conversions_that_lose_nothing(source: torch.dtype, target: torch.dtype) -> None:
    """A field is widened exactly, including the extremes of its dtype."""
    registry = _registry(max_bs=2)
    slot = registry.register_slot(make_slot(dtype=target))
    if source is torch.bool:
        lengths = torch.tensor([True, False])
    elif source.is_floating_point:
        lengths = torch.tensor([torch.finfo(source).max, torch.finfo(source).tiny], dtype=source)
    else:
        lengths = torch.tensor([torch.iinfo(source).max, torch.iinfo(source).min], dtype=source)
    fill(registry, 2, 2, lengths=lengths)
    assert slot.slice_for(2, 2).tolist() == lengths.tolist()


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((3, 2, 1, 1), "3 raw requests into 2 padded of at most 4"),
        ((1, 5, 1, 1), "1 raw requests into 5 padded of at most 4"),
        ((-1, 2, 1, 1), "-1 raw requests"),
        ((-2, -1, 1, 1), "-2 raw requests"),
        ((1, 1, 4, 3), "4 raw tokens into 3 padded of at most 8"),
        ((1, 1, 1, 9), "1 raw tokens into 9 padded of at most 8"),
        ((1, 1, -1, 0), "-1 raw tokens"),
    ],
)
def test_counts_out_of_order_are_refused(counts: tuple[int, int, int, int], says: str) -> None:
    """Raw counts above padded ones, padded ones above the maximum, and negative ones are refused by name."""
    registry = _registry()
    registry.register_slot(make_slot())
    names = ("raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens")
    batch = SimpleNamespace(lengths=torch.ones(1, dtype=I64))
    for _ in range(2):
        with _refused(registry, says, "raw <= padded <= maximum"):
            registry.fill_from(batch, **dict(zip(names, counts, strict=True)))
    assert not registry._plans


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_source_that_raises_leaves_nothing_written(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """An error of a source_fn names its slot, and is raised before any row is written."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: where == "host")

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no such thing")

    registry = _registry()
    registry.register_slot(make_slot())
    registry.register_slot(make_slot("wide", shape_fn=lambda bs, _: (bs, 2)))
    registry.register_slot(make_slot("a.b", source_fn=broken))
    with _refused(registry, "the source_fn of slot 'a.b' of somebody raised RuntimeError: no such"):
        fill(registry, 1, 4, lengths=torch.tensor([1]), wide=torch.ones(1, 2, dtype=I64))


def test_a_post_fill_that_raises_is_named() -> None:
    """An exception of a post_fill becomes an error that names the slot; a graphpact error is passed on."""

    def broken(buffer: torch.Tensor, batch: Any, _: FillContext) -> None:
        raise batch.error

    registry = _registry()
    registry.register_slot(make_slot(post_fill=broken))
    lengths = torch.tensor([1])
    with pytest.raises(SlotError, match="the post_fill of slot 'lengths' of somebody raised KeyError"):
        fill(registry, 1, 1, lengths=lengths, error=KeyError("x"))
    ours = UnknownSlotError("of its own")
    with pytest.raises(UnknownSlotError) as error:
        fill(registry, 1, 1, lengths=lengths, error=ours)
    assert error.value is ours


def _raises(*_: Any) -> Any:
    raise LookupError("nothing here")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slice_fn": lambda b, n: b[:n, :n]}, "its slice_fn cuts more than one axis"),
        ({"slice_fn": lambda b, n: b[:n].clone()}, "does not begin where its buffer does"),
        ({"slice_fn": lambda b, n: b[-n:]}, "does not begin where its buffer does"),
        (
            {"slice_fn": lambda b, n: b[:n] if n > 1 else b[0]},
            "its slice_fn cuts more than one axis",
        ),
        ({"slice_fn": lambda *_: None}, "its slice_fn returned None"),
        ({"slice_fn": _raises}, "its slice_fn raised LookupError: nothing here"),
        ({"shape_fn": _raises}, "its shape_fn raised LookupError: nothing here"),
        ({"shape_fn": lambda *_: (-1,)}, r"its shape_fn returned \(-1,\)"),
        ({"shape_fn": lambda *_: 4}, "its shape_fn returned 4"),
        ({"shape_fn": lambda *_: (4.0,)}, r"its shape_fn returned \(4.0,\)"),
    ],
)
def test_what_a_slot_says_of_its_shape_is_tried_at_once(changes: dict[str, Any], says: str) -> None:
    """A shape or a slice that no fill could use is refused when the slot is registered."""
    registry = _registry()
    registry.register_slot(make_slot("first"))
    slot = make_slot("mask", **({"shape_fn": lambda bs, _: (bs, bs)} | changes))
    with pytest.raises(SlotError, match=f"slot 'mask' of somebody.*{says}"):
        registry.register_slot(slot)
    assert registry.slot_names() == ["first"]


@pytest.mark.parametrize(
    "changes",
    [
        {"slice_fn": lambda b, n: b[-n:]},
        {"shape_fn": lambda *_: (3,)},
        {"owner": None},
        {"padding_policy": P.KEEP_PAD},
    ],
)
def test_a_slot_that_is_refused_leaves_no_memory(changes: dict[str, Any]) -> None:
    """An invalid slot is refused before memory is allocated, from the registry or from a pool."""
    pool = SharedBuffers()
    for shared in (None, pool):
        registry = CudaGraphBufferRegistry(
            device="cpu", max_bs=4, max_num_tokens=4, lane="decode", share_pool=shared
        )
        with pytest.raises(SlotError, match="slot 'lengths'"):
            registry.register_slot(make_slot(**changes))
        assert registry.allocated_nbytes == pool.arenas.nbytes == 0
        sentinel = {"padding_policy": P.FILL_SENTINEL, "pad_value": 7}
        registry.register_slot(make_slot("other"))
        if shared is pool:  # the pool holds nothing of the refused slot
            registry.register_slot(make_slot(**sentinel))


def test_a_lanes_slot_has_a_row_for_all_there_can_be() -> None:
    """A lane refuses a slot with fewer rows than its axis; without a lane it may have any number."""
    slot = make_slot(shape_fn=lambda *_: (3,))
    with _refused(_registry(lane="decode"), "has 3 rows; its axis 'bs' has up to 4 in lane 'decode'"):
        _registry(lane="decode").register_slot(slot)
    assert _registry().register_slot(slot).buffer is not None


def test_two_slots_do_not_lie_in_one_place() -> None:
    """A slot cannot be bound to the memory of another slot; interleaved columns are allowed."""
    registry = _registry()
    first = registry.register_slot(make_slot())
    with _refused(registry, "slot 'other' of somebody is bound to the memory of slot 'lengths' of somebody"):
        registry.register_slot(make_slot("other"), bind=first.buffer)
    columns = torch.zeros(4, 2, dtype=I64)  # interleaved, but disjoint
    for number, name in enumerate("ab"):
        registry.register_slot(make_slot(name), bind=columns[:, number])


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_field_that_has_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A field that torch cannot copy is refused before any other field is copied."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: where == "host")
    registry = _registry()
    registry.register_slot(make_slot("first"))
    registry.register_slot(make_slot())
    absent = torch.ones(1, dtype=I64, device="meta")
    with _refused(registry, "slot 'lengths' of somebody is on cpu, but its source in this batch is on meta"):
        fill(registry, 1, 4, first=torch.tensor([1]), lengths=absent)


@pytest.mark.parametrize("changes", [{"max_bs": -1}, {"max_bs": 8.0}, {"share_pool": "yes"}])
def test_a_registry_of_nonsense_is_refused(changes: dict[str, Any]) -> None:
    """A size must be a whole number from 0 up, and a pool must be a pool."""
    sizes: dict[str, Any] = {"max_bs": 4, "max_num_tokens": 4}
    with pytest.raises(SlotError, match=next(iter(changes))):
        CudaGraphBufferRegistry(device="cpu", **(sizes | changes))


def test_a_view_keeps_what_is_no_tensor() -> None:
    """In a view, a slot does not replace the field of its name if that is not a tensor."""
    registry = _registry()
    registry.register_slot(make_slot("batch_size", copy_from_fb=False))
    view = registry.extract_buffer(
        padded_bs=3, padded_num_tokens=3, forward_batch_template=_Batch(batch_size=1)
    )
    assert view.batch_size == 3


# -- one step --------------------------------------------------------------------------------------


def test_tokens_and_requests_are_padded_by_their_own_counts() -> None:
    """A slot is padded by the counts of its axis: requests or tokens."""
    registry = _registry()
    lengths = registry.register_slot(make_slot())
    ids = registry.register_slot(make_slot("ids", axis="tokens", shape_fn=lambda _, tokens: (tokens,)))
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(-7)
    batch = SimpleNamespace(lengths=torch.tensor([3, 2]), ids=torch.arange(1, 6))
    registry.fill_from(batch, raw_bs=2, padded_bs=3, raw_num_tokens=5, padded_num_tokens=7)
    assert lengths.slice_for(4, 8).tolist() == [3, 2, 0, -7]
    assert ids.slice_for(4, 8).tolist() == [1, 2, 3, 4, 5, 0, 0, -7]


def test_post_fill_runs_after_all_copies() -> None:
    """A post_fill runs after all copies and resets, with the counts and proxy tensors of this fill."""
    seen: list[tuple[list[int], list[int], FillContext, Any]] = []

    def hook(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
        seen.append((buffer.tolist(), later.slice_for(4, 4).tolist(), context, batch.sent))
        buffer[:2] *= 10

    registry = _registry()
    slot = registry.register_slot(make_slot(post_fill=hook))
    later = registry.register_slot(make_slot("later"))
    proxies = SimpleNamespace(tensors={})
    batch = SimpleNamespace(lengths=torch.tensor([1, 2]), later=torch.tensor([3, 4]), sent=proxies)
    registry.fill_from(
        batch,
        raw_bs=2,
        padded_bs=4,
        raw_num_tokens=2,
        padded_num_tokens=5,
        pp_proxy_tensors=proxies,
    )
    ((mine, others, context, sent),) = seen
    assert (mine, others) == ([1, 2, 0, 0], [3, 4, 0, 0])
    assert context == FillContext(2, 4, 2, 5)
    assert context.pp_proxy_tensors is proxies is sent
    assert slot.slice_for(4, 4).tolist() == [10, 20, 0, 0]
    registry.fill_from(batch, raw_bs=2, padded_bs=4, raw_num_tokens=2, padded_num_tokens=5)
    assert seen[-1][2].pp_proxy_tensors is None  # not those of the previous fill


def test_a_source_sees_the_counts_and_what_a_stage_sent() -> None:
    """A source_fn gets the batch of this fill, and a context with its counts and its proxy tensors."""
    seen: list[tuple[Any, FillContext, Any]] = []

    def source(batch: Any, context: FillContext) -> torch.Tensor:
        seen.append((batch, context, context.pp_proxy_tensors))
        tensor: torch.Tensor = context.pp_proxy_tensors.tensors["a"]
        return tensor

    registry = _registry()
    slot = registry.register_slot(make_slot("proxy.a", source_fn=source))
    for step in range(3):
        batch = SimpleNamespace()
        sent = SimpleNamespace(tensors={"a": torch.tensor([step, 9])})
        counts = {"raw_bs": 2, "padded_bs": 3, "raw_num_tokens": 4 + step, "padded_num_tokens": 7}
        registry.fill_from(batch, pp_proxy_tensors=sent, **counts)
        assert slot.slice_for(3, 3).tolist() == [step, 9, 0]
        got, context, proxies = seen.pop()
        assert got is batch
        assert context == FillContext(2, 3, 4 + step, 7)
        assert proxies is sent
        assert not seen  # called once


def test_a_source_goes_before_the_field_of_its_name() -> None:
    """A slot with a source_fn copies its result, not the batch field of the same name."""
    registry = _registry()
    slot = registry.register_slot(make_slot(source_fn=lambda batch, _: batch.other))
    fill(registry, 1, 2, lengths=torch.tensor([1]), other=torch.tensor([2]))
    assert slot.slice_for(2, 2).tolist() == [2, 0]


def test_a_slot_without_an_axis_is_copied_whole() -> None:
    """A slot with axis none is filled and sliced whole, whatever the counts."""
    registry = _registry()
    slot = registry.register_slot(make_slot(axis="none", shape_fn=lambda *_: (3,)))
    scalar = registry.register_slot(make_slot("scalar", axis="none", shape_fn=lambda *_: ()))
    fill(registry, 1, 4, lengths=torch.tensor([4, 5, 6]), scalar=torch.tensor(8))
    assert slot.slice_for(1, 1).tolist() == [4, 5, 6]
    assert scalar.slice_for(1, 1).item() == 8


def test_more_slots_than_one_arena_has_rows() -> None:
    """Forty slots of one dtype and width, more than an arena holds, keep separate contents."""
    registry = _registry()
    names = [f"slot{i}" for i in range(40)]
    for i, name in enumerate(names):
        sentinel = make_slot(name, padding_policy=P.FILL_SENTINEL, pad_value=-i)
        registry.register_slot(sentinel)
    fill(registry, 4, 4, **{name: torch.full((4,), 1000) for name in names})
    fill(registry, 2, 3, **{name: torch.tensor([i, i + 50]) for i, name in enumerate(names)})
    assert list(_bytes(registry).values()) == [[i, i + 50, -i, 1000] for i in range(40)]


def test_a_late_slot_joins_the_next_fill() -> None:
    """A slot that is registered after a fill is filled by the next one with the same counts."""
    registry = _registry()
    registry.register_slot(make_slot())
    fill(registry, 1, 2, lengths=torch.tensor([1]))
    late = registry.register_slot(make_slot("late"))
    fill(registry, 1, 2, lengths=torch.tensor([1]), late=torch.tensor([6]))
    assert late.slice_for(2, 2).tolist() == [6, 0]


def test_the_plan_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of fill plans drops the oldest plans, and fills stay correct."""
    monkeypatch.setattr(registry_module, "_MAX_PLANS", 3)
    registry = _registry(max_bs=8)
    slot = registry.register_slot(make_slot())
    for raw in (1, 2, 3, 4, 5, 6, 1, 2):
        fill(registry, raw, 8, lengths=torch.full((raw,), raw))
        assert len(registry._plans) <= 3
        assert slot.slice_for(8, 8).tolist() == [raw] * raw + [0] * (8 - raw)
    assert [raw_bs for raw_bs, *_ in registry._plans] == [6, 1, 2]


@pytest.mark.parametrize("where", ["host", "device"])
def test_rows_that_are_every_second_element(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """With a strided slice_fn, live rows are copied and padding rows reset, and gaps are not written."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: where == "host")
    registry = _registry()
    slot = registry.register_slot(
        make_slot(shape_fn=lambda bs, _: (2 * bs,), slice_fn=lambda buffer, n: buffer[: 2 * n : 2])
    )
    assert slot.buffer is not None
    slot.buffer.fill_(7)
    fill(registry, 1, 3, lengths=torch.tensor([5]))
    assert slot.buffer.tolist() == [5, 7, 0, 7, 0, 7, 7, 7]


@pytest.mark.parametrize("where", ["host", "device"])
def test_neighbours_with_tails_of_their_own(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Slots of one arena with different padding rows are each reset only in their columns."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: where == "host")
    registry = _registry(max_bs=8, max_num_tokens=8)
    slots = [
        registry.register_slot(make_slot(f"{axis}{i}", axis=axis)) for i in "12" for axis in ("bs", "tokens")
    ]
    for slot in slots:
        assert slot.buffer is not None
        slot.buffer.fill_(7)
    batch = SimpleNamespace()
    registry.fill_from(batch, raw_bs=1, padded_bs=3, raw_num_tokens=2, padded_num_tokens=3)
    by_requests, by_tokens = [7, 0, 0, 7, 7, 7, 7, 7], [7, 7, 0, 7, 7, 7, 7, 7]
    assert list(_bytes(registry).values()) == [by_requests, by_tokens] * 2
    registry.fill_from(batch, raw_bs=1, padded_bs=4, raw_num_tokens=1, padded_num_tokens=5)
    by_requests, by_tokens = [7, 0, 0, 0, 7, 7, 7, 7], [7, 0, 0, 0, 0, 7, 7, 7]
    assert list(_bytes(registry).values()) == [by_requests, by_tokens] * 2


# -- number of operations --------------------------------------------------------------------------

WIDTH = 8


class _Ops(TorchDispatchMode):
    """A recorder of the torch operations of a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _decode_batch(size: int) -> ForwardBatch:
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    tensors: dict[str, Any] = {name: torch.arange(1, size + 1) for name in (*names, "seq_lens_cpu")}
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        mamba_track_indices=torch.arange(1, size + 1),
        mamba_track_mask=torch.ones(size, dtype=torch.bool),
        **tensors,
    )


def _decode_registry(**more: Any) -> CudaGraphBufferRegistry:
    return build_decode_registry(
        device="cpu",
        max_bs=WIDTH,
        max_num_token=WIDTH,
        seq_len_fill_value=1,
        enable_mrope=False,
        register_global_num_tokens=False,
        zero_input_ids=True,
        **more,
    )


COPY, GROUPED = "copy_.default", "_foreach_copy_.default"
MAMBA: dict[str, Any] = {"enable_mamba_track": True}
SHARED: dict[str, Any] = {"share_pool": SharedBuffers()}


@pytest.mark.parametrize(
    ("where", "more", "raw", "ops"),
    [
        ("host", {}, 5, [GROUPED]),
        ("host", {}, 8, [GROUPED]),
        ("host", MAMBA, 5, [GROUPED]),
        ("host", SHARED, 5, [GROUPED]),
        ("device", SHARED, 5, [COPY, GROUPED]),
        ("device", {}, 5, [COPY, GROUPED]),
        ("device", {}, 8, [GROUPED]),
        (
            "device",
            MAMBA,
            5,
            [GROUPED, GROUPED, GROUPED],
        ),  # tails of two dtypes are one copy, as bytes
        ("device", MAMBA, 8, [GROUPED, GROUPED]),
    ],
)
def test_a_fill_is_few_operations(
    monkeypatch: pytest.MonkeyPatch, where: str, more: dict[str, Any], raw: int, ops: list[str]
) -> None:
    """A fill is one operation on a host; on a device it is one per dtype, and one for padding rows if any."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: where == "host")
    registry, batch = _decode_registry(**more), _decode_batch(raw)
    for _ in range(2):  # the first fill compiles the plan
        with _Ops() as seen:
            registry.fill_from(
                batch,
                raw_bs=raw,
                padded_bs=WIDTH,
                raw_num_tokens=raw,
                padded_num_tokens=WIDTH,
            )
    assert seen.names == ops


def test_groups_are_of_one_pair_of_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, copies are grouped by the dtypes of both sides: a narrower field needs one copy more."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: False)
    registry, batch = _decode_registry(), _decode_batch(WIDTH)
    batch.positions = batch.positions.to(I32)
    batch.seq_lens = batch.seq_lens.to(I32)
    counts = dict.fromkeys(("raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens"), WIDTH)
    registry.fill_from(batch, **counts)
    with _Ops() as seen:
        registry.fill_from(batch, **counts)
    assert seen.names == [GROUPED, GROUPED]


def test_tails_outside_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, dense zero padding outside arenas is one operation, and any other padding one each."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: False)
    registry = _registry()
    for name in ("a", "b"):
        registry.register_slot(make_slot(name, shape_fn=lambda bs, _: (bs, 2)))
    registry.register_slot(make_slot("gaps"), bind=torch.ones(4, 2, dtype=I64)[:, 0])
    sentinel = make_slot("c", padding_policy=P.FILL_SENTINEL, pad_value=5)
    registry.register_slot(sentinel, bind=torch.ones(4, dtype=I64))
    fill(registry, 1, 4)
    with _Ops() as seen:
        fill(registry, 1, 4)
    assert sorted(seen.names) == ["_foreach_zero_.default", "fill_.Scalar", "fill_.Scalar"]


def test_the_inputs_of_decode_lie_in_one_arena() -> None:
    """With one token per request, all decode inputs are aligned rows of one arena."""
    registry = _decode_registry()
    (arena,) = registry._memory
    buffers = [slot.buffer for slot in registry if slot.buffer is not None]
    assert len(buffers) == 6
    assert {b.untyped_storage().data_ptr() for b in buffers} == {arena.memory.untyped_storage().data_ptr()}
    assert {(b.data_ptr() - arena.memory.data_ptr()) % 512 for b in buffers} == {0}
    assert arena.template[:6, 0].tolist() == [0, 0, 0, 0, 1, 1]


def test_planted_operation_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots outside arenas need more operations on a device, so the count above can fail."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: False)
    monkeypatch.setattr("graphpact.buffers.arenas._suits", lambda *_: False)
    registry, batch = _decode_registry(), _decode_batch(5)
    counts = {"raw_bs": 5, "padded_bs": 8, "raw_num_tokens": 5, "padded_num_tokens": 8}
    registry.fill_from(batch, **counts)
    with _Ops() as seen:
        registry.fill_from(batch, **counts)
    assert len(seen.names) > 2


# -- the view --------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Batch:
    batch_size: int
    lengths: torch.Tensor | None = None
    computed: torch.Tensor | None = None
    sourced: torch.Tensor | None = None
    off: torch.Tensor | None = None
    note: str = ""


def _viewed() -> CudaGraphBufferRegistry:
    registry = _registry()
    registry.register_slot(make_slot())
    registry.register_slot(make_slot("computed", copy_from_fb=False))
    registry.register_slot(make_slot("sourced", source_fn=lambda *_: None))
    registry.register_slot(make_slot("off", enabled=False))
    registry.register_slot(make_slot("nested.lengths", source_fn=lambda *_: None))
    registry.register_slot(make_slot("backend_private", copy_from_fb=False))
    return registry


def test_the_view_is_slices_of_slots() -> None:
    """Tensors of a view are padded slices of their slots; other fields are the template's."""
    registry = _viewed()
    off, lengths = torch.ones(1), torch.tensor([1, 2])
    template = _Batch(2, lengths=lengths, off=off, note="as it was")
    view = registry.extract_buffer(padded_bs=3, padded_num_tokens=5, forward_batch_template=template)
    assert (view.batch_size, view.note) == (3, "as it was")
    assert view.off is off
    for name in ("lengths", "computed", "sourced"):
        tensor, buffer = getattr(view, name), registry.get_slot(name).buffer
        assert buffer is not None
        assert tuple(tensor.shape) == (3,)
        assert tensor.data_ptr() == buffer.data_ptr()
    assert template == _Batch(2, lengths=lengths, off=off, note="as it was")
    assert not hasattr(view, "backend_private")


def test_what_nobody_copied_is_not_shown() -> None:
    """A field that the template lacks is None in the view, unless its slot computes it or has a source_fn."""
    view = _viewed().extract_buffer(padded_bs=3, padded_num_tokens=5, forward_batch_template=_Batch(2))
    assert view.lengths is None
    assert view.off is None
    assert view.computed is not None
    assert view.sourced is not None


def test_the_view_of_a_forward_batch() -> None:
    """The view of a `ForwardBatch` has the padded counts; a field without a slot is the template's."""
    view = _decode_registry().extract_buffer(
        padded_bs=4, padded_num_tokens=4, forward_batch_template=_decode_batch(2)
    )
    assert (view.batch_size, view.num_tokens, view.forward_mode) == (4, 4, ForwardMode.DECODE)
    assert view.extend_seq_lens is None
    assert view.mamba_track_indices is not None
    assert view.mamba_track_indices.tolist() == [1, 2]  # this registry has no such slot


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"padding_policy": P.KEEP_PAD},
        {"shape_fn": lambda bs, _: (bs, 3)},
        {"shape_fn": lambda bs, _: (3, bs), "slice_fn": lambda b, n: b[:, :n]},
        {"shape_fn": lambda bs, _: (bs + 1,), "slice_fn": lambda b, n: b[: n + 1]},
        {"axis": "none"},
        {"dtype": torch.bool},
    ],
)
def test_a_slot_is_found_by_its_memory(changes: dict[str, Any]) -> None:
    """`slot_of` returns the slot of any slice of its buffer, and not a neighbour in the same allocation."""
    registry = _registry()
    slots = [registry.register_slot(make_slot(name, **changes)) for name in ("a", "b", "c")]
    for slot in slots:
        assert slot.buffer is not None
        for view in (slot.buffer, slot.slice_for(2, 2), slot.buffer[1:], slot.buffer[-1:]):
            assert registry.slot_of(view) is slot
        assert registry.slot_of(slot.buffer.clone()) is None
    assert registry.slot_of(torch.zeros(4, device="meta")) is None


def test_adopted_memory_is_found_too() -> None:
    """`slot_of` returns the slot of a bound tensor's slice, and None for memory before or after it."""
    registry, memory = _registry(), torch.zeros(12, dtype=I64)
    slot = registry.register_slot(make_slot(), bind=memory[4:8])
    assert registry.slot_of(memory[4:]) is slot
    assert registry.slot_of(memory[7:]) is slot
    assert registry.slot_of(memory[3:]) is None
    assert registry.slot_of(memory[8:]) is None


def test_bytes() -> None:
    """`nbytes` counts the buffers; `allocated_nbytes` also counts spare rows, alignment and templates."""
    registry = _registry()
    assert registry.nbytes == registry.allocated_nbytes == 0
    registry.register_slot(make_slot("loose", padding_policy=P.KEEP_PAD))
    assert registry.nbytes == registry.allocated_nbytes == 4 * 8
    registry.register_slot(make_slot())
    assert registry.nbytes == 2 * 4 * 8
    arena = 2 * 16 * 512  # sixteen rows, and their template
    assert registry.allocated_nbytes == 4 * 8 + arena
    registry.register_slot(make_slot("beside", dtype=I64))
    assert registry.allocated_nbytes == 4 * 8 + arena


def test_planted_write_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill that writes before it refuses fails the check in `_refused`."""
    registry = _registry()
    registry.register_slot(make_slot("first"))
    registry.register_slot(make_slot())
    look_at: Callable[..., Any] = fills.FillPlan._check

    def write_first(self: fills.FillPlan, batch: Any) -> Any:
        registry.get_slot("first").slice_for(1, 1).fill_(5)
        return look_at(self, batch)

    monkeypatch.setattr(fills.FillPlan, "_check", write_first)
    with pytest.raises(AssertionError), _refused(registry, "'lengths'"):
        fill(registry, 1, 2, first=torch.tensor([1]), lengths=torch.tensor([1.5]))


def test_shared_memory_is_found_in_every_registry() -> None:
    """For shared memory, `slot_of` of a registry returns the slot in that registry."""
    pool = SharedBuffers()
    registries = [
        CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4, share_pool=pool) for _ in range(2)
    ]
    slots = [registry.register_slot(make_slot()) for registry in registries]
    for registry, slot in zip(registries, slots, strict=True):
        assert registry.slot_of(slots[0].slice_for(1, 1)) is slot
