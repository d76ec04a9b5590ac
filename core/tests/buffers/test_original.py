"""A program written against the original registry (SGLang PR 26742) works after changing its import.

The tests are parts of such a program: a registry without a lane, slots with positional arguments, and a
batch that is any dataclass with a ``batch_size``. There is one difference: a declaration is frozen, and
``register_slot`` returns the slot with its memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpact import parallel
from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
    build_prefill_registry,
    get_attention_tp_rank,
    get_attention_tp_size,
    get_parallel,
    share_input_buffer,
    sharing,
)

CPU = torch.device("cpu")
REQUESTS, TOKENS = 6, 10


@dataclass
class StepBatch:
    """A batch of such a program: any dataclass is accepted."""

    batch_size: int
    mode: str = "decode"
    notes: list[str] | None = None
    input_ids: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    encoder_lens: torch.Tensor | None = None
    positions_3d: torch.Tensor | None = None
    total: torch.Tensor | None = None
    nested: Any = None
    num_token_non_padded: torch.Tensor | None = None
    global_num_tokens_gpu: torch.Tensor | None = None


@pytest.fixture(autouse=True)
def _process_wide() -> Iterator[None]:
    """Clear the process-wide pool before and after each test."""
    sharing.PROCESS_WIDE.clear()
    yield
    sharing.PROCESS_WIDE.clear()


def _registry(*, tokens: int = TOKENS, share_pool: bool = False) -> CudaGraphBufferRegistry:
    return CudaGraphBufferRegistry(device=CPU, max_bs=REQUESTS, max_num_tokens=tokens, share_pool=share_pool)


def _ids() -> GraphSlot:
    return GraphSlot("input_ids", lambda bs, mt: (mt,), torch.int64, axis="tokens")


def _lens(policy: PaddingPolicy, pad_value: int | None = None) -> GraphSlot:
    return GraphSlot("seq_lens", lambda bs, mt: (bs,), torch.int32, "bs", None, policy, pad_value)


def _buffer(registry: CudaGraphBufferRegistry, name: str) -> torch.Tensor:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _fill(registry: CudaGraphBufferRegistry, batch: Any, **more: Any) -> None:
    """Fill 2 requests with 3 tokens, padded to 4 and 8."""
    counts = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 3, "padded_num_tokens": 8}
    registry.fill_from(batch, **counts, **more)


def _view(registry: CudaGraphBufferRegistry, template: StepBatch) -> StepBatch:
    return registry.extract_buffer(padded_bs=4, padded_num_tokens=8, forward_batch_template=template)


# -- declaring -------------------------------------------------------------------------------------


def test_a_slot_by_position() -> None:
    """A slot with name, shape and dtype by position and the axis by name is zero when registered."""
    registry = _registry()
    slot = registry.register_slot(_ids())
    assert registry.get_slot("input_ids") is slot
    assert slot.buffer is not None
    assert (slot.buffer.dtype, slot.buffer.tolist()) == (torch.int64, [0] * TOKENS)


def test_the_policies_are_the_originals() -> None:
    """There are the five policies of the original, with its names and values."""
    assert {policy.name: policy.value for policy in PaddingPolicy} == {
        "KEEP_PAD": "keep_pad",
        "FILL_SENTINEL": "fill_sentinel",
        "ZERO": "zero",
        "FOREACH_COPY": "foreach_copy",
        "FILL_ONCE": "fill_once",
    }


def test_a_bare_registry_asks_for_no_owner_and_no_reason() -> None:
    """A registry without a lane takes every policy without an owner or a reason."""
    for policy in PaddingPolicy:
        registry = _registry()
        registry.register_slot(_lens(policy, pad_value=1))
        assert registry.lane is None


def test_what_raises_value_error() -> None:
    """A repeated name, an unknown axis, and a bound tensor of another shape or dtype raise ValueError."""
    registry = _registry()
    registry.register_slot(_ids())
    with pytest.raises(ValueError, match="input_ids"):
        registry.register_slot(_ids())
    with pytest.raises(ValueError, match="sideways"):
        GraphSlot("x", lambda bs, mt: (bs,), torch.int64, axis="sideways")  # type: ignore[arg-type]
    for bad in (torch.zeros(REQUESTS + 1, dtype=torch.int32), torch.zeros(REQUESTS)):
        with pytest.raises(ValueError, match="seq_lens"):
            registry.register_slot(_lens(PaddingPolicy.ZERO), bind=bad)
    assert registry.slot_names() == ["input_ids"]


def test_what_raises_other_errors() -> None:
    """An unknown name raises KeyError; a slice of a slot without memory, or not registered, RuntimeError."""
    with pytest.raises(KeyError):
        _registry().get_slot("input_ids")
    with pytest.raises(RuntimeError):
        _registry().register_slot(replace(_ids(), enabled=False)).slice_for(1, 1)
    slot = _ids()
    _registry().register_slot(slot)
    with pytest.raises(RuntimeError, match=r"input_ids.*declaration"):
        slot.slice_for(1, 1)  # there it would be the memory; here a declaration is never written


def test_a_slot_that_is_switched_off() -> None:
    """A disabled slot is not allocated, listed, filled or in the view, but is found by its name."""
    registry = _registry()
    slot = registry.register_slot(replace(_ids(), enabled=False))
    assert slot.buffer is None
    assert registry.slot_names() == []
    assert not registry.has_slot("input_ids")
    assert registry.get_slot("input_ids") is slot
    ids = torch.arange(3)
    batch = StepBatch(2, input_ids=ids)
    _fill(registry, batch)
    assert _view(registry, batch).input_ids is ids


def test_a_bound_tensor_is_taken_as_initialised() -> None:
    """A bound tensor is the slot's buffer, and registering does not change its contents."""
    memory = _int32(*range(REQUESTS))
    slot = _registry().register_slot(_lens(PaddingPolicy.FILL_SENTINEL, 9), bind=memory)
    assert slot.buffer is memory
    assert memory.tolist() == list(range(REQUESTS))


