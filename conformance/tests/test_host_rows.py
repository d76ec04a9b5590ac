"""Host tensors of the view, which plans may read at any time, and copies to the host, which end late."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact.batch import ForwardMode
from graphpact.buffers import GraphSlot, PaddingPolicy, metadata_slot
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.host_rows import host_rows
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options

OPTIONS = Options(size="quick", examples=1, shrink=False)
NAME = "extend_seq_lens_cpu"


def with_slot(change: Callable[[GraphSlot], GraphSlot]) -> type[ReferenceRunner]:
    """Return a runner with another slot for the new tokens on the host."""

    class Edited(ReferenceRunner):
        def slots(self) -> Any:
            return [change(slot) if slot.name == NAME else slot for slot in super().slots()]

    return Edited


def lane(runner: type[ReferenceRunner]) -> LaneUnderTest:
    """Return the plain lane of prefill."""
    plans = planned_lanes(ReferenceBackend, runner, OPTIONS, kind="runner", values=())
    return next(plan.lane for plan in plans if plan.lane.config.case == Case(ForwardMode.EXTEND))


def rules(of: LaneUnderTest) -> set[tuple[str | None, str]]:
    """Return rule and field of the findings for a batch with padding rows."""
    rig = of.rig()
    step = rig.step(of.drawn(1, 0)[0].padded)
    return {(found.rule, (found.field or "").split("[")[0]) for found in host_rows(of, rig, step)}


def test_rows_that_no_step_writes_are_stale() -> None:
    """Padding rows that are not reset are GP03, although the suite's backend does not read them."""

    class Keeps(ReferenceRunner):
        def populate(self, registry: Any, batch: Any, shape: Any) -> None:
            buffer = registry.get_slot(NAME).buffer[batch.batch_size :]
            kept = buffer.clone()
            super().populate(registry, batch, shape)
            buffer.copy_(kept)

    assert rules(lane(Keeps)) == {("GP03", f"view.{NAME}")}


def test_rows_that_differ_from_the_device_have_a_wrong_value() -> None:
    """Padding rows with another number than on the device are GP04."""
    assert rules(lane(with_slot(lambda slot: replace(slot, pad_value=1)))) == {("GP04", f"view.{NAME}")}


@pytest.mark.parametrize(
    "change",
    [
        lambda slot: slot,
        lambda slot: replace(
            slot, padding_policy=PaddingPolicy.KEEP_PAD, pad_value=None, reason="plans read live rows"
        ),
    ],
    ids=["reset", "kept"],
)
def test_rows_that_are_reset_or_kept_for_a_reason_are_right(change: Any) -> None:
    """A declared reason allows stale padding rows, as long as no result depends on them."""
    assert not rules(lane(with_slot(change)))


# -- copies to the host ------------------------------------------------------------------------------


def through_the_host(*, waits: bool) -> type[ReferenceBackend]:
    """Return a backend whose plan reads lengths by numpy from memory to which they are copied."""

    class Copies(ReferenceBackend):
        def declare_slots(self, limits: Any) -> Any:
            kept = metadata_slot("test.kept", lambda bs, _: (bs,), torch.int64, role="staging")
            return [*super().declare_slots(limits), kept]

        def plan_metadata(self, view: Any, metadata: Any) -> None:
            if self.driver is not None and metadata.staging is not None:
                memory = self._registry.get_slot("test.kept").buffer
                self.alias = getattr(self, "alias", None) or [memory.numpy()]
                self.driver.copy_async(memory[: view.batch_size], view.seq_lens)
                if waits:
                    event = self.driver.event()
                    event.record()
                    event.synchronize()
                keys = torch.from_numpy(self.alias[0][: view.batch_size].clip(1))
                view = replace(view, seq_lens_cpu=keys)
            super().plan_metadata(view, metadata)

    return Copies


@pytest.mark.parametrize("waits", [False, True])
def test_a_plan_that_reads_before_the_copy_has_ended_is_gp16(waits: bool) -> None:  # noqa: FBT001
    """A read that no guard sees gets the lengths of requests that have left: a wrong result, and no error."""
    plans = planned_lanes(through_the_host(waits=waits), ReferenceRunner, OPTIONS, values=())
    plan = next(plan for plan in plans if plan.lane.config.case == Case(ForwardMode.DECODE))
    chosen = [each for each in EXPERIMENTS if each.name == "strict_replays"]
    found = [f for result in examine_lane(plan, OPTIONS, experiments=chosen) for f in result.findings]
    assert {each.rule for each in found} == (set() if waits else {"GP16"})
