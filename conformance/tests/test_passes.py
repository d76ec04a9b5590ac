"""Runners whose region has several forward passes. A fault that only lowers acceptance is a wrong result.

A right runner has no finding, for any tokens, dtype and backend. A region that is wrong in eager steps and in
graphs alike has one, though nothing in its own outputs may show it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphpact_speculative.runners as speculative
from graphpact.attention import AttentionBackend, DraftMetadata
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.runners import GraphRunner
from graphpact.shapes import GraphShape
from graphpact.speculation import HIDDEN_STATES
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.cases import cases_of
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import CONTEXT, VOCAB, Config
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.results import Outcome
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_speculative import EagleDraftExtendRunner, EagleDraftRunner, FrozenKvMtpRunner

RUNNERS = (EagleDraftRunner, EagleDraftExtendRunner, FrozenKvMtpRunner)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    """Run each test in inference mode, as lanes do."""
    with torch.inference_mode():
        yield


def lanes_of(
    runner: type[GraphRunner], backend: type[AttentionBackend] = ReferenceBackend
) -> dict[str, Config]:
    """Return the lanes of a runner by name."""
    return {
        str(config): config
        for config in configs_of(backend.capabilities, cases=cases_of(runner))
        if config.case.mode in runner.modes
    }


def plain(runner: type[GraphRunner], kind: str) -> Config:
    """Return the plain lane of a kind of step."""
    return lanes_of(runner)[f"{kind}-page16-gqa-float32"]


def wrong_eagerly(runner: type[GraphRunner], config: Config, seeds: int = 1, **more: Any) -> list[str]:
    """Return what differs between eager steps and the oracle."""
    rig = Rig(config, **{"backend": ReferenceBackend, "runner": runner, "capture": False, **more})
    found = []
    for seed in range(seeds):
        (steps,) = draw(config, 1, seed)
        for problem in steps:
            step = rig.step(problem, eagerly=True)
            if step.error is not None:
                found.append(str(step.error))
                continue
            wrong = differences(rig, step, rig.answer(problem))
            found += [f"{d.what}: {d.actual}, not {d.expected}" for d in wrong]
    return found


# -- right runners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_right_runner_has_right_results(runner: type[GraphRunner]) -> None:
    """Eager steps of chains and trees agree with the oracle, for more batches than a check draws."""
    for config in lanes_of(runner).values():
        if str(config).endswith("page16-gqa-float32"):
            assert not wrong_eagerly(runner, config, seeds=6)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", [ReferenceBackend, FA3Backend, FlashInferBackend])
@pytest.mark.parametrize("runner", RUNNERS)
def test_rounding_flips_no_choice(runner: type[GraphRunner], backend: type[AttentionBackend]) -> None:
    """Eager steps agree with the oracle in every lane, also with 16 bits, and for many batches."""
    for config in lanes_of(runner, backend).values():
        if config.case.mode in backend.capabilities.modes:
            assert not wrong_eagerly(runner, config, seeds=4, backend=backend), str(config)


@pytest.mark.sweep
def test_rounding_that_passes_hand_on_is_no_wrong_result() -> None:
    """A lane with few keys passes if a second pass is 1.3 times as far off as a single pass may be."""
    lane = "draft_decode-page64-mha-bfloat16"
    options = Options(size="thorough", lanes=(lane,), only=frozenset({"GP04"}), shrink=False)
    (plan,) = planned_lanes(ReferenceBackend, EagleDraftRunner, options, kind="runner")
    assert [result.outcome for result in examine_lane(plan, options)] == [Outcome.PASS]


# -- regions that are wrong in eager steps too -------------------------------------------------------

Pass = Callable[[Forward, RegionContext, int, list[StepOutputs], ForwardBatch, Any, Any], StepOutputs]


def passing(edit: Pass) -> Callable[[type[GraphRunner]], type[GraphRunner]]:
    """Return a factory of runners whose region runs ``edit`` instead of the model in each pass."""

    def make(base: type[GraphRunner]) -> type[GraphRunner]:
        class Edited(base):  # type: ignore[misc, valid-type]
            def compose(self, forward: Forward, step: RegionContext) -> Region:
                """Return the region with other passes."""
                done: list[StepOutputs] = []

                def one(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
                    done.append(edit(forward, step, len(done), done, batch, metadata, attend))
                    return done[-1]

                region: Region = super().compose(one, step)

                def anew() -> StepOutputs:
                    done.clear()
                    return region()

                return anew

        return Edited

    return make


def _without_offset(
    forward: Any, step: Any, number: Any, done: Any, batch: ForwardBatch, metadata: Any, attend: Any
) -> Any:
    return forward(replace(batch, positions=step.view.positions), metadata, attend)


def _of_the_first_step(
    forward: Any, step: Any, number: Any, done: Any, batch: ForwardBatch, metadata: Any, attend: Any
) -> Any:
    return forward(batch, step.metadata.steps[0], attend)


def _of_the_other_branch(
    forward: Any, step: RegionContext, number: int, done: Any, batch: ForwardBatch, metadata: Any, attend: Any
) -> Any:
    if number:
        states, rows = batch.extra[HIDDEN_STATES], torch.arange(batch.num_tokens)
        batch = batch.with_tensors({HIDDEN_STATES: states[rows ^ 1]})
    return forward(batch, metadata, attend)


def _of_the_row_itself(
    forward: Any, step: Any, number: int, done: Any, batch: ForwardBatch, metadata: Any, attend: Any
) -> Any:
    if number:
        batch = batch.with_tensors({HIDDEN_STATES: done[-1]["hidden_states"]})
    return forward(batch, metadata, attend)


def _of_the_batch(
    forward: Any, step: RegionContext, number: Any, done: Any, batch: ForwardBatch, metadata: Any, attend: Any
) -> Any:
    extra = {HIDDEN_STATES: step.view.extra[HIDDEN_STATES]}
    return forward(batch.with_tensors(extra), metadata, attend)


def _of_the_last_token(
    forward: Any, step: Any, number: Any, done: Any, batch: ForwardBatch, metadata: Any, attend: Any
) -> Any:
    last = torch.full_like(batch.num_correct_drafts, batch.tokens_per_request - 1)
    return forward(replace(batch, num_correct_drafts=last), metadata, attend)


@pytest.mark.parametrize(
    ("runner", "kind", "edit"),
    [
        (EagleDraftRunner, "draft_decode", _without_offset),
        (FrozenKvMtpRunner, "decode_frozen", _without_offset),
        (EagleDraftRunner, "draft_decode", _of_the_first_step),
        (EagleDraftRunner, "draft_decode_tree", _of_the_other_branch),
        (EagleDraftRunner, "draft_decode_tree", _of_the_row_itself),
        (FrozenKvMtpRunner, "decode_frozen_tree", _of_the_row_itself),
        (EagleDraftRunner, "draft_decode", _of_the_batch),
        (FrozenKvMtpRunner, "decode_frozen", _of_the_batch),
        (EagleDraftExtendRunner, "draft_extend", _of_the_last_token),
    ],
)
def test_a_wrong_pass_is_found(runner: type[GraphRunner], kind: str, edit: Pass) -> None:
    """A wrong position, plan, hidden state or row of a pass is a wrong result of an eager step."""
    assert wrong_eagerly(passing(edit)(runner), plain(runner, kind), seeds=2)


def test_branches_that_attend_to_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch whose KV slots hold the keys of another branch has a wrong result, in a tree only."""
    monkeypatch.setattr(speculative, "_copy_ancestors", lambda *_: None)
    assert wrong_eagerly(EagleDraftRunner, plain(EagleDraftRunner, "draft_decode_tree"), seeds=2)
    assert not wrong_eagerly(EagleDraftRunner, plain(EagleDraftRunner, "draft_decode"), seeds=2)


