"""`explain`: why a replay is wrong, by what its kernels read.

After a wrong replay there are two sets of reads: those of the graph, which are the captured tensors as they
stand and the captured host numbers; and those of an eager build, by new builders, on the same padded batch.
The model of the kernel runs with the first set, and with single values of the second in their place. The
first value that makes the outputs right is at fault.

    GP01   a tensor whose memory the last build did not return: the graph reads another one
    GP02   live rows of a tensor; GP09 that a build writes after some batches alone
    GP03   padding rows, and the end of a plan, that no build writes; GP04 padding rows with wrong values
    GP08   a host number; GP10 another number of launches, or a tensor that one of both has not
    GP13   a buffer that is too small
    GP14   a tensor that neither builder nor engine keeps, or that the builder replaced after the capture

Does not: run experiments.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import DraftMetadata
from graphpact.batch import ForwardBatch
from graphpact.errors import ConfigError, KernelRefusal
from graphpact.shapes import GraphShape
from graphpact.tensors import same, storage_id
from graphpact_adapters.backend import Built, begins_steps
from graphpact_adapters.reads import copied, field_name, leaves, with_leaves
from graphpact_adapters.under_test import BuilderUnderTest, backend_of
from graphpact_conformance.experiments.base import differences, spell, values_at, wrong_results
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.raised import message_of, rule_of
from graphpact_conformance.subject.records import StepRecord
from graphpact_conformance.world.problems import Problem
from graphpact_tape.poison import is_poison, poison

_HELP = {
    "GP01": "write into the tensor of the capture: a graph reads its memory, and what build() returns is"
    " dropped",
    "GP02": "write it in every build, into persistent memory that the captured metadata refers to",
    "GP03": "write the padding rows in every build too, or clear them: they keep what an earlier batch left",
    "GP04": "give padding rows numbers that the kernel accepts: no query, no key",
    "GP08": "the graph keeps this number: build captures with the largest one, or let the kernel read it from"
    " a tensor",
    "GP09": "make it anew in every build, or compare all that it is made of: pages too, not only counts",
    "GP10": "captures and replays must choose the same launches: decide by what is equal for all batches of"
    " a graph, not by the numbers of one batch",
    "GP13": "size it for the longest request of a step, with the drafts that a step may add",
    "GP14": "allocate it in the constructor, for the largest step, and keep it in the builder: the engine"
    " drops what a capture returned, and its memory goes to other tensors",
}


_OF_LENGTHS = (
    "no graph is involved: in decodes of different lengths the host knows only the number of tokens, and its"
    " offsets share them evenly; take each request's tokens from the device's query_start_loc"
)


@dataclass(frozen=True)
class _Fault:
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


def explain(
    lane: BuilderUnderTest, rig: Rig, step: StepRecord, *, what: str = "a replay"
) -> Iterator[Finding]:
    """Yield findings about a wrong replay: the field that makes it wrong, and what came of it.

    Args:
        lane: The lane.
        rig: The rig of the step, as the step left it.
        step: A step that raised, or whose outputs are wrong.
        what: The kind of step, for texts.
    """
    shape, view = step.shape, rig.observer.view
    if shape is None or view is None or step.stage in ("prepare", "metadata"):
        yield _as_it_is(lane, step, what)
        return
    graph = rig.lane.captured[shape].step.metadata
    if begins_steps(graph):
        yield from _explain_draft(lane, rig, step, view, shape, graph, what)
        return
    captured = copied(backend_of(rig).captured(shape))
    returned = backend_of(rig).returned
    fresh = lane.build(capture=False)
    try:
        right = _right(lane, fresh, step, view, shape)
    except ConfigError as unread:
        yield lane.finding(
            "GP10",
            hook=_hook(rig),
            field="the launches of the kernel",
            expected="those of the capture: what an eager build on this batch returns has a reader too",
            actual=message_of(unread),
            step=step,
            help=_HELP["GP10"],
        )
        return
    if not lane.is_right(fresh, lane.outputs_with(fresh, step.problem, view, right)):
        yield from _wrong_without_a_graph(lane, fresh, step, view, shape, right, what)
        yield from _beside_bounds(lane, rig, fresh, step, captured, right)
        return
    if (other := _other_launches(captured, right)) is not None:
        mine, theirs = other
        yield lane.finding(
            "GP10",
            hook=_hook(rig),
            field="the launches of the kernel",
            expected=f"{theirs}, as an eager build on this batch has them",
            actual=f"{mine}, those of the capture",
            step=step,
            help=_HELP["GP10"],
        )
        return
    faults = _faults(lane, fresh, step.problem, view, captured, right)
    for fault in faults:
        yield _finding(lane, rig, step, fault, returned, view, shape)
    if not faults:
        yield _as_it_is(lane, step, what)


def _explain_draft(
    lane: BuilderUnderTest,
    rig: Rig,
    step: StepRecord,
    view: ForwardBatch,
    shape: GraphShape,
    graph: DraftMetadata,
    what: str,
) -> Iterator[Finding]:
    """Yield a finding about the first step of a draft in which the graph reads something else than it should.

    Every step of a graph reads the tensors of one capture, which the steps before it have changed. So the
    steps are done again, on this metadata and by eager builds of a new instance, and compared one by one.
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
            if got.shape != wanted.shape or _equal(got[:rows], wanted[:rows]):
                continue
            differs = ~same(got[:rows], wanted[:rows])
            freed = bool(is_poison(got).any())
            yield lane.finding(
                "GP14" if freed else "GP02",
                hook="init_metadata_replay",
                field=f"step {part.step} of the draft, {_named(captured, path)}{spell(differs)}",
                expected=f"{values_at(wanted[:rows], differs)}, as an eager build of this step has it",
                actual="poison, in memory that was freed after the capture"
                if freed
                else values_at(got[:rows], differs),
                step=step,
                help=_HELP["GP14"]
                if freed
                else "a draft's graph builds nothing between its steps: bring every tensor that the kernel"
                " reads up to date in the update of the captured metadata, in place",
            )
            return
    yield _as_it_is(lane, step, what)


