"""`faults_of`: finds the fields that make a graph wrong, by trial. `finding_of`: the rule that each breaks.

The model of the kernel runs on the reads of the graph, with single values replaced by those of an eager
build. The first value whose replacement makes the outputs right is at fault. Its memory, and whether a build
writes it, decide the rule:

    GP01   a tensor that the graph reads in other memory than the last build returned
    GP02   live rows of a tensor
    GP03   padding rows, or the end of a plan, that no build writes
    GP04   padding rows with wrong values
    GP08   a host number
    GP09   live rows of a tensor that a build writes only after some batches
    GP10   another number of launches, or a tensor that is missing in the graph or in the eager build
    GP13   a buffer that is too small
    GP14   a tensor that neither builder nor engine keeps, or that the builder replaced after the capture
    GP21   an argument of a task to which the engine's update gives another value

Does not: know why an eager build is wrong; see `graphpact_adapters.diagnosis`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact.tensors import same, storage_id
from graphpact_adapters.backend import Built
from graphpact_adapters.builder_lanes import backend_of, ended_right, outputs_with
from graphpact_adapters.read_leaves import field_name, leaves, with_leaves
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import spell, values_at
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.raised import message_of, rule_of
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.poison import is_poison, poison

HELP = {
    "GP01": "write into the tensor of the capture: a graph reads its memory, not that of a new tensor from"
    " {replay}()",
    "GP02": "write it in every {replay}(), into persistent memory that the captured metadata refers to",
    "GP03": "write the padding rows in every {replay}() too, or clear them: they keep the data of an earlier"
    " batch",
    "GP04": "give padding rows numbers that the kernel accepts: no query, no key",
    "GP08": "the graph keeps this number: build captures with the largest one, or let the kernel read it from"
    " a tensor; if the engine updates it in the graph for each replay, as on an NPU, name it in tasks",
    "GP09": "make it again in every {replay}(), or compare all of its inputs: pages too, not only counts",
    "GP10": "captures and replays must choose the same launches: decide by what is equal for all batches of"
    " a graph, not by the numbers of one batch",
    "GP13": "size it for the longest request of a step, with the drafts that a step may add",
    "GP14": "allocate it in {allocates}, for the largest step, and keep it in the {subject}: the engine"
    " drops the tensors of a capture, and their memory goes to other tensors",
    "GP21": "update all tasks, in their order, and give each one the metadata that {replay}() made for its"
    " layer in this step",
}
"""The next action, by rule, with placeholders for the engine's names; see `help_of`."""


def help_of(rig: Rig, rule: str) -> str:
    """Return the next action after a breach of a rule, in the words of the engine."""
    backend = backend_of(rig)
    return HELP[rule].format(replay=backend.calls["replay"], **asdict(backend.words))


@dataclass(frozen=True)
class FieldFault:
    """A field whose captured value is at fault, in one KV-cache group or in several.

    Args:
        path: The leaf of the first such group.
        field: The field, as findings name it.
        captured: The value of the leaf.
        right: The value that an eager build gives.
    """

    path: str
    field: str
    captured: Any
    right: Any


def other_launches(captured: Built, right: Built) -> tuple[str, str] | None:
    """Return a description of each of two reads where their structure differs; None if it does not."""
    for mine, theirs in zip(captured.reads, right.reads, strict=True):
        a, b = dict(leaves(mine)), dict(leaves(theirs))
        paths = [path for path in {**a, **b} if _form(a, path) is not _form(b, path)]
        if paths:
            return _words_of(mine, a, paths), _words_of(theirs, b, paths)
    return None


_ABSENT = object()


def _form(found: dict[str, Any], path: str) -> object:
    """Return the type of a leaf."""
    return type(found[path]) if path in found else _ABSENT


def _words_of(reads: Any, found: dict[str, Any], paths: Sequence[str]) -> str:
    def said(path: str) -> str:
        value = found.get(path, _ABSENT)
        if value is None or value is _ABSENT:
            return f"no {field_name(reads, path)}"
        return f"{field_name(reads, path)}={'a tensor' if isinstance(value, torch.Tensor) else value}"

    return ", ".join(map(said, paths))


def faults_of(
    lane: LaneUnderTest,
    fresh: Rig,
    problem: Problem,
    view: ForwardBatch,
    captured: Built,
    right: Built,
) -> list[FieldFault]:
    """Return the fields whose right values make the outputs right: one if it suffices, else a minimal set."""
    theirs = dict(leaves(right))
    by_field: dict[str, list[str]] = {}
    for path, mine in leaves(captured):
        if not equal_leaves(mine, theirs[path]):
            by_field.setdefault(path.partition("].")[2], []).append(path)
    differing = [*by_field.values()]

    def right_with(changed: Sequence[Sequence[str]]) -> bool:
        built = with_leaves(captured, {path: theirs[path] for paths in changed for path in paths})
        return ended_right(lane, fresh, outputs_with(fresh, problem, view, built))

    if right_with([]):
        return []  # the kernel is right with the present reads of the graph
    for each in differing:
        if right_with([each]):
            return [_fault(fresh, captured, right, each)]
    needed = differing
    if not right_with(needed):
        return []
    for each in differing:
        fewer = [other for other in needed if other is not each]
        if right_with(fewer):
            needed = fewer
    return [_fault(fresh, captured, right, each) for each in needed]


