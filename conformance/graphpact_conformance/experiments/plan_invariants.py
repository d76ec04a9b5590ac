"""What a backend declares about its plans: GP09.

The invariants of `AttentionBackend.plan_invariants` have to be true after every fill. An invariant that is
also true with the plan of another batch shows nothing. So the plans of earlier batches of the same shape are
put into the memory of the plan, and at least one invariant has to be false.

Does not: know what a plan contains. Plans on the host, and plans outside the metadata, are not exchanged.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.pact import walk
from graphpact.shapes import GraphShape
from graphpact.tensors import equal
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import assorted, corner, neighbours
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import altered
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.plans import PlanVerdict, verdicts
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.writes import write

PlanTensors = dict[str, dict[str, torch.Tensor]]
"""Copies of the tensors of a plan: for each slot, by path."""


def plan_invariants(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Evaluate what the backend declares about its plans, with the right plans and those of other batches."""
    if not lane.backend.plan_invariants:
        return
    rig = lane.rig(lane.ways[-1])  # the hook makes the metadata, where it can
    found: dict[tuple[str, str], Finding] = {}
    exchange = _Exchange(rig)

    def note(said: list[PlanVerdict], hook: str, step: StepRecord | None, problem: Problem | None) -> None:
        for each in said:
            if each.holds is False and (hook, each.name) not in found:
                found[hook, each.name] = lane.of_invariant(each, hook, step=step, problem=problem)

    long = assorted(lane.config)
    for problem in (*steps, corner(lane.config), long, *neighbours(lane.config, long)):
        said: list[PlanVerdict] = []
        look = partial(exchange.look, problem, said)
        is_later = rig.backend.records_metadata  # no hook fills metadata: the replay itself does
        step = rig.step(problem, ready=None if is_later else look)
        if is_later and step.error is None and rig.observer.view is not None:
            look(rig.observer.view, rig.observer.metadata)
        note(said, "init_metadata_replay", step, None)

    at_capture: list[PlanVerdict] = []
    rig.capture(ready=lambda view, metadata: at_capture.extend(verdicts(rig.backend, view, metadata)))
    note(at_capture, "init_metadata_capture", None, None)

    rig.load(steps.exact)
    batch = rig.batch_of(steps.exact)
    made = rig.backend.init_metadata_eager(batch)
    note([*verdicts(rig.backend, batch, made)], "init_metadata_eager", None, steps.exact)

    yield from found.values()
    if not found:
        yield from exchange.unnoticed(lane)


@dataclass
class _Exchange:
    """The exchange of plans between the batches of a rig.

    Args:
        rig: The rig.
        known: The plans of earlier batches, by shape.
        tried: For each slot, the last step in which its plan was exchanged.
        settled: The slots whose exchange an invariant noticed, or could not judge.
    """

    rig: Rig
    known: dict[GraphShape | None, list[PlanTensors]] = field(default_factory=dict)
    tried: dict[str, StepRecord] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)

    def look(self, problem: Problem, said: list[PlanVerdict], view: ForwardBatch, metadata: Any) -> None:
        """Evaluate the invariants with the right plan, then with the plan of each earlier batch."""
        said += verdicts(self.rig.backend, view, metadata)
        if any(each.holds is False for each in said):
            return
        now, shape = self._plans(metadata), self.rig.observer.shape
        earlier = self.known.setdefault(shape, [])
        for plans in earlier:
            for slot, tensors in plans.items():
                if slot not in self.settled and _differ(tensors, now.get(slot, {})):
                    self.tried[slot] = StepRecord(problem, shape=shape)
                    self._put(slot, tensors, view, metadata)
        earlier.append(now)

    def _put(self, slot: str, tensors: dict[str, torch.Tensor], view: ForwardBatch, metadata: Any) -> None:
        edits = {path: partial(write, value=value) for path, value in tensors.items()}
        undo = altered(edits)(view, metadata)
        if any(each.holds is not True for each in verdicts(self.rig.backend, view, metadata)):
            self.settled.add(slot)
        if undo is not None:
            undo()

    def _plans(self, metadata: Any) -> PlanTensors:
        """Return copies of the tensors of the metadata in slots of the role ``plan``."""
        plans: PlanTensors = {}
        for path, value in walk({"metadata": metadata}):
            if isinstance(value, torch.Tensor) and value.numel():
                slot = self.rig.registry.slot_of(value)
                if slot is not None and slot.role == "plan":
                    plans.setdefault(slot.label, {})[path] = value.clone()
        return plans

    def unnoticed(self, lane: LaneUnderTest) -> Findings:
        """Yield a finding for each slot whose exchange no invariant noticed."""
        for slot, step in self.tried.items():
            if slot not in self.settled:
                yield lane.finding(
                    "GP09",
                    hook="init_metadata_replay",
                    field=slot,
                    expected="an invariant of `plan_invariants` is false with the plan of another batch",
                    actual="no declared invariant notices the plan of another batch",
                    step=step,
                    help="compare the tensors of the plan with the lengths of the view: for example, whether"
                    " the plan covers the keys of each request",
                )


def _differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two plans have the same tensors with other contents."""
    if one.keys() != other.keys() or any(one[path].shape != other[path].shape for path in one):
        return False
    return any(not equal(one[path], other[path]) for path in one)
