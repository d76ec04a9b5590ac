"""Exhibits of rooms about the life of lanes and requests, and the experiment that shows each of them."""

from collections import Counter
from dataclasses import replace

import pytest

from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.suite import examine_lane
from graphpact_museum import room_of
from graphpact_museum.collection import EXHIBITS
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.gallery import OPTIONS, planted, right_class

SHOWN_BY = {
    "captured_again": ("trtllm-returns-tensors-of-the-first-capture", "trtllm-capacity-of-the-step-before"),
    "rewritten_memory": (
        *("fa3-sinks-copied-at-construction", "flashinfer-sinks-cast-at-capture"),
        *("decode-runner-compares-tensors-by-identity", "verify-runner-keeps-rows-of-the-same-tensor"),
        "decode-runner-returns-a-slot",
    ),
    "beside_other_lanes": (
        *("trtllm-falls-back-after-a-prefill-capture", "fa3-prefill-capture-writes-the-class"),
        *("flashinfer-prefill-step-writes-the-class", "flashinfer-plans-once-for-all-lanes"),
        *("decode-runner-fills-once-for-all-lanes", "verify-runner-shares-its-output-buffer"),
        *("fa3-keeps-scales-by-layer-number", "flashinfer-second-model-writes-the-scales"),
    ),
    "whole_requests": (
        *("values-copied-only-by-eager-steps", "kept-row-of-a-request-that-ended"),
        "kept-row-does-not-reach-the-next-page",
    ),
    "python_state": ("turn-of-two-buffers-in-the-region", "positions-by-a-count-of-the-region"),
    "survives_eager_activity": ("flashinfer-keeps-sixteen-sizes", "fa3-keeps-twelve-sizes"),
    "answers_replayed": (
        *("fa3-skips-requests-of-the-fill-length", "decode-runner-masks-token-0-at-position-0"),
        "extend-runner-takes-no-rows-of-fresh-prompts",
    ),
    "padding": (
        *("reference-prefetches-scratch-in-full-batches", "reference-scales-by-scratch-in-full-batches"),
    ),
    "graph_choice": (
        *("decode-runner-takes-chunks-of-one-token", "verify-runner-takes-chunks-of-its-width"),
        *("decode-runner-lacks-one-more-than-a-multiple", "decode-runner-takes-one-size-more-above-8"),
    ),
}
"""The exhibits of these rooms, by the experiment that shows them. Only the first of each is not a sweep."""


ROOMS = tuple(
    e for e in EXHIBITS if room_of(e.module) in ("life", "requests", "whole_requests", "python_state")
)


def findings_of(exhibit: Exhibit, shown_by: str, *, alone: bool) -> set[str | None]:
    """Return the rules that one experiment finds broken in an exhibit, or that all other experiments do."""
    chosen = [e for e in EXPERIMENTS if (e.name == shown_by) is alone]
    with planted(exhibit, right_class(exhibit.base)) as plans:
        results = [r for plan in plans for r in examine_lane(plan, OPTIONS, experiments=chosen)]
    return {finding.rule for result in results for finding in result.findings}


def named(name: str) -> Exhibit:
    """Return the exhibit whose name begins with ``name``."""
    (exhibit,) = [e for e in ROOMS if e.name.startswith(name)]
    return exhibit


SHOWN = [
    pytest.param(by, name, marks=[pytest.mark.sweep] if at else [], id=name)
    for by, names in SHOWN_BY.items()
    for at, name in enumerate(names)
]


@pytest.mark.parametrize(("by", "name"), SHOWN)
def test_an_experiment_shows_its_exhibits(by: str, name: str) -> None:
    """The experiment finds the exhibit without other experiments, under the exhibit's rule."""
    exhibit = named(name)
    assert exhibit.rule in findings_of(exhibit, by, alone=True)


SEEN_BY_OTHERS = {
    "decode-runner-returns-a-slot",
    "flashinfer-plans-once-for-all-lanes",
    "decode-runner-fills-once-for-all-lanes",
}
"""Exhibits that other experiments find too: these run several lanes of a class, or read outputs late."""


OF_LIFE = [
    (by, name)
    for by in ("captured_again", "rewritten_memory", "beside_other_lanes", "whole_requests", "python_state")
    for name in SHOWN_BY[by]
    if name not in SEEN_BY_OTHERS
]


@pytest.mark.sweep
@pytest.mark.parametrize(("by", "name"), OF_LIFE)
def test_no_other_experiment_shows_an_exhibit_of_life(by: str, name: str) -> None:
    """Without the experiment, the suite does not find the exhibit under its rule."""
    exhibit = named(name)
    assert exhibit.rule not in findings_of(exhibit, by, alone=False)


def test_every_exhibit_of_these_rooms_has_its_experiment() -> None:
    """Each experiment shows at least two exhibits, and one experiment shows each exhibit of the rooms."""
    shown = [named(name) for names in SHOWN_BY.values() for name in names]
    assert Counter(e.name for e in shown) == Counter(e.name for e in ROOMS)
    assert min(map(len, SHOWN_BY.values())) >= 2
    assert {*SHOWN_BY} <= {e.name for e in EXPERIMENTS}


def test_a_write_that_replays_leave_out_is_named() -> None:
    """If a copy of values is written by eager steps only, the finding names the copies of values alone."""
    exhibit = named("values-copied-only-by-eager-steps")
    chosen = [e for e in EXPERIMENTS if e.name == "whole_requests"]
    with planted(exhibit, right_class(exhibit.base)) as plans:
        results = [r for plan in plans for r in examine_lane(plan, OPTIONS, experiments=chosen)]
    (field,) = {finding.field for result in results for finding in result.findings}
    assert field == "slot 'variant.values0' of variant, slot 'variant.values1' of variant"


def test_a_light_lane_names_the_rule_of_a_wrong_output() -> None:
    """A stale plan in a lane that compares only outputs is reported as GP09, with the field."""
    (exhibit,) = [e for e in EXHIBITS if e.name == "flashinfer-window-not-planned"]
    with planted(exhibit, right_class(exhibit.base)) as plans:
        results = [*examine_lane(replace(plans[0], is_full=False), OPTIONS)]
    found = {f.rule: f for result in results for f in result.findings}
    assert found["GP09"].field
    assert "unwritten_and_stale" in next(r.check for r in results if r.rule == "GP09")


def test_a_light_lane_without_findings_runs_no_more() -> None:
    """Experiments that find the rule of a wrong output do not run in a light lane of a right plugin."""
    (exhibit,) = [e for e in EXHIBITS if e.name == "flashinfer-window-not-planned"]
    right = replace(exhibit, make=lambda base: base)
    with planted(right, right_class(exhibit.base)) as plans:
        results = [*examine_lane(replace(plans[0], is_full=False), OPTIONS)]
    assert not any(result.findings for result in results)
    assert not any("unwritten_and_stale" in result.check for result in results)
