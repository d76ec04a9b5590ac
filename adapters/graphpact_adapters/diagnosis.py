"""`explain_replay`: finds why a replay is wrong, by the data that its kernels read.

After a wrong replay there are two sets of reads. The reads of the graph are the captured tensors with their
present contents, and the captured host numbers. The other set is that of an eager build, by new builders, on
the same padded batch. If the second set is right, `graphpact_adapters.faults` finds the wrong fields of the
first set. If the second set is wrong too, the fault is in padding rows, in the engine's bounds, or in the
build itself. A draft is compared step by step.

Does not: run experiments, or choose rules; see `graphpact_adapters.faults`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from graphpact.attention import DraftMetadata
from graphpact.batch import ForwardBatch
from graphpact.errors import ConfigError, KernelRefusal, ReplayError
from graphpact.shapes import GraphShape
from graphpact.tensors import same
from graphpact_adapters.backend import Built, begins_steps
from graphpact_adapters.builder_lanes import (
    ROOM,
    backend_of,
    ended_right,
    outputs_with,
    replays_with_room,
)
from graphpact_adapters.faults import (
    equal_leaves,
    faults_of,
    finding_of,
    help_of,
    hook_of_read,
    named,
    other_launches,
)
from graphpact_adapters.read_leaves import copied, leaves, with_leaves
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences, spell, values_at, wrong_results
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.raised import message_of, need_of, rule_of
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.poison import is_poison

_OF_LENGTHS = (
    "no graph is involved: in decodes of different lengths the host knows only the number of tokens, and its"
    " offsets divide them evenly; take each request's tokens from the device's query_start_loc"
)


def explain_replay(
    lane: LaneUnderTest, rig: Rig, step: StepRecord, *, what: str = "a replay"
) -> Iterator[Finding]:
    """Yield findings about a wrong replay: the field that makes it wrong, and the effect.

    Args:
        lane: The lane.
        rig: The rig of the step, in its state after the step.
        step: A step that raised an error, or whose outputs are wrong.
        what: The kind of step, for texts.
    """
    shape, view = step.shape, rig.observer.view
    if isinstance(step.error, ReplayError):  # a fast tape raises it only for wrong use of tasks
        yield _of_tasks(lane, rig, step, step.error)
        return
    if shape is None or view is None or step.stage in ("prepare", "metadata"):
        yield _too_small(lane, rig, step, what) or _as_it_is(lane, step, what)
        return
    graph = rig.lane.captured[shape].context.metadata
    if begins_steps(graph):
        yield from _explain_draft(lane, rig, step, view, shape, graph, what)
        return
    captured = copied(backend_of(rig).captured(shape))
    returned = backend_of(rig).returned
    fresh = lane.build(capture=False)
    try:
        right = _right(lane, fresh, step, view, shape)
    except ConfigError as unread:
        if need_of(unread) is not None:
            raise
        yield lane.finding(
            "GP10",
            hook=hook_of_read(rig),
            field="the launches of the kernel",
            expected="those of the capture: the metadata of an eager build on this batch has a reader too",
            actual=message_of(unread),
            step=step,
            help=help_of(rig, "GP10"),
        )
        return
    if not ended_right(lane, fresh, outputs_with(fresh, step.problem, view, right)):
        yield from _wrong_without_a_graph(lane, fresh, step, view, shape, right, what)
        yield from _beside_bounds(lane, rig, fresh, step, captured, right)
        return
    if (other := other_launches(captured, right)) is not None:
        mine, theirs = other
        yield lane.finding(
            "GP10",
            hook=hook_of_read(rig),
            field="the launches of the kernel",
            expected=f"{theirs}, as an eager build on this batch has them",
            actual=f"{mine}, those of the capture",
            step=step,
            help=help_of(rig, "GP10"),
        )
        return
    faults = faults_of(lane, fresh, step.problem, view, captured, right)
    for fault in faults:
        yield finding_of(lane, rig, step, fault, returned, view, shape)
    if not faults:
        yield _as_it_is(lane, step, what)


def _explain_draft(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    view: ForwardBatch,
    shape: GraphShape,
    graph: DraftMetadata,
    what: str,
) -> Iterator[Finding]:
    """Yield a finding about the first step of a draft in which the graph reads wrong data.

    All steps of a graph read the tensors of one capture, and earlier steps have changed them. So this repeats
    the steps on this metadata and with eager builds of a new instance, and compares them one by one.
    """
    fresh = lane.build(capture=False)
    fresh.load(step.problem)
    rig.load(step.problem)
    mine, theirs = backend_of(rig), backend_of(fresh)
    mine.lend(view, shape)
    theirs.lend(view, shape)
    live = step.problem.batch_size
    for part in graph.steps:
        captured = mine.begin_step(part)
        right = theirs.begin_step(replace(part, built=None))
        for (path, got), (_, wanted) in zip(leaves(captured), leaves(right), strict=False):
            if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
                continue
            rows = live * len(wanted) // max(shape.batch_size, 1) + (len(wanted) > shape.batch_size)
            if got.shape != wanted.shape or equal_leaves(got[:rows], wanted[:rows]):
                continue
            differs = ~same(got[:rows], wanted[:rows])
            freed = bool(is_poison(got).any())
            yield lane.finding(
                "GP14" if freed else "GP02",
                hook="init_metadata_replay",
                field=f"step {part.step} of the draft, {named(captured, path)}{spell(differs)}",
                expected=f"{values_at(wanted[:rows], differs)}, as an eager build of this step has it",
                actual="poison, in memory that was freed after the capture"
                if freed
                else values_at(got[:rows], differs),
                step=step,
                help=help_of(rig, "GP14")
                if freed
                else "a draft's graph builds nothing between its steps: bring every tensor that the kernel"
                " reads up to date in the update of the captured metadata, in place",
            )
            return
    yield _as_it_is(lane, step, what)


def explain_capture(lane: LaneUnderTest, refusal: KernelRefusal, problem: Problem) -> Finding | None:
    """Return a finding about a field whose negative numbers a kernel refuses in a capture.

    This makes the metadata of dummy batches again, until the kernel refuses one. Then it replaces the
    negative numbers of one field after another by zeros. The first field whose zeros the kernel accepts is at
    fault. Return None if there is no such field.

    Args:
        lane: The lane.
        refusal: The error of its capture.
        problem: The batch that the finding shows.
    """
    rig = lane.build(capture=False)
    backend = backend_of(rig)
    for shape in sorted(rig.planned, key=lambda at: at.num_tokens, reverse=True):
        view = rig.dummy(shape)
        backend.record_metadata(view, backend.init_metadata_capture(view, shape))
        built = copied(backend.captured(shape))
        if outputs_with(rig, problem, view, built).error is not None:
            break
    else:
        return None
    for path, got in leaves(built):
        if not isinstance(got, torch.Tensor) or not bool((is_negative := got < 0).any()):
            continue
        legal = with_leaves(built, {path: got.clamp(min=0)})
        if outputs_with(rig, problem, view, legal).error is None:
            return lane.finding(
                rule_of(refusal),
                hook="init_metadata_capture",
                field=named(built, path) + spell(is_negative),
                expected="0 or more: the kernel takes the dummy batch of a capture too",
                actual=f"{values_at(got, is_negative)}, which the kernel refuses: {message_of(refusal)}",
                problem=problem,
                help=help_of(rig, "GP04"),
            )
    return None


def _right(lane: LaneUnderTest, fresh: Rig, step: StepRecord, view: ForwardBatch, shape: GraphShape) -> Built:
    """Return the reads of an eager build on a padded batch, by builders that have built nothing before.

    If these are wrong, return the reads of builders that have captured the shape before: rows that no build
    writes keep the earlier contents of their memory.

    Raises:
        ConfigError: No reader knows the metadata of such a build.
    """
    fresh.load(step.problem)
    right: Built = copied(backend_of(fresh).expected(view, shape))
    if not ended_right(lane, fresh, outputs_with(fresh, step.problem, view, right)):
        backend_of(fresh).init_metadata_capture(fresh.dummy(shape), shape)
        fresh.load(step.problem)
        right = copied(backend_of(fresh).expected(view, shape))
    return right


def _too_small(lane: LaneUnderTest, rig: Rig, step: StepRecord, what: str) -> Finding | None:
    """Return a finding about an error of the author's code that more room ends; None if it does not."""
    if step.error is None or lane.raised_at(step.error) is None or not replays_with_room(lane, step.problem):
        return None
    subject = backend_of(rig).words.subject
    return lane.finding(
        "GP13",
        hook="init_metadata_replay",
        field=f"a buffer of the {subject}",
        expected=f"{what} runs, as it does if the configuration allows {ROOM} times the requests and tokens",
        actual=message_of(step.error),
        step=step,
        error=step.error,
        help=help_of(rig, "GP13"),
    )


