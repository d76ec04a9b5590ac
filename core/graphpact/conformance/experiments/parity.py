"""What a replay prepared, against a capture of the very same batch: GP01, GP05, GP07, GP08, GP10, GP11.

Capture is a replay of a dummy batch, plus binding. So a capture of a batch that is live says what its replay
has to prepare: the same types, fields, host numbers, shapes, and contents; and the operations that it records
are those that the graph of the dummy recorded, with the same host numbers.

Does not: look at values of attention; see `graphpact.conformance.experiments.values`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.conformance.experiments.base import (
    Findings,
    matters,
    same,
    spell,
    values_at,
)
from graphpact.conformance.experiments.refresh import hook_of
from graphpact.conformance.problems import Problem
from graphpact.conformance.results import Finding
from graphpact.conformance.rig import Leaf, Rig, Step
from graphpact.conformance.subject import LaneUnderTest, Way
from graphpact.graphs.poison import poison_of
from graphpact.graphs.recorder import TracedCall
from graphpact.graphs.tape import Tape
from graphpact.pact import Breach, Promise, is_readable
from graphpact.shapes import GraphShape

_OFFSETS = re.compile(r"indptr|cu_seq|seqlens_q|start_loc|offsets?$", re.IGNORECASE)
"""Names of offsets: where the rows of each request begin."""


def captured_anew(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Capture each batch anew, and compare with what its replay prepared and what the graph recorded."""
    for way in lane.ways:
        rig = lane.rig(way)
        for problem in steps:
            yield from compare_with_capture(lane, rig, way, problem)


def compare_with_capture(lane: LaneUnderTest, rig: Rig, way: Way, problem: Problem) -> Findings:
    """Compare one batch's replay with a capture of it on a lane of its own."""
    step = rig.step(problem)
    for breach in step.breaches:
        yield _of_breach(lane, step, breach)
    shape = step.shape
    if shape is None or not step.leaves:
        return
    if not problem.requests and shape.mode is not ForwardMode.DECODE:
        return  # an idle batch has no width of its own, and is captured by nobody
    twin = lane.build(way, capture=False)
    try:
        seen = _capture(twin, problem, shape)
    except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code runs here
        yield lane.of_error(
            error,
            expected="a batch that can be replayed can be captured",
            rule="GP11",
            problem=problem,
            hook="init_metadata_capture",
        )
        return
    yield from _compare_numbers(lane, rig, step, seen)
    yield from _compare_contents(lane, rig, step, seen)
    yield from _compare_traces(lane, step, trace_of(rig, shape), trace_of(twin, shape))


@torch.inference_mode()
def _capture(twin: Rig, problem: Problem, shape: GraphShape) -> Step:
    """Capture a batch in the place of the runner's dummy, replay it once, and return what there is then."""
    twin.load(problem)
    twin.runner.lane = twin.lane
    twin.lane.capture(shape, twin.batch_of(problem))
    twin.lane.captured(shape).graph.replay()
    step = Step(problem, stage="done", shape=shape)
    step.leaves, step.numbers = twin.prepared(problem)
    return step


# -- the pact ----------------------------------------------------------------------------------------


def _of_breach(lane: LaneUnderTest, step: Step, breach: Breach) -> Finding:
    rule = breach.broken
    if breach.rule == "shape" and _counts_real_rows(step, breach):
        rule = "GP05"
    hook = "populate" if breach.path.startswith("view") else "init_metadata_replay"
    whose = f" ({breach.owner})" if breach.owner else ""
    return lane.finding(
        rule,
        hook=hook,
        field=f"{breach.path}{whose}",
        expected=f"{breach.rule} as captured: {breach.captured}",
        actual=breach.replayed,
        step=step,
        help=breach.advice,
    )


def _counts_real_rows(step: Step, breach: Breach) -> bool:
    """Return whether a shape counts real rows where captured ones are padded."""
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    numbers = [
        [int(n) for n in re.findall(r"\d+", text)] for text in (breach.captured, breach.replayed)
    ]
    raw = len(step.problem.requests), len(step.problem.tokens)
    padded = shape.batch_size, shape.num_tokens
    return any(
        c - n in (padded[0] - raw[0], padded[1] - raw[1]) and c != n
        for c, n in zip(*numbers, strict=False)
    )


# -- host numbers ------------------------------------------------------------------------------------


def _compare_numbers(lane: LaneUnderTest, rig: Rig, step: Step, seen: Step) -> Findings:
    if step.shape is None or not rig.lane.is_captured(step.shape):
        return
    promised = {p.path: p for p in rig.lane.captured(step.shape).pact.promises}
    for path in {**step.numbers, **seen.numbers}:
        if not path.startswith("metadata"):
            continue
        if (path in step.numbers) is not (path in seen.numbers):
            missing = "replay" if path not in step.numbers else "a capture of this batch"
            yield lane.finding(
                "GP10",
                hook="init_metadata_replay",
                field=path,
                expected="the same fields at capture and at replay",
                actual=f"{missing} lacks it",
                step=step,
                help="return one type with the same fields from both hooks, for every batch",
            )
            continue
        now, then = step.numbers[path], seen.numbers[path]
        if not (is_readable(now) and is_readable(then)) or now == then or now != now:  # noqa: PLR0124  NaN
            continue
        promise = promised.get(path)
        if promise is not None and _keeps_bound(promise, then):
            continue
        yield lane.finding(
            "GP08",
            hook="init_metadata_capture",
            field=path,
            expected=f"one value for all batches of {step.shape}: a capture of this batch has {then!r}",
            actual=f"{now!r} is what the graph was recorded with",
            step=step,
            help="take a number that holds for every batch of the shape (the limits'), put it in a tensor, or"
            " declare it bounded() and capture the largest",
        )


