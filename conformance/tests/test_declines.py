"""Runners with eager reasons of their own: they can be conformant, and escape no experiment by declining.

A runner may leave a batch that a captured shape holds to an eager step, with a reason that it declares. The
suite replays batches that are not declined; what it cannot replay is unsupported, never a pass.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import EagerReason, ForwardBatch, ForwardMode, GraphShape
from graphpact.runners import GraphRunner
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.draws.batches import REDRAWS, Drawn, draw
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.chosen_batches import (
    assorted,
    corner,
    half_size_batch,
    neighbours,
    of_size,
    steady,
)
from graphpact_conformance.draws.lanes import CONTEXT
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.experiments.when import everywhere
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.rules import RULES
from graphpact_conformance.suite import PlannedLane, examine_lane, planned_lanes
from graphpact_conformance.targets import Options

LONG = EagerReason("acme_long", "a request is longer than the tier")
OPTIONS = Options(size="quick", examples=1, shrink=False)
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


def declining(
    when: Callable[[ForwardBatch], object],
    *,
    declares: Any = (LONG,),
    reason: EagerReason = LONG,
) -> type[GraphRunner]:
    """Return a runner that leaves a batch to an eager step where ``when`` holds, or ranks gather."""

    class Declines(ReferenceRunner):
        """A runner with a reason of its own."""

        declines = declares

        def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
            """Return the reason, or the smallest shape."""
            is_declined = batch.global_num_tokens_cpu is not None or when(batch)
            return reason if is_declined else super().fit(batch)

    return Declines


def longer_than(longest: int) -> Callable[[ForwardBatch], bool]:
    """Return whether a request of a batch has more than ``longest`` keys."""
    return lambda batch: max(batch.seq_lens_cpu.tolist(), default=0) > longest


def plan_of(runner: type[GraphRunner], lane: str = "decode-*") -> PlannedLane:
    """Return the lane of a quick run in which a runner is checked."""
    options = Options(size="quick", lanes=(lane,))
    return planned_lanes(ReferenceBackend, runner, options, kind="runner")[0]  # the plain one


def results_of(runner: type[GraphRunner], *experiments: str | Experiment) -> dict[str | None, Result]:
    """Return the results of some experiments for a runner in a decode lane, by rule."""
    chosen = [BY_NAME[e] if isinstance(e, str) else e for e in experiments]
    results = examine_lane(plan_of(runner), OPTIONS, experiments=chosen)
    return {result.rule: result for result in results}


# -- which batches -----------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=40)
@given(seed=st.integers(0, 9999), longest=st.integers(0, CONTEXT))
def test_a_declined_batch_is_drawn_again(seed: int, longest: int) -> None:
    """Declined batches are drawn again if possible; draws do not change if nothing is declined."""
    config = next(c for c in configs_of(ReferenceBackend.capabilities) if c.case.mode is ForwardMode.DECODE)
    asked: list[Problem] = []

    def declines(problem: Problem) -> bool:
        asked.append(problem)
        return any(len(r.cached) > longest for r in problem.requests[:1])

    plain, again = draw(config, 1, seed), draw(config, 1, seed, declines)
    assert len(asked) <= 3 * REDRAWS + 1  # the idle batch is asked once
    if not any(map(declines, plain[0])):
        assert again == plain
    assert longest < CONTEXT // 4 or not any(map(declines, again[0]))
    assert draw(config, 1, seed, lambda _: False) == plain


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["decode-*", "extend-*", "target_verify-*", "draft_decode-*"])
@pytest.mark.parametrize("longest", [30, pytest.param(64, marks=pytest.mark.sweep)])
def test_the_longest_requests_that_are_replayed_are_found(lane: str, longest: int) -> None:
    """A fixed batch of a lane is not declined, one key more would be, and the limits stay as they are."""
    plan = plan_of(declining(longer_than(longest)), lane).lane
    config = plan.config
    fixed = [
        corner(config),
        half_size_batch(config),
        assorted(config),
        of_size(config, 1),
        *neighbours(config, assorted(config)),
    ]
    if config.case.tokens_per_request is not None:
        now, before = steady(config)
        fixed += [now, *before]
    assert not any(map(plan.declined, fixed))
    longer = plan.declined(corner(config.unbounded))
    assert longer == LONG
    assert max(corner(config).batch().seq_lens_cpu.tolist()) == longest
    assert config.limits == plan_of(ReferenceRunner, lane).lane.config.limits


def test_what_does_not_depend_on_lengths_leaves_them_as_they_are() -> None:
    """Requests keep their lengths if there are no reasons, or if the reasons do not depend on lengths."""
    for runner in (ReferenceRunner, declining(lambda _: True), declining(lambda b: b.batch_size == 3)):
        assert plan_of(runner).lane.config.most_cached is None


# -- what holds of a declined batch ------------------------------------------------------------------


def test_a_batch_beyond_runs_eagerly_and_is_counted() -> None:
    """GP12 passes for a declared reason, after eager runs beyond the tier; its result says how many."""
    found = results_of(declining(longer_than(40)), "graph_choice", "answers_replayed")
    assert {r.outcome for r in found.values()} == {Outcome.PASS}
    assert re.fullmatch(rf"2 of \d+ steps declined: {LONG}", str(found["GP12"].reason))
    assert {rule for rule, result in found.items() if result.reason} == {"GP12"}


@pytest.mark.parametrize("experiment", ["graph_choice", "answers_eagerly"])
def test_a_declined_batch_must_be_right(experiment: str) -> None:
    """A wrong answer to a batch beyond the tier is a finding, though no graph is involved."""

    class WrongBeyond(declining(longer_than(40))):  # type: ignore[misc]
        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return a region whose eager runs of long requests are wrong."""
            region: Region = super().compose(forward, step)
            if max(step.view.seq_lens_cpu.tolist(), default=0) <= 40:
                return region
            return lambda: StepOutputs(rows=(region()["rows"] + 1, "tokens"))

    lane = plan_of(WrongBeyond).lane
    (steps,) = draw(lane.config, 1, 0, lane.declined)
    with torch.inference_mode():
        found = BY_NAME[experiment].findings(lane, steps).findings
    assert found
    assert {f.rule for f in found} == {None}