def _as_it_is(lane: LaneUnderTest, step: StepRecord, what: str) -> Finding:
    """Return a finding without a field, because the reads of the kernel are right or unknown."""
    if step.error is not None:
        return lane.of_error(step.error, expected=f"{what} of a declared kind of batch runs", step=step)
    rig = lane.rig()
    found = next(
        iter(wrong_results(lane, rig, step, what=what, help=help_of(rig, "GP10"), rule="GP10")), None
    )
    return found or lane.finding(
        "GP10", field=what, expected="equal outputs in equal steps", actual="other outputs", step=step
    )


def _of_tasks(lane: LaneUnderTest, rig: Rig, step: StepRecord, error: ReplayError) -> Finding:
    """Return a finding about tasks that were not updated correctly."""
    return lane.finding(
        error.rule,
        hook="init_metadata_replay",
        field="the tasks of the graph",
        expected="for each replay every task is updated once, in captured order, with arguments that stay in"
        " place until the replay has run",
        actual=message_of(error),
        step=step,
        help=help_of(rig, "GP21") if error.rule == "GP21" else error.hint,
    )


def _wrong_without_a_graph(
    lane: LaneUnderTest,
    fresh: Rig,
    step: StepRecord,
    view: ForwardBatch,
    shape: GraphShape,
    reads: Built,
    what: str,
) -> Iterator[Finding]:
    """Yield a finding about a build that is wrong without a graph too: by padding, by bounds, or always."""
    alone = fresh.step(step.problem, eagerly=True)
    wrong = outputs_with(fresh, step.problem, view, reads)
    said = message_of(wrong.error) if wrong.error is not None else "the outputs of live requests are wrong"
    rule = (wrong.error is not None and rule_of(wrong.error)) or "GP04"
    if not ended_right(lane, fresh, alone):
        exact = lane.build(capture=False)
        backend_of(exact).has_exact_bounds = True
        if ended_right(lane, exact, exact.step(step.problem, eagerly=True)):
            yield lane.finding(
                "GP09",
                hook="init_metadata_replay",
                field=backend_of(fresh).bounds,
                expected="right outputs, as when each bound is the length itself",
                actual=said,
                step=step,
                help="an engine that speculates knows only that at most all drafts were accepted: plan with"
                " the bounds, and take lengths from the device",
            )
            return
        subject = backend_of(fresh).words.subject
        off = [] if alone.error is not None else differences(fresh, alone, lane.answer(fresh, step.problem))
        yield lane.finding(
            None,
            field="an eager build" + (f": {off[0].what}" if off else ""),
            expected="right outputs without a graph",
            actual=said,
            step=step,
            help=_OF_LENGTHS
            if lane.foreign.most_tokens is not None
            else f"no graph is involved: check the metadata that the {subject} makes for this batch",
        )
        return
    live = step.problem.batch_size
    rows = "padding rows" if shape.batch_size > live else "padding tokens"
    yield lane.finding(
        rule,
        hook="init_metadata_replay",
        field=_padded_field(lane, fresh, step.problem, view, shape, reads) or f"{what}: {rows}",
        expected=f"the batch is right without padding, so {rows} without queries and keys change nothing",
        actual=said,
        step=step,
        help=help_of(fresh, "GP04"),
    )


