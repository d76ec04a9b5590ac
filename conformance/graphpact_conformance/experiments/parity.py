"""Comparison of a replay with a capture of the same batch: GP01 to GP03, GP05, GP07 to GP11.

Capture is a replay of a dummy batch, plus binding. So a capture of a live batch has the inputs that its
replay must have: the same types, fields, host numbers, shapes, and contents. It must also record the same
operations as the graph of the dummy, with the same host numbers. If the results differ, the memory that both
graphs read is compared too, and the recorded run is compared with the warm-up before it.

Does not: check outputs of attention (see `graphpact_conformance.experiments.outputs`), or find stale values
of earlier batches (see ``refresh``).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from graphpact.batch import ForwardMode
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import assorted
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.breaches import of_breaches
from graphpact_conformance.experiments.compared_inputs import (
    compare_contents,
    compare_numbers,
    compare_tasks,
    compare_ways,
)
from graphpact_conformance.experiments.compared_work import (
    capture_and_replay,
    compare_eager_calls,
    compare_memory,
    compare_recorded_work,
    compare_with_warm_up,
)
from graphpact_conformance.experiments.comparison import gives_the_same
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import Before
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding


def replay_against_capture(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture each batch, and compare its inputs and recorded work with those of its replay."""
    problems = [*steps, assorted(lane.config)]
    if lane.config.case.mode is ForwardMode.IDLE:
        problems = problems[:1]  # all idle batches are equal
    replayed: dict[Way, list[StepRecord]] = {}
    for way in lane.ways:
        rig = lane.rig(way)
        replayed[way] = []
        is_wrong = False
        for problem in problems:
            compared = _compare(lane, rig, way, problem)
            step, seen = compared.step, compared.seen
            replayed[way].append(step)
            yield from compared.found
            if seen is None or compared.explained:
                continue
            if not is_wrong and not gives_the_same(rig, step, seen):
                is_wrong = True
                yield from compare_with_warm_up(lane, way, step)
    for by_graph, by_hook in zip(replayed["graph"], replayed.get("hook", ()), strict=False):
        yield from compare_ways(lane, by_graph, by_hook)


def compare_with_capture(lane: LaneUnderTest, rig: Rig, way: Way, problem: Problem) -> Findings:
    """Compare the replay of a batch with a capture of it in a new lane. Stale slots are included."""
    compared = _compare(lane, rig, way, problem)
    yield from (*compared.found, *compared.stale)


class _Compared(NamedTuple):
    """The differences between the replay of a batch and a capture of it.

    Args:
        step: The replay.
        seen: The replay right after a capture of the batch. None if there is no capture.
        found: Findings about the differences.
        stale: Findings about stale slots, which `refresh` also reports.
        explained: Whether a finding shows the cause of wrong results.
    """

    step: StepRecord
    seen: StepRecord | None
    found: list[Finding]
    stale: Sequence[Finding] = ()
    explained: bool = False


def _compare(lane: LaneUnderTest, rig: Rig, way: Way, problem: Problem) -> _Compared:
    before = Before(rig)
    step = rig.step(problem)
    if lane.hook_raised(step):
        return _Compared(step, None, [])  # `answers_replayed` reports it; it is no evidence for other rules
    found = of_breaches(lane, step, step.breaches)
    shape = step.shape
    if shape is None or not step.leaves:
        return _Compared(step, None, found)
    if not problem.requests and shape.mode is not ForwardMode.DECODE:
        # An idle batch has no tokens per request, and cannot be captured.
        return _Compared(step, None, found)
    twin = lane.build(way, capture=False)
    try:
        seen = capture_and_replay(twin, problem, shape)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        failed = lane.of_error(
            error,
            expected="a batch that can be replayed can be captured",
            rule="GP11",
            problem=problem,
            hook="init_metadata_capture",
        )
        return _Compared(step, None, [*found, failed])
    found += compare_numbers(lane, rig, step, seen)
    stale: list[Finding] = []
    fresh = cache(lambda: lane.build(way).step(problem))
    for is_stale, each in compare_contents(lane, rig, before, step, seen, fresh):
        (stale if is_stale else found).append(each)
    found += compare_recorded_work(lane, way, step, rig.trace(shape), twin.trace(shape))
    found += compare_tasks(lane, rig, step, seen, fresh) if step.tasks else []
    if found or stale or gives_the_same(rig, step, seen):
        return _Compared(step, seen, found, stale)
    found += compare_memory(lane, rig, twin, before, (step, seen))
    found += [] if found else compare_eager_calls(lane, rig, (step, seen))
    return _Compared(step, seen, found, explained=bool(found))