def explain_capture(lane: BuilderUnderTest, refusal: KernelRefusal, problem: Problem) -> Finding | None:
    """Return a finding about a field whose negative numbers a kernel refuses in a capture.

    The metadata of dummy batches is made once more, up to the first that is refused. The kernel runs on that
    with zeros in the place of a field's negative numbers. The first field that ends the refusal is at fault;
    None if none does.

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
        if lane.outputs_with(rig, problem, view, built).error is not None:
            break
    else:
        return None
    for path, got in leaves(built):
        if not isinstance(got, torch.Tensor) or not bool((is_negative := got < 0).any()):
            continue
        legal = with_leaves(built, {path: got.clamp(min=0)})
        if lane.outputs_with(rig, problem, view, legal).error is None:
            return lane.finding(
                rule_of(refusal),
                hook="init_metadata_capture",
                field=_named(built, path) + spell(is_negative),
                expected="0 or more: the kernel takes the dummy batch of a capture too",
                actual=f"{values_at(got, is_negative)}, which the kernel refuses: {message_of(refusal)}",
                problem=problem,
                help=_HELP["GP04"],
            )
    return None


def _right(
    lane: BuilderUnderTest, fresh: Rig, step: StepRecord, view: ForwardBatch, shape: GraphShape
) -> Built:
    """Return the reads of an eager build on a padded batch, by builders that have built nothing before.

    If they are wrong, then of builders that have captured the shape: rows that no build writes hold what was
    in their memory before.

    Raises:
        ConfigError: No reader knows the metadata of such a build.
    """
    fresh.load(step.problem)
    right: Built = copied(backend_of(fresh).expected(view, shape))
    if not lane.is_right(fresh, lane.outputs_with(fresh, step.problem, view, right)):
        backend_of(fresh).init_metadata_capture(fresh.dummy(shape), shape)
        fresh.load(step.problem)
        right = copied(backend_of(fresh).expected(view, shape))
    return right


def _as_it_is(lane: BuilderUnderTest, step: StepRecord, what: str) -> Finding:
    """Return a finding without a field: what the kernel reads is right, or is not known."""
    if step.error is not None:
        return lane.of_error(step.error, expected=f"{what} of a declared kind of batch runs", step=step)
    rig = lane.rig()
    found = next(iter(wrong_results(lane, rig, step, what=what, help=_HELP["GP10"], rule="GP10")), None)
    return found or lane.finding(
        "GP10", field=what, expected="equal outputs in equal steps", actual="other outputs", step=step
    )


def _wrong_without_a_graph(
    lane: BuilderUnderTest,
    fresh: Rig,
    step: StepRecord,
    view: ForwardBatch,
    shape: GraphShape,
    reads: Built,
    what: str,
) -> Iterator[Finding]:
    """Yield a finding about a build that is wrong also without a graph: on padding, on bounds, or always."""
    alone = fresh.step(step.problem, eagerly=True)
    wrong = lane.outputs_with(fresh, step.problem, view, reads)
    said = message_of(wrong.error) if wrong.error is not None else "the outputs of live requests are wrong"
    rule = (wrong.error is not None and rule_of(wrong.error)) or "GP04"
    if not lane.is_right(fresh, alone):
        exact = lane.build(capture=False)
        backend_of(exact).has_exact_bounds = True
        if lane.is_right(exact, exact.step(step.problem, eagerly=True)):
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
        off = [] if alone.error is not None else differences(fresh, alone, lane.answer(fresh, step.problem))
        yield lane.finding(
            None,
            field="an eager build" + (f": {off[0].what}" if off else ""),
            expected="right outputs without a graph",
            actual=said,
            step=step,
            help=_OF_LENGTHS
            if lane.most_tokens is not None
            else "no graph is involved: check what the builder makes of this batch",
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
        help=_HELP["GP04"],
    )


def _beside_bounds(
    lane: BuilderUnderTest, rig: Rig, fresh: Rig, step: StepRecord, captured: Built, bounded: Built
) -> Iterator[Finding]:
    """Yield findings about fields that a graph has otherwise than a build that is wrong by bounds alone.

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
    is_right = lane.is_right(fresh, lane.outputs_with(fresh, step.problem, view, right))
    if not is_right or _other_launches(captured, right) is not None:
        return
    made = dict(leaves(bounded))
    for fault in _faults(lane, fresh, step.problem, view, captured, right):
        if not _equal(fault.captured, made[fault.path]):  # otherwise the bounds are its cause
            yield _finding(lane, rig, step, fault, backend_of(rig).returned, view, shape)