# -- filling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "pad_value", "tail"),
    [
        (PaddingPolicy.KEEP_PAD, None, [50, 50]),
        (PaddingPolicy.FOREACH_COPY, None, [50, 50]),
        (PaddingPolicy.ZERO, None, [0, 0]),
        (PaddingPolicy.FILL_SENTINEL, 9, [9, 9]),
        (PaddingPolicy.FILL_ONCE, 9, [50, 50]),
    ],
)
def test_each_policy(policy: PaddingPolicy, pad_value: int | None, tail: list[int]) -> None:
    """Live rows are the batch's, padding rows follow the policy, and rows beyond the bucket are kept."""
    registry = _registry()
    slot = registry.register_slot(_lens(policy, pad_value))
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [pad_value or 0] * REQUESTS
    slot.buffer.fill_(50)
    _fill(registry, StepBatch(2, seq_lens=_int32(7, 8)))
    assert slot.buffer.tolist() == [7, 8, *tail, 50, 50]


def test_a_field_that_is_absent_is_skipped() -> None:
    """If a field is None, missing or not a tensor, its live rows are kept; padding rows are still reset."""
    registry = _registry()
    for slot in (_lens(PaddingPolicy.ZERO), _ids()):
        buffer = registry.register_slot(slot).buffer
        assert buffer is not None
        buffer.fill_(50)
    _fill(registry, StepBatch(2))
    assert _buffer(registry, "seq_lens").tolist() == [50, 50, 0, 0, 50, 50]
    assert _buffer(registry, "input_ids").tolist() == [50] * TOKENS
    _fill(registry, SimpleNamespace())
    assert _buffer(registry, "seq_lens").tolist() == [50, 50, 0, 0, 50, 50]
    _fill(registry, SimpleNamespace(seq_lens=[1, 2]))  # not a tensor
    assert _buffer(registry, "seq_lens").tolist() == [50, 50, 0, 0, 50, 50]


def test_fields_come_and_go() -> None:
    """A field that is absent in one step is copied in the next, with the same counts."""
    registry = _registry()
    registry.register_slot(_lens(PaddingPolicy.ZERO))
    registry.register_slot(_ids())
    for step in range(1, 6):
        lens = _int32(step, step) if step % 2 else None
        _fill(registry, StepBatch(2, seq_lens=lens, input_ids=torch.full((3,), step)))
        odd = step - 1 + step % 2
        assert _buffer(registry, "seq_lens").tolist()[:4] == [odd, odd, 0, 0]
        assert _buffer(registry, "input_ids").tolist()[:3] == [step] * 3


