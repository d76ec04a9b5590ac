"""The experiments for builders of other engines: outputs of replays, and what builders do to lent buffers.

The contract of a builder is weaker than that of a graphpact backend: it may leave rows unwritten that no
kernel reads, and it may return other numbers than at the capture. So replays are judged by their outputs,
through a model of the kernel. `graphpact_adapters.diagnosis` finds the field at fault.

Does not: run the suite's experiments on graphpact's own contract.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from graphpact.errors import ConfigError, KernelRefusal
from graphpact.shapes import GraphShape
from graphpact.tensors import same
from graphpact_adapters.builder_lanes import (
    ROOM,
    backend_class_of,
    backend_of,
    ended_right,
    is_captured_with_room,
)
from graphpact_adapters.diagnosis import explain_capture, explain_replay
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import (
    assorted,
    corner,
    edges,
    half_size_batch,
    neighbours,
    prompts_of_width,
    steady,
)
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.experiments.comparison import spell, values_at
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.when import everywhere, in_full_lanes
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.raised import CannotCaptureError, causes, message_of, need_of, rule_of
from graphpact_conformance.results import Finding

OF_REPLAYS = ("GP01", "GP02", "GP03", "GP04", "GP05", "GP08", "GP09", "GP10", "GP13", "GP14", "GP15")
"""The rules that a wrong replay can break."""


REFUSED = (
    "the kernel refuses what the {subject} makes for the dummy batch of a capture: offsets rise from 0 to the"
    " tokens of the shape, and there is one row for each of its requests"
)


def captures_dummies(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture every shape with a dummy batch, the largest first."""
    try:
        lane.rig()
    except CannotCaptureError as stopped:
        words = backend_class_of(lane).words
        expected = f"every declared shape is captured, with the {words.subject}'s metadata of a dummy batch"
        if isinstance(stopped.error, KernelRefusal) and (
            finding := explain_capture(lane, stopped.error, steps.exact)
        ):
            yield finding
            return
        if not is_captured_with_room(lane):
            # If no reader understands the metadata, that is not a fault of the capture.
            is_unread = any(isinstance(each, ConfigError) for each in causes(stopped.error))
            rule = None if is_unread or lane.raised_at(stopped.error) is not None else "GP20"
            rule = rule_of(stopped.error) or rule
            refused = isinstance(stopped.error, KernelRefusal)
            help_ = REFUSED.format(subject=words.subject) if refused else words.no_graphs
            yield lane.of_error(stopped.error, expected=expected, problem=steps.exact, rule=rule, help=help_)
            return
        yield lane.finding(
            "GP13",
            hook="init_metadata_capture",
            field=f"a buffer of the {words.subject}",
            expected=f"{expected}; it is, once the configuration allows {ROOM} times the requests and tokens",
            actual=message_of(stopped.error),
            problem=steps.exact,
            error=stopped.error,
            help=f"size it for the largest step: {words.largest}",
        )


