"""Other orders of batches, poisoned memory, and eager activity between replays: GP06, GP14 to GP18, and more.

A guarded lane runs on the strict tape, whose errors name their rule.

Does not: compare with attention in float64, except where no other comparison is possible.
"""

import contextlib
import functools
import gc
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact.batch import ForwardMode
from graphpact.buffers import PaddingPolicy
from graphpact.errors import PactBreach, PoisonError
from graphpact.memory_map import MemoryMap
from graphpact.shapes import GraphShape
from graphpact.tensors import equal, storage_id
from graphpact_conformance.experiments.base import (
    Findings,
    is_right,
    same_step,
    same_tensors,
    sides_of,
    wrong_results,
)
from graphpact_conformance.problems import Case, Drawn, Problem, corner, of_size
from graphpact_conformance.reference import ReferenceRunner
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import Rig, StepRecord
from graphpact_conformance.subject import (
    CannotCaptureError,
    LaneUnderTest,
    Way,
    caches_of,
    planned_shapes,
    reset_slot,
)

GUARDED = (
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
)
"""The rules that errors of a strict lane, its pact and kernels can name."""


def guarded(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay batches in a strict lane, over poison, with a pact check of every replay."""
    exact, small, idle, padded = steps
    for way in lane.ways:
        rig = _guarded(lane, way)
        if rig is None:
            lane.rig()  # raises where no lane can be captured
            return
        for problem in (exact, small, idle, padded, small, exact):
            step = rig.step(problem)
            if step.error is None:
                continue
            rule = "GP06" if problem is not exact and _spreads(step.error) else None
            found = lane.of_error(
                step.error,
                expected="a strict lane runs the batch without an error",
                rule=rule,
                step=step,
            )
            if rule is not None and found.rule == rule:
                found = found.model_copy(update={"help": _SPREAD_HELP})
            elif _is_dropped(step.error):
                found = found.model_copy(update={"rule": "GP14", "help": _STAYS})
            yield found
            break


def _is_dropped(error: BaseException) -> bool:
    """Return whether an attribute of the backend was a tensor that a graph reads, and no longer is one."""
    breaches = error.breaches if isinstance(error, PactBreach) else ()
    return any(b.path.startswith("backend.") and b.rule == "type" for b in breaches)


def _spreads(error: BaseException) -> bool:
    """Return whether no call failed and all slots were written, but live rows are NaN.

    If a batch without padding passes, the NaN comes from padding rows: kernels may leave them unwritten, and
    uninitialised memory is NaN here.
    """
    return isinstance(error, PoisonError) and error.__cause__ is None and error.rule is None


_SPREAD_HELP = (
    "batches without padding pass: a padding row is NaN, and live rows read it. Write every output row in"
    " kernels, zeros for rows without keys, and mask padding rows in work across rows (scales, routing)"
)


def _guarded(lane: LaneUnderTest, way: Way) -> Rig | None:
    """Return a strict lane; None if it cannot be captured, which is a finding of ``captures``."""
    try:
        return lane.guarded(way)
    except CannotCaptureError:
        return None


def interleaved(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a batch cold, after one of the same shape, and after one of another shape: equal bits."""
    exact, small, _, padded = steps
    rig = lane.rig()
    rig.step(exact, eagerly=True)  # as engines do between replays
    cold, armed = {}, {}
    for problem in (padded, small):
        fresh = _captured_for(lane, rig, problem)
        armed[id(problem)] = _copies(states(fresh))
        cold[id(problem)] = fresh.step(problem)
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
        if _same_real(rig, first, step):
            continue
        if not _same_real(rig, step, rig.step(problem)):
            return  # not deterministic, a finding of `repeated`
        now = states(rig)
        changed = [n for n, v in armed[id(problem)].items() if n not in now or not equal(v, now[n])]
        for name in changed:
            now[name].copy_(armed[id(problem)][name])
        if changed and _same_real(rig, first, rig.step(problem)):
            yield _unarmed(lane, rig, step, changed, f"the same after {after} as right after capture")
            continue
        if _comes_by_slots(lane, rig, before, problem):
            continue
        yield lane.finding(
            rule,
            field="the outputs, or the KV cache",
            expected=f"the results of the first replay after capture, also after {after}",
            actual="other results" if step.error is None else f"{step.error}",
            step=step,
            help="do not read memory of an earlier step or of another graph: copy outputs before another"
            " graph replays, plan for each batch, and share no memory that a capture allocated",
        )


def _captured_for(lane: LaneUnderTest, rig: Rig, problem: Problem) -> Rig:
    """Return a new lane that captured the shape of a batch alone; all shapes for a batch without one."""
    shape = rig.lane.fit(rig.batch_of(problem))
    fresh = lane.build(capture=not isinstance(shape, GraphShape))
    if isinstance(shape, GraphShape):
        fresh.lane.capture(shape)
    return fresh


def _comes_by_slots(lane: LaneUnderTest, rig: Rig, before: Problem, problem: Problem) -> bool:
    """Return whether the difference comes from slots that each step has to write, a finding of `refresh`."""
    rig.step(before)
    cold = _captured_for(lane, rig, problem).step(problem, fill=reset_slot)
    return _same_real(rig, cold, rig.step(problem, fill=reset_slot))


def _same_real(rig: Rig, a: StepRecord, b: StepRecord) -> bool:
    return same_step(a, b, first_slot=rig.config.page_size, padded=False)


def repeated(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay one batch three times on the same inputs: outputs and remaining memory must be equal."""
    rig = lane.rig()
    for problem in (steps.padded, steps.small):
        results = []
        for _ in range(3):
            step = rig.step(problem)
            if step.error is not None or step.shape is None:
                return
            results.append((step, _copies(states(rig))))
        (first, _), (second, two), (third, three) = results
        rows = same_tensors(first.rows, second.rows) and same_tensors(second.rows, third.rows)
        changed = [name for name, value in two.items() if not equal(value, three[name])]
        if not rows or changed:
            expected = "equal outputs and equal memory after three replays on the same inputs"
            yield _unarmed(lane, rig, third, changed, expected, gives_other=not rows)


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
        actual="the replays differ" if gives_other else "the contents differ after each replay",
        step=step,
        help="reset counters and flags inside the graph, before their first use, or in"
        f" {lane.body_of(rig)}; draw random numbers only from the device's default generator",
    )


def states(rig: Rig) -> dict[str, torch.Tensor]:
    """Return the external memory of graphs by name, without the slots that every step writes."""
    memory = MemoryMap(rig.registry, rig.backend)
    weights = {storage_id(weight) for weight in rig.net.tensors()}
    found: dict[str, torch.Tensor] = {}
    for captured in rig.lane.captured.values():
        for at, tensor in enumerate(captured.graph.external_tensors() or ()):
            if storage_id(tensor) in weights or memory.is_engines(tensor):
                continue
            slot = memory.slot_of(tensor)
            if slot is None:
                number = f"a tensor of {tensor.dtype} {tuple(tensor.shape)}, number {at}"
                name, whole = memory.attribute_of(tensor) or (number, tensor)
                found[name] = _without_repeats(whole)
            elif slot.padding_policy is PaddingPolicy.FILL_ONCE and slot.buffer is not None:
                found[slot.label] = slot.buffer
    return found


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor with one entry per address: `torch.Tensor.expand` repeats entries."""
    return tensor[tuple(slice(0, None if step else 1) for step in tensor.stride())]


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# -- eager activity between replays ------------------------------------------------------------------


def survives_eager_activity(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Run eager batches, clear caches and reuse freed memory between capture and replay."""
    lane = lane.like(replace(lane.config, room=2))
    for strict in (True, False):
        for clear in caches_of(lane):  # graphs of another lane would keep cached tensors alive
            clear()
        rig = _guarded(lane, "graph") if strict else lane.rig()
        if rig is None:
            continue
        problems = [p for p in (steps.padded, steps.small) if is_right(lane, rig, p)]
        _run_eager_activity(lane, rig)
        for problem in problems:
            step = rig.step(problem)
            expected = "memory that a graph uses stays at its address, whatever ran in between"
            if step.error is not None:
                found = lane.of_error(step.error, expected=expected, step=step, help=_STAYS)
                yield found.model_copy(update={"rule": "GP14"})
                break
            yield from _moved(lane, step)
            yield from wrong_results(
                lane, rig, step, rule="GP14", what="a replay", expected=expected, help=_STAYS
            )


def _moved(lane: LaneUnderTest, step: StepRecord) -> Findings:
    """Yield findings for attributes that a graph reads and the backend has replaced."""
    for breach in step.breaches:
        if breach.path.startswith("backend."):
            expected, actual = sides_of(breach)
            yield lane.finding(
                "GP14",
                field=breach.path,
                expected=f"the memory that the graph reads: {expected}",
                actual=actual,
                step=step,
                help=_STAYS,
            )


_STAYS = (
    "allocate memory at its largest size before capture, keep it for the lifetime of the graph, and copy"
    " into it: a graph does not follow memory that an eager step replaces, grows or evicts"
)


def _run_eager_activity(lane: LaneUnderTest, rig: Rig) -> None:
    """Do what engines do between two steps: clear caches, reuse freed memory, run eager batches."""
    for clear in caches_of(lane):
        clear()
    gc.collect(1)  # collecting all generations would take longer than the rest of the experiment
    junk = [torch.full((n,), -7, dtype=torch.int32) for n in (1, 5, 8, 33, 64, 257, 1024)]
    junk += [torch.full((n,), float("nan")) for n in (1, 5, 8, 33, 64, 257, 1024)]
    if lane.config.case.mode is not ForwardMode.IDLE:
        largest = lane.config.most_requests
        for count in (1, 3, largest + lane.config.room):  # sizes without a graph
            rig.step(of_size(lane.config, count), eagerly=True)
    rig.step(corner(lane.config.unbounded), eagerly=True)
    _run_other_mode(lane)
    del junk


def _run_other_mode(lane: LaneUnderTest) -> None:
    """Run a batch of another mode without a graph, in a lane of its own, as prefill beside decode does.

    The lanes have nothing in common but the plugin's classes and modules. Errors are findings of its lane.
    """
    here, modes = lane.config.case.lane_mode, lane.backend.capabilities.modes
    mode = ForwardMode.DECODE if here.is_ragged else ForwardMode.EXTEND
    if lane.kind == "attention_backend" and mode in modes:
        config = replace(lane.config, case=Case(mode), capture_shapes=(), room=0)
        with contextlib.suppress(Exception, SystemExit):
            other = replace(lane, config=config, runner=ReferenceRunner).build(capture=False)
            other.step(corner(config), eagerly=True)


# -- many captures -----------------------------------------------------------------------------------


def smallest_first(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture the smallest shape first, and replay: the order of captures must have no effect."""
    usual = lane.rig()
    rig = lane.build(capture=False)
    shapes = planned_shapes(rig.runner)
    if len(shapes) < 2:
        return
    try:
        with torch.inference_mode():
            for shape in shapes:
                rig.lane.capture(shape)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        yield lane.of_error(error, expected="shapes are captured in any order", rule="GP15")
        return
    problems = (steps.small, steps.padded, steps.small)
    taken = [rig.step(p) for p in problems]
    if all(map(functools.partial(_same_real, rig), map(usual.step, problems), taken)):
        return
    fresh = lane.build()  # the usual lane has replayed before
    for problem in problems:
        step = rig.step(problem, fill=reset_slot)
        if not _same_real(rig, step, rig.step(problem, fill=reset_slot)):
            return  # not deterministic, a finding of `repeated`
        if not _same_real(rig, fresh.step(problem, fill=reset_slot), step):
            yield lane.finding(
                "GP15",
                field="the outputs, or the KV cache",
                expected="the same for any order of captures",
                actual="other results" if step.error is None else str(step.error),
                step=step,
                help="size and allocate shared memory before the first capture",
            )
            return