def test_a_hook_after_the_copies() -> None:
    """``post_fill`` gets buffer, batch and counts after the live rows are copied."""
    seen: list[tuple[Any, FillContext]] = []

    def double(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
        seen.append((batch, context))
        buffer[: context.raw_num_tokens] *= 2

    registry = _registry()
    registry.register_slot(replace(_ids(), post_fill=double))
    batch = StepBatch(2, input_ids=torch.tensor([4, 5, 6]))
    _fill(registry, batch)
    assert _buffer(registry, "input_ids").tolist() == [8, 10, 12] + [0] * 7
    assert seen == [(batch, FillContext(2, 4, 3, 8))]
    assert batch.input_ids is not None
    assert batch.input_ids.tolist() == [4, 5, 6]


def test_rows_on_the_last_axis() -> None:
    """With a slice_fn for ``[3, T]``, live rows, padding rows and the view follow the last axis."""
    registry = _registry()
    slot = GraphSlot(
        "positions_3d",
        lambda bs, mt: (3, mt),
        torch.int64,
        axis="tokens",
        padding_policy=PaddingPolicy.ZERO,
        slice_fn=lambda buffer, n: buffer[:, :n],
    )
    buffer = registry.register_slot(slot).buffer
    assert buffer is not None
    buffer.fill_(50)
    batch = StepBatch(2, positions_3d=torch.arange(9).reshape(3, 3))
    _fill(registry, batch)
    pad = [0] * 5 + [50] * 2
    assert buffer.tolist() == [[0, 1, 2, *pad], [3, 4, 5, *pad], [6, 7, 8, *pad]]
    view = _view(registry, batch).positions_3d
    assert view is not None
    assert tuple(view.shape) == (3, 8)


def test_fill_once() -> None:
    """The value is written once: live rows of an earlier batch stay as padding rows of later ones."""
    registry = _registry()
    slot = GraphSlot(
        "encoder_lens",
        lambda bs, mt: (bs,),
        torch.int32,
        axis="bs",
        padding_policy=PaddingPolicy.FILL_ONCE,
        pad_value=9,
    )
    buffer = registry.register_slot(slot).buffer
    assert buffer is not None
    assert buffer.tolist() == [9] * REQUESTS
    _fill(registry, StepBatch(2, encoder_lens=_int32(1, 2)))
    assert buffer.tolist() == [1, 2, 9, 9, 9, 9]
    counts = {"raw_bs": 1, "padded_bs": 4, "raw_num_tokens": 1, "padded_num_tokens": 4}
    registry.fill_from(StepBatch(1, encoder_lens=_int32(3)), **counts)
    assert buffer.tolist() == [3, 2, 9, 9, 9, 9]


def _nested_slot() -> GraphSlot:
    def rows(batch: Any, context: FillContext) -> torch.Tensor | None:
        if context.pp_proxy_tensors is not None:
            sent: torch.Tensor = context.pp_proxy_tensors.tensors["rows"]
            return sent
        return None if batch.nested is None else batch.nested.rows

    return GraphSlot(
        "nested.rows",
        lambda bs, mt: (5,),
        torch.int32,
        axis="none",
        padding_policy=PaddingPolicy.KEEP_PAD,
        source_fn=rows,
    )


def test_a_source_fills_as_much_as_it_has() -> None:
    """A tensor that a source_fn returns fills as many rows as it has; None changes nothing."""
    registry = _registry()
    buffer = registry.register_slot(_nested_slot()).buffer
    assert buffer is not None
    buffer.fill_(50)
    _fill(registry, StepBatch(2))
    assert buffer.tolist() == [50] * 5
    _fill(registry, StepBatch(2, nested=SimpleNamespace(rows=_int32(1, 2, 3))))
    assert buffer.tolist() == [1, 2, 3, 50, 50]
    sent = SimpleNamespace(tensors={"rows": _int32(7)})
    _fill(registry, StepBatch(2), pp_proxy_tensors=sent)
    assert buffer.tolist() == [7, 2, 3, 50, 50]


# -- viewing ---------------------------------------------------------------------------------------


def test_the_view() -> None:
    """In the view slots are padded slices at their own addresses; all other fields are the template's."""
    registry = _registry()
    registry.register_slot(_ids())
    registry.register_slot(_lens(PaddingPolicy.ZERO))
    notes = ["kept"]
    batch = StepBatch(2, notes=notes, input_ids=torch.tensor([1, 2, 3]))
    _fill(registry, batch)
    view = _view(registry, batch)
    assert type(view) is StepBatch
    assert (view.batch_size, view.mode) == (4, "decode")
    assert view.notes is notes
    assert view.input_ids is not None
    assert view.input_ids.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert view.input_ids.data_ptr() == _buffer(registry, "input_ids").data_ptr()
    assert view.seq_lens is None  # absent in this step: not a stale buffer


def test_the_template_is_not_written() -> None:
    """The template of a view keeps its size and its tensors."""
    registry = _registry()
    registry.register_slot(_ids())
    ids = torch.tensor([1, 2, 3])
    batch = StepBatch(2, input_ids=ids)
    _fill(registry, batch)
    assert _view(registry, batch) is not batch
    assert batch.batch_size == 2
    assert batch.input_ids is ids
    assert ids.tolist() == [1, 2, 3]


def test_computed_slots_are_always_in_the_view() -> None:
    """A computed slot is in the view even if the template's field is None."""
    registry = _registry()
    slot = GraphSlot(
        "total",
        lambda bs, mt: (1,),
        torch.int32,
        axis="none",
        copy_from_fb=False,
        post_fill=lambda buffer, batch, context: buffer.fill_(context.padded_num_tokens),  # type: ignore[arg-type]
    )
    bound = registry.register_slot(slot)
    batch = StepBatch(2)
    _fill(registry, batch)
    view = _view(registry, batch)
    assert view.total is bound.buffer
    assert view.total is not None
    assert view.total.tolist() == [8]
    assert batch.total is None


def test_dotted_slots_are_not_in_the_view() -> None:
    """A slot with a dotted name replaces no field of the view."""
    registry = _registry()
    registry.register_slot(_nested_slot())
    nested = SimpleNamespace(rows=_int32(1))
    assert _view(registry, StepBatch(2, nested=nested)) == StepBatch(4, nested=nested)


# -- sharing ---------------------------------------------------------------------------------------


def test_sharing_is_asked_for() -> None:
    """Registries with ``share_pool`` share the memory of equal slots; other registries do not."""
    on = [_registry(share_pool=True).register_slot(_ids()) for _ in range(2)]
    off = [_registry(share_pool=False).register_slot(_ids()) for _ in range(2)]
    addresses = [slot.buffer.data_ptr() for slot in (*on, *off) if slot.buffer is not None]
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 3


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8), (16, 16)])
def test_sharing_does_not_depend_on_the_order(sizes: tuple[int, int]) -> None:
    """Slots of equal size share memory and slots of different sizes do not, in either order."""
    first, second = (
        _registry(tokens=tokens, share_pool=True).register_slot(_ids()).buffer for tokens in sizes
    )
    assert first is not None
    assert second is not None
    assert (tuple(first.shape), tuple(second.shape)) == ((sizes[0],), (sizes[1],))
    assert (first.data_ptr() == second.data_ptr()) == (sizes[0] == sizes[1])


