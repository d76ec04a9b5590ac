"""The choice of the graph for a batch, and the agreement of ranks: GP05, GP06, GP11, GP12, GP17, GP20.

Ranks are simulated: they run one after another in this process, with the rank set by `graphpact.parallel`.
Real ranks would synchronise in collectives, so the recorded operations and the gathered rows must be equal.

Does not: communicate.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import zip_longest

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.parallel import get_parallel
from graphpact.runners import RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.experiments.base import Findings, differences, is_right, wrong_results
from graphpact_conformance.experiments.parity import compare_with_capture, trace_of
from graphpact_conformance.experiments.values import pads_leak
from graphpact_conformance.problems import Config, Drawn, Problem, corner, half_size_batch, of_size
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import DeclinedError, Rig
from graphpact_conformance.subject import CannotCaptureError, LaneUnderTest, planned_shapes
from graphpact_tape.tape import TapeDriver
from graphpact_tape.trace import TracedCall

_RANKS = 2
_RANK_HELP = (
    "with one rank it does not fail: check sizes that depend on attn_tp_size and offsets that depend on"
    " attn_tp_rank"
)
_GATHER_HELP = (
    "without other ranks it does not fail: check the use of global_num_tokens_cpu, and ranks without"
    " requests and rows"
)
_COUNT = "num_token_non_padded"
_COUNT_HELP = (
    "declare the slot whenever layers need it (RunnerContext.num_token_non_padded), and fill it with"
    " graphpact.parallel.local_num_token_non_padded(count, padded tokens): ranks split the padded tokens"
)
_DECLINE_HELP = (
    "return the captured shape; or, if its graph must not serve the batch, return an EagerReason of the"
    " runner's own, and list it in the class attribute `declines`"
)
_DECLINE_RANK_HELP = (
    "let a declared reason depend only on data that all ranks have. Requests of a rank are its own where"
    " layers gather over ranks: decline every batch with global_num_tokens_cpu, or none"
)
_MOST = (1, 3, 5, 7, 13, 42, 100, 301)
"""Values of max_bs for which runners are asked for their shapes. No regular step of sizes ends at all of
them."""


# -- which graph -------------------------------------------------------------------------------------


def graph_choice(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Fit and run batches of every size: each takes the smallest captured shape that holds it.

    Or it runs eagerly, with a reason that the runner declares, or because no captured shape holds it.
    """
    rig = lane.rig()
    shapes = list(rig.lane.captured)
    yield from _planned(lane, rig, shapes)
    largest = [half_size_batch(lane.config), corner(lane.config)]
    if lane.config != lane.config.unbounded:
        largest.append(corner(lane.config.unbounded))
    for problem in (*_sizes(lane.config), *largest):
        batch = rig.batch_of(problem)
        asked, refused = _ask(lane, rig, batch, problem)
        if refused is not None:
            yield refused
            continue
        held_by = _smallest(shapes, batch)
        may_be_eager = not held_by or asked in rig.declines
        if asked not in held_by and not (isinstance(asked, EagerReason) and may_be_eager):
            yield lane.finding(
                "GP12",
                hook="prepare_replay",
                field="fit()",
                expected=" or ".join(map(str, held_by)) or "an EagerReason: no captured shape holds it",
                actual=str(asked),
                problem=problem,
                help=_DECLINE_HELP
                if isinstance(asked, EagerReason)
                else "let fit() depend only on the batch: return the smallest captured shape of its mode with"
                " room for its requests and tokens",
            )
            continue
        yield from _run_as_fitted(lane, rig, problem, asked)
    yield from _other_kinds(lane, rig)


