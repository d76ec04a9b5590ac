"""Which graph a batch replays, and that all ranks agree: GP05, GP06, GP11, GP12, GP17, GP20.

Ranks are simulated: one after another in this process, each as the rank that `graphpact.parallel` says it is.
What they would wait for each other in is the sequence of what they record and of the rows that they gather.

Does not: communicate.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import zip_longest

import torch

from graphpact.attention import GraphSupport
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.parallel import get_parallel
from graphpact.runners import RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.experiments.base import Findings, differences
from graphpact_conformance.experiments.parity import compare_with_capture, trace_of
from graphpact_conformance.experiments.values import pads_leak
from graphpact_conformance.problems import Config, Drawn, Problem, corner, nearly, of_size
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import Rig
from graphpact_conformance.subject import CannotCaptureError, LaneUnderTest, planned_shapes
from graphpact_tape.recorder import TracedCall
from graphpact_tape.tape import TapeDriver

_RANKS = 2
_RANK_HELP = (
    "as the only rank it does not fail: look at what takes its size from attn_tp_size or its place from"
    " attn_tp_rank"
)
_GATHER_HELP = (
    "without other ranks it does not fail: look at what goes by global_num_tokens_cpu, and at what a rank"
    " without requests has no rows for"
)
_COUNT = "num_token_non_padded"
_COUNT_HELP = (
    "declare the slot wherever layers ask for it (RunnerContext.num_token_non_padded), and fill it by"
    " graphpact.parallel.local_num_token_non_padded(count, padded tokens): the boundary between ranks is"
    " drawn in the padded count"
)
_MOST = (1, 3, 5, 7, 13, 42, 100, 301)
"""The largest steps for which runners are asked for their shapes; no rhythm of sizes ends at all of them."""


# -- which graph -------------------------------------------------------------------------------------


def takes_the_right_graph(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Ask for, and replay, batches of every size: each takes the smallest captured shape that holds it."""
    rig = lane.rig()
    shapes = list(rig.lane.captured)
    yield from _planned(lane, rig, shapes)
    for problem in (*_sizes(lane.config), nearly(lane.config), corner(lane.config)):
        batch = rig.batch_of(problem)
        asked, refused = _ask(lane, rig, batch, problem)
        if refused is not None:
            yield refused
            continue
        held_by = _smallest(shapes, batch)
        if asked not in held_by and not (isinstance(asked, EagerReason) and not held_by):
            yield lane.finding(
                "GP12",
                hook="prepare_replay",
                field="fit()",
                expected=" or ".join(map(str, held_by))
                or "a reason to run eagerly: no captured shape holds it",
                actual=str(asked),
                problem=problem,
                help="let bucket and eligibility follow from the batch alone: the smallest captured shape"
                " with room for its requests and tokens, of its mode",
            )
            continue
        best = asked if isinstance(asked, GraphShape) else None
        before = {shape: stats.replays for shape, stats in rig.lane.stats.shapes.items()}
        eager = rig.lane.stats.eager.total()
        step = rig.step(problem)
        if step.error is not None:
            if best is None:  # what fails in a replay, others tell
                yield lane.of_error(
                    step.error,
                    expected="a batch that no captured shape holds runs eagerly",
                    rule="GP12",
                    step=step,
                    help="Lane.run() serves it; fit() has to give a reason for it",
                )
            continue
        replayed = [
            shape
            for shape, stats in rig.lane.stats.shapes.items()
            if stats.replays > before.get(shape, 0)
        ]
        counted = rig.lane.stats.eager.total() - eager
        if replayed != ([best] if best else []) or counted != (0 if best else 1):
            yield lane.finding(
                "GP12",
                field="Lane.stats",
                expected=f"one replay of {best}"
                if best
                else "one eager run, counted with its reason",
                actual=f"replays of {', '.join(map(str, replayed)) or 'none'}, {counted} eager runs",
                step=step,
                help="let fit() answer with a captured shape, or with the reason why there is none",
            )
        wrong = differences(rig, step, lane.answer(rig, problem))
        if wrong and _is_recorded_otherwise(lane, rig, problem):
            yield lane.finding(
                "GP12",
                field=wrong[0].what,
                expected=wrong[0].expected,
                actual=wrong[0].actual,
                step=step,
                help="a graph serves what it was recorded for, and a capture of this batch records other"
                " work: put all that recorded kernels depend on into the shape",
            )
    yield from _other_kinds(lane, rig)


