"""Comparison of the work of a graph with that of a capture of the same batch.

The work is the recorded operations, the eager calls between segments, and memory that is no input.

Does not: compare what hooks write; see `graphpact_conformance.experiments.compared_inputs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.pact import walk
from graphpact.shapes import GraphShape
from graphpact.tensors import equal
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.compared_inputs import COUNTED_HELP, _is_right
from graphpact_conformance.experiments.comparison import gives_the_same
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import Before
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.raised import message_of
from graphpact_conformance.records.steps import StepRecord
from graphpact_tape.trace import TracedCall, first_difference
from graphpact_tape.writes import write


def compare_memory(
    lane: LaneUnderTest, rig: Rig, twin: Rig, before: Before, pair: tuple[StepRecord, StepRecord]
) -> Findings:
    """Find the memory, in slots or outside them, that makes a replay wrong.

    The replay is repeated with the contents that a capture of the batch wrote there. If its results become
    those of the capture, this memory is the cause. In segments a second replay alone may be right, because
    eager calls hold something of the step before: `compare_eager_calls` reports that.
    """
    step, seen = pair
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    pairs = [*zip(rig.external(shape), twin.external(shape), strict=False)]
    if any((mine.shape, mine.dtype) != (theirs.shape, theirs.dtype) for mine, theirs in pairs):
        return  # the recorded work differs, which `compare_recorded_work` reports
    if rig.num_segments(shape) > 1 and gives_the_same(rig, _with_memory(rig, step, before, ()), seen):
        return
    differing = [at for at, (mine, theirs) in enumerate(pairs) if not equal(mine, theirs)]
    alone = [[at] for at in differing]
    for chosen in [*alone, differing] if len(alone) > 1 else alone:
        renewed = _with_memory(rig, step, before, [pairs[at] for at in chosen])
        if not gives_the_same(rig, renewed, seen):
            continue
        mine = pairs[chosen[0]][0]
        is_held = rig.holds(mine)
        is_between = rig.num_segments(shape) > 1
        more = f", and {len(chosen) - 1} more" if len(chosen) > 1 else ""
        other = (
            ", and an eager call made another tensor"
            if is_between
            else ", and the backend holds another tensor now"
        )
        yield lane.finding(
            "GP02" if is_held else "GP01",
            hook=_hook_between(lane) if is_between else "init_metadata_replay",
            field=rig.name_of(mine, shape) + more,
            expected="the memory that the graph reads is written for this batch",
            actual="its contents differ from those that a capture of this batch writes"
            + ("" if is_held else other),
            step=step,
            help=_HANDED_ON_HELP if is_between else _REBOUND_HELP,
        )
        return


def _with_memory(
    rig: Rig, step: StepRecord, before: Before, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> StepRecord:
    """Repeat a step after copying, in each pair, the second tensor into the first; then restore the first."""
    kept = [mine.clone() for mine, _ in pairs]

    def renew(_: ForwardBatch, __: Any) -> None:
        for mine, theirs in pairs:
            write(mine, theirs)

    renewed = rig.step(step.problem, fill=before.put_back, ready=renew)
    for (mine, _), value in zip(pairs, kept, strict=True):
        write(mine, value)
    return renewed


_REBOUND_HELP = (
    "declare it in declare_slots() and write into it in place in every step: a graph always reads the memory"
    " that it recorded, even after an attribute is rebound"
)
_HANDED_ON_HELP = (
    "let the next segment read the result of `eager_call`, or memory that is an argument of the call and that"
    " it writes in every replay: a segment always reads the tensor of the capture, even if a list or an"
    " attribute holds another one now"
)


def compare_eager_calls(lane: LaneUnderTest, rig: Rig, pair: tuple[StepRecord, StepRecord]) -> Findings:
    """Yield a finding if a replay in segments is wrong, and a capture of its batch is right.

    Inputs, recorded work and memory are the same, so the eager calls between segments must differ. They hold
    something of the step before if a second replay of the same batch is right, otherwise of the capture.
    """
    step, seen = pair
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    if rig.num_segments(shape) == 1:
        return
    if not _is_right(lane, rig, seen):
        return
    is_stale = gives_the_same(rig, rig.step(step.problem), seen)
    wrong = "other results" if step.error is None else message_of(step.error)
    yield lane.finding(
        "GP02" if is_stale else "GP08",
        hook=_hook_between(lane),
        field="the eager calls between segments",
        expected="results that depend only on this batch: a graph captured with it is right",
        actual=f"{wrong}; "
        + (
            "a second replay of the batch is right"
            if is_stale
            else "the graph was captured with another batch"
        ),
        step=step,
        help=COUNTED_HELP if lane.kind == "runner" else _FORWARD_HELP,
    )


_FORWARD_HELP = (
    "forward() runs again in every replay: use the metadata that this call gets, and keep no metadata, or"
    " numbers made from it, on the backend from call to call"
)


def _hook_between(lane: LaneUnderTest) -> str:
    """Return the method whose eager calls run between the segments of a graph."""
    return "compose" if lane.kind == "runner" else "init_metadata_eager"


def compare_with_warm_up(lane: LaneUnderTest, way: Way, step: StepRecord) -> Findings:
    """Compare, for a batch whose replay is wrong, the recorded run with the warm-up before it."""
    if step.shape is None:
        return
    runs = lane.build(way, capture=False).runs_of_capture(step.problem, step.shape)
    if not runs:
        return
    found = compare_traces(runs[-1], runs[0])
    if found is not None and found["rule"] == "GP10":
        yield lane.finding(
            "GP10",
            hook="init_metadata_capture",
            field=found["field"],
            expected=f"the recorded run does the same work as the warm-up before it: {found['there']}",
            actual=found["here"],
            step=step,
            help=TRACE_HELP["GP10"],
        )


def compare_traces(recorded: Sequence[TracedCall], other: Sequence[TracedCall]) -> Mapping[str, str] | None:
    """Return the first difference between two recordings, or None if they are equal.

    The mapping has the keys ``rule``, ``field``, ``here`` (the first recording) and ``there`` (the second).
    """
    found = first_difference(recorded, other)
    if found is None:
        return None
    mine, theirs = found.mine, found.theirs
    if found.argument is not None and mine is not None and theirs is not None:
        a, b = mine.arguments[found.argument], theirs.arguments[found.argument]
        return {
            "rule": "GP07" if isinstance(a, tuple) or isinstance(b, tuple) else "GP08",
            "field": f"argument {found.argument} of {mine.op} at {mine.line}",
            "here": str(a),
            "there": str(b),
        }
    if mine is not None and theirs is not None:
        return {
            "rule": "GP10",
            "field": f"operation {found.at}",
            "here": f"{mine.op} at {mine.line}",
            "there": f"{theirs.op} at {theirs.line}",
        }
    more = mine or theirs
    return {
        "rule": "GP10",
        "field": "" if more is None else f"{more.op} at {more.line}",
        "here": "not recorded" if mine is None else "recorded",
        "there": "not recorded" if theirs is None else "recorded",
    }


def compare_recorded_work(
    lane: LaneUnderTest,
    way: Way,
    step: StepRecord,
    recorded: Sequence[TracedCall],
    other: Sequence[TracedCall],
) -> Findings:
    """Yield findings about the first operation that differs from that of a capture of the batch."""
    found = compare_traces(recorded, other)
    if found is None:
        return
    rules = [found["rule"]]
    if rules != ["GP08"] and _lengths_decide(lane, way, step, recorded, other):
        rules = ["GP08"] if rules == ["GP07"] else ["GP08", *rules]
    for rule in rules:
        yield lane.finding(
            rule,
            hook="init_metadata_capture",
            field=found["field"],
            expected=f"the same as in a capture of this batch: {found['there']}",
            actual=f"the graph was recorded with {found['here']}",
            step=step,
            help=TRACE_HELP[rule],
        )


def _lengths_decide(
    lane: LaneUnderTest,
    way: Way,
    step: StepRecord,
    recorded: Sequence[TracedCall],
    other: Sequence[TracedCall],
) -> bool:
    """Return whether two recordings differ because of the lengths on the host.

    If so, the batch with the dummy's lengths gives the recording of the dummy, or the dummy with the batch's
    lengths gives the recording of the batch.
    """
    twin = lane.build(way, capture=False)
    assert step.shape is not None  # noqa: S101  it was replayed
    batch, dummy = twin.batch_of(step.problem), twin.dummy(step.shape)
    real = batch.batch_size
    lens = torch.cat([batch.seq_lens_cpu, dummy.seq_lens_cpu[real:]])
    for swapped, wanted in (
        (replace(batch, seq_lens_cpu=dummy.seq_lens_cpu[:real]), recorded),
        (replace(dummy, seq_lens_cpu=lens), other),
    ):
        try:
            capture_and_replay(twin, step.problem, step.shape, swapped)
        except (Exception, SystemExit):  # noqa: BLE001, S112  the lengths contradict each other
            continue
        if compare_traces(wanted, twin.trace(step.shape)) is None:
            return True
    return False


TRACE_HELP = {
    "GP07": "slice tensors for recorded operations by the counts of the shape",
    "GP08": "pass a bound that holds for every batch of the shape, or a tensor; do not branch on the"
    " lengths of this batch, or make the branch part of the shape (`variant`)",
    "GP10": "record the same work for every batch, independent of what ran before: no cache that is filled"
    " on first use, no branch on contents, no flag of an earlier phase",
}


@torch.inference_mode()
def capture_and_replay(
    twin: Rig, problem: Problem, shape: GraphShape, batch: ForwardBatch | None = None
) -> StepRecord:
    """Capture a batch in place of the runner's dummy, replay it once, and return the record.

    The inputs are restored before the replay, because a region may write its own inputs, also in the warm-up.
    """
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(view: ForwardBatch, metadata: Any) -> None:
        tensors = (value for _, value in walk({"view": view, "metadata": metadata}))
        given.extend((each, each.clone()) for each in tensors if isinstance(each, torch.Tensor))

    twin.load(problem)
    twin.capture(shape, twin.batch_of(problem) if batch is None else batch, ready=keep)
    for tensor, before in given:
        if not equal(tensor, before):
            write(tensor, before)
    return twin.replay(problem, shape)
