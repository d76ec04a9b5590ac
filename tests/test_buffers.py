"""The registry: what a fill writes, what it leaves alone, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
)
from graphpact.buffers import registry as registry_module
from graphpact.errors import SlotError

CPU = torch.device("cpu")
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=60)
MAX_BS, MAX_TOKENS, FILL_LEN = 6, 6, 1
PADS = {
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": 0,
    "req_pool_indices": 0,
    "seq_lens": FILL_LEN,
    "seq_lens_cpu": FILL_LEN,
}
POISON = -77


def _slot(**changes: Any) -> GraphSlot:
    declared: dict[str, Any] = {
        "name": "lengths",
        "shape_fn": lambda bs, _tokens: (bs,),
        "dtype": torch.int64,
        "owner": "somebody",
        "axis": "bs",
    }
    return GraphSlot(**(declared | changes))


def _registry(max_bs: int = 4, max_num_tokens: int = 8) -> CudaGraphBufferRegistry:
    return CudaGraphBufferRegistry(max_bs=max_bs, max_num_tokens=max_num_tokens, device=CPU)


def _fill(registry: CudaGraphBufferRegistry, raw: int, padded: int, **fields: Any) -> None:
    batch: Any = SimpleNamespace(**fields)
    registry.fill_from(
        batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
    )


def _decode_batch(size: int, seed: int = 0) -> ForwardBatch:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(2, 99, (size,), generator=generator) for _ in range(6)]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=values[0],
        positions=values[1],
        out_cache_loc=values[2],
        req_pool_indices=values[3],
        seq_lens=values[4],
        seq_lens_cpu=values[5],
    )


def _decode_registry() -> CudaGraphBufferRegistry:
    return build_decode_registry(
        max_bs=MAX_BS, max_num_tokens=MAX_TOKENS, device=CPU, seq_len_fill_value=FILL_LEN
    )


# -- the fill --------------------------------------------------------------------------------------


@EXAMPLES
@given(
    history=st.lists(
        st.tuples(st.integers(0, MAX_BS), st.integers(0, MAX_BS)).map(sorted),
        min_size=1,
        max_size=8,
    )
)
def test_heads_tails_and_the_rest_whatever_came_before(history: list[list[int]]) -> None:
    """After any history of fills: heads are the batch, tails the pad value, the rest untouched."""
    registry = _decode_registry()
    addresses = {s.name: s.buffer.data_ptr() for s in registry if s.buffer is not None}
    for step, (raw, padded) in enumerate(history):
        batch = _decode_batch(raw, seed=step)
        given_fields = {name: getattr(batch, name).clone() for name in PADS}
        for slot in registry:
            assert slot.buffer is not None
            slot.buffer[padded:] = POISON
        registry.fill_from(
            batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
        )
        for slot in registry:
            assert slot.buffer is not None
            expected = given_fields[slot.name].tolist() + [PADS[slot.name]] * (padded - raw)
            assert slot.buffer.tolist() == expected + [POISON] * (MAX_BS - padded)
            assert slot.buffer.data_ptr() == addresses[slot.name]
            assert torch.equal(getattr(batch, slot.name), given_fields[slot.name])
            slot.buffer[padded:] = PADS[slot.name]


def test_a_forgotten_tail_is_caught_when_planted() -> None:
    """A policy that leaves the tail after a shrink fails the property above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaddingPolicy, "resets_tail", False)
        check = test_heads_tails_and_the_rest_whatever_came_before.hypothesis.inner_test
        check(history=[[4, 4]])
        with pytest.raises(AssertionError):
            check(history=[[4, 4], [2, 4]])


@pytest.mark.parametrize(
    ("policy", "extra", "tail"),
    [
        (PaddingPolicy.ZERO, {}, [0, 0]),
        (PaddingPolicy.FILL_SENTINEL, {"pad_value": -1}, [-1, -1]),
        (PaddingPolicy.FILL_SENTINEL, {"pad_value": 0}, [0, 0]),
        (PaddingPolicy.KEEP_PAD, {"reason": "nobody reads it"}, [7, 8]),
        (PaddingPolicy.FOREACH_COPY, {"reason": "nobody reads it"}, [7, 8]),
    ],
)
def test_each_policy_after_a_shrink(
    policy: PaddingPolicy, extra: dict[str, Any], tail: list[int]
) -> None:
    """Four rows, then two: the tail is what the policy says, and repeating it changes nothing."""
    registry = _registry()
    slot = registry.register_slot(_slot(padding_policy=policy, **extra))
    _fill(registry, 4, 4, lengths=torch.tensor([5, 6, 7, 8]))
    for _ in range(2):
        _fill(registry, 2, 4, lengths=torch.tensor([1, 2]))
        assert slot.buffer is not None
        assert slot.buffer.tolist() == [1, 2, *tail]


