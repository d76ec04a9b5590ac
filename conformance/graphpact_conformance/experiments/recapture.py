"""What an engine may do to a lane later: capture it again, run other lanes, rewrite batches and weights.

GP02, GP03, GP09, GP10, GP15, GP16, GP19. The contract allows an engine each of these actions.

Does not: run eager batches of many sizes between replays; see ``replay_order``.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import ReplayError
from graphpact.shapes import GraphShape
from graphpact.tensors import equal, same
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import corner, neighbours, of_size
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.another_model import beside_another_model
from graphpact_conformance.experiments.comparison import faults, is_right, same_tensors, spell, strict_rig
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import hook_of, is_plan
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord, copies
from graphpact_conformance.results import Finding
from graphpact_tape.poison import poison

# -- captured again ----------------------------------------------------------------------------------


def captured_again(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture again after a long step, after a short step and close, and only one shape; then replay."""
    rig = strict_rig(lane)
    if rig is None:
        lane.rig()  # raises if a fast lane cannot be captured either
        return
    problems = [p for p in (steps.padded, steps.small) if is_right(lane, rig, p, may_decline=True)]
    short = of_size(lane.config, 1) if steps.exact.requests else steps.idle
    for when, before, shape in (
        ("a long step", corner(lane.config), None),
        ("a short step and close()", short, None),
        ("one shape was captured again", short, rig.captured[0]),
        ("one shape was captured again twice", short, rig.captured[0]),
    ):
        rig.step(before, may_decline=True)
        if before is short and shape is None:
            rig.close()
        try:
            rig.capture(shape)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            expected = f"shapes can be captured again after {when}"
            yield lane.of_error(error, expected=expected, rule="GP10", hook="init_metadata_capture")
            return
        expected = f"a graph captured again after {when} replays like the first one"
        for problem in problems:
            step = rig.step(problem, may_decline=True)
            found = faults(lane, rig, step, rule="GP10", expected=expected, help=_AGAIN)
            if found:
                yield from found
                return


_AGAIN = (
    "bind and record everything again in every capture: keep no metadata, tensors or flags of an earlier"
    " capture"
)


# -- rewritten ---------------------------------------------------------------------------------------