def _run_as_fitted(
    lane: LaneUnderTest, rig: Rig, problem: Problem, asked: GraphShape | EagerReason | None
) -> Findings:
    """Run a batch: the lane replays the shape that ``fit`` gave, or runs eagerly and counts the reason."""
    best = asked if isinstance(asked, GraphShape) else None
    before = {shape: stats.replays for shape, stats in rig.lane.stats.shapes.items()}
    eager = rig.lane.stats.eager.total()
    step = rig.step(problem, may_decline=True)
    if step.error is not None:
        if best is None:  # a failing replay is a finding of other experiments
            yield lane.of_error(
                step.error,
                expected=f"a batch for which fit() returns a reason runs eagerly: {asked}",
                rule="GP12",
                step=step,
                help="return an EagerReason from fit(); Lane.run() then runs the batch eagerly",
            )
        return
    replayed = [
        shape for shape, stats in rig.lane.stats.shapes.items() if stats.replays > before.get(shape, 0)
    ]
    counted = rig.lane.stats.eager.total() - eager
    reason = None if best else asked
    if (replayed, counted, step.reason) != ([best] if best else [], 0 if best else 1, reason):
        yield lane.finding(
            "GP12",
            field="Lane.stats",
            expected=f"one replay of {best}" if best else f"one eager run, counted as {asked}",
            actual=f"replays of {', '.join(map(str, replayed)) or 'none'}, {counted} eager runs"
            + (f", counted as {step.reason}" if step.reason else ""),
            step=step,
            help="return a captured shape from fit(), or an EagerReason",
        )
    if step.declined is not None:
        yield from wrong_results(
            lane, rig, step, what="an eager run", help="no graph is involved: check the region"
        )
        return
    wrong = differences(rig, step, lane.answer(rig, problem))
    if wrong and _is_recorded_otherwise(lane, rig, problem):
        yield lane.finding(
            "GP12",
            field=wrong[0].what,
            expected=wrong[0].expected,
            actual=wrong[0].actual,
            step=step,
            help="a capture of this batch records other work than the graph that replayed it: put"
            " everything that recorded kernels depend on into the shape",
        )


def _ask(
    lane: LaneUnderTest, rig: Rig, batch: ForwardBatch, problem: Problem
) -> tuple[GraphShape | EagerReason | None, Finding | None]:
    """Return the result of ``fit``, called without host syncs, or a finding about its error."""
    guard = TapeDriver(lane.device, strict=True)
    host = batch.host_tensors() if lane.device.type == "cpu" else [*batch.tensors().values()]
    try:
        with guard.preparation(host, read_only=[*batch.tensors().values()]):
            return rig.lane.fit(batch), None
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        return None, lane.of_error(
            error,
            expected="fit() returns a shape or an EagerReason for any batch, from host data",
            rule="GP12",
            problem=problem,
            hook="prepare_replay",
            help="return an EagerReason where no shape holds the batch, and raise no error",
        )


def _is_recorded_otherwise(lane: LaneUnderTest, rig: Rig, problem: Problem) -> bool:
    """Return whether a capture of this batch records other work or other host numbers."""
    found = compare_with_capture(lane, rig, "graph", problem)
    return any(f.rule in ("GP08", "GP10") for f in found)


def _sizes(config: Config) -> list[Problem]:
    """Return batches of short requests: every small size, the largest shape, one more, and an idle batch."""
    most = config.most_requests
    sizes = [*range(1, min(most, 9) + 1), most, most + 1]
    if config.case.mode is ForwardMode.IDLE:
        return [Problem(config.case, [], 0)]
    return [of_size(config, size) for size in dict.fromkeys(sizes)] + [Problem(config.case, [], 0)]


def _smallest(shapes: Sequence[GraphShape], batch: ForwardBatch) -> list[GraphShape]:
    """Return the smallest captured shapes that hold a batch.

    There are several if shapes differ in two sizes, or in their variant.
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
        if not any(other != (bs, tokens) and other[0] <= bs and other[1] <= tokens for other in sizes)
    ]


def _planned(lane: LaneUnderTest, rig: Rig, shapes: Sequence[GraphShape]) -> Findings:
    """Check that the runner's shapes are captured and cover the largest step."""
    planned = planned_shapes(rig.runner)
    if set(planned) != set(shapes) or len(set(shapes)) != len(shapes):
        yield lane.finding(
            "GP12",
            field="shapes()",
            expected=f"every shape captured once: {', '.join(map(str, planned))}",
            actual=", ".join(map(str, shapes)),
            help="return the same shapes from every call of shapes(), each once",
        )
    if lane.kind == "runner" and not lane.config.case.mode.is_ragged:
        yield from _default_shapes(lane, rig)