def test_fill_once_holds_its_value_from_the_start() -> None:
    """A FILL_ONCE slot starts as its pad value and no fill writes it, so that an owner may."""
    registry = _registry()
    slot = registry.register_slot(
        _slot(padding_policy=PaddingPolicy.FILL_ONCE, pad_value=9, copy_from_fb=False)
    )
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [9] * 4
    slot.buffer[0] = 3
    _fill(registry, 1, 4)
    assert slot.buffer.tolist() == [3, 9, 9, 9]


def test_fill_once_is_refused_where_rows_are_copied() -> None:
    """FILL_ONCE never rewrites a tail, so a slot whose head is copied each step cannot have it."""
    with pytest.raises(SlotError):
        _slot(padding_policy=PaddingPolicy.FILL_ONCE, pad_value=9)


def test_a_slot_that_nothing_pads_is_copied_whole() -> None:
    """An axis of none means the whole buffer, in every fill and every view."""
    registry = _registry()
    slot = registry.register_slot(_slot(axis="none", shape_fn=lambda *_: (3,)))
    _fill(registry, 1, 4, lengths=torch.tensor([4, 5, 6]))
    assert slot.slice_for(1, 1).tolist() == [4, 5, 6]


def test_owners_slots_are_not_copied_from_the_batch() -> None:
    """A slot that its owner fills keeps its head, and has its tail reset by policy."""
    registry = _registry()
    slot = registry.register_slot(
        _slot(copy_from_fb=False, padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=5)
    )
    assert slot.buffer is not None
    slot.buffer.copy_(torch.tensor([1, 2, 3, 4]))
    _fill(registry, 2, 3)
    assert slot.buffer.tolist() == [1, 2, 5, 4]


def test_tokens_and_requests_are_padded_by_their_own_counts() -> None:
    """A slot follows its axis: requests by requests, tokens by tokens."""
    registry = _registry()
    registry.register_slot(_slot())
    registry.register_slot(_slot(name="ids", axis="tokens", shape_fn=lambda _bs, tokens: (tokens,)))
    batch: Any = SimpleNamespace(lengths=torch.tensor([3, 2]), ids=torch.arange(1, 6))
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(POISON)
    registry.fill_from(batch, raw_bs=2, padded_bs=3, raw_num_tokens=5, padded_num_tokens=7)
    assert registry.get_slot("lengths").slice_for(3, 7).tolist() == [3, 2, 0]
    assert registry.get_slot("ids").slice_for(3, 7).tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert registry.get_slot("ids").slice_for(4, 8)[-1] == POISON


def test_rows_on_the_last_axis() -> None:
    """A slice_fn may put the rows last, as for ``[3, tokens]`` positions."""
    registry = _registry()
    slot = registry.register_slot(
        _slot(
            axis="tokens",
            shape_fn=lambda _bs, tokens: (3, tokens),
            slice_fn=lambda buffer, n: buffer[:, :n],
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=-1,
        )
    )
    _fill(registry, 4, 4, lengths=torch.full((3, 4), 8))
    _fill(registry, 1, 3, lengths=torch.full((3, 1), 2))
    assert slot.slice_for(3, 3).tolist() == [[2, -1, -1]] * 3
    assert slot.buffer is not None
    assert slot.buffer[:, 3].tolist() == [8] * 3


def test_one_row_more_than_requests() -> None:
    """A slice_fn may take ``n + 1`` rows, as offsets do: the head is copied, what follows is padded."""
    registry = _registry()
    slot = registry.register_slot(
        _slot(shape_fn=lambda bs, _: (bs + 1,), slice_fn=lambda buffer, n: buffer[: n + 1])
    )
    _fill(registry, 4, 4, lengths=torch.tensor([1, 2, 3, 4, 5]))
    _fill(registry, 1, 3, lengths=torch.tensor([6, 7]))
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [6, 7, 0, 0, 5]


def test_wide_rows_on_the_first_axis_of_a_slice_fn() -> None:
    """A slice_fn that keeps rows on the first axis of a wide buffer has whole rows padded."""
    registry = _registry()
    slot = registry.register_slot(
        _slot(shape_fn=lambda bs, _: (bs + 1, 3), slice_fn=lambda buffer, n: buffer[: n + 1])
    )
    _fill(registry, 3, 4, lengths=torch.full((4, 3), 7))
    _fill(registry, 1, 4, lengths=torch.full((2, 3), 5))
    assert slot.buffer is not None
    assert slot.buffer[2:].tolist() == [[0] * 3] * 3


def test_wide_rows() -> None:
    """Rows may be wide: whole rows are copied and whole rows are padded."""
    registry = _registry()
    slot = registry.register_slot(_slot(shape_fn=lambda bs, _: (bs, 2), dtype=torch.float32))
    _fill(registry, 3, 4, lengths=torch.ones(3, 2))
    _fill(registry, 1, 4, lengths=torch.full((1, 2), 2.0))
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [[2, 2], [0, 0], [0, 0], [0, 0]]