def rewritten_memory(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Rewrite a batch after its step, prepare the next step while outputs are held, and write weights."""
    lane = lane.with_sinks()
    rig = strict_rig(lane)
    if rig is None:
        lane.rig()  # raises if a fast lane cannot be captured either
        return
    yield from _batch_rewritten(lane, rig, steps)
    yield from _batch_reused(lane, rig, steps.exact)
    yield from _weights_written(lane, rig, steps.padded)


@torch.inference_mode()
def _batch_rewritten(lane: LaneUnderTest, rig: Rig, steps: Drawn) -> Findings:
    """Rewrite every tensor of a batch after its step; hold its outputs until the next replay."""
    first, other, last = steps.exact, steps.small, steps.padded
    batch = rig.batch_of(first)
    held = _outputs_of(rig, first, batch)
    if held is None:
        return
    right = copies(held)
    for tensor in batch.tensors().values():
        poison(tensor)
    try:
        rig.synchronize()
    except ReplayError as error:
        expected = "the engine may rewrite a batch once its step has returned"
        found = lane.of_error(error, expected=expected, problem=first, help=_REWRITTEN)
        yield found.model_copy(update={"rule": "GP16"})
        return
    rig.load(other)
    with contextlib.suppress(Exception, SystemExit):  # `answers_eagerly` reports it
        rig.run(rig.batch_of(other), eagerly=True)
    when = "after an eager step"
    if same_tensors(copies(held), right):
        rig.load(last)
        when = "while the next step is prepared"
        with contextlib.suppress(Exception, SystemExit):  # `answers_replayed` reports it
            rig.prepare(rig.batch_of(last))
    if not same_tensors(copies(held), right):
        yield lane.finding(
            "GP15",
            field="the outputs",
            expected=f"outputs are valid until the next replay of the driver, also {when}",
            actual="other values",
            problem=first,
            help="return memory that only the graph writes: no tensor of the batch, no slot that the next"
            " step fills, and no buffer that eager steps use",
        )


@torch.inference_mode()
def _batch_reused(lane: LaneUnderTest, rig: Rig, problem: Problem) -> Findings:
    """Run several batches in the same tensors: they are overwritten with the values of each next batch.

    Batches with another set of fields are left out.
    """
    rig.step(problem, may_decline=True)
    batch, before = rig.batch_of(problem), problem
    for other in (problem, *neighbours(lane.config, problem)[:2]):
        following = rig.batch_of(other)
        if following.kind != batch.kind:
            continue
        for name, values in following.tensors().items():
            batch.tensors()[name].copy_(values)
        step = rig.step(other, batch=batch, may_decline=True)
        expected = "a batch that reuses the tensors of the batch before is treated as a new batch"
        found = faults(lane, rig, step, rule="GP16", expected=expected, help=_REWRITTEN)
        if found:
            rig.step(before, may_decline=True)
            if is_right(lane, rig, other, may_decline=True):  # right in new tensors, after the same batch
                yield from found
            return
        before = other


_REWRITTEN = (
    "keep no tensor of a batch after its step: the engine owns it and may write the next batch into it. Copy"
    " the values that a later step compares, and copy to the device from memory that the plugin owns"
)


@torch.inference_mode()
def _weights_written(lane: LaneUnderTest, rig: Rig, problem: Problem) -> Findings:
    """Write other weights and sinks in place, as engines do in online training, and replay."""
    if not is_right(lane, rig, problem, may_decline=True):
        return
    for weight in rig.weights:
        weight.copy_(weight.flip(0))
    anew = replace(problem)  # a new object, because the answer of the old one is cached
    expected = "the results use weights and sinks that were written in place between two steps"
    step = rig.step(anew, may_decline=True)
    if step.error is not None:  # GP02 even if the error names a rule, such as GP16, unrelated to weights
        yield lane.of_error(step.error, expected=expected, rule="GP02", step=step, help=_WEIGHTS)
        return
    yield from faults(lane, rig, step, rule="GP02", expected=expected, help=_WEIGHTS)


_WEIGHTS = (
    "read weights and `LayerSpec.sinks` in place in every step: do not keep a copy, cast or product of them"
    " from construction or capture. A cast inside `forward` is recorded, and so is correct"
)


# -- lanes beside each other -------------------------------------------------------------------------


def beside_other_lanes(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture and step lanes of the same classes in one process, of another mode or model and of the same."""
    lane.clear_caches()
    rig = lane.rig()
    problems = [p for p in (steps.padded, steps.small) if is_right(lane, rig, p, may_decline=True)]
    if not problems:
        return
    found = [*_beside_another_mode(lane, rig, problems)]
    if found:
        yield from found
        return
    found = [*beside_another_model(lane, rig, problems)]
    if found:
        yield from found
        return
    sharing = lane.build_sharing()
    for other in sharing:
        expected = "a lane that is captured after other lanes replays like the first one"
        for problem in problems:
            step = other.step(problem, may_decline=True)
            found = faults(lane, other, step, rule="GP10", expected=expected, help=_CLASS)
            if found:
                yield from found
                return
    for one, how in ((rig, "without"), (sharing[0], "with")):
        found = [*_in_turn(lane, one, sharing[1], [*problems, steps.exact], how)]
        if found:
            yield from found
            return


_CLASS = (
    "keep the state of a lane in the instance, or in metadata: class attributes, module globals and function"
    " caches are shared by all lanes of the process"
)


def _beside_another_mode(lane: LaneUnderTest, rig: Rig, problems: list[Problem]) -> Findings:
    """Replay after the capture of a lane of another mode, and again after the first step of that lane."""
    built = None
    with contextlib.suppress(Exception, SystemExit):  # the lanes of that mode report it
        built = lane.of_another_mode(capture=True)
    if built is None:
        return
    other, largest = built
    mode = largest.case.mode.value
    for when, rule in (
        (f"after the capture of a {mode} lane", "GP19"),
        (f"after its step of {mode}", "GP15"),
    ):
        if rule == "GP15":
            other.step(largest, may_decline=True)
        for problem in problems:
            expected = f"the results of a lane without other lanes, also {when}"
            step = rig.step(problem, may_decline=True)
            found = faults(lane, rig, step, rule=rule, expected=expected, help=_CLASS)
            if found:
                yield from found
                return


def _in_turn(lane: LaneUnderTest, one: Rig, two: Rig, problems: list[Problem], how: str) -> Findings:
    """Step two lanes in turn, with the same batch and with others, while the outputs of one are held."""
    expected = f"two lanes of one class, {how} a shared pool of inputs, do not affect each other"
    first, *others = problems
    for mine, theirs in ((one, two), (two, one)):
        theirs.step(others[0], may_decline=True)
        alone = mine.step(first, may_decline=True)
        held = _outputs_of(mine, first, mine.batch_of(first))
        if held is None:
            return
        right = copies(held)
        step = theirs.step(first, may_decline=True)
        found = faults(lane, theirs, step, rule="GP15", expected=expected, help=_CLASS)
        if found:
            yield _left_unwritten(lane, step, alone) or found[0]
            return
        for other in others:  # one of them has the same shape
            theirs.step(other, may_decline=True)
        if not same_tensors(copies(held), right):
            yield lane.finding(
                "GP15",
                field="the outputs",
                expected=f"{expected}: outputs are valid until the next replay of the same driver",
                actual="a replay of the other lane changes them",
                problem=first,
                help=_CLASS,
            )
            return


def _left_unwritten(lane: LaneUnderTest, step: StepRecord, right: StepRecord) -> Finding | None:
    """Return a finding about the first slot that a wrong step did not write, or None if there is none.

    Args:
        lane: The lane.
        step: The wrong step.
        right: A step of the same batch in another lane, with the right contents.
    """
    for path, leaf in step.leaves.items():
        other = right.leaves.get(path)
        if not leaf.is_written or other is None or equal(leaf.value, other.value):
            continue
        differs = ~same(leaf.value, other.value) if leaf.value.shape == other.value.shape else None
        if differs is not None and not bool((differs & ~leaf.in_tail).any()):
            return lane.finding(
                "GP03",
                hook=hook_of(leaf),
                field=leaf.name + spell(differs),
                expected="the padding rows that another lane of the class has for this batch",
                actual="other values, after the other lane ran the batch",
                step=step,
                help="write all rows up to the padded count in every step: lanes of one pool share the memory"
                " of inputs",
            )
        return lane.finding(
            "GP09" if is_plan(leaf) else "GP02",
            hook=hook_of(leaf),
            field=leaf.name,
            expected="the contents that another lane of the class has for this batch",
            actual="other contents, after the other lane ran the batch",
            step=step,
            help=_CLASS,
        )
    return None


@torch.inference_mode()
def _outputs_of(rig: Rig, problem: Problem, batch: ForwardBatch) -> Mapping[str, torch.Tensor] | None:
    """Return the outputs of a replay without a copy, or None if the step fails or runs eagerly."""
    if not isinstance(rig.fit(batch), GraphShape):
        return None
    rig.load(problem)
    with contextlib.suppress(Exception, SystemExit):  # `answers_replayed` reports it
        return rig.run(batch)
    return None