def _padded_field(
    lane: BuilderUnderTest, fresh: Rig, problem: Problem, view: ForwardBatch, shape: GraphShape, reads: Built
) -> str | None:
    """Return the first tensor whose padding rows are at fault, with its index; None if no single field is.

    With other padding rows in it, all 0 or all 1 in every group, the batch is right.
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
        if not lane.is_right(fresh, lane.outputs_with(fresh, problem, view, changed)):
            continue
        for path, value in values.items():
            bad = (others[path] != value).cpu()
            if bool(bad.any()):
                return f"{_named(reads, path)}{spell(bad)} = {values_at(value.cpu(), bad)}"
    return None


def _other_launches(captured: Built, right: Built) -> tuple[str, str] | None:
    """Return what differs in the structure of two reads, in words; None if nothing does."""
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


def _faults(
    lane: BuilderUnderTest,
    fresh: Rig,
    problem: Problem,
    view: ForwardBatch,
    captured: Built,
    right: Built,
) -> list[_Fault]:
    """Return the fields whose right values make the outputs right: one if one suffices, else a least set."""
    theirs = dict(leaves(right))
    by_field: dict[str, list[str]] = {}
    for path, mine in leaves(captured):
        if not _equal(mine, theirs[path]):
            by_field.setdefault(path.partition("].")[2], []).append(path)
    differing = [*by_field.values()]

    def right_with(changed: Sequence[Sequence[str]]) -> bool:
        built = with_leaves(captured, {path: theirs[path] for paths in changed for path in paths})
        return lane.is_right(fresh, lane.outputs_with(fresh, problem, view, built))

    if right_with([]):
        return []  # the kernel is right with what the graph reads now
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


def _fault(rig: Rig, captured: Built, right: Built, paths: Sequence[str]) -> _Fault:
    first = paths[0]
    is_all = len(paths) == len(captured.reads)
    where = "" if is_all else f"{backend_of(rig).unit} {_split(first)[0]}: "
    name = where + _named(captured, first)
    return _Fault(first, name, dict(leaves(captured))[first], dict(leaves(right))[first])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(same(a, b).all())
    return type(a) is type(b) and bool(a == b)


def _split(path: str) -> tuple[int, str]:
    """Return the group of a leaf, and its path in the reads of that group."""
    group, _, rest = path.removeprefix("reads[").partition("].")
    return int(group), rest


def _named(built: Built, path: str) -> str:
    group, rest = _split(path)
    return field_name(built.reads[group], rest)


def _finding(
    lane: BuilderUnderTest,
    rig: Rig,
    step: StepRecord,
    fault: _Fault,
    returned: Built | None,
    view: ForwardBatch,
    shape: GraphShape,
) -> Finding:
    mine, theirs = fault.captured, fault.right
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return lane.finding(
            "GP08",
            hook=_hook(rig),
            field=fault.field,
            expected=f"{theirs}, as an eager build on this batch has it",
            actual=f"{mine}, the number of the capture",
            step=step,
            help=_HELP["GP08"],
        )
    both = _overlap(mine, theirs)
    is_short = any(m < t for m, t in zip(mine.shape, theirs.shape, strict=False))
    if step.error is not None and rule_of(step.error) == "GP13" and is_short:
        return lane.finding(
            "GP13",
            hook=_hook(rig),
            field=fault.field,
            expected=f"room for {tuple(theirs.shape)}, as an eager build on this batch has it",
            actual=f"{tuple(mine.shape)}, which the kernel leaves: {message_of(step.error)}",
            step=step,
            help=_HELP["GP13"],
        )
    if both is None or (mine.shape != theirs.shape and bool(same(*both).all())):
        return lane.finding(
            "GP05",
            hook=_hook(rig),
            field=fault.field,
            expected=f"shape {tuple(theirs.shape)}",
            actual=f"shape {tuple(mine.shape)}, that of the capture",
            step=step,
            help=_HELP["GP10"],
        )
    mine, theirs = both
    differs = ~same(mine, theirs)
    rule, how = _rule_of(lane, rig, step, fault, returned, view, shape, differs)
    is_freed = rule in ("GP01", "GP14") and bool(is_poison(mine).any())
    return lane.finding(
        rule,
        hook=_hook(rig),
        field=fault.field + spell(differs),
        expected=f"{values_at(theirs, differs)}, as an eager build on this batch has it",
        actual=("the freed memory" if is_freed else values_at(mine, differs)) + how,
        step=step,
        help=_HELP[rule],
    )


def _overlap(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rows and columns that both tensors have: a buffer may be longer than the batch needs.

    None for tensors of different dimensions.
    """
    if mine.dim() != theirs.dim():
        return None
    sizes = tuple(slice(min(pair)) for pair in zip(mine.shape, theirs.shape, strict=True))
    return mine[sizes], theirs[sizes]