class OneKeyLate(ReferenceBackend):
    """A backend whose later draft steps attend to as many keys as the step before."""

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Write the metadata without the newest draft."""
        super().fill_metadata(view, metadata)
        if view.draft_step:
            metadata.drafts[:, -1] = metadata.drafts[:, -2]


class OneKeyMore(ReferenceBackend):
    """A backend that counts the new token as a key, as a decode without frozen KV does."""

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Write the metadata with one more key."""
        super().fill_metadata(view, metadata)
        metadata.last += 1


@pytest.mark.parametrize(
    ("runner", "kind", "backend"),
    [(EagleDraftRunner, "draft_decode", OneKeyLate), (FrozenKvMtpRunner, "decode_frozen", OneKeyMore)],
)
def test_a_backend_with_another_number_of_keys_is_found(
    runner: type[GraphRunner], kind: str, backend: type[AttentionBackend]
) -> None:
    """A backend without a step's offset, or with one on frozen KV, has a wrong result below the runner."""
    assert wrong_eagerly(runner, plain(runner, kind), backend=backend)


# -- outputs of any name -----------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_graph_that_does_not_run_is_seen(runner: type[GraphRunner]) -> None:
    """Outputs of every name and dtype are cleared before a replay, so that the last ones do not pass."""
    (config, *_) = (c for n, c in lanes_of(runner).items() if n.endswith("page16-gqa-float32"))
    rig = Rig(config, backend=ReferenceBackend, runner=runner)
    (steps,) = draw(config, 1, 0)
    assert not differences(rig, rig.step(steps.exact), rig.answer(steps.exact))
    for captured in rig.lane.captured.values():
        captured.graph.replay = lambda: None  # type: ignore[method-assign]
    step = rig.step(steps.exact)
    assert step.error is None
    right = rig.answer(steps.exact).rows
    assert step.rows is not None
    assert all(not torch.equal(tensor, right[name]) for name, tensor in step.rows.items())
    assert differences(rig, step, rig.answer(steps.exact))


# -- fields of a runner's own ------------------------------------------------------------------------


