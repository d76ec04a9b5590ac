"""Optional fields of batches: each that has a slot is drawn, read, and held to what it may be."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.parallel import get_parallel
from graphpact.runners import GraphRunner
from graphpact.step import Attend, Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.draws import fields
from graphpact_conformance.draws.batches import Drawn, draw, sequences
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.choice import configs_of, dimensions
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.experiments.dummies import _values
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.runners import drawn_batch
from graphpact_conformance.model import own_rows
from graphpact_conformance.suite import takes
from graphpact_speculative.runners import EagleDraftRunner, FrozenKvMtpRunner

CPU = torch.device("cpu")


def with_fields(case: Case, page_size: int = 16) -> Config:
    """Return a lane of a kind of step with optional fields."""
    configs = configs_of(ReferenceBackend.capabilities, cases=(case,))
    plain = next(c for c in configs if (c.heads.name, c.page_size) == ("gqa", page_size))
    return replace(plain, fields=True)


DECODE = with_fields(Case(ForwardMode.DECODE))
KINDS = [Case(ForwardMode.DECODE), Case(ForwardMode.EXTEND), Case(ForwardMode.DRAFT_DECODE, topk=2)]


@pytest.fixture(scope="module")
def rig() -> Rig:
    """Return a captured lane of decode with optional fields."""
    with torch.inference_mode():
        return Rig(DECODE, backend=ReferenceBackend)


def test_a_name_says_that_a_lane_has_optional_fields() -> None:
    """The value is in the lane's name and in its dimensions, and the batches of other lanes have no field."""
    assert str(DECODE).endswith("-fields")
    assert dimensions(DECODE)["fields"] == "optional"
    bare = replace(DECODE, fields=False)
    assert dimensions(bare)["fields"] == "plain"
    given = Rig(bare, backend=ReferenceBackend, capture=False).batch_of(draw(bare, 1, 0)[0].exact).tensors()
    assert not given.keys() & {*fields.DRAWN, fields.COUNT}


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_replays_and_eager_steps_with_optional_fields_are_right(case: Case) -> None:
    """Sequences of batches, with and without optional fields, agree with the oracle in every kind of step."""
    config = with_fields(case)
    rig = Rig(config, backend=ReferenceBackend)
    for problem in (p for steps in draw(config, 2, 0) for p in steps):
        for eagerly in (False, True):
            step = rig.step(problem, eagerly=eagerly)
            assert step.error is None
            assert not differences(rig, step, rig.answer(problem)), problem


@pytest.mark.parametrize("name", [*fields.DRAWN, fields.COUNT])
def test_another_value_of_a_field_changes_the_outputs(rig: Rig, name: str) -> None:
    """The model reads every optional field with a slot: a wrong value in a live row is seen."""
    problem = draw(DECODE, 1, 0)[0].exact
    base = rig.step(problem)
    assert f"view.{name}" in base.leaves

    def edit(view: ForwardBatch, _: Any) -> None:
        values = view.tensors()[name][..., :1]
        if name == "mamba_track_indices":
            view.tensors()["mamba_track_mask"][:1] = True  # otherwise no layer reads it
        values.copy_(~values if values.dtype is torch.bool else values + 1 - 2 * (values > 1))

    step = rig.step(problem, ready=edit)
    assert base.rows is not None
    assert step.rows is not None
    assert not torch.equal(base.rows["rows"], step.rows["rows"])


@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.data())
def test_live_batches_hold_values_of_the_table(rig: Rig, data: st.DataObject) -> None:
    """Every drawn field has its dtype, its rows and its values; equal problems have equal fields."""
    drawn: Drawn = data.draw(sequences(DECODE))
    for problem in drawn:
        batch = drawn_batch(problem, DECODE, rig.fields, CPU)
        again = drawn_batch(problem, DECODE, rig.fields, CPU).tensors()
        for name, value in batch.tensors().items():
            assert torch.equal(value, again[name])
            field = fields.DRAWN.get(name)
            if field is None:
                continue
            assert value.dtype is field.dtype
            assert value.shape[-1] == (batch.batch_size if field.axis == "bs" else batch.num_tokens)
            assert {*value.flatten().int().tolist()} <= {*field.live(DECODE)}


def test_an_optional_field_is_absent_in_some_batches_alone(rig: Rig) -> None:
    """A field whose slot is optional is in some batches and not in others; any other field is in all."""
    batches = [rig.batch_of(p).tensors() for steps in draw(DECODE, 4, 0) for p in steps if p.requests]
    for slot in rig.fields:
        has = [slot.name in batch for batch in batches]
        assert any(has)
        assert all(has) is not slot.optional, slot.name