def _rule_of(
    lane: BuilderUnderTest,
    rig: Rig,
    step: StepRecord,
    fault: _Fault,
    returned: Built | None,
    view: ForwardBatch,
    shape: GraphShape,
    differs: torch.Tensor,
) -> tuple[str, str]:
    """Return the rule that a tensor with wrong contents breaks, and how, in words."""
    backend, captured = backend_of(rig), rig.lane.captured[shape]
    tensor = dict(leaves(backend.captured(shape)))[fault.path]
    if (found := _rule_of_memory(lane, rig, fault.path, tensor, returned, shape)) is not None:
        return found
    before = tensor.clone()
    poison(tensor)
    backend.init_metadata_replay(view, shape, captured.step.metadata)
    with contextlib.suppress(Exception):  # of kernels that read poison; a builder's own nodes come first
        captured.graph.replay()
    unwritten = is_poison(tensor[tuple(map(slice, differs.shape))]).to(differs.device)
    tensor.copy_(before)
    return _rule_of_contents(lane, rig, step, shape, differs, unwritten)


def _rule_of_memory(
    lane: BuilderUnderTest,
    rig: Rig,
    path: str,
    tensor: torch.Tensor,
    returned: Built | None,
    shape: GraphShape,
) -> tuple[str, str] | None:
    """Return the rule that a tensor's memory breaks, and how, in words; None if its contents are at fault."""
    backend, graph = backend_of(rig), rig.lane.captured[shape].graph
    if storage_id(tensor) not in {storage_id(each) for each in graph.external_tensors() or ()}:
        return "GP02", ", computed in the graph"
    last = None if returned is None else dict(leaves(returned)).get(path)
    is_kept = backend.keeps(tensor)
    if isinstance(last, torch.Tensor) and storage_id(last) != storage_id(tensor):
        if not is_kept and _returns_it_again(lane, path, shape):
            return "GP14", " of the capture, which the builder has replaced since"
        where = ", in the memory of the capture" if is_kept else " of the capture, which nothing keeps"
        return "GP01", f"{where}; {backend.calls['replay']}() returned another tensor"
    if path in backend.freed.get(shape, ()) or not is_kept:
        return "GP14", " of the capture, which neither the builder nor the engine keeps"
    return None


