"""Eager steps between replays, of many sizes and of another mode, that free and reuse memory: GP14.

Does not: replay batches in other orders; see `graphpact_conformance.experiments.replay_order`.
"""

import contextlib
import gc
from dataclasses import replace

import torch

from graphpact.batch import ForwardMode
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import corner, of_size
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import (
    is_right,
    sides_of,
    strict_rig,
    wrong_results,
)
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord


def survives_eager_activity(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Run eager batches of many sizes, clear caches, and reuse freed memory between capture and replay."""
    lane = lane.like(replace(lane.config, extra_requests=_MORE_SIZES))
    for strict in (True, False):
        lane.clear_caches()  # graphs of another rig would keep cached tensors alive
        rig = strict_rig(lane, "graph") if strict else lane.rig()
        if rig is None:
            continue
        problems = [p for p in (steps.padded, steps.small) if is_right(lane, rig, p)]
        _run_eager_activity(lane, rig, every_size=strict)
        for problem in problems:
            step = rig.step(problem)
            expected = "memory that a graph uses stays at its address during any eager activity"
            if step.error is not None:
                found = lane.of_error(step.error, expected=expected, step=step, help=STAYS_HELP)
                yield found.model_copy(update={"rule": "GP14"})
                break
            yield from _moved(lane, step)
            yield from wrong_results(
                lane, rig, step, rule="GP14", what="a replay", expected=expected, help=STAYS_HELP
            )


def _moved(lane: LaneUnderTest, step: StepRecord) -> Findings:
    """Yield findings about tensors that a graph reads and that the backend has replaced in its attributes."""
    for breach in step.breaches:
        if breach.path.startswith("backend."):
            expected, actual = sides_of(breach)
            yield lane.finding(
                "GP14",
                field=breach.path,
                expected=f"the memory that the graph reads: {expected}",
                actual=actual,
                step=step,
                help=STAYS_HELP,
            )


STAYS_HELP = (
    "allocate memory at its largest size before capture, keep it for the lifetime of the graph, and copy"
    " into it: a graph does not follow memory that an eager step replaces, grows or evicts"
)
_MORE_SIZES = 24
"""Number of batch sizes beyond the largest shape that are run eagerly."""


def _run_eager_activity(lane: LaneUnderTest, rig: Rig, *, every_size: bool) -> None:
    """Do what engines do between two steps: clear caches, reuse freed memory, run eager batches.

    Args:
        lane: The lane.
        rig: The rig whose graphs are replayed afterwards.
        every_size: Whether to run a batch of every size that the limits allow, so that caches of tensors by
            size evict tensors that a graph reads. Only a strict rig frees evicted tensors. False runs a few
            sizes.
    """
    lane.clear_caches()
    gc.collect(1)  # collecting all generations would take longer than the rest of the experiment
    junk = [torch.full((n,), -7, dtype=torch.int32) for n in (1, 5, 8, 33, 64, 257, 1024)]
    junk += [torch.full((n,), float("nan")) for n in (1, 5, 8, 33, 64, 257, 1024)]
    if lane.config.case.mode is not ForwardMode.IDLE:
        largest = lane.config.most_requests
        most = largest + lane.config.extra_requests
        for count in (1, 3, most):  # sizes without a graph
            rig.step(of_size(lane.config, count), eagerly=True)
        if every_size:
            _run_every_size(rig, of_size(lane.config, most))
    rig.step(corner(lane.config.unbounded), eagerly=True)
    _run_other_mode(lane)
    del junk


def _run_every_size(rig: Rig, whole: Problem) -> None:
    """Run every prefix of a batch's requests eagerly, and ignore errors, which other experiments report."""
    rig.load(whole)
    for count in range(1, len(whole.requests)):
        some = replace(whole, requests=whole.requests[:count])
        with contextlib.suppress(Exception, SystemExit):
            rig.run(rig.batch_of(some), eagerly=True)


def _run_other_mode(lane: LaneUnderTest) -> None:
    """Run a batch of another mode without a graph, as engines run prefill between decode steps.

    Errors are ignored: the lanes of that mode report them.
    """
    with contextlib.suppress(Exception, SystemExit):
        other = lane.of_another_mode()
        if other is not None:
            rig, problem = other
            rig.step(problem, eagerly=True)
