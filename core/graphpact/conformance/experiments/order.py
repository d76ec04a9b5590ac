"""Batches in other orders, over poison, and after what happens to an engine: GP14, GP15, GP16, GP18, and more.

A guarded lane runs on the strict tape: whatever it refuses names its rule.

Does not: compare with attention in float64, but where nothing else could tell.
"""

import functools
import gc
import sys
from collections.abc import Iterator, Sequence

import torch

from graphpact.attention import kv_tensors
from graphpact.buffers import PaddingPolicy
from graphpact.conformance.experiments.base import (
    Findings,
    differences,
    same_rows,
    same_step,
)
from graphpact.conformance.problems import Problem, corner
from graphpact.conformance.rig import Rig
from graphpact.conformance.subject import CannotCaptureError, LaneUnderTest, Way, rule_of

GUARDED = (
    "GP01",
    "GP02",
    "GP03",
    "GP08",
    "GP09",
    "GP10",
    "GP14",
    "GP15",
    "GP16",
    "GP18",
    "GP19",
    "GP20",
)
"""The rules that a strict lane, with its pact, can name."""


def guarded(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay batches in a strict lane, over poison, every replay held to its pact."""
    exact, small, idle, padded = steps[0], steps[1 % len(steps)], steps[2 % len(steps)], steps[-1]
    for way in lane.ways:
        rig = _guarded(lane, way)
        if rig is None:
            return
        for problem in (exact, small, idle, padded, small, exact):
            step = rig.step(problem)
            if step.error is None:
                continue
            yield lane.of_error(
                step.error,
                expected="a strict lane finds nothing to refuse",
                step=step,
            )
            break


def _guarded(lane: LaneUnderTest, way: Way) -> Rig | None:
    """Return a strict lane, None where it cannot be captured: that is told once, by ``captures``."""
    try:
        return lane.guarded(way)
    except CannotCaptureError:
        return None


def interleaved(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay a batch cold, after another of its bucket, and after one of another bucket: the same bits."""
    padded, small, exact = steps[-1], steps[1], steps[0]
    cold = {id(p): lane.build().step(p) for p in (padded, small)}
    rig = lane.rig()
    for problem, before, rule, after in (
        (padded, exact, "GP09", "another batch of its bucket"),
        (padded, small, "GP15", "a batch of another bucket"),
        (small, padded, "GP15", "a batch of another bucket"),
    ):
        first = cold[id(problem)]
        if first.error is not None or first.shape is None:
            continue
        held = rig.step(before)
        if rule == "GP15" and held.shape == first.shape:
            continue
        step = rig.step(problem)
        if same_step(first, step, first_slot=rig.config.page_size, padded=False):
            continue
        yield lane.finding(
            rule,
            field="what the lane returns, or the KV cache",
            expected=f"what the first replay after capture gives, also after {after}",
            actual="something else" if step.error is None else f"{step.error}",
            step=step,
            help="let nothing of one step, or of one graph, be read by the next: copy outputs out before"
            " another graph replays, plan anew for each batch, and share no memory that a capture allocated",
        )


def repeated(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay one batch three times on the same inputs: the same bits, and the same memory left behind."""
    rig = lane.rig()
    for problem in (steps[-1], steps[1]):
        results = []
        for _ in range(3):
            step = rig.step(problem)
            if step.error is not None or step.shape is None:
                return
            results.append((step, _left_behind(rig, step.shape)))
        (first, _), (second, two), (third, three) = results
        rows = same_rows(first.rows, second.rows) and same_rows(second.rows, third.rows)
        changed = [name for name, value in two.items() if not same_rows(value, three[name])]
        if rows and not changed:
            continue
        yield lane.finding(
            "GP18",
            field=", ".join(changed) or "what the lane returns",
            expected="three replays on the same inputs give, and leave, the same",
            actual="each replay leaves another content" if rows else "the replays differ",
            step=third,
            help="reset counters and flags inside the graph, before their first use, or in the replay hook;"
            " draw from the device's default generator alone",
        )


def _left_behind(rig: Rig, shape: object) -> dict[str, torch.Tensor]:
    """Return copies of what a graph uses besides the slots that every step writes, by name."""
    graph = next(graph for at, graph in rig.lane.graphs() if at == shape)
    known = {t.untyped_storage().data_ptr() for t in (*kv_tensors(rig.kv).values(), rig.table)}
    found: dict[str, torch.Tensor] = {}
    for at, tensor in enumerate(graph.external_tensors() or ()):
        if tensor.untyped_storage().data_ptr() in known:
            continue
        slot = rig.registry.slot_of(tensor)
        if slot is None:
            name = next(
                (
                    f"{type(rig.backend).__name__}.{name}"
                    for name, value in vars(rig.backend).items()
                    if isinstance(value, torch.Tensor)
                    and value.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                ),
                f"a tensor of {tensor.dtype} {tuple(tensor.shape)}, number {at}",
            )
            found[name] = tensor.clone()
        elif slot.padding_policy is PaddingPolicy.FILL_ONCE:
            found[slot.label] = tensor.clone()
    return found


# -- what happens to an engine -----------------------------------------------------------------------


def life_goes_on(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Between capture and replay: larger eager batches, cleared caches, memory given to others."""
    for strict in (True, False):
        rig = _guarded(lane, "graph") if strict else lane.build()
        if rig is None:
            continue
        first = rig.step(steps[-1])
        if first.error is not None:
            continue
        _live(lane, rig)
        for problem in (steps[-1], steps[1]):
            step = rig.step(problem)
            expected = "memory that a graph uses is where it was, whatever ran in between"
            if step.error is not None:
                if strict and rule_of(step.error) not in (None, "GP14", "GP01"):
                    break  # told by ``guarded``
                yield lane.of_error(step.error, expected=expected, rule="GP14", step=step)
                break
            for found in differences(rig, step, lane.answer(rig, problem)):
                yield lane.finding(
                    "GP14",
                    field=f"a replay: {found.what}",
                    expected=f"{expected}: {found.expected}",
                    actual=found.actual,
                    step=step,
                    help="make memory at its largest size before capture, keep it for as long as the graph,"
                    " and copy into it",
                )


def _live(lane: LaneUnderTest, rig: Rig) -> None:
    """Let happen what happens to an engine between two steps."""
    for clear in _caches_of(lane):
        clear()
    gc.collect(1)  # all generations would take longer than the rest of the experiment
    junk = [torch.full((n,), -7, dtype=torch.int32) for n in (1, 5, 8, 33, 64, 257, 1024)]
    junk += [torch.full((n,), float("nan")) for n in (1, 5, 8, 33, 64, 257, 1024)]
    rig.step(corner(lane.config), eagerly=True)
    del junk


def _caches_of(lane: LaneUnderTest) -> Iterator[functools.partial[None]]:
    """Yield what clears each `functools.lru_cache` in the packages of the plugin."""
    packages = {cls.__module__.partition(".")[0] for cls in (lane.backend, lane.runner)}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] not in packages - {"graphpact", "torch"} or module is None:
            continue
        for value in [*vars(module).values()]:
            clear = getattr(value, "cache_clear", None)
            if callable(clear):
                yield functools.partial(clear)


# -- many captures -----------------------------------------------------------------------------------


def smallest_first(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Capture the smallest shape first, and replay: the order of captures changes nothing."""
    rig = lane.build(capture=False)
    ladder = rig.runner.ladder
    if ladder is None or len(ladder.shapes) == 1:
        return
    rig.runner.lane = rig.lane
    try:
        with torch.inference_mode():
            for shape in ladder.shapes:
                rig.lane.capture(shape)
    except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code runs here
        yield lane.of_error(error, expected="shapes are captured in any order", rule="GP15")
        return
    usual = lane.rig()
    for problem in (steps[1], steps[-1], steps[1]):
        step, other = rig.step(problem), usual.step(problem)
        if not same_step(other, step, first_slot=rig.config.page_size, padded=False):
            yield lane.finding(
                "GP15",
                field="what the lane returns, or the KV cache",
                expected="the same whichever shape was captured first",
                actual="something else" if step.error is None else str(step.error),
                step=step,
                help="size and allocate what graphs share before the first capture",
            )
            return