def _beside_bounds(
    lane: LaneUnderTest, rig: Rig, fresh: Rig, step: StepRecord, captured: Built, bounded: Built
) -> Iterator[Finding]:
    """Yield findings about fields that are wrong in the graph, besides those that only bounds make wrong.

    Args:
        lane: The lane.
        rig: The rig of the step.
        fresh: A rig of new builders.
        step: A wrong step.
        captured: What the graph reads.
        bounded: What an eager build on this batch reads.
    """
    shape, view = step.shape, rig.observer.view
    assert shape is not None  # noqa: S101  the step was replayed
    assert view is not None  # noqa: S101
    backend_of(fresh).has_exact_bounds = True
    right = copied(backend_of(fresh).expected(view, shape))
    is_right = ended_right(lane, fresh, outputs_with(fresh, step.problem, view, right))
    if not is_right or other_launches(captured, right) is not None:
        return
    made = dict(leaves(bounded))
    for fault in faults_of(lane, fresh, step.problem, view, captured, right):
        if not equal_leaves(fault.captured, made[fault.path]):  # otherwise the bounds are the cause
            yield finding_of(lane, rig, step, fault, backend_of(rig).returned, view, shape)


def _padded_field(
    lane: LaneUnderTest, fresh: Rig, problem: Problem, view: ForwardBatch, shape: GraphShape, reads: Built
) -> str | None:
    """Return the first tensor whose padding rows are at fault, with their indices; None if there is none.

    A tensor is at fault if the batch is right with its padding rows set to 0, or to 1, in every group.
    """
    fields: dict[str, dict[str, torch.Tensor]] = {}
    for path, value in leaves(reads):
        if isinstance(value, torch.Tensor) and "slot_mapping" not in path and len(value):
            fields.setdefault(path.partition(".")[2], {})[path] = value
    for values, number in itertools.product(fields.values(), (0, 1)):
        others = dict[str, torch.Tensor]()
        for path, value in values.items():
            others[path] = value.clone()
            others[path][problem.batch_size * len(value) // shape.batch_size :] = number
        changed = with_leaves(reads, others)
        if not ended_right(lane, fresh, outputs_with(fresh, problem, view, changed)):
            continue
        for path, value in values.items():
            bad = (others[path] != value).cpu()
            if bool(bad.any()):
                return f"{named(reads, path)}{spell(bad)} = {values_at(value.cpu(), bad)}"
    return None