def test_the_key_of_a_shared_buffer() -> None:
    """Name, number of elements and dtype are the key; another shape is a view of the same memory."""
    first = share_input_buffer("ids", torch.zeros(6, dtype=torch.int64))
    assert share_input_buffer("ids", torch.ones(6, dtype=torch.int64)).data_ptr() == first.data_ptr()
    table = share_input_buffer("ids", torch.ones(2, 3, dtype=torch.int64))
    assert (table.data_ptr(), tuple(table.shape)) == (first.data_ptr(), (2, 3))
    for name, other in (
        ("other", torch.zeros(6, dtype=torch.int64)),
        ("ids", torch.zeros(6, dtype=torch.int32)),
        ("ids", torch.zeros(7, dtype=torch.int64)),
    ):
        assert share_input_buffer(name, other) is other


# -- the preset registries -------------------------------------------------------------------------


def _decode(**more: Any) -> CudaGraphBufferRegistry:
    return build_decode_registry(
        device=CPU,
        max_bs=REQUESTS,
        max_num_token=TOKENS,
        seq_len_fill_value=5,
        cache_loc_dtype=torch.int64,
        share_pool=False,
        source=None,
        **more,
    )


def test_decode_is_built_as_there() -> None:
    """The decode factory takes the original's arguments; padding rows are kept for input ids only."""
    registry = _decode()
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(50)
    lens = torch.tensor([7, 8])
    batch = SimpleNamespace(input_ids=torch.tensor([1, 2, 3]), seq_lens=lens, seq_lens_cpu=lens)
    _fill(registry, batch)
    assert _buffer(registry, "input_ids").tolist() == [1, 2, 3] + [50] * 7
    assert _buffer(registry, "positions").tolist() == [50] * 3 + [0] * 5 + [50] * 2
    assert _buffer(registry, "seq_lens").tolist() == [7, 8, 5, 5, 50, 50]
    assert _buffer(registry, "seq_lens_cpu").tolist() == [7, 8, 5, 5, 50, 50]
    assert registry.has_slot("mrope_positions")
    assert not registry.has_slot("mamba_track_indices")


