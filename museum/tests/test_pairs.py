"""Exhibits in pairs: backends with runners of plugins, and runners with attention outside the graphs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from graphpact.runners import GraphRunner
from graphpact_conformance.draws.cases import SEGMENTS
from graphpact_conformance.results import Outcome
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options
from graphpact_cuda_graph.breakable import BreakableCudaGraphRunner
from graphpact_cuda_graph.piecewise import PiecewiseCudaGraphRunner
from graphpact_museum.collection import EXHIBITS, VARIANTS
from graphpact_museum.exhibit import Exhibit, Variant
from graphpact_museum.gallery import right_class, visit
from graphpact_speculative import EagleDraftExtendRunner, EagleDraftRunner

QUICK = Options(size="quick", examples=1, shrink=False)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, as lanes do."""
    with torch.inference_mode():
        yield


IN_BACKENDS = [e for e in EXHIBITS if e.site == "backend" and str(SEGMENTS) in e.lanes]


BELOW_BOTH = pytest.mark.parametrize(
    "runner", [BreakableCudaGraphRunner, pytest.param(PiecewiseCudaGraphRunner, marks=pytest.mark.sweep)]
)


@BELOW_BOTH
@pytest.mark.parametrize(
    "exhibit",
    [
        pytest.param(e, id=e.name, marks=[pytest.mark.sweep] * (e.rule not in ("GP05", "GP10")))
        for e in IN_BACKENDS
    ],
)
def test_a_bug_of_eager_metadata_is_found_below_a_prefill_runner(
    exhibit: Exhibit, runner: type[GraphRunner]
) -> None:
    """The suite finds the bug in the pair too, under the same rule as in the backend."""
    options = replace(QUICK, only=frozenset({exhibit.rule}))
    backend = exhibit.make(right_class(exhibit.base))
    plan, *_ = planned_lanes(backend, runner, options, is_pair=True)
    (result,) = examine_lane(replace(plan, is_full=True), options)
    assert (result.rule, result.outcome) == (exhibit.rule, Outcome.FAIL)


@BELOW_BOTH
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, id=v.name, marks=[pytest.mark.sweep] * v.name.endswith("live-tokens"))
        for v in VARIANTS
        if v.name.startswith("upgraded-metadata")
    ],
)
def test_metadata_that_is_upgraded_in_every_step_passes_below_a_prefill_runner(
    variant: Variant, runner: type[GraphRunner]
) -> None:
    """A backend that upgrades metadata in each step has no finding, with live and with padded rows."""
    backend = variant.make(right_class(variant.base))
    plan, *_ = planned_lanes(backend, runner, QUICK, is_pair=True)
    results = [*examine_lane(replace(plan, is_full=True), QUICK)]
    assert {r.outcome for r in results} == {Outcome.PASS}, [r.findings for r in results]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("breakable-cuts-rows-as-captured", marks=pytest.mark.sweep),
        "breakable-leaves-results-in-the-workspace",
        "breakable-keeps-embeddings",
    ],
)
def test_a_bug_between_segments_is_found(name: str) -> None:
    """Counts of the capture, overwritten results and stale embeddings are found under their own rules."""
    (exhibit,) = (e for e in EXHIBITS if e.name == name)
    seen = visit(exhibit, replace(QUICK, only=frozenset({exhibit.rule})))
    assert seen.is_right, seen


RUNS = {
    "draft_decode": EagleDraftRunner,
    "draft_decode_tree": EagleDraftRunner,
    "draft_extend": EagleDraftExtendRunner,
}


MISALIGNED = ("GP02", "GP03", "GP07", "GP09", "GP10")
"""Rules about inputs of a replay that differ from those of its capture; they are checked in pairs too."""


WITHOUT_A_SWEEP = ("flashinfer-first-step-planned", "trtllm-mla-packed-queries")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "exhibit",
    [
        pytest.param(e, id=e.name, marks=[pytest.mark.sweep] * (e.name not in WITHOUT_A_SWEEP))
        for e in EXHIBITS
        if e.site == "backend" and e.rule in MISALIGNED and e.lanes[0] in RUNS
        if "single" not in e.values  # EAGLE takes a single draft from the extend, without attention
    ],
)
def test_a_bug_of_a_backend_is_found_below_a_draft_runner(exhibit: Exhibit) -> None:
    """A stale plan of a draft step or a packed stride is found under its rule with the draft runners too."""
    options = replace(QUICK, only=frozenset({exhibit.rule}))
    backend, runner = exhibit.make(right_class(exhibit.base)), RUNS[exhibit.lanes[0]]
    with exhibit.around():
        (plan,) = (
            p
            for p in planned_lanes(backend, runner, options, is_pair=True, values=exhibit.values)
            if str(p.lane.config.case) in exhibit.lanes
        )
        (result,) = examine_lane(replace(plan, is_full=True), options)
    assert (result.rule, result.outcome) == (exhibit.rule, Outcome.FAIL)