def _ask(
    lane: LaneUnderTest, rig: Rig, batch: ForwardBatch, problem: Problem
) -> tuple[GraphShape | EagerReason | None, Finding | None]:
    """Return what ``fit`` answers while the host may not wait for the device, or why it answers nothing."""
    guard = TapeDriver(lane.device, strict=True)
    host = batch.host_tensors() if lane.device.type == "cpu" else [*batch.tensors().values()]
    try:
        with guard.preparation(host, read_only=[*batch.tensors().values()]):
            return rig.lane.fit(batch), None
    except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code runs here
        return None, lane.of_error(
            error,
            expected="fit() answers for any batch, from what lies on the host",
            rule="GP12",
            problem=problem,
            hook="prepare_replay",
            help="answer with an EagerReason where no shape holds the batch, and raise nothing",
        )


def _is_recorded_otherwise(lane: LaneUnderTest, rig: Rig, problem: Problem) -> bool:
    """Return whether a capture of the batch itself records other work, or other host numbers."""
    found = compare_with_capture(lane, rig, "graph", problem)
    return any(f.rule in ("GP08", "GP10") for f in found)


def _sizes(config: Config) -> list[Problem]:
    """Return a small batch of each number of requests, one more than the largest shape has, and none."""
    most = config.shapes[-1].batch_size
    sizes = [*range(1, min(most, 9) + 1), most, most + 1]
    if config.case.mode is ForwardMode.IDLE:
        return [Problem(config.case, [], 0)]
    return [of_size(config, size) for size in dict.fromkeys(sizes)] + [Problem(config.case, [], 0)]


def _smallest(shapes: Sequence[GraphShape], batch: ForwardBatch) -> list[GraphShape]:
    """Return the captured shapes that hold a batch, and of which no other one is smaller.

    There is more than one where they differ in more than one size, or in their variant.
    """
    fits = [
        shape
        for shape in shapes
        if shape.batch_size >= batch.batch_size
        and shape.num_tokens >= batch.num_tokens
        and batch.forward_mode in (shape.mode, ForwardMode.IDLE)
    ]
    sizes = [(shape.batch_size, shape.num_tokens) for shape in fits]
    return [
        shape
        for shape, (bs, tokens) in zip(fits, sizes, strict=True)
        if not any(
            other != (bs, tokens) and other[0] <= bs and other[1] <= tokens for other in sizes
        )
    ]


def _planned(lane: LaneUnderTest, rig: Rig, shapes: Sequence[GraphShape]) -> Findings:
    """Verify that the runner's shapes are captured, and reach the largest step."""
    planned = planned_shapes(rig.runner)
    if set(planned) != set(shapes) or len(set(shapes)) != len(shapes):
        yield lane.finding(
            "GP12",
            field="shapes()",
            expected=f"every shape captured once: {', '.join(map(str, planned))}",
            actual=", ".join(map(str, shapes)),
            help="shapes() gives the same shapes whenever it is asked, each once",
        )
    if lane.kind == "runner" and not lane.config.case.mode.is_ragged:
        yield from _default_shapes(lane, rig)