def test_an_optional_field_may_be_missing() -> None:
    """A slot declared optional keeps its head where the batch lacks the field."""
    registry = _registry()
    slot = registry.register_slot(_slot(optional=True))
    _fill(registry, 2, 2, lengths=torch.tensor([3, 4]))
    _fill(registry, 2, 3, lengths=None)
    assert slot.slice_for(3, 3).tolist() == [3, 4, 0]


def test_narrower_fields_are_widened() -> None:
    """An int32 field is copied into an int64 slot, value for value."""
    registry = _registry()
    slot = registry.register_slot(_slot())
    _fill(registry, 2, 2, lengths=torch.tensor([3, 4], dtype=torch.int32))
    assert slot.slice_for(2, 2).tolist() == [3, 4]


# -- what is refused, before anything is written -----------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        None,
        torch.tensor([1]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1], [2]]),
        torch.tensor([1.0, 2.0]),
    ],
    ids=["missing", "too few", "too many", "another rank", "not convertible"],
)
def test_a_bad_field_is_refused_by_slot_and_owner(lengths: torch.Tensor | None) -> None:
    """A field that does not fit its slot is an error that names both, and nothing is written."""
    registry = _registry()
    registry.register_slot(_slot(name="first", owner="another"))
    registry.register_slot(_slot())
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(POISON)
    with pytest.raises(SlotError) as error:
        _fill(registry, 2, 4, first=torch.tensor([1, 2]), lengths=lengths)
    assert "'lengths'" in str(error.value)
    assert "somebody" in str(error.value)
    for slot in registry:
        assert slot.buffer is not None
        assert slot.buffer.tolist() == [POISON] * 4


def test_a_conversion_that_loses_is_refused() -> None:
    """A dtype that does not convert exactly is refused, as fill_from() says."""
    registry = _registry()
    registry.register_slot(_slot(dtype=torch.int32))
    with pytest.raises(SlotError):
        _fill(registry, 1, 1, lengths=torch.tensor([2**40]))


@pytest.mark.parametrize(
    ("counts", "what"),
    [
        ((3, 2, 1, 1), "requests"),
        ((1, 5, 1, 1), "requests"),
        ((-1, 2, 1, 1), "requests"),
        ((1, 1, 4, 3), "tokens"),
        ((1, 1, 1, 9), "tokens"),
    ],
)
def test_counts_out_of_order_are_refused(counts: tuple[int, ...], what: str) -> None:
    """Raw counts above padded ones, or padded ones above the largest, are refused by name."""
    registry = _registry()
    slot = registry.register_slot(_slot())
    names = ("raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens")
    batch: Any = SimpleNamespace(lengths=torch.ones(1, dtype=torch.int64))
    with pytest.raises(SlotError, match=what):
        registry.fill_from(batch, **dict(zip(names, counts, strict=True)))
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [0] * 4
    assert not registry._plans


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"axis": "rows"}, "axis 'rows'"),
        ({"padding_policy": PaddingPolicy.FILL_SENTINEL}, "FILL_SENTINEL without a pad_value"),
        ({"padding_policy": PaddingPolicy.FILL_ONCE}, "FILL_ONCE without a pad_value"),
        ({"padding_policy": PaddingPolicy.KEEP_PAD}, "KEEP_PAD without a reason"),
        ({"padding_policy": PaddingPolicy.FOREACH_COPY, "reason": ""}, "FOREACH_COPY without a"),
    ],
)
def test_a_bad_declaration_is_refused(changes: dict[str, Any], says: str) -> None:
    """A slot that lacks what its policy needs is refused when it is declared, by name and owner."""
    with pytest.raises(SlotError) as error:
        _slot(**changes)
    for part in (says, "'lengths'", "somebody", "help: "):
        assert part in str(error.value)


def test_a_name_is_taken_once() -> None:
    """A second slot of one name is refused, naming both owners."""
    registry = _registry()
    first = registry.register_slot(_slot())
    with pytest.raises(SlotError, match=r"of other is already registered by somebody"):
        registry.register_slot(_slot(owner="other"))
    assert registry.get_slot("lengths") is first


def test_an_unknown_slot_names_the_nearest() -> None:
    """Asking for a slot that is not there says what is there and what was probably meant."""
    registry = _decode_registry()
    with pytest.raises(SlotError) as error:
        registry.get_slot("seq_len")
    assert "did you mean 'seq_lens'?" in str(error.value)
    assert "req_pool_indices" in str(error.value)
    with pytest.raises(SlotError, match="registered: none"):
        _registry().get_slot("x")