def test_an_absent_field_is_its_initial_value() -> None:
    """A batch without an optional field stands for the slot's initial value, in slots of any name."""
    problem = draw(DECODE, 1, 0)[0].exact
    slots = [
        GraphSlot(name, lambda bs, _: (bs,), torch.int32, axis="bs", optional=True, owner="a test")
        for name in ("encoder_lens", "acme.lengths")
    ]
    batch = fields.completed(problem.batch(), slots)
    for name in ("encoder_lens", "acme.lengths"):
        assert batch.tensors()[name].tolist() == [0] * problem.batch_size
    assert fields.completed(batch, slots) is batch


_ILLEGAL = {
    "input_ids": -1,
    "positions": DECODE.context,
    "out_cache_loc": DECODE.page_size,
    "req_pool_indices": 1,
    "mrope_positions": -1,
    "encoder_lens": -1,
    "mamba_track_indices": -1,
    "mamba_track_seqlens": DECODE.context + 1,
    fields.COUNT: 0,
}


@pytest.mark.parametrize("name", _ILLEGAL)
def test_a_dummy_is_held_to_what_a_field_may_be(rig: Rig, name: str) -> None:
    """Every field of a dummy has a legal value; one other value in any field is told by the field's name."""
    shape = rig.captured[-1]
    asked = rig.dummy(shape)
    dummy = asked.with_tensors({name: tensor.clone() for name, tensor in asked.tensors().items()})
    assert all(each.holds for each in _values(rig, shape, dummy))
    dummy.tensors()[name][..., -1] = _ILLEGAL[name]
    if name == "mamba_track_indices":
        assert all(each.holds for each in _values(rig, shape, dummy))  # masked: no layer reads it
        dummy.tensors()["mamba_track_mask"][-1] = True
    assert [each.field for each in _values(rig, shape, dummy) if not each.holds] == [name]


def test_embeddings_of_padding_rows_are_finite() -> None:
    """An infinite or undefined number is told, in its place."""
    value = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [1.0, float("-inf")]])
    wrong = fields.wrong_rows("input_embeds", {"input_embeds": value}, DECODE)
    assert wrong.tolist() == [[False, False], [True, False], [False, True]]


@pytest.mark.parametrize(("gathers", "expected"), [(True, (6, 3)), (False, (0, 12))])
def test_a_rank_has_a_share_where_ranks_gather(gathers: bool, expected: tuple[int, int]) -> None:  # noqa: FBT001
    """With a gather a rank pools its share of the padded tokens, without one all of them."""
    with get_parallel().override(attn_tp_rank=2, attn_tp_size=4):
        assert own_rows(replace(DECODE, counts=True, gathers=gathers), 12) == expected


class StandingStill(EagleDraftRunner):
    """A draft runner that gives the multimodal positions of the batch to every draft step."""

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the region, whose passes have the first positions."""

        def standing(batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
            return forward(replace(batch, mrope_positions=step.view.mrope_positions), metadata, attend)

        return super().compose(standing, step)


@pytest.mark.parametrize("runner", [EagleDraftRunner, FrozenKvMtpRunner, StandingStill])
def test_draft_steps_advance_multimodal_positions(runner: type[GraphRunner]) -> None:
    """Every draft step has multimodal positions one further; a runner that keeps them is found."""
    mode = ForwardMode.DECODE if runner.frozen_kv else ForwardMode.DRAFT_DECODE
    config = with_fields(Case(mode, topk=2, frozen=runner.frozen_kv))
    rig = Rig(config, backend=ReferenceBackend, runner=runner, capture=False)
    problem = draw(config, 1, 0)[0].padded
    step = rig.step(problem, eagerly=True)
    assert step.error is None
    assert bool(differences(rig, step, rig.answer(problem))) is (runner is StandingStill)


class OfTextAlone(ReferenceRunner):
    """A runner that takes no multimodal positions."""

    def slots(self) -> list[GraphSlot]:
        """Return all other slots."""
        return [slot for slot in super().slots() if slot.name != fields.MROPE]


def test_only_runners_that_take_a_field_are_asked_for_it() -> None:
    """A runner is asked by its context, and one without the slot takes none of the fields."""
    can = ReferenceBackend.capabilities
    assert takes({fields.MROPE}, ReferenceRunner, DECODE, can, CPU)
    assert not takes({fields.MROPE}, OfTextAlone, DECODE, can, CPU)
    assert not takes({fields.MROPE}, ReferenceRunner, replace(DECODE, fields=False), can, CPU)
