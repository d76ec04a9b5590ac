"""Tests that the command line of a finding reproduces it, whatever ran before."""

import random
import shlex
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from graphpact import ForwardMode
from graphpact_cli import main
from graphpact_conformance import suite
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.suite.run import run_once
from graphpact_conformance.targets import Options
from graphpact_museum.collection import EXHIBITS
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.gallery import OPTIONS, planted, right_class, visit

pytestmark = pytest.mark.sweep

CHOSEN = {
    "trtllm-mla-table-not-populated": {
        "answers_replayed",
        "replay_against_capture",
        "strict_replays",
        "padding",
        "ranks_agree",
        "unwritten_and_stale",
    },
    "fa3-padded-tokens-write-the-last-slot": {"ranks_agree"},
    "fa3-idle-rank-gathers-row-minus-one": {"captures"},
    "trtllm-mla-offsets-reassigned": {"interleaved", "survives_eager_activity"},
    "fa3-page-table-of-a-fixed-length": {"answers_eagerly", "largest_step"},
    "fa3-counter-advances-in-captures": {"capture_side_effects", "repeated"},
    "flashinfer-verify-counts-live-queries": {"dummies"},
    "trtllm-output-buffer-keeps-padded-rows": {"smallest_first"},
    "trtllm-mla-fallback-left": {"cold_and_warm"},
    "cuda-graph-captures-below-the-largest": {"graph_choice"},
    "trtllm-returns-tensors-of-the-first-capture": {"captured_again"},
    "flashinfer-planned-by-sorted-lengths": {"plan_invariants"},
    "fa3-sinks-copied-at-construction": {"rewritten_memory"},
    "flashinfer-prefill-step-writes-the-class": {"beside_other_lanes"},
    "fa3-scales-of-padding-are-in-row-minus-one": {"indices"},
    "eagle-draft-gathers-drafts-without-an-offset": {"independent_requests"},
    "kept-row-of-a-request-that-ended": {"whole_requests"},
    "turn-of-two-buffers-in-the-region": {"python_state"},
    "fa3-readers-of-a-cache-keep-lengths": {"without_new_keys"},
}
"""Exhibits, each with the experiments that find its bug; together they cover all but two experiments."""
BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}


def options_of(line: str, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Return the options of a printed command line, as the command parses them."""
    given: list[Options] = []

    def note(names: Any, options: Options, *_: Any, **__: Any) -> Any:
        """Store the options, and check nothing."""
        given.append(options)
        raise SystemExit(0)

    monkeypatch.setattr("graphpact_conformance.cli.check._run", note)
    _, command, *arguments = shlex.split(line)
    main([command, "mine", *arguments])
    return replace(given[0], shrink=OPTIONS.shrink)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_printed_line_shows_the_finding_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each rule that an exhibit breaks, the command line of its first finding gives an equal finding."""
    exhibit = BY_NAME[name]
    first = visit(exhibit)
    assert first.is_right
    for rule, finding in first.findings.items():
        options = options_of(str(finding.reproduce), monkeypatch)
        assert options.only == ({rule} if rule else set())
        assert visit(exhibit, options).findings[rule] == finding


def found_by_each(plan: PlannedLane, order: list[Any]) -> dict[str, Any]:
    """Return the findings of each experiment in a lane, run in the given order."""
    asked = suite.experiments_of(plan, OPTIONS, order)
    runs = {e.name: run_once(e, plan, OPTIONS, None, plan.lane.anew(e.examines)) for e in asked}
    return {name: (run.findings, run.not_run, run.error) for name, run in runs.items()}


def orders() -> list[list[Any]]:
    """Return the experiments in their order, reversed, and shuffled."""
    shuffled = list(EXPERIMENTS)
    random.Random(3).shuffle(shuffled)
    return [list(EXPERIMENTS), list(EXPERIMENTS)[::-1], shuffled]


@pytest.mark.parametrize("name", list(CHOSEN)[:6])
def test_the_order_of_experiments_changes_no_finding(name: str) -> None:
    """Experiments do not influence each other: each has the same findings in any order."""
    exhibit = BY_NAME[name]
    with ExitStack() as stack:
        plans = stack.enter_context(planted(exhibit, right_class(exhibit.base)))
        first, *others = (found_by_each(plans[0], order) for order in orders())
    assert any(found for found, _, _ in first.values())
    assert all(error is None for _, _, error in first.values())
    assert others == [first] * 2
    assert {e for e, (found, _, _) in first.items() if found} >= CHOSEN[name]


def test_in_a_right_plugin_no_order_finds_anything() -> None:
    """The suite's backend and runner have no findings in a decode lane, in any order of experiments."""
    plans = suite.planned_lanes(ReferenceBackend, ReferenceRunner, OPTIONS)
    plan = next(p for p in plans if p.lane.config.case.mode is ForwardMode.DECODE)
    for order in orders()[1:]:
        assert set(map(str, found_by_each(plan, order).values())) == {"([], None, None)"}


def test_the_chosen_exhibits_cover_the_experiments() -> None:
    """Every experiment has a finding in a chosen exhibit, except two.

    The two need an exhibit that overstates its graph support, or a recording.
    """
    covered = {name for names in CHOSEN.values() for name in names}
    assert covered == {e.name for e in EXPERIMENTS} - {"declared_graph_support", "recorded_steps"}
    assert {type(BY_NAME[name]) for name in CHOSEN} == {Exhibit}