def test_a_slot_without_a_buffer_has_no_slices() -> None:
    """A slot that no registry holds says so instead of slicing nothing."""
    with pytest.raises(SlotError, match="'lengths' of somebody has no buffer"):
        _slot().slice_for(1, 1)


# -- binding, views, plans -------------------------------------------------------------------------


def test_an_existing_tensor_is_adopted() -> None:
    """A bound tensor is the slot's buffer, at its own address."""
    registry, memory = _registry(), torch.zeros(4, dtype=torch.int64)
    slot = registry.register_slot(_slot(), bind=memory)
    _fill(registry, 2, 2, lengths=torch.tensor([3, 4]))
    assert slot.buffer is memory
    assert memory.tolist() == [3, 4, 0, 0]


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_a_tensor_of_another_kind_is_not_adopted(memory: torch.Tensor) -> None:
    """A bound tensor must be exactly what was declared; otherwise no slot is registered."""
    registry = _registry()
    with pytest.raises(SlotError, match="'lengths' of somebody: declared"):
        registry.register_slot(_slot(), bind=memory)
    assert not registry.has_slot("lengths")


def test_devices_are_compared_as_devices() -> None:
    """``cuda`` and ``cuda:0``, here ``cpu:0`` and ``cpu``, are one device to a registry."""
    registry = CudaGraphBufferRegistry(max_bs=1, max_num_tokens=1, device=torch.device("cpu:0"))
    registry.register_slot(_slot())


def test_fill_once_holds_in_adopted_memory_too() -> None:
    """What a new buffer holds from the start, an adopted one holds as well."""
    slot = _slot(padding_policy=PaddingPolicy.FILL_ONCE, pad_value=9, copy_from_fb=False)
    memory = torch.zeros(4, dtype=torch.int64)
    _registry().register_slot(slot, bind=memory)
    assert memory.tolist() == [9] * 4


def test_the_view_is_slices_of_slots() -> None:
    """Every tensor of a view lies in its slot, padded; what is no slot's comes from the template."""
    registry = _decode_registry()
    view = registry.extract_buffer(
        padded_bs=3, padded_num_tokens=3, forward_batch_template=_decode_batch(2)
    )
    assert view.batch_size == view.num_tokens == 3
    assert view.forward_mode is ForwardMode.DECODE
    assert view.extend_seq_lens is None
    for name in PADS:
        tensor, buffer = getattr(view, name), registry.get_slot(name).buffer
        assert tensor.shape == (3,)
        assert buffer is not None
        assert tensor.data_ptr() == buffer.data_ptr()


def test_the_plan_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pairs of counts a lane meets, the oldest plans are dropped and fills stay right."""
    monkeypatch.setattr(registry_module, "_MAX_PLANS", 3)
    registry = _registry(max_bs=8)
    slot = registry.register_slot(_slot())
    for raw in (1, 2, 3, 4, 5, 6, 1, 2):
        _fill(registry, raw, 8, lengths=torch.full((raw,), raw))
        assert len(registry._plans) <= 3
        assert slot.slice_for(8, 8).tolist() == [raw] * raw + [0] * (8 - raw)
    assert [ctx.raw_bs for ctx in registry._plans] == [6, 1, 2]


def test_a_late_slot_joins_the_next_fill() -> None:
    """A slot that is registered after a fill is filled by the next one with the same counts."""
    registry = _registry()
    registry.register_slot(_slot())
    _fill(registry, 1, 2, lengths=torch.tensor([1]))
    late = registry.register_slot(_slot(name="late"))
    _fill(registry, 1, 2, lengths=torch.tensor([1]), late=torch.tensor([6]))
    assert late.slice_for(2, 2).tolist() == [6, 0]


def test_the_registry_lists_what_it_holds() -> None:
    """Names come in the order of registration, and bytes are counted."""
    registry = _decode_registry()
    assert registry.slot_names() == list(PADS)
    assert [s.name for s in registry] == list(PADS)
    assert registry.has_slot("seq_lens")
    assert not registry.has_slot("nothing")
    assert registry.nbytes == len(PADS) * MAX_BS * 8
    assert all(s.owner == "decode inputs" for s in registry)
    assert registry.get_slot("seq_lens_cpu").slice_for(1, 1).device == CPU


def test_new_buffers_hold_what_padding_holds() -> None:
    """Before any fill a slot already reads as padding, so that capture sees legal rows."""
    for slot in _decode_registry():
        assert slot.buffer is not None
        assert slot.buffer.tolist() == [PADS[slot.name]] * MAX_BS


def test_rows_of_a_context() -> None:
    """A fill context answers raw and padded rows by axis."""
    ctx = FillContext(1, 2, 3, 4)
    assert (ctx.rows("bs"), ctx.rows("tokens"), ctx.rows("none")) == ((1, 2), (3, 4), None)
