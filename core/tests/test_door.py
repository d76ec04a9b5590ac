"""Tests that a lane refuses fields of a batch, and entries of `extra`, that have no slot."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, GraphShape, GraphSlot, Lane, PaddingPolicy, StepOutputs
from graphpact.errors import EngineError, SlotError
from graphpact.runners import EagerRunner
from graphpact.step import Attend
from graphpact_cuda_graph import CudaGraphRunner
from rigs.lane import DTYPE, SHAPE_OF, WIDTH, LaneRig

HIDDEN, FLAG = "eagle.hidden_states", "eagle.flag"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, as lanes do for their steps."""
    with torch.inference_mode():
        yield


def _counts(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


FIELDS: dict[str, Any] = {  # of three requests
    "mrope_positions": torch.zeros(3, 3, dtype=torch.int64),
    "input_embeds": torch.zeros(3, WIDTH),
    "encoder_lens": _counts(3),
    "num_correct_drafts": _counts(3),
    "extend_seq_lens_cpu": torch.ones(3, dtype=torch.int64),
    "mamba_track_mask": torch.ones(3, dtype=torch.bool),
    "num_token_non_padded": _counts(1),
    "global_num_tokens_gpu": _counts(1),
}


def refused(lane: Lane, batch: ForwardBatch, *names: str) -> None:
    """Assert that ``batch`` is refused with these names of fields, before any of its fields is copied."""
    assert lane.registry is not None
    slot = lane.registry.get_slot("input_ids").buffer
    assert slot is not None
    before, replays = slot.clone(), lane.stats.replays
    with pytest.raises(EngineError, match="the batch carries ") as error:
        lane.run(batch)
    assert "help: declare a slot of that name" in str(error.value)
    found = str(error.value).partition("carries ")[2].partition(", which")[0]
    assert sorted(found.split(", ")) == sorted(map(repr, names))
    assert torch.equal(slot, before)
    assert lane.stats.replays == replays


@pytest.fixture(scope="module")
def plain() -> LaneRig:
    """Return a rig with the default slots, captured once."""
    with torch.inference_mode():
        return LaneRig()


@settings(derandomize=True, max_examples=40)
@given(names=st.sets(st.sampled_from(sorted(FIELDS)), min_size=1))
def test_every_live_field_without_a_slot_is_refused(names: set[str], plain: LaneRig) -> None:
    """The refusal names exactly the tensors of a batch that have no slot."""
    with torch.inference_mode():
        batch = plain.batch(3, 2, 4)
        refused(plain.lane, replace(batch, **{n: FIELDS[n] for n in names}), *names)
        plain.lane.run(batch)


@settings(derandomize=True, max_examples=20)
@given(names=st.sets(st.sampled_from([HIDDEN, FLAG, "acme.rows"]), min_size=1))
def test_every_entry_of_extra_without_a_slot_is_refused(names: set[str], plain: LaneRig) -> None:
    """Entries of ``extra`` without a slot are refused by their dotted names."""
    with torch.inference_mode():
        batch = plain.batch(3, 2, 4)
        extra = {name: torch.zeros(3) for name in names}
        refused(plain.lane, replace(batch, extra=extra), *names)


def test_an_embedding_of_ngrams_without_its_slots_is_refused() -> None:
    """A tensor in ``ngram_embedding_info`` without a slot is refused like a field."""
    rig = LaneRig()
    info = SimpleNamespace(column_starts=_counts(3), req_lens=_counts(3))
    batch = replace(rig.batch(3, 2, 4), ngram_embedding_info=info)
    refused(rig.lane, batch, "ngram_embedding_info.req_lens")


def test_a_kind_of_batch_is_looked_at_once() -> None:
    """An accepted kind of batch is checked once for each shape; a refused kind is refused every time."""
    rig = LaneRig()
    record = rig.lane.captured[SHAPE_OF[4]]
    looks: list[tuple[object, ...]] = []
    admit = rig.lane._admit

    def look(batch: ForwardBatch, captured: Any) -> None:
        looks.append(batch.kind)
        admit(batch, captured)

    rig.lane._admit = look  # type: ignore[method-assign]
    batch = rig.batch(3, 2, 4)
    for _ in range(3):
        rig.lane.run(batch)
    assert len(looks) == len(record.admitted) == 1
    bad = replace(batch, encoder_lens=_counts(3))
    for _ in range(2):
        refused(rig.lane, bad, "encoder_lens")
    assert len(looks) == 3
    assert len(record.admitted) == 1
    rig.lane.run(rig.batch(1))  # every shape has a separate record
    assert len(looks) == 4


def test_host_numbers_need_no_slot() -> None:
    """Integers and tuples on the host are accepted without a slot, because no graph reads them."""
    rig = LaneRig()
    batch = replace(
        rig.batch(3, 2, 4),
        num_token_non_padded_cpu=3,
        global_num_tokens_cpu=(3, 4),
        draft_step=None,
    )
    rig.lane.run(batch)
    assert rig.lane.stats.replays == 1


@pytest.mark.parametrize("lane", ["no graphs", "not captured", "too large"])
def test_an_eager_step_takes_every_field(lane: str) -> None:
    """An eager step accepts every field and every entry of ``extra``, and the model gets them."""
    seen: list[ForwardBatch] = []
    rig = LaneRig(runner=EagerRunner) if lane == "no graphs" else LaneRig(capture=lane == "too large")
    plain = rig.model
    rig.lane.model = lambda batch, meta, attend: (seen.append(batch), plain(batch, meta, attend))[1]
    batch = rig.batch(*[2] * (5 if lane == "too large" else 3))
    batch = replace(batch, encoder_lens=_counts(3), extra={HIDDEN: torch.ones(3, WIDTH)})
    rig.lane.run(batch)
    assert rig.lane.stats.eager.total() == 1
    assert seen[0].extra[HIDDEN] is batch.extra[HIDDEN]
    assert seen[0].encoder_lens is batch.encoder_lens


# -- slots that a plugin adds ----------------------------------------------------------------------


class Eagle(CudaGraphRunner):
    """A runner that adds two fields: hidden states per token and a flag per request."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the input slots and two more."""
        hidden = GraphSlot(
            HIDDEN,
            lambda _, tokens: (tokens, WIDTH),
            DTYPE,
            padding_policy=PaddingPolicy.ZERO,
            owner="eagle",
        )
        flag = GraphSlot(
            FLAG,
            lambda bs, _: (bs,),
            torch.int64,
            axis="bs",
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=-1,
            owner="eagle",
        )
        return [*super().slots(), hidden, flag]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a dummy with both fields."""
        return with_extra(super().dummy(shape), shape.batch_size)


class Forgets(Eagle):
    """A runner that captures without the fields for which it has slots."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the same slots, with the two added ones as optional."""
        return [replace(slot, optional=slot.owner == "eagle") for slot in super().slots()]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a dummy without both fields."""
        return CudaGraphRunner.dummy(self, shape)


def with_extra(batch: ForwardBatch, size: int, value: float = 0.0) -> ForwardBatch:
    """Return the batch with both fields, whose rows count up from ``value``."""
    rows = torch.arange(size, dtype=DTYPE) + value
    return replace(batch, extra={HIDDEN: rows[:, None].expand(-1, WIDTH).clone(), FLAG: rows.long()})


@pytest.fixture(scope="module")
def eagle() -> LaneRig:
    """Return a strict rig whose model adds its hidden states to the logits, captured once."""
    rig = LaneRig(runner=Eagle, capture=False, strict=True)
    plain = rig.model

    def model(batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        logits = plain(batch, metadata, attend).logits
        rows = batch.extra[HIDDEN][:, :1] + batch.extra[FLAG][:, None]
        return StepOutputs(logits=(logits + rows, "bs"))

    rig.lane.model = model
    rig.lane.capture_all()
    return rig


@settings(derandomize=True, max_examples=15)
@given(steps=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_fields_of_a_plugin_are_filled_padded_and_seen_by_the_graph(steps: list[int], eagle: LaneRig) -> None:
    """Entries of ``extra`` are copied to their slots and padded by policy; a replay computes with them."""
    with torch.inference_mode():
        rig = eagle
        for number, size in enumerate(steps):
            batch = with_extra(rig.batch(*[2 + number] * size), size, value=10.0 * number)
            replayed = rig.lane.run(batch).clone()
            assert torch.allclose(replayed.logits, rig.lane.run_eager(batch).logits)
            shape = rig.lane.fit(batch)
            assert isinstance(shape, GraphShape)
            view = rig.lane.captured[shape].context.view
            tail = shape.batch_size - size
            assert view.extra[FLAG].tolist() == [*batch.extra[FLAG].tolist(), *[-1] * tail]
            assert view.extra[HIDDEN][size:].tolist() == [[0.0] * WIDTH] * tail
            assert torch.equal(view.extra[HIDDEN][:size], batch.extra[HIDDEN])
            registry = rig.lane.registry
            assert registry is not None
            for name in (HIDDEN, FLAG):
                buffer = registry.get_slot(name).buffer
                assert buffer is not None
                assert view.extra[name].data_ptr() == buffer.data_ptr()


def test_a_batch_without_a_field_that_has_a_slot_is_refused(eagle: LaneRig) -> None:
    """A batch that lacks an entry of ``extra`` with a slot is refused: the slot would keep earlier rows."""
    batch = with_extra(eagle.batch(3, 2), 2)
    for name in (HIDDEN, FLAG):
        lacks = {n: t for n, t in batch.extra.items() if n != name}
        with pytest.raises(SlotError, match=f"slot '{name}' of eagle found nothing"):
            eagle.lane.run(replace(batch, extra=lacks))


def test_a_field_that_no_capture_had_is_refused() -> None:
    """A field with a slot that the dummy lacked is refused, because no graph was recorded with it."""
    rig = LaneRig(runner=Forgets)
    batch = rig.batch(3, 2)
    rig.lane.run(batch)
    with pytest.raises(EngineError, match=f"'{HIDDEN}', '{FLAG}', which .* was captured without"):
        rig.lane.run(with_extra(batch, 2))
    assert rig.lane.stats.replays == 1


@pytest.mark.parametrize("name", ["hidden", "input_ids"])
def test_an_entry_of_extra_without_an_owner_is_refused(name: str) -> None:
    """A name without a dot is refused even if a slot has it: the slot would copy the field of that name."""
    rig = LaneRig()
    refused(rig.lane, replace(rig.batch(3, 2), extra={name: torch.zeros(2, dtype=torch.int64)}), name)