def test_counts_are_built_as_there() -> None:
    """If gathered, the count is this rank's share of the padded tokens; the global count is all of them."""
    registry = _decode(enable_num_token_non_padded=True, require_gathered_buffer=True)
    batch = StepBatch(2, num_token_non_padded=_int32(100), global_num_tokens_gpu=_int32(999))
    with get_parallel().override(attn_tp_size=2, attn_tp_rank=0):
        _fill(registry, batch)
    assert _buffer(registry, "num_token_non_padded").tolist() == [4]
    assert _buffer(registry, "global_num_tokens_gpu").tolist() == [8]


def test_the_group_may_be_given_by_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch of ``get_attention_tp_size`` and ``get_attention_tp_rank`` sets this rank's share too."""
    assert (get_attention_tp_size(), get_attention_tp_rank()) == (1, 0)
    with get_parallel().override(attn_tp_size=4, attn_tp_rank=3):
        assert (get_attention_tp_size(), get_attention_tp_rank()) == (4, 3)
    monkeypatch.setattr(parallel, "get_attention_tp_size", lambda: 2)
    monkeypatch.setattr(parallel, "get_attention_tp_rank", lambda: 1)
    registry = _decode(enable_num_token_non_padded=True, require_gathered_buffer=True)
    for count, share in ((100, 4), (6, 2), (3, 0)):
        _fill(registry, StepBatch(2, num_token_non_padded=_int32(count)))
        assert _buffer(registry, "num_token_non_padded").tolist() == [share]


def test_counts_may_stay_the_batchs() -> None:
    """Without global slots the view has the batch's tensors; if not gathered, the count is copied."""
    registry = _decode(enable_num_token_non_padded=True, register_global_num_tokens=False)
    count = _int32(37)
    batch = SimpleNamespace(num_token_non_padded=_int32(7))
    _fill(registry, batch)
    assert _buffer(registry, "num_token_non_padded").tolist() == [7]
    assert _view(registry, StepBatch(2, global_num_tokens_gpu=count)).global_num_tokens_gpu is count


def test_prefill_is_built_as_there() -> None:
    """The prefill factory takes the original's arguments; the padding rows of every token slot are zero."""
    registry = build_prefill_registry(
        device=CPU,
        max_bs=1,
        max_num_token=TOKENS,
        cache_loc_dtype=torch.int32,
        is_multimodal=True,
        hidden_size=2,
        embed_dtype=torch.float32,
        enable_mamba_track=True,
        register_input_embeds=False,
        share_pool=False,
        source=None,
    )
    for slot in registry:
        _buffer(registry, slot.name).fill_(50)
    counts = {"raw_bs": 1, "padded_bs": 1, "raw_num_tokens": 3, "padded_num_tokens": 8}
    registry.fill_from(StepBatch(1, input_ids=torch.tensor([1, 2, 3])), **counts)
    tail = [0] * 5 + [50] * 2
    assert _buffer(registry, "input_ids").tolist() == [1, 2, 3, *tail]
    for name in ("positions", "out_cache_loc"):
        assert _buffer(registry, name).tolist() == [50, 50, 50, *tail]
    assert _buffer(registry, "mrope_positions").tolist() == [[50, 50, 50, *tail]] * 3
    assert {slot.name for slot in registry if slot.axis == "tokens"} == {
        *("input_ids", "positions", "out_cache_loc", "mrope_positions")
    }
    assert _buffer(registry, "out_cache_loc").dtype is torch.int32
    assert not registry.has_slot("input_embeds")
    assert registry.has_slot("mrope_positions")
