"""Comparisons of the results of two steps, and of a step with the oracle; edits of the inputs of a replay.

Does not: check a rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import Breach
from graphpact.pact import walk
from graphpact.tensors import equal, same
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.attended_slots import DraftRow, attended_slots
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.model import ROWS_OF_PASS
from graphpact_conformance.oracle import Answer
from graphpact_conformance.records.raised import CannotCaptureError, same_error
from graphpact_conformance.records.steps import Leaf, Ready, StepRecord, Undo, live_rows
from graphpact_conformance.results import Finding
from graphpact_tape.writes import write

# -- comparing ---------------------------------------------------------------------------------------

_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}
_DEFAULT_TOLERANCE = 1e-1  # for all other dtypes


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the allowed error of one or two attention layers against float64, for inputs of scale 1."""
    return _TOLERANCE.get(dtype, _DEFAULT_TOLERANCE)


def tolerance_in(rig: Rig, output: str | None = None) -> float:
    """Return the allowed error of an output, or of the KV cache after the last pass, against float64.

    Rounding errors add up over passes if each pass reads the results of the one before.

    Args:
        rig: The rig.
        output: Name of the output. None means the KV cache.
    """
    passes = rig.config.case.num_steps if rig.feeds_itself else 1
    if output is not None and output.startswith(ROWS_OF_PASS) and rig.feeds_itself:
        passes = 1 + int(output.removeprefix(ROWS_OF_PASS))
    return passes * tolerance_of(rig.config.dtype)


Rows = Mapping[str, torch.Tensor]
"""Outputs by name."""


def same_tensors(a: Rows | None, b: Rows | None) -> bool:
    """Return whether two sets of outputs have the same names and bits, or are both None."""
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(equal(tensor, b[name]) for name, tensor in a.items())


def first_off(rig: Rig, rows: Rows, expected: Rows) -> tuple[str, torch.Tensor] | None:
    """Return the first output that is wrong by more than rounding, and its `excess`; None if there is none.

    Outputs are checked in the order of passes.
    """
    for name in sorted(expected, key=lambda n: (n != "rows", not n.startswith(ROWS_OF_PASS))):
        off = excess(rows[name], expected[name], tolerance_in(rig, name))
        if off.numel() and float(off.max()) > 1:
            return name, off
    return None