def _fault(rig: Rig, captured: Built, right: Built, paths: Sequence[str]) -> FieldFault:
    first = paths[0]
    is_all = len(paths) == len(captured.reads)
    where = "" if is_all else f"{backend_of(rig).unit} {_split(first)[0]}: "
    name = where + named(captured, first)
    return FieldFault(first, name, dict(leaves(captured))[first], dict(leaves(right))[first])


def equal_leaves(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal: tensors of one shape with the same contents, or equal numbers."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(same(a, b).all())
    return type(a) is type(b) and bool(a == b)


def _split(path: str) -> tuple[int, str]:
    """Return the group of a leaf, and its path in the reads of that group."""
    group, _, rest = path.removeprefix("reads[").partition("].")
    return int(group), rest


def named(built: Built, path: str) -> str:
    """Return the author's name of a leaf."""
    group, rest = _split(path)
    return field_name(built.reads[group], rest)


def finding_of(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    fault: FieldFault,
    returned: Built | None,
    view: ForwardBatch,
    shape: GraphShape,
) -> Finding:
    """Return the finding about a fault: its rule, with both values.

    Args:
        lane: The lane.
        rig: The rig of the step.
        step: The wrong step.
        fault: The field at fault.
        returned: The reads of kernels from the result of the last build; None if they are unknown.
        view: The padded batch.
        shape: The replayed shape.
    """
    mine, theirs = fault.captured, fault.right
    hook = hook_of_read(rig, fault.path)
    if backend_of(rig).updates(fault.path, backend_of(rig).captured(shape)):
        where, (wrong, right) = "", (str(mine), str(theirs))
        if isinstance(mine, torch.Tensor) and (both := _overlap(mine, theirs)) is not None:
            differs = ~same(*both)
            where, wrong, right = spell(differs), values_at(both[0], differs), values_at(both[1], differs)
        return lane.finding(
            "GP21",
            hook=hook,
            field=fault.field + where,
            expected=f"{right}, as an eager build on this batch has it",
            actual=f"{wrong}, which the update of a task gave",
            step=step,
            help=help_of(rig, "GP21"),
        )
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return lane.finding(
            "GP08",
            hook=hook,
            field=fault.field,
            expected=f"{theirs}, as an eager build on this batch has it",
            actual=f"{mine}, the number of the capture",
            step=step,
            help=help_of(rig, "GP08"),
        )
    both = _overlap(mine, theirs)
    is_short = any(m < t for m, t in zip(mine.shape, theirs.shape, strict=False))
    if step.error is not None and rule_of(step.error) == "GP13" and is_short:
        return lane.finding(
            "GP13",
            hook=hook,
            field=fault.field,
            expected=f"room for {tuple(theirs.shape)}, as an eager build on this batch has it",
            actual=f"{tuple(mine.shape)}, which the kernel leaves: {message_of(step.error)}",
            step=step,
            help=help_of(rig, "GP13"),
        )
    if both is None or (mine.shape != theirs.shape and bool(same(*both).all())):
        return lane.finding(
            "GP05",
            hook=hook,
            field=fault.field,
            expected=f"shape {tuple(theirs.shape)}",
            actual=f"shape {tuple(mine.shape)}, that of the capture",
            step=step,
            help=help_of(rig, "GP10"),
        )
    mine, theirs = both
    differs = ~same(mine, theirs)
    rule, how = _rule_of(lane, rig, step, fault, returned, view, shape, differs)
    is_freed = rule in ("GP01", "GP14") and bool(is_poison(mine).any())
    return lane.finding(
        rule,
        hook=hook,
        field=fault.field + spell(differs),
        expected=f"{values_at(theirs, differs)}, as an eager build on this batch has it",
        actual=("the freed memory" if is_freed else values_at(mine, differs)) + how,
        step=step,
        help=help_of(rig, rule),
    )


def _overlap(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rows and columns that both tensors have, or None for different numbers of dimensions.

    A buffer may be longer than the batch needs.
    """
    if mine.dim() != theirs.dim():
        return None
    sizes = tuple(slice(min(pair)) for pair in zip(mine.shape, theirs.shape, strict=True))
    return mine[sizes], theirs[sizes]


def _rule_of(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    fault: FieldFault,
    returned: Built | None,
    view: ForwardBatch,
    shape: GraphShape,
    differs: torch.Tensor,
) -> tuple[str, str]:
    """Return the rule that a tensor with wrong contents breaks, and a description of the fault."""
    backend, captured = backend_of(rig), rig.lane.captured[shape]
    tensor = dict(leaves(backend.captured(shape)))[fault.path]
    call = f"{backend.call_of(_split(fault.path)[0])}()"
    if (found := _rule_of_memory(lane, rig, fault.path, tensor, returned, shape)) is not None:
        return found
    before = tensor.clone()
    poison(tensor)
    backend.init_metadata_replay(view, shape, captured.context.metadata)
    with contextlib.suppress(Exception):  # kernels may refuse poison; nodes of the builder run before them
        captured.graph.replay()
    unwritten = is_poison(tensor[tuple(map(slice, differs.shape))]).to(differs.device)
    tensor.copy_(before)
    return _rule_of_contents(lane, step, shape, differs, unwritten, call)


def _rule_of_memory(
    lane: LaneUnderTest,
    rig: Rig,
    path: str,
    tensor: torch.Tensor,
    returned: Built | None,
    shape: GraphShape,
) -> tuple[str, str] | None:
    """Return the rule that a tensor's memory breaks, and a description; None if its contents are at fault."""
    backend, graph = backend_of(rig), rig.lane.captured[shape].graph
    if storage_id(tensor) not in {storage_id(each) for each in graph.external_tensors() or ()}:
        return "GP02", ", computed in the graph"
    last = None if returned is None else dict(leaves(returned)).get(path)
    is_kept = backend.keeps(tensor)
    if isinstance(last, torch.Tensor) and storage_id(last) != storage_id(tensor):
        if not is_kept and _returns_it_again(lane, path, shape):
            return "GP14", f" of the capture, which the {backend.words.subject} has replaced since"
        where = ", in the memory of the capture" if is_kept else " of the capture, which nothing keeps"
        return "GP01", f"{where}; {backend.call_of(_split(path)[0])}() returned another tensor"
    if path in backend.freed.get(shape, ()) or not is_kept:
        return "GP14", f" of the capture, which neither the {backend.words.subject} nor the engine keeps"
    return None


def _rule_of_contents(
    lane: LaneUnderTest,
    step: StepRecord,
    shape: GraphShape,
    differs: torch.Tensor,
    unwritten: torch.Tensor,
    call: str,
) -> tuple[str, str]:
    """Return the rule that a tensor in the right memory breaks, and a description with ``call``."""
    is_unwritten = bool((unwritten & differs).any())
    first, tail = _first_of_tail(step, shape, unwritten)
    if not bool(differs[:first].any()):
        return (
            ("GP03", f", in {tail}, which {call} does not write")
            if is_unwritten
            else ("GP04", f", in {tail}")
        )
    if not is_unwritten:
        return "GP02", f", which {call} wrote"
    if ended_right(lane, afresh := lane.build(), afresh.step(step.problem)):
        return "GP09", f", made of an earlier batch, which {call} kept"
    return "GP02", f", which {call} does not write"


def _returns_it_again(lane: LaneUnderTest, path: str, shape: GraphShape) -> bool:
    """Return whether a build on the dummy batch returns the memory of the capture again."""
    rig = lane.build()
    backend, captured = backend_of(rig), rig.lane.captured[shape].context
    backend.init_metadata_replay(captured.view, shape, captured.metadata)
    found = [dict(leaves(built)).get(path) for built in (backend.captured(shape), backend.returned)]
    storages = [storage_id(each) for each in found if isinstance(each, torch.Tensor)]
    return len(storages) == len(found) and len({*storages}) == 1


def _first_of_tail(step: StepRecord, shape: GraphShape, unwritten: torch.Tensor) -> tuple[int, str]:
    """Return the first row of a tensor's tail, and a description of the tail.

    The tail of a tensor with rows of requests or tokens is their padding. The tail of any other tensor begins
    where a build stops writing.
    """
    live, rows = step.problem.batch_size, len(unwritten)
    if rows in (shape.batch_size, shape.batch_size + 1):
        return live + rows - shape.batch_size, "padding rows"
    if rows == shape.num_tokens:
        return len(step.problem.tokens), "padding tokens"
    written = (~unwritten).reshape(rows, -1).any(1).nonzero()
    return (int(written[-1]) + 1 if len(written) else rows), "the end of a plan"


def hook_of_read(rig: Rig, path: str = "reads[0].") -> str:
    """Return the hook that prepared a leaf: a call of the last replay, or the capture before any replay."""
    backend = backend_of(rig)
    return "init_metadata_capture" if backend.returned is None else backend.call_of(_split(path)[0])
