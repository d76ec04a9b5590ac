"""`Experiment`, and the comparison of the results of two steps.

Does not: check a rule.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import Breach
from graphpact.pact import walk
from graphpact.tensors import equal
from graphpact_conformance.model import ROWS_OF_PASS
from graphpact_conformance.oracle import Answer
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.global_state import Call
from graphpact_conformance.subject.raised import same_error
from graphpact_conformance.subject.records import Leaf, Ready, StepRecord, Undo
from graphpact_conformance.subject.under_test import (
    CannotCaptureError,
    DeclinedError,
    Subject,
    UnderTest,
    Way,
)
from graphpact_conformance.world.problems import Problem
from graphpact_tape.writes import write

Scope = Literal["attention_backend", "runner"]
Findings = Iterator[Finding]


@dataclass(frozen=True)
class Experiment:
    """One procedure of the suite on a lane.

    Args:
        name: Its name in reports.
        examines: Ids of the rules that it checks. Its findings have one of these rules, or none.
        run: ``(lane, steps) -> findings``: the procedure, for `Drawn` or a recorded sequence of batches.
        scopes: The kinds of plugins that it checks.
        repeats: Whether more batches show more. An experiment without `repeats` runs once per lane.
        depth: The lanes that it runs in: ``lightest`` in all; ``light`` in all but the lanes of a quick run
            that differ from a full lane only in sizes; ``full`` in no lane that differs only in sizes.
        in_pairs: Whether it runs for a pair of a backend and a runner, and for a backend below eager
            attention.
        of_fields: Whether it runs in lanes that differ from others only in the fields of their batches, and
            in every lane with optional fields of a runner, which declares their slots.
        of_kinds: Whether it runs in the plain lane of every kind of step, also in a quick run.
        of_long: Whether it runs in every lane of a long context, also in a quick run.
        needs_graphs: Whether it runs only in lanes that capture.
        of_recordings: Whether it takes the whole sequence of a recorded lane, and runs in no other lane.
        names_rules: Whether it runs also in a lane that is too light for its depth, after a finding there: a
            wrong output shows no rule, and it names the rule and the field.
        explains_captures: Whether it runs also in every lane that cannot be captured, and says why.
        reuses: Whether it begins with the captures of the experiment before, if that one found nothing. What
            it finds then is found again with new ones, or does not count.
    """

    name: str
    examines: tuple[str, ...]
    run: Callable[[UnderTest, Any], Findings]
    scopes: frozenset[Scope] = frozenset({"attention_backend", "runner"})
    repeats: bool = False
    depth: Literal["lightest", "light", "full"] = "full"
    in_pairs: bool = False
    of_fields: bool = False
    of_kinds: bool = False
    of_long: bool = False
    needs_graphs: bool = True
    of_recordings: bool = False
    names_rules: bool = False
    explains_captures: bool = False
    reuses: bool = False

    @property
    def about(self) -> str:
        """The first line of its docstring."""
        return (self.run.__doc__ or "").strip().splitlines()[0]

    def listed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings of the rules that it examines, and those without a rule."""
        return [finding for finding in findings if finding.rule in (None, *self.examines)]

    def findings(self, lane: UnderTest, steps: Sequence[Problem]) -> "Found":
        """Run it, and return its findings, those before an error included."""
        found: list[Finding] = []
        try:
            with lane.watch.during(Call(f"other calls in {self.name}")):
                for finding in self.run(lane, steps):
                    found.append(finding)  # noqa: PERF402  those before an error count
        except DeclinedError as declined:
            return Found(found, declined=str(declined))
        except Exception as error:  # noqa: BLE001  of the plugin or of the suite; the caller tells which
            return Found(found, error=error)
        return Found(found)


class Found(NamedTuple):
    """What an experiment found.

    Args:
        findings: Its findings.
        declined: Why it ended early, if the runner declined a batch that it needs.
        error: The error that ended it early.
    """

    findings: list[Finding]
    declined: str | None = None
    error: Exception | None = None


# -- comparing ---------------------------------------------------------------------------------------

_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}
_DEFAULT_TOLERANCE = 1e-1  # of any other dtype


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the allowed error of one or two attention layers against float64, for inputs of scale 1."""
    return _TOLERANCE.get(dtype, _DEFAULT_TOLERANCE)


def tolerance_in(rig: Subject, output: str | None = None) -> float:
    """Return the allowed error of an output, or of the KV cache after the last pass, against float64.

    A pass that reads results of the passes before it adds its rounding to theirs.

    Args:
        rig: The subject.
        output: Name of the output; None for the KV cache.
    """
    passes = rig.config.case.num_steps if rig.feeds_itself else 1
    if output is not None and output.startswith(ROWS_OF_PASS) and rig.feeds_itself:
        passes = 1 + int(output.removeprefix(ROWS_OF_PASS))
    return passes * tolerance_of(rig.config.dtype)


Rows = Mapping[str, torch.Tensor]
"""Outputs by name."""


def same_tensors(a: Rows | None, b: Rows | None) -> bool:
    """Return whether two results have the same names and bits, or are both None."""
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(equal(tensor, b[name]) for name, tensor in a.items())


def first_off(rig: Subject, rows: Rows, expected: Rows) -> tuple[str, torch.Tensor] | None:
    """Return the first output, in the order of passes, that is wrong by more than rounding, and its error."""
    for name in sorted(expected, key=lambda n: (n != "rows", not n.startswith(ROWS_OF_PASS))):
        off = excess(rows[name], expected[name], tolerance_in(rig, name))
        if off.numel() and float(off.max()) > 1:
            return name, off
    return None


def excess(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return ``|actual - expected|`` divided by ``tolerance * (1 + |expected|)``; inf where one is NaN.

    Numbers other than floats must be equal: it is 0 or inf.
    """
    if not expected.dtype.is_floating_point:
        return torch.where(actual == expected, 0.0, float("inf")).double()
    wide = expected.double()
    ratio = (actual.double() - wide).abs() / (tolerance * (1 + wide.abs()))
    return ratio.nan_to_num(nan=float("inf"))