def _default_shapes(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Verify that the runner's own shapes reach the largest step, or one cap whatever that is."""
    capture_sizes: dict[int, list[int]] = {}
    for most in _MOST:
        limits = replace(lane.config.limits, max_bs=most, max_num_tokens=most * 8)
        context = RunnerContext(
            lane.device,
            rig.backend.capabilities,
            limits,
            mode=lane.config.case.lane_mode,
        )
        try:
            own = planned_shapes(lane.runner(context))
        except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code runs here
            yield lane.of_error(
                error,
                expected=f"shapes for steps of {most} requests",
                rule="GP12",
                help="shapes() is asked for any limits.max_bs from 1 up",
            )
            return
        if own:
            capture_sizes[most] = [shape.batch_size for shape in own]
    cap = max((size for sizes in capture_sizes.values() for size in sizes), default=0)
    for most, sizes in capture_sizes.items():
        reach = min(most, cap)
        if max(sizes, default=0) != reach or min(sizes, default=0) < 1:
            yield lane.finding(
                "GP12",
                field=f"the default capture sizes for max_bs = {most}",
                expected=f"buckets from 1 up, the largest {reach}: every step can be replayed",
                actual=str(sizes),
                help="append max_bs to the capture sizes, whatever their steps are",
            )
            return


def _other_kinds(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Ask for batches of other modes, of other widths, with other fields: none may take this graph."""
    problem = of_size(lane.config, 1)
    batch = rig.batch_of(problem)
    others = [
        (f"a {mode.value} batch", replace(batch, forward_mode=mode))
        for mode in ForwardMode
        if mode not in (ForwardMode.IDLE, batch.forward_mode, lane.config.case.lane_mode)
    ]
    if batch.batch_size and not batch.forward_mode.is_ragged:
        twice = {
            name: getattr(batch, name).repeat_interleave(2, dim=0)
            for name in ("input_ids", "positions", "out_cache_loc")
        }
        others.append(
            ("a batch with twice as many tokens of each request", replace(batch, **twice))
        )
    for what, other in others:
        asked, refused = _ask(lane, rig, other, problem)
        if refused is not None:
            yield refused
        elif isinstance(asked, GraphShape):
            width = asked.num_tokens // asked.batch_size
            if asked.mode is other.forward_mode and width == other.tokens_per_request:
                continue
            yield lane.finding(
                "GP12",
                field="fit()",
                expected=f"a reason, for {what}: {asked} was recorded for another kind",
                actual=str(asked),
                problem=problem,
                help="compare the mode, the tokens of each request, and all else that recorded kernels"
                " depend on, before the size",
            )


def declares_what_it_can(lane: LaneUnderTest, _: Drawn) -> Findings:
    """A backend that declares that a graph holds this mode is captured in it."""
    support = lane.backend.capabilities.graph_support
    if not isinstance(support, GraphSupport) or not support.covers(lane.config.case.needs):
        return
    rig = lane.rig()
    if not planned_shapes(rig.runner):
        yield lane.finding(
            "GP12",
            field="capabilities.graph_support",
            expected=f"graphs of {lane.config.case}: it declares {support.value!r}",
            actual="the lane captures nothing",
            help="declare what graphs can hold, and no more",
        )


# -- ranks -------------------------------------------------------------------------------------------


def ranks_agree(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture and step as each of two ranks: the same shapes, the same work, the same rows gathered."""
    counted = lane.like(replace(lane.config, counts=True))
    rigs: list[Rig] = []
    for rank in range(_RANKS):
        with _as_rank(rank):
            try:
                rigs.append(counted.build(capture=False))
                if not rigs[-1].registry.has_slot(_COUNT):
                    yield _without_count(counted, steps[0])
                    return
                yield from _captured_counts(counted, rank, rigs[-1])
            except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code runs here
                if not _captures_alone(lane):
                    return  # it is no matter of ranks
                yield lane.of_error(
                    error,
                    expected=f"rank {rank} of {_RANKS} captures as any other",
                    rule="GP17",
                    help=_RANK_HELP,
                )
                return
    yield from _same_captures(lane, rigs)
    for problem in (steps.padded, steps.small, steps.idle):
        yield from _same_steps(lane, counted, rigs, problem)
    yield from _uneven(lane, rigs)


def _as_rank(rank: int) -> AbstractContextManager[object]:
    return get_parallel().override(attn_tp_rank=rank, attn_tp_size=_RANKS)


def _captures_alone(lane: LaneUnderTest) -> bool:
    try:
        lane.rig()
    except CannotCaptureError:
        return False
    return True


@torch.inference_mode()
def _captured_counts(lane: LaneUnderTest, rank: int, rig: Rig) -> Findings:
    """Capture, and see that the number of real tokens is that of a replay of the same dummy."""
    counts: dict[GraphShape, torch.Tensor | None] = {}

    def see(view: ForwardBatch, _: object) -> None:
        shape, count = rig.observer.shape, view.num_token_non_padded
        if shape is not None:
            counts[shape] = None if count is None else count.clone()

    rig.observer.ready = see
    try:
        rig.capture()
    finally:
        rig.observer.ready = None
    for shape, count in counts.items():
        rows = shape.num_tokens // _RANKS
        if count is not None and int(count) != rows:
            yield lane.finding(
                "GP11",
                hook="populate",
                field=f"view.num_token_non_padded at the capture of {shape}, on rank {rank} of {_RANKS}",
                expected=f"{rows}, as at replay: no row of a dummy is padding, and so many are this rank's",
                actual=str(int(count)),
                help="count at capture as at replay: graphpact.parallel.local_num_token_non_padded(count,"
                " padded tokens), of a dummy that says that all its tokens are real",
            )
            return


def _without_count(lane: LaneUnderTest, problem: Problem) -> Finding:
    return lane.finding(
        "GP05",
        hook="populate",
        field=f"view.{_COUNT}",
        expected="a slot of that name where layers ask for the number of real tokens",
        actual="slots() declares none, and Lane.run() refuses the batch",
        problem=problem,
        help=_COUNT_HELP,
    )


def _same_captures(lane: LaneUnderTest, rigs: Sequence[Rig]) -> Findings:
    orders = [list(rig.lane.captured) for rig in rigs]
    if orders[0] != orders[1]:
        yield lane.finding(
            "GP17",
            field="captured shapes",
            expected=f"the same on all ranks, in one order: {', '.join(map(str, orders[0]))}",
            actual=f"on rank 1: {', '.join(map(str, orders[1]))}",
            help="let nothing about shapes depend on the rank",
        )
        return
    for shape in orders[0]:
        found = _other_work(trace_of(rigs[0], shape), trace_of(rigs[1], shape))
        if found is not None:
            at, first, second = found
            yield lane.finding(
                "GP17",
                hook="init_metadata_capture",
                field=f"{shape}: operation {at} of what is recorded",
                expected=f"the same on all ranks; rank 0 has {first}",
                actual=f"rank 1 has {second}",
                help="record the same operations, on tensors of the same shapes, on all ranks: what differs"
                " by rank is what tensors hold",
            )
            return


def _other_work(
    first: Sequence[TracedCall], second: Sequence[TracedCall]
) -> tuple[int, str, str] | None:
    """Return where two ranks record other operations, or tensors of other shapes, and both in words.

    Host numbers may differ: where a rank's rows begin is one.
    """
    for at, (one, two) in enumerate(zip_longest(first, second)):
        told = [_work_of(call) for call in (one, two)]
        if told[0] != told[1]:
            words = [
                "nothing more" if call is None else f"{call.op}{_sizes_of(call)} at {call.line}"
                for call in (one, two)
            ]
            return at, words[0], words[1]
    return None


def _work_of(call: TracedCall | None) -> object:
    if call is None:
        return None
    return call.op, [argument for argument in call.arguments if isinstance(argument, tuple)]


def _sizes_of(call: TracedCall) -> str:
    sizes = [list(argument[1]) for argument in call.arguments if isinstance(argument, tuple)]
    return f" of {', '.join(map(str, sizes))}" if sizes else ""


def _same_steps(
    plain: LaneUnderTest, lane: LaneUnderTest, rigs: Sequence[Rig], problem: Problem
) -> Findings:
    """All ranks of a tensor-parallel group have one batch, and each its share of the padded rows."""
    shapes = []
    for rank, rig in enumerate(rigs):
        with _as_rank(rank):
            step = rig.step(problem)
            shapes.append(step.shape)
            if step.error is not None:
                if plain.rig().step(problem).error is None:
                    yield lane.of_error(
                        step.error,
                        expected=f"rank {rank} replays as any other",
                        rule="GP17",
                        step=step,
                        help=_RANK_HELP,
                    )
                return
            if step.shape is not None:
                count = step.leaves.get("view.num_token_non_padded")
                real = None if count is None else int(count.value)
                yield from _share(lane, rank, step.shape, problem, real)
            wrong = differences(rig, step, rig.answer(problem))
            if wrong and not _is_wrong_alone(plain, problem):
                yield lane.finding(
                    "GP17",
                    field=f"rank {rank}: {wrong[0].what}",
                    expected=wrong[0].expected,
                    actual=wrong[0].actual,
                    step=step,
                    help="each rank pools the real tokens among its own rows of the padded shape",
                )
            if step.outputs is not None:
                yield from pads_leak(lane, rig, step)
    if len(set(shapes)) > 1:
        yield lane.finding(
            "GP17",
            field="the shape that is replayed",
            expected=f"one for all ranks: {shapes[0]}",
            actual=", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes)),
            problem=problem,
            help="let fit() answer by what all ranks know: the batch, and global_num_tokens_cpu",
        )


def _is_wrong_alone(lane: LaneUnderTest, problem: Problem) -> bool:
    """Return whether a batch is answered wrong without any ranks."""
    rig = lane.rig()
    step = rig.step(problem)
    return step.error is not None or bool(differences(rig, step, lane.answer(rig, problem)))


def _share(
    lane: LaneUnderTest, rank: int, shape: GraphShape, problem: Problem, count: int | None
) -> Findings:
    rows = shape.num_tokens // _RANKS
    real = min(max(len(problem.tokens) - rank * rows, 0), rows)
    if count != real:
        yield lane.finding(
            "GP05",
            hook="populate",
            field=f"view.num_token_non_padded on rank {rank} of {_RANKS}",
            expected=f"{real}: the real tokens among its {rows} rows of {shape}",
            actual="the view has no such field" if count is None else str(count),
            problem=problem,
            help=_COUNT_HELP,
        )


def _uneven(lane: LaneUnderTest, rigs: Sequence[Rig]) -> Findings:
    """Data-parallel ranks with more, fewer and no requests replay the bucket of the largest."""
    config = lane.config
    width = config.case.width
    if width is None or config.case.mode is ForwardMode.IDLE:
        return
    most = config.shapes[-1].batch_size
    for sizes in ((most, 1), (most, 0), (1, 0), (most + 1, 1)):
        together = tuple(size * width for size in sizes)
        answers: list[GraphShape | EagerReason | None] = []
        for rig, size in zip(rigs, sizes, strict=True):
            problem = of_size(config, size) if size else Problem(config.case, [], 0)
            batch = replace(rig.batch_of(problem), global_num_tokens_cpu=together)
            asked, refused = _ask(lane, rig, batch, problem)
            if refused is not None:
                return  # told already
            if isinstance(asked, GraphShape):
                step = rig.step(problem, batch=batch)
                if step.error is not None:
                    if rig.step(problem).error is None:
                        what = f"{size} requests, with {together} tokens on the ranks"
                        yield lane.of_error(
                            step.error,
                            expected=f"a replay of {what}",
                            rule="GP17",
                            step=step,
                            help=_GATHER_HELP,
                        )
                    return
                asked = step.shape if step.replays == 1 else None
            answers.append(asked)
        if answers[0] != answers[1] and any(isinstance(a, GraphShape) for a in answers):
            told = [
                f"rank {rank} with {size} requests: {answer or 'no graph'}"
                for rank, (size, answer) in enumerate(zip(sizes, answers, strict=True))
            ]
            yield lane.finding(
                "GP17",
                field="the shape that is replayed",
                expected=f"one on all ranks for global_num_tokens_cpu = {together}",
                actual="; ".join(told),
                help="where layers gather over ranks, all take the bucket of the largest: CaptureSizes.fit()"
                " looks at global_num_tokens_cpu",
            )
