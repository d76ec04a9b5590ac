"""Right plugins have no findings: batches stay within the limits, and held memory may have any layout.

`test_museum` runs all experiments on all variants. This module checks the kinds of false alarms that they
guard against.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from graphpact.batch import ForwardBatch
from graphpact.lane import Lane
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.suite import PlannedLane, examine_lane, planned_lanes
from graphpact_conformance.targets import TargetKind
from graphpact_museum.collection import VARIANTS
from graphpact_museum.exhibit import Variant
from graphpact_museum.gallery import OPTIONS, planted, right_class

BY_NAME = {variant.name: variant for variant in VARIANTS}


def _beyond(lane: Lane, batch: ForwardBatch) -> list[str]:
    """Return a description of each limit of a lane that a batch exceeds."""
    longest = max(batch.seq_lens_cpu.tolist(), default=0) + batch.drafts_in_rows
    limits = lane.backend.context.limits
    sizes = {
        "max_bs": (batch.batch_size, limits.max_bs),
        "max_num_tokens": (batch.num_tokens, limits.max_num_tokens),
        "max_context_len": (longest, limits.max_context_len),
    }
    return [f"{name}: {has} of {most}" for name, (has, most) in sizes.items() if has > most]


CASES = ("decode", "target_verify", "extend", "draft_decode_tree", "draft_extend", "mixed")
SIZED = ("graph_choice", "ranks_agree", "largest_step", "survives_eager_activity")
"""The experiments that choose the sizes of their batches."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("decode", SIZED),
        pytest.param("extend", SIZED, marks=pytest.mark.sweep),
        *(pytest.param(case, (), marks=pytest.mark.sweep) for case in CASES),
    ],
)
def test_every_batch_of_the_suite_is_within_the_limits_of_its_lane(
    case: str, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No experiment fits or runs a batch beyond the limits, because plugins size their memory by them."""
    found: set[str] = set()
    fit, eager = Lane.fit, Lane.forward_eager

    def fits(self: Lane, batch: ForwardBatch) -> Any:
        found.update(f"fit, {each}" for each in _beyond(self, batch))
        return fit(self, batch)

    def runs(self: Lane, batch: ForwardBatch, *more: Any) -> Any:
        found.update(f"an eager run, {each}" for each in _beyond(self, batch))
        return eager(self, batch, *more)

    monkeypatch.setattr(Lane, "fit", fits)
    monkeypatch.setattr(Lane, "forward_eager", runs)
    kinds: tuple[TargetKind, ...] = ("attention_backend", "runner")
    for kind in kinds:
        options = replace(OPTIONS, lanes=(f"{case}-*",))
        for plan in planned_lanes(ReferenceBackend, ReferenceRunner, options, kind=kind):
            whole = replace(plan, is_full=True)
            results = list(examine_lane(whole, options, experiments=_experiments(names) or EXPERIMENTS))
            assert [r.findings for r in results if r.outcome is not Outcome.PASS] == []
    assert found == set()


def _experiments(names: Sequence[str]) -> list[Experiment]:
    chosen = [experiment for experiment in EXPERIMENTS if experiment.name in names]
    assert len(chosen) == len(names)
    return chosen


def _visit(variant: Variant, names: Sequence[str]) -> list[Result]:
    """Return the results of some experiments for a variant, in its first lane."""
    with planted(variant, right_class(variant.base)) as plans:
        first: PlannedLane = plans[0]
        return list(examine_lane(first, OPTIONS, experiments=_experiments(names)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "experiments"),
    [
        ("constants-by-limits", ("graph_choice", "survives_eager_activity")),
        ("expanded-views", ("interleaved", "repeated", "padding", "replay_against_capture")),
        ("constants-bound-by-size", ("interleaved", "repeated")),
        ("metadata-of-narrow-types", ("unwritten_and_stale", "padding")),
        ("metadata-is-the-view", ("replay_against_capture",)),
        ("outputs-that-no-replay-writes", ("answers_replayed",)),
    ],
)
def test_memory_of_any_layout_and_life_is_no_fault(name: str, experiments: Sequence[str]) -> None:
    """A plugin passes if its memory is sized by limits, expanded, bound again, narrow, or never written."""
    results = _visit(BY_NAME[name], experiments)
    assert results
    assert [(r.rule, r.reason, r.findings) for r in results if r.outcome is not Outcome.PASS] == []


def test_a_right_backend_of_every_level_of_graph_support_is_in_the_museum() -> None:
    """There are a backend and a runner for each level that capabilities and runners can declare."""
    made = [variant.make(right_class(variant.base)) for variant in VARIANTS]
    levels = {cls.capabilities.graph_support for cls in made if hasattr(cls, "capabilities")}
    assert levels == {cls.needs for cls in made if hasattr(cls, "needs")}
    assert {level.value for level in levels} == {"never", "uniform_decode", "uniform", "always"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        ("support-always", "target_verify-*"),
        ("state-per-shape", "decode-*"),
        ("runner-of-two-axes", "extend-*"),
    ],
)
def test_a_right_plugin_passes_in_every_lane(name: str, lanes: str) -> None:
    """A variant has no finding and no error in any lane of a kind of step that `--thorough` checks."""
    variant = BY_NAME[name]
    options = replace(OPTIONS, size="thorough", lanes=(lanes,))
    with planted(variant, right_class(variant.base), options) as plans:
        assert len(plans) > 6
        for plan in plans:
            bad = [r for r in examine_lane(plan, options) if r.outcome in (Outcome.FAIL, Outcome.ERROR)]
            assert bad == [], str(plan)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["graphs-of-short-contexts", "graphs-of-whole-prompts"])
def test_a_right_runner_that_declines_keeps_every_rule(name: str) -> None:
    """Every rule passes, and none is left out, for a runner that declines long contexts or cached keys."""
    variant = BY_NAME[name]
    with planted(variant, right_class(variant.base)) as plans:
        assert plans
        for plan in plans:
            results = [*examine_lane(plan, OPTIONS)]
            assert [r for r in results if r.outcome is not Outcome.PASS] == []


def test_host_numbers_of_a_view_that_metadata_holds_are_not_the_backends() -> None:
    """Metadata may refer to the view: the counts of a batch in it count as numbers of the runner."""
    backend = BY_NAME["metadata-is-the-view"].make(ReferenceBackend)
    values = ["fields", "tall"]
    plans = planned_lanes(backend, ReferenceRunner, OPTIONS, kind="attention_backend", values=values)
    (plan,) = [plan for plan in plans if str(plan.lane.config.case.plain) == "decode"]
    chosen = [e for e in EXPERIMENTS if e.name == "replay_against_capture"]
    found = examine_lane(plan, OPTIONS, experiments=chosen)
    assert [result for result in found if result.outcome is not Outcome.PASS] == []