def _keeps_bound(promise: Promise, value: Any) -> bool:
    if not promise.bounded or promise.value is None:
        return False
    return bool(value <= promise.value)


# -- contents ----------------------------------------------------------------------------------------


def _compare_contents(lane: LaneUnderTest, rig: Rig, step: Step, seen: Step) -> Findings:
    for path in {**step.leaves, **seen.leaves}:
        if (path in step.leaves) is not (path in seen.leaves):
            if path.startswith("metadata"):
                yield lane.finding(
                    "GP10",
                    hook="init_metadata_replay",
                    field=path,
                    expected="the same fields at capture and at replay",
                    actual="replay lacks it" if path not in step.leaves else "capture lacks it",
                    step=step,
                    help="return one type with the same fields from both hooks, for every batch",
                )
            continue
        mine, theirs = step.leaves[path], seen.leaves[path]
        facts = [(tuple(x.value.shape), x.value.stride(), x.value.dtype) for x in (mine, theirs)]
        if facts[0] != facts[1]:
            yield lane.finding(
                "GP07",
                hook=hook_of(mine),
                field=mine.name,
                expected=f"shape, stride and dtype of a capture of this batch: {facts[1]}",
                actual=str(facts[0]),
                step=step,
                help="lay the field out by the shape alone, never by the batch's contents",
            )
            continue
        yield from _compare_leaf(lane, rig, step, mine, theirs)


def _compare_leaf(lane: LaneUnderTest, rig: Rig, step: Step, mine: Leaf, theirs: Leaf) -> Findings:
    differs = ~same(mine.value, theirs.value)
    garbage = torch.full_like(mine.value, poison_of(mine.value.dtype))
    differs &= ~same(mine.value, garbage) & ~same(theirs.value, garbage)
    if not bool(differs.any()) or mine.slot is None or mine.is_alias:
        return
    if not matters(rig, step, mine, differs, theirs.value):
        return
    is_offsets = bool(_OFFSETS.search(mine.path))
    rule = "GP07" if is_offsets else "GP02"
    if not bool((differs & ~mine.in_tail).any()):
        rule = "GP05" if not is_offsets else "GP07"
    if mine.slot.name == "num_token_non_padded":
        rule = "GP05"
    yield lane.finding(
        rule,
        hook=hook_of(mine),
        field=f"{mine.path}{spell(differs)} ({mine.slot.label})",
        expected=f"what a capture of this batch writes: {values_at(theirs.value, differs)}",
        actual=values_at(mine.value, differs),
        step=step,
        help=_CONTENT_HELP[rule],
    )


_CONTENT_HELP = {
    "GP02": "write in the replay hook what the capture hook writes, from the view: one body for both",
    "GP05": "count padded rows where the graph has padded rows: the shape's counts, not the batch's",
    "GP07": "lay offsets out at replay as at capture: a uniform stride stays uniform, whatever was accepted",
}


# -- what was recorded -------------------------------------------------------------------------------


def trace_of(rig: Rig, shape: GraphShape) -> list[TracedCall]:
    """Return what the graph of a shape recorded, call by call; empty where its driver does not tell."""
    graph = rig.lane.captured(shape).graph
    return (graph.trace or []) if isinstance(graph, Tape) else []


def compare_traces(
    recorded: Sequence[TracedCall], other: Sequence[TracedCall]
) -> Mapping[str, str] | None:
    """Return the first difference of two recordings: its rule, and both sides in words; None for none."""
    for at, (mine, theirs) in enumerate(zip(recorded, other, strict=False)):
        if mine.op != theirs.op:
            return {
                "rule": "GP10",
                "field": f"operation {at}",
                "here": f"{mine.op} at {mine.line}",
                "there": f"{theirs.op} at {theirs.line}",
            }
        for i, (a, b) in enumerate(zip(mine.arguments, theirs.arguments, strict=False)):
            is_tensor = isinstance(a, tuple) or isinstance(b, tuple)
            if a == b or (not is_tensor and not (is_readable(a) and is_readable(b))) or a != a:  # noqa: PLR0124
                continue
            return {
                "rule": "GP07" if is_tensor else "GP08",
                "field": f"argument {i} of {mine.op} at {mine.line}",
                "here": str(a),
                "there": str(b),
            }
    if len(recorded) != len(other):
        longer = max(recorded, other, key=len)
        call = longer[min(len(recorded), len(other))]
        which = ("recorded", "not recorded")
        here, there = which if longer is recorded else which[::-1]
        return {
            "rule": "GP10",
            "field": f"{call.op} at {call.line}",
            "here": here,
            "there": there,
        }
    return None


def _compare_traces(
    lane: LaneUnderTest,
    step: Step,
    recorded: Sequence[TracedCall],
    other: Sequence[TracedCall],
) -> Findings:
    found = compare_traces(recorded, other)
    if found is not None:
        yield lane.finding(
            found["rule"],
            hook="init_metadata_capture",
            field=found["field"],
            expected=f"what a capture of this batch records: {found['there']}",
            actual=f"the graph was recorded with {found['here']}",
            step=step,
            help=TRACE_HELP[found["rule"]],
        )


TRACE_HELP = {
    "GP07": "give recorded operations slices by the shape's counts",
    "GP08": "pass a bound that holds for every batch of the shape, or a tensor; or make the number part of"
    " the shape (`variant`)",
    "GP10": "record the same work whatever the batch, and whatever ran before: no cache that is filled on"
    " first use, no branch on contents, no flag that an earlier phase leaves",
}
