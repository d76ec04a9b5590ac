"""Other orders of batches and of captures, and poisoned memory: GP06, GP14 to GP18, and more.

A strict lane runs on the strict tape, whose errors name the broken rule.

Does not: compare with attention in float64, except where no other comparison is possible.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import PactBreach, PoisonError
from graphpact.shapes import GraphShape
from graphpact.tensors import equal
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.breaches import of_breaches
from graphpact_conformance.experiments.comparison import (
    differences,
    is_right,
    other_result,
    same_step,
    same_tensors,
    strict_rig,
)
from graphpact_conformance.experiments.eager_activity import STAYS_HELP
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.snapshots import reset_slot
from graphpact_conformance.records.raised import message_of, rule_of
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.tape import TapeDriver
from graphpact_tape.writes import write

RULES_OF_STRICT_LANES = (
    "GP01",
    "GP02",
    "GP03",
    "GP04",
    "GP05",
    "GP06",
    "GP07",
    "GP08",
    "GP09",
    "GP10",
    "GP13",
    "GP14",
    "GP15",
    "GP16",
    "GP18",
    "GP19",
    "GP20",
    "GP21",
)
"""The rules that errors of a strict lane, its pact and kernels can name."""


def strict_replays(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay batches in a strict lane, over poison, with a pact check of every replay."""
    exact, small, idle, padded, *others = steps
    for way in lane.ways:
        rig = strict_rig(lane, way)
        if rig is None:
            lane.rig()  # raises if a fast lane cannot be captured either
            return
        for problem in (exact, small, idle, padded, *others, small, exact):
            step = rig.step(problem)
            if step.error is None:
                yield from _unwritten_rows(lane, way, step)
                yield from _late_copies(lane, way, rig, step)
                continue
            if lane.hook_raised(step):
                plain = lane.rig(way).step(problem)
                step = plain if lane.hook_raised(plain) else step  # poison is not the cause
            yield from _of_strict_error(lane, step, has_padding=problem is not exact)
            break


def _unwritten_rows(lane: LaneUnderTest, way: Way, step: StepRecord) -> Findings:
    """Yield a finding if padding rows of attention are NaN: kernels left memory of the graph unwritten.

    Live rows are right here. But models compute scales over all rows, and then one NaN makes every row wrong.
    Rows that are NaN without poison too are left out: their NaN was read from memory that no request owns.
    """
    rows, unwritten = _not_a_number(step)
    if not bool(unwritten.any()):
        return
    _, read = _not_a_number(lane.rig(way).step(step.problem))
    if read.shape == unwritten.shape and bool((unwritten & ~read).any()):
        first = len(step.problem.tokens) + int((unwritten & ~read).nonzero()[0])
        yield lane.finding(
            "GP06",
            field=f"row {first} of the result of attention, of {len(rows)} with padding",
            expected="finite numbers in every row: an amax or another scale of a model reads all rows",
            actual="NaN: memory that the graph has not written in this replay",
            step=step,
            help=_SPREAD_HELP,
        )


def _late_copies(lane: LaneUnderTest, way: Way, rig: Rig, step: StepRecord) -> Findings:
    """Yield a finding if a step is wrong where copies to the host end late, and right where they end at once.

    A read that torch does not see, such as by numpy, raises no error: it gets values of an earlier step.
    """
    driver = rig.lane.driver
    if not isinstance(driver, TapeDriver) or not driver.num_copies_to_host or step.declined is not None:
        return
    wrong = differences(rig, step, lane.answer(rig, step.problem))
    if wrong and is_right(lane, lane.rig(way), step.problem, may_decline=True):
        yield lane.finding(
            "GP16",
            hook="init_metadata_replay",
            field=f"a replay: {wrong[0].what}",
            expected=f"{wrong[0].expected}, also if a copy to the host ends as late as a device may end it",
            actual=f"{wrong[0].actual}; if the copy ends at once, the step is right",
            step=step,
            help="record an event after copy_async(), and synchronize() it before the host reads the memory",
        )


