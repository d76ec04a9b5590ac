"""The end of a run at the first named rule, and findings for which no smaller batch is searched."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from graphpact import ForwardMode
from graphpact_conformance import suite
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.experiments.experiment import Experiment
from graphpact_conformance.experiments.when import everywhere
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.suite.fail_fast import run_lanes
from graphpact_conformance.targets import Options

QUICK = Options(size="quick", examples=1, shrink=False)
FAST = replace(QUICK, fail_fast=True)
DECODE = next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == "decode-page16-gqa-float32")


def _reporting(rule: str | None, name: str, ran: list[str], *, hook: str | None = None) -> Experiment:
    """Return an experiment that notes its run in a lane, and has a finding in lanes of extend."""

    def run(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Note the run, and yield a finding in a lane of extend."""
        del steps
        ran.append(f"{lane.config.case}: {name}")
        if lane.config.case.mode is ForwardMode.EXTEND:
            yield lane.finding(rule, hook=hook, expected="this", actual="that")

    return Experiment(name, () if rule is None else (rule,), run, everywhere)


def _plans(*experiments: Experiment) -> list[PlannedLane]:
    """Return a lane of decode and one of extend with some experiments."""
    configs = {str(config): config for config in configs_of(ReferenceBackend.capabilities)}
    lanes = [configs[f"{mode}-page16-gqa-float32"] for mode in ("decode", "extend")]
    return [PlannedLane(LaneUnderTest(c), is_full=True, experiments=experiments) for c in lanes]


def test_a_fast_run_ends_at_the_first_rule_and_explains_a_lane_with_a_finding_first() -> None:
    """Outputs come first in every lane, then the rest of a lane with a finding, up to a rule."""
    ran: list[str] = []
    plans = _plans(
        _reporting(None, "answers_replayed", ran),
        _reporting("GP02", "parity", ran),
        _reporting("GP03", "last", ran),
    )
    (found,) = run_lanes(plans, FAST, lambda _: None)
    assert ran == ["decode: answers_replayed", "extend: answers_replayed", "extend: parity"]
    assert [(r.rule, r.outcome) for r in found[1]] == [
        (None, Outcome.FAIL),
        ("GP02", Outcome.FAIL),
        (None, Outcome.NOT_RUN),
    ]


def test_a_known_failure_ends_no_fast_run() -> None:
    """A rule that is listed as a known failure does not end a run; the results are those of a whole run."""
    ran: list[str] = []
    plans = _plans(_reporting("GP02", "answers_replayed", ran), _reporting("GP03", "last", ran))
    lanes = [*run_lanes(plans, FAST, lambda _: None, is_known=lambda rule, _: rule == "GP02")]
    assert ran[-1] == "extend: last"
    assert [r.rule for r in lanes[-1][1]] == ["GP02", "GP03", None]


def test_a_fast_run_without_a_finding_is_a_whole_run() -> None:
    """A run that finds nothing has the results of a run without the option."""
    ran: list[str] = []
    plans = [_plans(_reporting("GP02", "answers_replayed", ran), _reporting("GP03", "last", ran))[0]]
    results = [
        [replace_seconds(r) for _, found in run_lanes(plans, options, lambda _: None) for r in found]
        for options in (QUICK, FAST)
    ]
    assert results[0] == results[1]


def replace_seconds(result: Result) -> Result:
    """Return a result without its time."""
    return result.model_copy(update={"seconds": 0.0})


@pytest.mark.parametrize(
    ("changes", "searches"),
    [
        ({"hook": "populate", "field": "view.seq_lens"}, False),
        ({"hook": None, "field": "a replay: token 0"}, True),
        ({"hook": None, "field": "a replay: token 0", "number": 1}, False),
    ],
)
def test_a_clear_finding_starts_no_search_for_smaller_batches(
    changes: dict[str, Any], *, searches: bool
) -> None:
    """No smaller batches are tried where hook and field are named, or the batch has one request."""
    ran: list[int] = []

    def run(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Note the run, and yield a finding."""
        ran.append(1)
        problem = steps.exact
        problem = replace(problem, requests=problem.requests[: changes.get("number")])
        fields = {name: changes[name] for name in ("hook", "field")}
        yield lane.finding("GP02", expected="this", actual="that", problem=problem, **fields)

    plan = PlannedLane(LaneUnderTest(DECODE), is_full=True)
    list(
        suite.examine_lane(
            plan, replace(QUICK, shrink=True), experiments=(Experiment("a", ("GP02",), run, everywhere),)
        )
    )
    assert (len(ran) > 1) is searches