def replays(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a sequence of batches, and compare with attention in float64."""
    batches = (*steps, steps.exact, steps.small, *edges(lane.config), corner(lane.config))
    yield from _judge(lane, lane.rig(), (*batches, *_prompts(lane)), "a replay")


def _prompts(lane: LaneUnderTest) -> list[Problem]:
    """Return prompts with the shape of this lane's batches, if the engine replays such in its graphs."""
    width = lane.config.case.tokens_per_request
    if width is None or not backend_class_of(lane).takes_prompts:
        return []
    return prompts_of_width(lane.config, width)


def other_orders(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay after captures in another order, between eager steps, and after a second capture."""
    rig = lane.rig()
    batches = (*steps, half_size_batch(lane.config))
    upwards = lane.build(capture=False)
    why = "every shape is captured, from the smallest on too: no order is promised"
    if (failure := _captures(lane, upwards, upwards.planned, steps, why)) is None:
        yield from _judge(lane, upwards, batches, "a replay after captures from the smallest shape on")
    else:
        yield failure

    def with_eager_steps() -> Iterator[Problem]:
        for problem in batches:
            rig.step(corner(lane.config), eagerly=True)
            yield problem

    yield from _judge(lane, rig, with_eager_steps(), "a replay after a larger eager step")
    why = "every shape is captured again: an engine that wakes up does this"
    if (failure := _captures(lane, rig, (None,), steps, why)) is None:
        yield from _judge(lane, rig, batches, "a replay after a second capture")
    else:
        yield failure


def similar_batches(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a batch after one that differs in one thing: a length, the pages, the order, one decoded token.

    This shows values that a builder keeps because something else, such as a count, did not change.
    """
    rig, sequence = lane.rig(), list[Problem]()
    for problem in (steps.exact, assorted(lane.config)):
        sequence += [each for other in neighbours(lane.config, problem) for each in (problem, other)]
    now, before = steady(lane.config)
    sequence += [each for earlier in before for each in (earlier, now)]
    yield from _judge(lane, rig, sequence, "a replay after a similar batch")


def lent_buffers(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Compare the engine's persistent buffers before and after each build: builders may only read them."""
    rig = lane.rig()
    for problem in steps:
        rig.step(problem)
    reported: set[tuple[str, str]] = set()
    for change in backend_of(rig).lent_changes:
        if (change.name, change.call) in reported:
            continue
        reported.add((change.name, change.call))
        differs = ~same(change.before, change.after)
        yield lane.finding(
            "GP19",
            hook="init_metadata_capture" if change.phase == "capture" else "init_metadata_replay",
            field=f"{change.name}{spell(differs)}, lent by the engine",
            expected=f"{values_at(change.before, differs)}, as before {change.call}()",
            actual=values_at(change.after, differs),
            problem=steps[0],
            help=f"write into a copy: {backend_class_of(lane).words.next_reader} it after this one",
        )


def _captures(
    lane: LaneUnderTest, rig: Rig, shapes: Iterable[GraphShape | None], steps: Drawn, expected: str
) -> Finding | None:
    """Capture the given shapes, or all if None; return a finding if a capture raises."""
    try:
        for shape in shapes:
            rig.capture(shape)
    except Exception as error:  # the code under test may raise anything
        if need_of(error) is not None:
            raise
        return lane.of_error(error, expected=expected, problem=steps.exact)
    return None


def _judge(lane: LaneUnderTest, rig: Rig, problems: Iterable[Problem], what: str) -> Iterator[Finding]:
    """Replay batches, and yield findings about the first one with wrong outputs."""
    for problem in map(lane.within, problems):
        step = rig.step(problem)
        if not ended_right(lane, rig, step):
            yield from explain_replay(lane, rig, step, what=what)
            return


def _own(name: str, examines: tuple[str, ...], run: Callable[[LaneUnderTest, Drawn], Findings]) -> Experiment:
    return Experiment(
        name,
        examines,
        run,
        everywhere,
        repeats=True,
        num_captures=1,
    )


_EXPERIMENT = {experiment.name: experiment for experiment in EXPERIMENTS}

BUILDER_EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "captures_dummies",
        (*OF_REPLAYS, "GP07", "GP19", "GP20"),
        captures_dummies,
        in_full_lanes,
        after_failed_captures=everywhere,
    ),
    _EXPERIMENT["answers_eagerly"],
    _own("replays", OF_REPLAYS, replays),
    _own("other_orders", OF_REPLAYS, other_orders),
    _own("similar_batches", OF_REPLAYS, similar_batches),
    _own("lent_buffers", ("GP19",), lent_buffers),
    _EXPERIMENT["declared_graph_support"],
)
"""The experiments of a lane of builders. Their names are unique and appear in reports."""

TASK_EXPERIMENTS: tuple[Experiment, ...] = tuple(
    replace(each, examines=(*each.examines, "GP21")) if {*OF_REPLAYS} <= {*each.examines} else each
    for each in BUILDER_EXPERIMENTS
)
"""The experiments for builders whose kernels are tasks, which the engine updates."""