def excess(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return ``|actual - expected|`` divided by ``tolerance * (1 + |expected|)``; inf where one is NaN.

    For a dtype that is not floating, it is 0 where the numbers are equal and inf elsewhere.
    """
    if not expected.dtype.is_floating_point:
        return torch.where(actual == expected, 0.0, float("inf")).double()
    wide = expected.double()
    ratio = (actual.double() - wide).abs() / (tolerance * (1 + wide.abs()))
    return ratio.nan_to_num(nan=float("inf"))


def same_step(a: StepRecord, b: StepRecord, *, first_slot: int, padded: bool = True) -> bool:
    """Return whether two steps of one batch have the same outputs and KV cache, except in scratch.

    Two failed steps are the same if their errors have the same type, message and line.

    Args:
        a: The first step.
        b: The second step.
        first_slot: The first KV slot after scratch.
        padded: Whether to compare the outputs of padding rows.
    """
    if a.error is not None or b.error is not None:
        return a.error is not None and b.error is not None and same_error(a.error, b.error)
    if not same_tensors(a.rows, b.rows) or (padded and not same_tensors(a.outputs, b.outputs)):
        return False
    return all(equal(cache[first_slot:], b.caches[name][first_slot:]) for name, cache in a.caches.items())


@dataclass(frozen=True)
class Difference:
    """A difference between the results of a step and the oracle.

    Args:
        kind: ``rows`` for live rows, ``cache`` for the KV cache, ``extent`` for the number of rows.
        what: A description of the part that differs.
        expected: The right value.
        actual: The value of the step.
        slots: KV slots that differ.
        of_draft: The wrong row, if the step has several passes.
    """

    kind: Literal["rows", "cache", "extent"]
    what: str
    expected: str
    actual: str
    slots: tuple[int, ...] = ()
    of_draft: DraftRow | None = None


def differences(rig: Rig, step: StepRecord, answer: Answer) -> list[Difference]:
    """Return the differences between a step without error and the oracle's answer."""
    found = []
    rows = step.rows
    assert rows is not None  # noqa: S101  it ended
    for name, right in answer.rows.items():
        if name not in rows or rows[name].shape != right.shape:
            is_there = f"{tuple(rows[name].shape)}" if name in rows else "no output of that name"
            what = "the returned rows" if name == "rows" else f"the returned rows of {rig.where(name, 0)}"
            expected = f"{tuple(right.shape)}, one row for each live token"
            if name != "rows":
                expected = f"{tuple(right.shape)}, as in an eager run of the region"
            return [Difference("extent", what, expected, is_there)]
    wrong = first_off(rig, rows, answer.rows)
    if wrong is not None:
        name, off = wrong
        at = int(off.argmax())
        row, column = divmod(at, off[0].numel())
        value = answer.rows[name].flatten()[at].item()
        found.append(
            Difference(
                "rows",
                f"{'request' if step.axes.get(name) == 'bs' else 'token'} {row} of the batch,"
                f" {rig.where(name, column)}",
                f"{value:.6g}, the result of float64 attention",
                f"{rows[name].flatten()[at].item():.6g}",
                of_draft=_draft_row(rig, name, row, column),
            )
        )
    for name, cache in step.caches.items():
        right = answer.caches[name].to(cache.dtype)
        scratch = rig.cache.scratch_rows(name)
        if equal(cache[scratch:], right[scratch:]):
            continue
        differs = rig.cache.differs(name, cache, right)
        if rig.feeds_itself:  # keys of later passes depend on attention
            differs &= excess(cache, right, tolerance_in(rig)) > 1
        changed = differs.flatten(1).any(dim=1).nonzero().flatten().tolist()
        if changed:
            what, slots = rig.cache.place(name, changed)
            expected = "only the tokens of the batch write the KV cache"
            found.append(Difference("cache", what, expected, "other values", slots))
    return found


def _draft_row(rig: Rig, name: str, row: int, column: int) -> DraftRow | None:
    """Return a row of attention of a draft, with the columns of its pass; None for other outputs."""
    width = rig.width_of_pass
    if rig.config.case.num_steps == 1 or column >= width * rig.config.case.num_steps:
        return None
    if name.startswith(ROWS_OF_PASS):
        return DraftRow(name, row, (0, width), int(name.removeprefix(ROWS_OF_PASS)))
    if name != "rows":
        return None
    step = column // width if rig.num_steps > 1 else rig.config.case.num_steps - 1
    first = step * width if rig.num_steps > 1 else 0
    return DraftRow(name, row, (first, first + width), step)


def said_of(rig: Rig, step: StepRecord, wrong: Difference) -> str:
    """Return the wrong value, and for a pass of a draft the first KV slot that it should not attend."""
    attended = None if wrong.of_draft is None else attended_slots(rig, step, wrong.of_draft)
    return wrong.actual if attended is None else f"{wrong.actual}; {attended}"


def wrong_results(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    *,
    what: str,
    help: str,  # noqa: A002  the field of reports
    rule: str | None = None,
    expected: str | None = None,
) -> Findings:
    """Yield a finding for each difference between the results of a step and the oracle.

    Args:
        lane: The lane.
        rig: The rig that did the step.
        step: A step without error.
        what: The kind of the step, such as "a replay".
        help: The next action.
        rule: The rule that a wrong result breaks here.
        expected: The expected property. It is printed before the right value.
    """
    for wrong in differences(rig, step, lane.answer(rig, step.problem)):
        yield lane.finding(
            rule,
            field=f"{what}: {wrong.what}",
            expected=f"{expected}: {wrong.expected}" if expected else wrong.expected,
            actual=said_of(rig, step, wrong),
            step=step,
            help=help,
        )


def faults(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    *,
    rule: str,
    expected: str,
    help: str,  # noqa: A002  the field of reports
) -> list[Finding]:
    """Return findings about a replay, all under one rule: its error, or its differences from the oracle.

    The list is empty for a batch that the runner declined.

    Args:
        lane: The lane.
        rig: The rig that did the step.
        step: The step.
        rule: The rule.
        expected: The expected property.
        help: The next action.
    """
    if step.error is not None:
        found = lane.of_error(step.error, expected=expected, rule=rule, step=step, help=help)
        return [found.model_copy(update={"rule": rule})]
    if step.declined is not None:
        return []
    wrong = wrong_results(lane, rig, step, what="a replay", help=help, rule=rule, expected=expected)
    return [*wrong]


def is_right(
    lane: LaneUnderTest, rig: Rig, problem: Problem, *, eagerly: bool = False, may_decline: bool = False
) -> bool:
    """Return whether a step of a batch ends without error and agrees with the oracle.

    Returns False for a batch that the runner declines, because an eager run is no evidence about graphs.
    """
    step = rig.step(problem, eagerly=eagerly, may_decline=may_decline)
    if step.error is not None or step.declined is not None:
        return False
    return not differences(rig, step, lane.answer(rig, problem))


def strict_rig(lane: LaneUnderTest, way: Way = "graph") -> Rig | None:
    """Return a strict lane, or None if it cannot be captured; ``captures`` reports that."""
    try:
        return lane.rig(way, strict=True)
    except CannotCaptureError:
        return None


# -- perturbing --------------------------------------------------------------------------------------

TensorEdit = Callable[[torch.Tensor], None]


def altered(changes: Mapping[str, TensorEdit]) -> Ready:
    """Return a callback that edits tensors of view and metadata, by path, between hooks and replay.

    All edits are undone after the step, because some tensors are not written again by the next step.
    """

    def ready(view: ForwardBatch, metadata: Any) -> Undo:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for path, value in walk({"view": view, "metadata": metadata}):
            if path in changes and isinstance(value, torch.Tensor):
                kept.append((value, value.clone()))
                changes[path](value)
        return partial(_restore, kept)

    return ready


def _restore(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the kept contents of tensors back, in reverse order of the edits."""
    for tensor, before in reversed(kept):
        write(tensor, before)


def put(mask: torch.Tensor, value: torch.Tensor | float) -> TensorEdit:
    """Return an edit that writes ``value`` where ``mask`` is set: a number, or a tensor of the same shape."""

    def change(tensor: torch.Tensor) -> None:
        new = value if isinstance(value, torch.Tensor) else torch.full_like(tensor, value)
        write(tensor, torch.where(mask.to(tensor.device), new.to(tensor.device), tensor))

    return change


def matters(
    rig: Rig,
    base: StepRecord,
    leaf: Leaf,
    mask: torch.Tensor,
    other: torch.Tensor,
    *,
    batch: ForwardBatch | None = None,
) -> bool:
    """Return whether ``other``, where ``mask`` is set, changes the results of the replay of ``base``.

    Args:
        rig: The rig of the step.
        base: The step.
        leaf: The tensor to edit.
        mask: The entries to edit.
        other: The new values, in the tensor's shape.
        batch: The batch that was run in place of the batch of the problem.
    """
    changed = rig.step(base.problem, ready=altered({leaf.path: put(mask, other)}), batch=batch)
    return not same_step(base, changed, first_slot=rig.config.page_size)


# -- words -------------------------------------------------------------------------------------------


def sides_of(breach: Breach) -> tuple[str, str]:
    """Return texts for the captured and the replayed value, without addresses, which differ between runs."""
    if breach.rule == "address":
        _, has_slot, slot = breach.replayed.partition(" in ")
        return "the captured address", f"another address, in {slot}" if has_slot else "another address"
    return f"{breach.rule} as captured: {breach.captured}", breach.replayed


def spell(mask: torch.Tensor) -> str:
    """Return the text of an index for a mask: a range for one axis, otherwise its first entry."""
    at = mask.nonzero()
    if mask.dim() == 1:
        first, last = int(at[0]), int(at[-1])
        return f"[{first}]" if first == last else f"[{first}:{last + 1}]"
    entry = ", ".join(str(int(i)) for i in at[0])
    return f"[{entry}]" + ("" if len(at) == 1 else f" and {len(at) - 1} more")


def values_at(tensor: torch.Tensor, mask: torch.Tensor, most: int = 8) -> str:
    """Return the first values of a tensor where ``mask`` is set."""
    values = tensor[mask].flatten()[: most + 1].tolist()
    text = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in values[:most])
    return f"{text}, ..." if len(values) > most else text


def other_result(rig: Rig, first: StepRecord, second: StepRecord) -> tuple[str, str, str]:
    """Return where two steps of a batch first differ, and both values, for texts. They must differ."""
    one, two = first.rows or {}, second.rows or {}
    shapes = {n: (tuple(was.shape), tuple(two[n].shape) if n in two else None) for n, was in one.items()}
    resized = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    if resized:  # a missing output comes last: it may follow from one of another shape
        name, (had, has) = min(resized.items(), key=lambda item: item[1][1] is None)
        what = "the returned rows" if name == "rows" else f"the returned rows of {rig.where(name, 0)}"
        return what, str(had), "no such output" if has is None else str(has)
    for name, was in one.items():
        now = two[name]
        if equal(was, now):
            continue
        at = int((~same(was, now)).flatten().nonzero()[0])
        row, column = divmod(at, was[0].numel())
        unit = "request" if second.axes.get(name) == "bs" else "token"
        what = f"a replay: {unit} {row} of the batch, {rig.where(name, column)}"
        return what, f"{was.flatten()[at].item():.6g}", f"{now.flatten()[at].item():.6g}"
    first_slot = rig.config.page_size
    for name, cache in first.caches.items():
        now = second.caches[name]
        differs = (~same(cache[first_slot:], now[first_slot:])).flatten(1).any(dim=1).nonzero()
        if len(differs):
            what, _ = rig.cache.place(name, [int(differs[0]) + first_slot])
            return what, "the values of the first replay", "other values"
    return "the outputs, or the KV cache", "equal results", "other results"


def gives_the_same(rig: Rig, step: StepRecord, other: StepRecord) -> bool:
    """Return whether two runs of one batch have equal live rows, except for rounding."""
    if step.error is not None or step.outputs is None or other.outputs is None:
        return step.error is None and other.error is None
    mine, theirs = (live_rows(each) for each in (step, other))
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (mine, theirs)]
    return shapes[0] == shapes[1] and first_off(rig, mine, theirs) is None