@pytest.mark.parametrize(
    ("declares", "reason"), [((), LONG), ((EagerReason.OVER_LARGEST,), EagerReason.OVER_LARGEST)]
)
def test_a_reason_that_is_not_the_runners_own_breaks_a_rule(declares: Any, reason: EagerReason) -> None:
    """A reason that is undeclared, or the core's, is a GP12 finding, which names `declines`."""
    runner = declining(longer_than(40), declares=declares, reason=reason)
    for experiment in ("graph_choice", "answers_replayed"):
        found = results_of(runner, experiment)["GP12"]
        assert found.outcome is Outcome.FAIL
        assert found.reason is None
        assert any("`declines`" in str(f.help) for f in found.findings)


def test_reasons_that_are_no_collection_are_named() -> None:
    """A runner whose `declines` is one reason, and no collection, fails with a message that names it."""
    (found, *_) = results_of(declining(longer_than(40), declares=LONG), "captures").values()
    assert found.outcome is Outcome.FAIL
    assert "declines() returned" in found.findings[0].actual


# -- what cannot be replayed -------------------------------------------------------------------------


ODD = declining(lambda batch: batch.batch_size == 3)


def _steps_over_an_odd_batch(lane: LaneUnderTest, _: Drawn) -> Iterator[Finding]:
    lane.rig().step(of_size(lane.config, 3))
    yield lane.finding("GP03", expected="no step", actual="a step")


def _finds_before_it_steps(lane: LaneUnderTest, _: Drawn) -> Iterator[Finding]:
    yield lane.finding("GP03", expected="this", actual="that")
    lane.rig().step(of_size(lane.config, 3))


def test_an_experiment_that_needs_a_declined_batch_is_unsupported() -> None:
    """The rule is unsupported, with the reason in words; a finding from before still fails it."""
    over = Experiment("over", ("GP03", "GP04"), _steps_over_an_odd_batch, everywhere)
    found = results_of(ODD, over)
    assert {rule: r.outcome for rule, r in found.items()} == {
        "GP03": Outcome.UNSUPPORTED,
        "GP04": Outcome.UNSUPPORTED,
    }
    assert found["GP03"].reason == f"the runner leaves this batch to an eager step: {LONG}"
    finds = Experiment("finds", ("GP03", "GP04"), _finds_before_it_steps, everywhere)
    found = results_of(ODD, finds, over)
    assert (found["GP03"].outcome, found["GP04"].outcome) == (Outcome.FAIL, Outcome.UNSUPPORTED)


@pytest.mark.sweep
@pytest.mark.parametrize("rules", [("GP03",), pytest.param(tuple(RULES), marks=pytest.mark.sweep)])
def test_no_rule_passes_without_its_batches(rules: tuple[str, ...]) -> None:
    """Where every batch is declined, GP12 fails, and every other rule is unsupported."""
    found = results_of(declining(lambda _: True), *(e for e in EXPERIMENTS if {*rules} & {*e.examines}))
    for rule in rules:
        assert found[rule].outcome is (Outcome.FAIL if rule == "GP12" else Outcome.UNSUPPORTED)


def test_a_runner_that_declines_every_batch_breaks_a_rule() -> None:
    """GP12 fails if no batch is replayed, also if idle ones are; it passes where any other is."""
    for when in (lambda _: True, lambda batch: batch.batch_size > 0):
        found = results_of(declining(when), "answers_replayed")["GP12"]
        assert found.outcome is Outcome.FAIL
        assert "every batch is declined" in found.findings[0].actual
    found = results_of(declining(lambda batch: batch.batch_size != 1), "answers_replayed")["GP12"]
    assert found.outcome is Outcome.UNSUPPORTED


def test_the_dummy_of_a_shape_is_checked_although_the_runner_declines_it() -> None:
    """A runner that declines short requests, as its dummies are, has its dummies checked in full."""
    found = results_of(declining(lambda b: b.batch_size and int(b.seq_lens_cpu.max()) < 3), "dummies")
    assert {r.outcome for r in found.values()} == {Outcome.PASS}


@pytest.mark.sweep
def test_a_runner_that_declines_idle_batches_is_checked_with_others() -> None:
    """Without ranks a lane has no idle batches: every rule of the other ones is checked."""
    found = results_of(declining(lambda batch: not batch.batch_size), *EXPERIMENTS)
    assert {result.outcome for result in found.values()} == {Outcome.PASS}


# -- ranks -------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "when", [longer_than(40), lambda batch: batch.batch_size == 2, lambda batch: not batch.batch_size]
)
def test_a_reason_that_depends_on_a_ranks_own_requests_breaks_a_rule(when: Callable[[Any], bool]) -> None:
    """GP17 fails where a rank declines its own batch, and another replays a graph that gathers."""

    class Alone(ReferenceRunner):
        declines: Sequence[EagerReason] = (LONG,)  # type: ignore[misc]

        def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
            """Decline by this rank's own requests."""
            return LONG if when(batch) else super().fit(batch)

    assert results_of(declining(when), "ranks_agree")["GP17"].outcome is Outcome.PASS
    found = results_of(Alone, "ranks_agree")["GP17"]
    assert found.outcome is Outcome.FAIL
    assert "global_num_tokens_cpu" in str(found.findings[0].help)
