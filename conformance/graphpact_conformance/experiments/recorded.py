"""The recorded steps of a real engine, replayed in the recorded order: GP02, GP03, GP09, GP10.

If a step is wrong only after the steps before it, it depends on them. Examples are metadata that is kept
because nothing seems to change, and a page that is appended too late.

Does not: read a recording (see `graphpact_conformance.draws.scenario`).
"""

from collections.abc import Sequence
from contextlib import suppress

from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences, is_right
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import after_two_histories
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.raised import CannotCaptureError
from graphpact_conformance.records.steps import StepRecord

_KEPT = (
    "in a new lane this batch is right: in every step write everything that the kernels read, from the view,"
    " and do not keep values because an earlier batch looked the same"
)
_ALONE = "this batch is wrong in a new lane too: see the other experiments in this lane"


def recorded_steps(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay the recorded batches in order, fast and strict, and compare with attention in float64."""
    found = [*_replay(lane, lane.rig(), steps)]
    with suppress(CannotCaptureError):  # `captures` reports it
        found = found or [*_replay(lane, lane.rig(strict=True), steps)]
    yield from found


def _replay(lane: LaneUnderTest, rig: Rig, steps: Sequence[Problem]) -> Findings:
    """Yield findings about the first wrong step."""
    for at, problem in enumerate(steps):
        step = rig.step(problem, may_decline=True)
        if step.error is None and not differences(rig, step, rig.answer(problem)):
            continue
        yield from _of_step(lane, rig, step, steps[:at])
        return


def _of_step(lane: LaneUnderTest, rig: Rig, step: StepRecord, before: Sequence[Problem]) -> Findings:
    is_kept = is_right(lane, lane.build(), step.problem, may_decline=True)
    after = f"recorded step {len(before) + 1}"
    if before:
        after += f", after: {before[-1].words}"
    expected = "each recorded step is replayed correctly after any earlier steps"
    if step.error is not None:
        rule = "GP02" if is_kept else None
        yield lane.of_error(step.error, expected=f"{expected} ({after})", rule=rule, step=step)
        return
    if is_kept:
        for way in lane.ways:
            yield from after_two_histories(lane, way, step.problem, before[-1:], [])
    wrong = differences(rig, step, rig.answer(step.problem))[0]
    yield lane.finding(
        "GP02" if is_kept else None,
        hook="init_metadata_replay" if is_kept else None,
        field=f"{after}: {wrong.what}",
        expected=f"{expected}: {wrong.expected}",
        actual=wrong.actual,
        step=step,
        help=_KEPT if is_kept else _ALONE,
    )