def _default_shapes(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Check that the runner's default shapes cover the largest step, or end at one fixed cap."""
    capture_sizes: dict[int, list[int]] = {}
    each = lane.config.case.rows_per_request
    for most in (each * number for number in _MOST):
        limits = replace(lane.config.limits, max_bs=most, max_num_tokens=most * 8)
        context = RunnerContext(
            lane.device,
            rig.backend.capabilities,
            limits,
            mode=lane.config.case.lane_mode,
        )
        try:
            own = planned_shapes(lane.runner(context))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            yield lane.of_error(
                error,
                expected=f"shapes for steps of {most} requests",
                rule="GP12",
                help="support every limits.max_bs from 1 up in shapes()",
            )
            return
        if own:
            capture_sizes[most] = [shape.batch_size for shape in own]
    cap = max((size for sizes in capture_sizes.values() for size in sizes), default=0)
    for most, sizes in capture_sizes.items():
        reach = min(most, cap)
        if max(sizes, default=0) != reach or min(sizes, default=0) < each:
            yield lane.finding(
                "GP12",
                field=f"the default capture sizes for max_bs = {most}",
                expected=f"sizes from 1 up, the largest {reach}: every step can be replayed",
                actual=str(sizes),
                help="append max_bs to the capture sizes",
            )
            return


def _other_kinds(lane: LaneUnderTest, rig: Rig) -> Findings:
    """Fit batches of other modes and widths: none may take this graph."""
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
        others.append(("a batch with twice as many tokens per request", replace(batch, **twice)))
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
                expected=f"an EagerReason for {what}: {asked} was recorded for another kind",
                actual=str(asked),
                problem=problem,
                help="compare the mode, the tokens per request, and everything else that recorded kernels"
                " depend on, before the size",
            )


