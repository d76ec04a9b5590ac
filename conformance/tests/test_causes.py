"""Findings about what only a graph has, about slots of drafts, and those that follow from another rule."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance_reports import finding, plugin, result
from graphpact import ForwardBatch, GraphShape
from graphpact.attention import Limits
from graphpact.buffers import GraphSlot
from graphpact_conformance import suite
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.experiment import Experiment, Findings
from graphpact_conformance.experiments.when import everywhere
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.report import rows
from graphpact_conformance.report.digest import to_fix
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.targets import Options

QUICK = Options(size="quick", examples=1, shrink=False)
DECODE = next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == "decode-page16-gqa-float32")


def results_of(backend: type[ReferenceBackend], *names: str) -> dict[str | None, Result]:
    """Return the results of experiments in a decode lane, by rule."""
    chosen = [each for each in EXPERIMENTS if each.name in names]
    plan = PlannedLane(LaneUnderTest(DECODE, backend), is_full=True)
    return {r.rule: r for r in suite.examine_lane(plan, QUICK, experiments=chosen)}


# -- only an eager run is right --------------------------------------------------------------------


class OneResultForAllLayers(ReferenceBackend):
    """A backend whose layers write one result in a graph."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        """Return the result in memory that all layers of a graph share."""
        out = super().forward(*args, **more)
        if self.driver is None or not self.driver.is_capturing:
            return out
        shared: dict[int, torch.Tensor] = self.__dict__.setdefault("_shared", {})
        kept = shared.setdefault(len(out), torch.empty_like(out))
        return kept.copy_(out)


def test_layers_that_share_a_result_in_a_graph_are_pool_aliasing() -> None:
    """A graph whose layers overwrite one result is found under GP15, not as work that runs once."""
    found = results_of(OneResultForAllLayers, "answers_replayed")
    assert found["GP15"].outcome is Outcome.FAIL
    assert "if each result is copied, the replay is right" in found["GP15"].findings[0].actual
    assert found["GP10"].outcome is Outcome.PASS


class NarrowSlots(ReferenceBackend):
    """A backend whose table of a graph has 8 bits, and whose eager steps have 64."""

    def declare_slots(self, limits: Limits) -> list[GraphSlot]:
        """Return the usual slots, and a narrow one."""
        slots = [*super().declare_slots(limits)]
        wide = next(slot for slot in slots if slot.name == "reference.table")
        narrow = replace(wide, name="narrow.table", dtype=torch.uint8)
        return [*slots, narrow]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Any) -> Any:
        """Bind the narrow slot in a graph."""
        metadata = super().allocate_metadata(view, shape, buffers)
        if buffers.in_graph:
            metadata.table = buffers("narrow.table")
        return metadata

    def keys_of(self, metadata: Any) -> Any:
        """Read the table as numbers of 64 bits."""
        slots, seen = super().keys_of(metadata)
        return slots.long(), seen


def test_a_slot_that_is_too_narrow_is_named() -> None:
    """Where only an eager run is right, a narrower dtype is GP07 with hook, field, and both dtypes."""
    found = results_of(NarrowSlots, "answers_replayed")
    first = found["GP07"].findings[0]
    assert (first.hook, str(first.field).partition("[")[0].partition(" ")[0]) == (
        "init_metadata_replay",
        "metadata.table",
    )
    assert "torch.int64" in first.expected
    assert "torch.uint8" in first.actual


# -- the KV slots of a draft -----------------------------------------------------------------------

DRAFT = next(
    c for c in configs_of(ReferenceBackend.capabilities) if str(c) == "draft_decode-page16-gqa-float32"
)


class NextSlots(ReferenceBackend):
    """A backend whose second draft step reads the slot of the third in place of its own."""

    def drafts_of(self, view: ForwardBatch) -> torch.Tensor:
        """Return the slots of the drafts, the last of step 1 one step too far."""
        slots = super().drafts_of(view)
        if view.draft_step == 1 and view.draft_cache_loc is not None:
            slots = torch.cat([slots[:, :1], view.draft_cache_loc[:, 2:3]], dim=1)
        return slots


class MissesTheFirst(ReferenceBackend):
    """A backend whose tokens do not see the first key."""

    def keys_of(self, metadata: Any) -> Any:
        """Hide the first key."""
        slots, seen = super().keys_of(metadata)
        return slots, seen & (torch.arange(seen.shape[1]) > 0)


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (
            NextSlots,
            r"; it attends KV slot (\d+), which is not of its path: cached .*, then drafts (\d+), \d+$",
        ),
        (MissesTheFirst, r"; it does not attend KV slot (\d+), position 0 of its path: cached (\d+)"),
    ],
)
@pytest.mark.parametrize("name", ["answers_replayed", "answers_eagerly"])
def test_a_draft_that_attends_wrong_keys_names_the_first_slot(
    backend: type[ReferenceBackend], says: str, name: str
) -> None:
    """The finding about a wrong pass has the first KV slot that differs from its path, and the path."""
    chosen = [each for each in EXPERIMENTS if each.name == name]
    plan = PlannedLane(LaneUnderTest(DRAFT, backend), is_full=True)
    results = [*suite.examine_lane(plan, QUICK, experiments=chosen)]
    told = [f for r in results for f in r.findings]
    assert told
    found = re.search(says, told[0].actual)
    assert found is not None, told[0].actual
    if backend is NextSlots:
        assert f"{found[2]} then " in str(told[0].batch)
        assert f"then {found[1]}" in str(told[0].batch)
    else:
        assert found[1] == found[2]


# -- consequences ----------------------------------------------------------------------------------


def _finds(*findings: dict[str, Any]) -> dict[str | None, Result]:
    """Return the results of a lane with given findings."""

    def run(lane: LaneUnderTest, steps: Drawn) -> Findings:
        """Yield the findings."""
        del steps
        for each in findings:
            yield lane.finding(**each, expected="this", actual="that")

    rules = tuple(str(each["rule"]) for each in findings)
    plan = PlannedLane(LaneUnderTest(DECODE), is_full=True)
    one = Experiment("one", rules, run, everywhere)
    return {r.rule: r for r in suite.examine_lane(plan, QUICK, experiments=[one])}


EXACT = {"hook": "init_metadata_capture", "field": "metadata.max_kv_len"}


@pytest.mark.parametrize(("cause", "follows"), [("GP08", "GP06"), ("GP08", "GP12"), ("GP16", "GP10")])
def test_what_follows_from_a_rule_is_no_finding_beside_it(cause: str, follows: str) -> None:
    """Findings without a field of a rule that follows from another are left out, and the reason is said."""
    found = _finds({"rule": cause, **EXACT}, {"rule": follows, "field": "a replay: token 0"})
    assert found[cause].outcome is Outcome.FAIL
    assert found[follows].outcome is Outcome.NOT_RUN
    assert found[follows].reason == f"what was found follows from {cause} in this lane"


def test_a_rule_with_a_field_of_its_own_stays() -> None:
    """A finding that names hook and field is no consequence, and a weak cause explains none."""
    own = _finds({"rule": "GP08", **EXACT}, {"rule": "GP06", "hook": "forward", "field": "metadata.a"})
    weak = _finds({"rule": "GP08", "field": "a replay"}, {"rule": "GP06", "field": "a replay: token 0"})
    assert own["GP06"].outcome is weak["GP06"].outcome is Outcome.FAIL


OFFSETS = {"hook": "init_metadata_replay", "field": "metadata.cu_seqlens_q[1:3]"}
PLAN = {"rule": "GP09", "hook": "init_metadata_replay", "field": "metadata.plan[0]"}
COUNT = {"rule": "GP05", "hook": "populate", "field": "view.positions[3]"}


@pytest.mark.parametrize(
    ("finding", "others", "cause"),
    [
        (PLAN, [{"rule": "GP07", **OFFSETS}], "GP07"),
        (PLAN, [{"rule": "GP02", "hook": "populate", "field": "view.seq_lens"}], None),
        (COUNT, [{"rule": "GP02", "hook": "populate", "field": "view.positions[0:2]"}], "GP02"),
        (COUNT, [{"rule": "GP02", "hook": "populate", "field": "view.seq_lens[0:2]"}], None),
    ],
)
def test_a_plan_of_wrong_offsets_and_rows_of_a_wrong_input_are_no_findings(
    finding: dict[str, Any], others: list[dict[str, Any]], cause: str | None
) -> None:
    """A plan follows from metadata that is wrong for the same batch, a count from its own tensor alone."""
    found = _finds(finding, *others)[finding["rule"]]
    assert found.outcome is (Outcome.FAIL if cause is None else Outcome.NOT_RUN)
    assert cause is None or f"follows from {cause}" in (found.reason or "")


def test_ranks_that_differ_come_before_the_graph_of_an_idle_rank() -> None:
    """GP12 of idle lanes alone comes after a GP17 that names its field; GP12 of other lanes does not."""

    def of(rule: str) -> list[Finding]:
        return [finding(rule, hook="prepare_replay", field="fit()")]

    ranks = result("fail", "GP17", findings=of("GP17"))
    idle, other = (result("fail", "GP12", lane=lane, findings=of("GP12")) for lane in ("idle-x", "decode-x"))
    assert [row.key for row in to_fix(rows(plugin([idle, ranks])))] == ["GP17", "GP12"]
    assert [row.key for row in to_fix(rows(plugin([idle, other, ranks])))] == ["GP12", "GP17"]