def same_step(a: StepRecord, b: StepRecord, *, first_slot: int, padded: bool = True) -> bool:
    """Return whether two steps of one batch have the same outputs and KV cache, except in scratch.

    Two steps that failed are the same if their errors are: type, message and line.

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
        what: The differing part, in words.
        expected: The right value.
        actual: The value of the step.
        slots: KV slots that differ.
    """

    kind: Literal["rows", "cache", "extent"]
    what: str
    expected: str
    actual: str
    slots: tuple[int, ...] = ()


def differences(rig: Subject, step: StepRecord, answer: Answer) -> list[Difference]:
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
                expected = f"{tuple(right.shape)}, as an eager run of the region gives"
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
            )
        )
    for name, cache in step.caches.items():
        right = answer.caches[name].to(cache.dtype)
        differs = rig.cache.differs(name, cache, right)
        if rig.feeds_itself:  # keys of later passes depend on attention
            differs &= excess(cache, right, tolerance_in(rig)) > 1
        changed = differs.flatten(1).any(dim=1).nonzero().flatten().tolist()
        if changed:
            what, slots = rig.cache.place(name, changed)
            expected = "only the tokens of the batch write the KV cache"
            found.append(Difference("cache", what, expected, "other values", slots))
    return found


def wrong_results(
    lane: UnderTest,
    rig: Subject,
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
        expected: The expected property, printed before the right value.
    """
    for wrong in differences(rig, step, lane.answer(rig, step.problem)):
        yield lane.finding(
            rule,
            field=f"{what}: {wrong.what}",
            expected=f"{expected}: {wrong.expected}" if expected else wrong.expected,
            actual=wrong.actual,
            step=step,
            help=help,
        )


def faults(
    lane: UnderTest,
    rig: Subject,
    step: StepRecord,
    *,
    rule: str,
    expected: str,
    help: str,  # noqa: A002  the field of reports
) -> list[Finding]:
    """Return what is wrong with a replay, all under one rule: its error, or its differences from the oracle.

    Empty for a batch that the runner declined.

    Args:
        lane: What is tested.
        rig: The subject that did the step.
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
    lane: UnderTest, rig: Subject, problem: Problem, *, eagerly: bool = False, may_decline: bool = False
) -> bool:
    """Return whether a step of a batch ends without error and agrees with the oracle.

    A batch that the runner may decline, and declines, shows nothing about graphs, and is not right.
    """
    step = rig.step(problem, eagerly=eagerly, may_decline=may_decline)
    if step.error is not None or step.declined is not None:
        return False
    return not differences(rig, step, lane.answer(rig, problem))


def strict_rig(lane: UnderTest, way: Way = "graph") -> Subject | None:
    """Return a strict lane; None if it cannot be captured, which is a finding of ``captures``."""
    try:
        return lane.guarded(way)
    except CannotCaptureError:
        return None


# -- perturbing --------------------------------------------------------------------------------------

TensorEdit = Callable[[torch.Tensor], None]


def altered(changes: dict[str, TensorEdit]) -> Ready:
    """Return a callback that edits tensors of view and metadata, by path, between hooks and replay.

    After the step they are as before, also those that no step writes.
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
    """Write the kept contents of tensors back, the last edit first."""
    for tensor, before in reversed(kept):
        write(tensor, before)


def put(mask: torch.Tensor, value: torch.Tensor | float) -> TensorEdit:
    """Return an edit that writes ``value`` where ``mask`` is set: a number, or a tensor of the same shape."""

    def change(tensor: torch.Tensor) -> None:
        new = value if isinstance(value, torch.Tensor) else torch.full_like(tensor, value)
        write(tensor, torch.where(mask.to(tensor.device), new.to(tensor.device), tensor))

    return change


def matters(
    rig: Subject,
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
        batch: The batch that was run instead of the problem's own one.
    """
    changed = rig.step(base.problem, ready=altered({leaf.path: put(mask, other)}), batch=batch)
    return not same_step(base, changed, first_slot=rig.config.page_size)


# -- words -------------------------------------------------------------------------------------------


def sides_of(breach: Breach) -> tuple[str, str]:
    """Return the captured and the replayed value in words, and for addresses only that they differ."""
    if breach.rule == "address":
        return "the captured address", "another address"
    return f"{breach.rule} as captured: {breach.captured}", breach.replayed


def spell(mask: torch.Tensor) -> str:
    """Return the entries of a mask as an index: the range of the first axis, or the first entry."""
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