def _not_a_number(step: StepRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention of a replay, and a mask of the padding rows that are NaN.

    Both are empty for a step that was not replayed, and for outputs without one row per token.
    """
    rows = (step.outputs or {}).get("rows")
    if rows is None or step.shape is None or step.axes.get("rows") != "tokens":
        rows = torch.zeros(0, 0)
    return rows, rows[len(step.problem.tokens) :].isnan().any(dim=1)


def _of_strict_error(lane: LaneUnderTest, step: StepRecord, *, has_padding: bool) -> Findings:
    """Yield findings about a step that failed in a strict lane."""
    error = step.error
    assert error is not None  # noqa: S101  it failed
    if isinstance(error, PactBreach) and not _is_dropped(error):
        yield from of_breaches(lane, step, error.breaches)
        return
    spreads = has_padding and _spreads(error)
    expected = "a strict lane runs the batch without an error"
    found = lane.of_error(error, expected=expected, rule="GP06" if spreads else None, step=step)
    if spreads and found.rule == "GP06":
        found = found.model_copy(update={"help": _SPREAD_HELP})
    elif _is_dropped(error):
        found = found.model_copy(update={"rule": "GP14", "help": STAYS_HELP})
    yield found


def _is_dropped(error: BaseException) -> bool:
    """Return whether the backend dropped a tensor that a graph reads: the attribute is no longer a tensor."""
    breaches = error.breaches if isinstance(error, PactBreach) else ()
    return any(b.path.startswith("backend.") and b.rule == "type" for b in breaches)


def _spreads(error: BaseException) -> bool:
    """Return whether live rows are NaN although no call failed and all slots were written.

    If a batch without padding passes, the NaN comes from padding rows: kernels may leave these unwritten, and
    uninitialised memory is filled with NaN in a strict lane.
    """
    return isinstance(error, PoisonError) and error.__cause__ is None and error.rule is None


_SPREAD_HELP = (
    "batches without padding pass: a padding row is NaN, and live rows read it. Write every output row in"
    " kernels, with zeros for rows without keys, and mask padding rows in work across rows (scales, routing)"
)


def interleaved(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a batch in a new lane, after a batch of its shape, and after another shape: equal results."""
    exact, small, _, padded = steps[:4]
    rig = lane.rig()
    rig.states()  # records the names of attributes now, because an eager step may rebind them
    rig.step(exact, eagerly=True)  # as engines do between replays
    cold, armed, used = {}, {}, {}
    for problem in (padded, small):
        fresh = _captured_for(lane, rig, problem)
        armed[id(problem)] = _copies(fresh.states())
        cold[id(problem)] = fresh.step(problem)
        used[id(problem)] = _copies(fresh.states())
    for problem, before, rule, after in (
        (padded, exact, "GP09", "another batch of its shape"),
        (padded, small, "GP15", "a batch of another shape"),
        (small, padded, "GP15", "a batch of another shape"),
    ):
        first = cold[id(problem)]
        if first.error is not None or first.shape is None:
            continue
        held = rig.step(before)
        if rule == "GP15" and held.shape == first.shape:
            continue
        step = rig.step(problem)
        if not _same_real(rig, first, step):
            memory = armed[id(problem)], used[id(problem)]
            yield from _of_other_results(lane, rig, before, (first, step), memory, rule, after)


def _of_other_results(
    lane: LaneUnderTest,
    rig: Rig,
    before: Problem,
    pair: tuple[StepRecord, StepRecord],
    memory: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    rule: str,
    after: str,
) -> Findings:
    """Yield a finding about a replay whose results differ from those of the first replay after capture.

    Args:
        lane: The lane.
        rig: The rig of the replay.
        before: The batch that was replayed before.
        pair: The first replay after capture, and the replay.
        memory: Two copies of the memory that outlives steps: after capture, and after the first replay.
        rule: The rule, unless something else is the cause.
        after: A description of the batch before.
    """
    (first, step), problem, (armed, used) = pair, pair[1].problem, memory
    expected = f"the results of the first replay after capture, also after {after}"
    if step.error is not None:  # the finding has no rule, because the cause is unknown
        yield lane.of_error(step.error, expected=expected, step=step)
        return
    if not _same_real(rig, step, rig.step(problem)):
        return  # the step is not deterministic: `repeated` reports it
    now = rig.states()
    changed = [name for name in _comparable(armed, now) if not equal(armed[name], now[name])]
    for name in changed:
        write(now[name], armed[name])
    if changed and _same_real(rig, first, rig.step(problem)):
        yield _unarmed(lane, rig, step, changed, f"the same contents after {after} as right after capture")
        return
    if _comes_by_slots(lane, rig, before, problem):
        return
    culprit = _at_fault(rig, before, first, used)
    what, was, now_is = other_result(rig, first, step)
    yield lane.finding(
        rule,
        # If neither lane nor backend holds the memory any more, it was rebound, and no hook can renew it.
        hook="init_metadata_replay" if culprit is not None and rig.holds(now[culprit]) else None,
        field=culprit or what,
        expected=f"{expected}: {was}",
        actual=now_is if culprit is None else f"not renewed for this batch: {now_is}, in {what}",
        step=step,
        help="do not read memory of an earlier step or of another graph: copy outputs before another"
        " graph replays, plan for each batch, and do not share memory that a capture allocated",
    )


def _at_fault(rig: Rig, before: Problem, first: StepRecord, used: dict[str, torch.Tensor]) -> str | None:
    """Return the name of the memory that causes other results than in the first replay; None if not found.

    Each tensor gets the contents that it had after the first replay, and the batch is replayed. If the
    results become those of the first replay, this tensor is the cause.

    Args:
        rig: The rig of the replay.
        before: The batch that is replayed before.
        first: The first replay after capture.
        used: Copies of the memory that outlives steps, after the first replay.
    """
    now = rig.states()
    kept = _copies(now)
    for name in used.keys() & now.keys():
        if now[name].shape != used[name].shape or equal(now[name], used[name]):
            continue

        def renew(_: ForwardBatch, __: Any, name: str = name) -> None:
            now[name].copy_(used[name])

        rig.step(before)
        step = rig.step(first.problem, ready=renew)
        now[name].copy_(kept[name])
        if _same_real(rig, first, step):
            return name
    return None


def _captured_for(lane: LaneUnderTest, rig: Rig, problem: Problem) -> Rig:
    """Return a new rig that captured only the shape of a batch, or all shapes if the batch has no shape."""
    shape = rig.fit(rig.batch_of(problem))
    fresh = lane.build(capture=not isinstance(shape, GraphShape))
    if isinstance(shape, GraphShape):
        fresh.capture(shape)
    return fresh


def _comes_by_slots(lane: LaneUnderTest, rig: Rig, before: Problem, problem: Problem) -> bool:
    """Return whether the difference comes from slots that each step has to write, which `refresh` reports."""
    rig.step(before)
    cold = _captured_for(lane, rig, problem).step(problem, fill=reset_slot)
    return _same_real(rig, cold, rig.step(problem, fill=reset_slot))


def _same_real(rig: Rig, a: StepRecord, b: StepRecord) -> bool:
    return same_step(a, b, first_slot=rig.config.page_size, padded=False)


def repeated(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay one batch three times on the same inputs: outputs and persistent memory must be equal."""
    rig = lane.rig()
    for problem in (steps.padded, steps.small):
        results: list[tuple[StepRecord, dict[str, torch.Tensor]]] = []
        for _ in range(3):
            step = rig.step(problem)
            if step.error is not None and results:
                yield lane.of_error(step.error, expected=_REPEATS, rule="GP18", step=step)
            if step.error is not None or step.shape is None:
                return
            results.append((step, _copies(rig.states())))
        (first, _), (second, two), (third, three) = results
        rows = same_tensors(first.rows, second.rows) and same_tensors(second.rows, third.rows)
        changed = [name for name in _comparable(two, three) if not equal(two[name], three[name])]
        if not rows or changed:
            yield _unarmed(lane, rig, third, changed, _REPEATS, gives_other=not rows)


_REPEATS = "equal outputs and equal memory after three replays on the same inputs"


def _unarmed(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    changed: Sequence[str],
    expected: str,
    *,
    gives_other: bool = True,
) -> Finding:
    return lane.finding(
        "GP18",
        field=", ".join(changed) or "the outputs",
        expected=expected,
        actual="the results differ" if gives_other else "the contents differ after each replay",
        step=step,
        help="reset counters and flags inside the graph, before their first use, or in"
        f" {rig.writer}; draw random numbers only from the device's default generator",
    )


def _comparable(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are in both snapshots with the same shape and dtype."""
    facts = [{name: (t.shape, t.dtype) for name, t in each.items()} for each in (one, other)]
    return [name for name, fact in facts[0].items() if facts[1].get(name) == fact]


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def smallest_first(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture the smallest shape first, and replay: the order of captures must have no effect."""
    usual = lane.rig()
    try:
        rig = _captured_upwards(lane)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        yield lane.of_error(error, expected="shapes are captured in any order", rule="GP15")
        return
    problems = (steps.small, steps.padded, steps.small)
    yield from _freed_upwards(lane, problems)
    taken = [rig.step(p) for p in problems]
    if len(rig.captured) < 2 or all(map(partial(_same_real, rig), map(usual.step, problems), taken)):
        return
    rig, fresh = _captured_upwards(lane), lane.build()  # the rigs above have replayed different batches
    for problem in problems:
        step, right = (each.step(problem, fill=reset_slot) for each in (rig, fresh))
        if _same_real(rig, right, step):
            continue
        if _same_real(rig, step, rig.step(problem, fill=reset_slot)):
            what, was, now = other_result(rig, right, step)
            yield lane.finding(
                "GP15",
                field=what if step.error is None else None,
                expected="the same for any order of captures" + (f": {was}" if step.error is None else ""),
                actual=now if step.error is None else message_of(step.error),
                step=step,
                error=step.error,
                help="size and allocate shared memory before the first capture",
            )
        return  # a step without a finding here is not deterministic: `repeated` reports it


def _freed_upwards(lane: LaneUnderTest, problems: Sequence[Problem]) -> Findings:
    """Replay in a strict rig that captured the smallest shape first, to find memory that later captures grow.

    An earlier graph still reads the old, smaller memory. A fast tape keeps all memory that its graphs use
    alive; a strict tape and CUDA graphs do not.
    """
    usual = strict_rig(lane)
    if usual is None:
        return
    lane.clear_caches()
    try:
        rig = _captured_upwards(lane, strict=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        yield lane.of_error(error, expected="shapes are captured in any order", rule="GP15")
        return
    for problem in problems:
        step = rig.step(problem)
        if step.error is not None and usual.step(problem).error is None:
            expected = "memory that a graph uses stays at its address, in any order of captures"
            if rule_of(step.error) in (None, "GP14", "GP15"):  # other rules do not depend on the order
                yield lane.of_error(step.error, expected=expected, rule="GP14", step=step, help=_GROWS)
            return


_GROWS = (
    "allocate it at its largest size before the first capture: a graph keeps reading the smaller memory that"
    " a later, larger capture replaces"
)


@torch.inference_mode()
def _captured_upwards(lane: LaneUnderTest, *, strict: bool = False) -> Rig:
    """Return a new rig that captured its shapes from the smallest to the largest."""
    rig = lane.build(strict=strict, capture=False)
    for shape in rig.planned:
        rig.capture(shape)
    return rig