def declared_graph_support(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Check that a lane captures shapes unless its backend or its runner declares no graphs of the mode."""
    if lane.captures_nothing and lane.no_graphs_declared is None:
        support = lane.backend.capabilities.graph_support
        yield lane.finding(
            "GP12",
            field="shapes()" if lane.kind == "runner" else "capabilities.graph_support",
            expected=f"graphs of {lane.config.case}: declared graph support is {support.value!r}",
            actual="the runner has no shape to capture",
            help="return the shapes to capture from shapes(), or declare needs = GraphSupport.NEVER"
            if lane.kind == "runner"
            else "declare only the graph support that the kernels have",
        )


# -- ranks -------------------------------------------------------------------------------------------


def ranks_agree(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture and step as each of two ranks: shapes, recorded work and gathered rows must be equal."""
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
            except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
                if not _captures_alone(lane):
                    return  # the error does not depend on ranks
                yield lane.of_error(
                    error,
                    expected=f"rank {rank} of {_RANKS} captures like a single rank",
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
    """Capture, and check that the count of live tokens is that of a replay of the same dummy."""
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
                expected=f"{rows}, as at replay: all rows of a dummy are live, and this rank has {rows} of"
                f" them",
                actual=str(int(count)),
                help="compute the count at capture as at replay:"
                " graphpact.parallel.local_num_token_non_padded(count, padded tokens); all tokens of a"
                " dummy are live",
            )
            return


def _without_count(lane: LaneUnderTest, problem: Problem) -> Finding:
    return lane.finding(
        "GP05",
        hook="populate",
        field=f"view.{_COUNT}",
        expected="a slot of that name where layers need the number of live tokens",
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
            expected=f"the same shapes in the same order on all ranks: {', '.join(map(str, orders[0]))}",
            actual=f"on rank 1: {', '.join(map(str, orders[1]))}",
            help="do not let shapes depend on the rank",
        )
        return
    for shape in orders[0]:
        found = _other_work(trace_of(rigs[0], shape), trace_of(rigs[1], shape))
        if found is not None:
            at, first, second = found
            yield lane.finding(
                "GP17",
                hook="init_metadata_capture",
                field=f"{shape}: recorded operation {at}",
                expected=f"the same on all ranks; rank 0 has {first}",
                actual=f"rank 1 has {second}",
                help="record the same operations, on tensors of the same shapes, on all ranks: only the"
                " contents of tensors may differ",
            )
            return


def _other_work(first: Sequence[TracedCall], second: Sequence[TracedCall]) -> tuple[int, str, str] | None:
    """Return the first recorded operation that differs between two ranks, and both in words.

    Operations and tensor shapes count. Host numbers may differ, such as the first row of a rank.
    """
    for at, (one, two) in enumerate(zip_longest(first, second)):
        shown = [_work_of(call) for call in (one, two)]
        if shown[0] != shown[1]:
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


def _same_steps(plain: LaneUnderTest, lane: LaneUnderTest, rigs: Sequence[Rig], problem: Problem) -> Findings:
    """Step all ranks of a tensor-parallel group with one batch: each rank has a share of the padded rows."""
    answers: list[GraphShape | EagerReason | None] = []
    declined: EagerReason | None = None
    for rank, rig in enumerate(rigs):
        with _as_rank(rank):
            step = rig.step(problem, may_decline=True)
            answers.append(step.reason or step.shape)
            if step.declined is not None:
                declined = step.declined
                continue
            if step.error is not None:
                if plain.rig().step(problem, may_decline=True).error is None:
                    yield lane.of_error(
                        step.error,
                        expected=f"rank {rank} replays like a single rank",
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
            if wrong and is_right(plain, plain.rig(), problem, may_decline=True):
                yield lane.finding(
                    "GP17",
                    field=f"rank {rank}: {wrong[0].what}",
                    expected=wrong[0].expected,
                    actual=wrong[0].actual,
                    step=step,
                    help="pool on each rank the live tokens among its rows of the padded shape",
                )
            if step.outputs is not None:
                yield from pads_leak(lane, rig, step)
    if len(set(answers)) > 1:
        yield lane.finding(
            "GP17",
            field="the replayed shape",
            expected=f"the same on all ranks: {answers[0]}",
            actual=", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers)),
            problem=problem,
            help="let fit() depend only on data that all ranks have: the batch, and global_num_tokens_cpu",
        )
    elif declined is not None:
        raise DeclinedError(declined)


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
            expected=f"{real}: the live tokens among its {rows} rows of {shape}",
            actual="the view has no such field" if count is None else str(count),
            problem=problem,
            help=_COUNT_HELP,
        )


def _uneven(lane: LaneUnderTest, rigs: Sequence[Rig]) -> Findings:
    """Step data-parallel ranks with unequal batches: all replay the shape of the largest."""
    config = lane.config
    width = config.case.width
    if width is None or config.case.mode is ForwardMode.IDLE:
        return
    most = config.most_requests
    groups = [
        [of_size(config, size) if size else Problem(config.case, [], 0) for size in sizes]
        for sizes in ((most, 1), (most, 0), (1, 0), (most + 1, 1))
    ]
    declined = next(filter(lane.declined, (corner(config.unbounded), *_sizes(config))), None)
    if declined is not None:
        groups.append([declined, of_size(config, most)])
    for group in groups:
        sizes = [len(problem.requests) for problem in group]
        together = tuple(size * width for size in sizes)
        answers: list[GraphShape | EagerReason | None] = []
        for rig, problem, size in zip(rigs, group, sizes, strict=True):
            batch = replace(rig.batch_of(problem), global_num_tokens_cpu=together)
            asked, refused = _ask(lane, rig, batch, problem)
            if refused is not None:
                return  # a finding of `graph_choice`
            if isinstance(asked, GraphShape):
                step = rig.step(problem, batch=batch, may_decline=True)
                if step.error is not None:
                    if rig.step(problem, may_decline=True).error is None:
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
            shown = [
                f"rank {rank} with {size} requests: {answer or 'no graph'}"
                for rank, (size, answer) in enumerate(zip(sizes, answers, strict=True))
            ]
            yield lane.finding(
                "GP17",
                field="the replayed shape",
                expected=f"the same on all ranks for global_num_tokens_cpu = {together}",
                actual="; ".join(shown),
                help=_DECLINE_RANK_HELP
                if any(answer in rigs[0].declines for answer in answers)
                else "where layers gather over ranks, all take the shape of the largest: CaptureSizes.fit()"
                " uses global_num_tokens_cpu",
            )