def with_field(axis: Any, dtype: torch.dtype, row: Sequence[int]) -> type[GraphRunner]:
    """Return a runner with one more field."""

    class WithField(ReferenceRunner):
        def slots(self) -> Sequence[GraphSlot]:
            """Return the slots of the mode and one more."""
            rows = {
                "bs": lambda bs, _: (bs, *row),
                "tokens": lambda _, n: (n, *row),
                "none": lambda *_: tuple(row),
            }
            policy = PaddingPolicy.KEEP_PAD if axis == "none" else PaddingPolicy.ZERO
            reset = {"axis": axis, "padding_policy": policy, "owner": "acme", "reason": "it has no rows"}
            return [*super().slots(), GraphSlot("acme.field", rows[axis], dtype, **reset)]

        def dummy(self, shape: GraphShape) -> ForwardBatch:
            """Return the mode's dummy with zeros."""
            (slot,) = (s for s in self.slots() if s.name == "acme.field")
            value = torch.zeros(slot.shape_fn(shape.batch_size, shape.num_tokens), dtype=dtype)
            return replace(super().dummy(shape), extra={"acme.field": value})

    return WithField


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["decode", "extend", "target_verify"])
@pytest.mark.parametrize(
    ("axis", "dtype", "row"),
    [
        ("tokens", torch.float32, (5,)),
        ("tokens", torch.float32, ()),
        ("bs", torch.bfloat16, (3, 2)),
        ("bs", torch.int64, ()),
        ("tokens", torch.bool, (4,)),
        ("none", torch.float32, (4,)),
    ],
)
def test_the_model_reads_every_field(kind: str, axis: Any, dtype: torch.dtype, row: Any) -> None:
    """A field of any axis and dtype is drawn for each batch, and another value in one row is seen there."""
    runner = with_field(axis, dtype, row)
    config = plain(runner, kind)
    rig = Rig(config, backend=ReferenceBackend, runner=runner)
    (steps,) = draw(config, 1, 0)
    problem = steps.padded
    step = rig.step(problem)
    assert step.replays == 1
    assert not differences(rig, step, rig.answer(problem))
    value = rig.batch_of(problem).extra["acme.field"]
    assert value.dtype is dtype
    assert len(value.unique()) > 1
    assert not dtype.is_floating_point or row or bool((value <= 0).all())

    def other(view: ForwardBatch, _: Any) -> None:
        field = view.extra["acme.field"]
        first = field if axis == "none" else field[:1]
        first.copy_(~first if dtype is torch.bool else first + 1)

    changed = rig.step(problem, ready=other)
    assert step.rows is not None
    assert changed.rows is not None
    differs = (step.rows["rows"] != changed.rows["rows"]).any(dim=1)
    assert bool(differs[0])
    if axis == "none":
        assert bool(differs.all())


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_runner_has_the_whole_draft_and_its_backend_a_part(runner: type[GraphRunner]) -> None:
    """Runners draft with top-k 1 and 2; backends get the part of the limits that their mode needs."""
    lanes = [c for n, c in lanes_of(runner).items() if n.endswith("page16-gqa-float32")]
    assert [c.limits.draft.topk for c in lanes] == [1, 2]
    for config in lanes:
        rig = Rig(config, backend=ReferenceBackend, runner=runner, capture=False)
        draft, mode = rig.runner.context.limits.draft, config.case.lane_mode
        assert draft.num_steps > 1
        assert rig.backend.context.limits.draft == draft.for_backend(mode)
        if mode is not ForwardMode.DRAFT_EXTEND:
            assert draft.num_draft_tokens != draft.num_steps + 1


def test_frozen_batches_have_equal_rows_and_no_new_key() -> None:
    """Each request of a frozen cache has top-k equal rows, one cached key or more, and writes nothing."""
    config = plain(FrozenKvMtpRunner, "decode_frozen_tree")
    rig = Rig(config, backend=ReferenceBackend, runner=FrozenKvMtpRunner, capture=False)
    for steps in draw(config, 4, 0):
        for problem in steps:
            batch = rig.batch_of(problem)
            assert batch.batch_size == batch.num_tokens == 2 * len(problem.requests)
            assert not batch.out_cache_loc.any()
            for name, tensor in batch.tensors().items():
                assert torch.equal(tensor[::2], tensor[1::2]), name
            assert batch.seq_lens.tolist()[::2] == [len(r.cached) for r in problem.requests]
            assert all(r.cached for r in problem.requests)
            assert (batch.positions < CONTEXT).all()
            assert (batch.input_ids < VOCAB).all()


def test_the_oracle_runs_all_steps_in_one_pass_too() -> None:
    """Without a region of the runner's own a draft is one pass, whose record has no passes."""
    config = plain(ReferenceRunner, "draft_decode")
    rig = Rig(config, backend=ReferenceBackend, capture=False)
    (steps,) = draw(config, 1, 0)
    metadata = rig.backend.init_metadata_eager(rig.batch_of(steps.exact))
    assert isinstance(metadata, DraftMetadata)
    assert {*rig.answer(steps.exact).rows} == {"rows"}