def _rule_of_contents(
    lane: BuilderUnderTest,
    rig: Rig,
    step: StepRecord,
    shape: GraphShape,
    differs: torch.Tensor,
    unwritten: torch.Tensor,
) -> tuple[str, str]:
    """Return the rule of a tensor in the right memory, and how it is broken, in words."""
    is_unwritten, call = bool((unwritten & differs).any()), f"{backend_of(rig).calls['replay']}()"
    first, tail = _first_of_tail(step, shape, unwritten)
    if not bool(differs[:first].any()):
        return (
            ("GP03", f", in {tail}, which {call} does not write")
            if is_unwritten
            else ("GP04", f", in {tail}")
        )
    if not is_unwritten:
        return "GP02", f", which {call} wrote"
    if lane.is_right(afresh := lane.build(), afresh.step(step.problem)):
        return "GP09", f", made of an earlier batch, which {call} kept"
    return "GP02", f", which {call} does not write"


def _returns_it_again(lane: BuilderUnderTest, path: str, shape: GraphShape) -> bool:
    """Return whether a build on the dummy itself returns the memory of the capture."""
    rig = lane.build()
    backend, captured = backend_of(rig), rig.lane.captured[shape].step
    backend.init_metadata_replay(captured.view, shape, captured.metadata)
    found = [dict(leaves(built)).get(path) for built in (backend.captured(shape), backend.returned)]
    storages = [storage_id(each) for each in found if isinstance(each, torch.Tensor)]
    return len(storages) == len(found) and len({*storages}) == 1


def _first_of_tail(step: StepRecord, shape: GraphShape, unwritten: torch.Tensor) -> tuple[int, str]:
    """Return the first row of a tensor's tail, and what the tail is, in words.

    A tensor with rows of requests or tokens ends with their padding; any other ends where a build stops.
    """
    live, rows = step.problem.batch_size, len(unwritten)
    if rows in (shape.batch_size, shape.batch_size + 1):
        return live + rows - shape.batch_size, "padding rows"
    if rows == shape.num_tokens:
        return len(step.problem.tokens), "padding tokens"
    written = (~unwritten).reshape(rows, -1).any(1).nonzero()
    return (int(written[-1]) + 1 if len(written) else rows), "the end of a plan"


def _hook(rig: Rig) -> str:
    return "init_metadata_replay" if backend_of(rig).returned is not None else "init_metadata_capture"
