"""The choice of the graph for a batch, and the agreement of ranks: GP05, GP06, GP11, GP12, GP17, GP20.

Ranks are simulated: they run one after another in this process, with the rank set by `graphpact.parallel`.
Real ranks would synchronise in collectives, so the recorded operations and the gathered rows must be equal.

Does not: communicate.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import cycle, islice, zip_longest

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.parallel import get_parallel
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.experiments.base import Findings, differences, is_right, wrong_results
from graphpact_conformance.experiments.kinds import MOST, of_default_sizes, of_other_kinds
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.experiments.values import pads_leak
from graphpact_conformance.model import own_rows
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.records import StepRecord
from graphpact_conformance.subject.under_test import CannotCaptureError, DeclinedError, Subject, UnderTest
from graphpact_conformance.world.fields import COUNT, GATHERED
from graphpact_conformance.world.lanes import DRAFT_WIDTH, Config
from graphpact_conformance.world.problems import (
    Drawn,
    Problem,
    corner,
    half_size_batch,
    of_size,
    short_and_long,
)
from graphpact_tape.tape import TapeDriver
from graphpact_tape.trace import TracedCall

_RANK_HELP = (
    "with one rank it does not fail: check sizes that depend on attn_tp_size and offsets that depend on"
    " attn_tp_rank"
)
_GATHER_HELP = (
    "without other ranks it does not fail: check the use of global_num_tokens_cpu, and ranks without"
    " requests and rows"
)
_COUNT_HELP = (
    "declare the slot whenever layers need it (RunnerContext.num_token_non_padded). With"
    " require_gathered_buffer ranks split the padded tokens: fill it with"
    " graphpact.parallel.local_num_token_non_padded(count, padded tokens); otherwise with the batch's count"
)
_GATHERED_HELP = (
    "let a post_fill of the slot write the padded count of FillContext, as"
    " build_decode_registry(require_gathered_buffer=True) does; the batch's counts are those of live tokens"
)
_DECLINE_HELP = (
    "return the captured shape; or, if its graph must not serve the batch, return an EagerReason of the"
    " runner's own, and list it in the class attribute `declines`"
)
_DECLINE_RANK_HELP = (
    "let a declared reason depend only on data that all ranks have. Requests of a rank are its own where"
    " layers gather over ranks: decline every batch with global_num_tokens_cpu, or none"
)
_MOST_SIZES = 256
"""The value of max_bs for which batches of every size are fitted."""


# -- which graph -------------------------------------------------------------------------------------


def graph_choice(lane: UnderTest, _: Drawn) -> Findings:
    """Fit and run batches of every size: each takes the smallest captured shape that holds it.

    Or it runs eagerly, with a reason that the runner declares, or because no captured shape holds it.
    """
    lane = _with_room(lane)
    rig = lane.rig()
    shapes = rig.captured
    yield from _planned(lane, rig, shapes)
    largest = [half_size_batch(lane.config), corner(lane.config)]
    if lane.config.case.width is None:
        largest.append(_one_token_more(lane.config))
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
    yield from _in_any_order(lane, rig)
    yield from _other_kinds(lane, rig)


def _with_room(lane: UnderTest) -> UnderTest:
    """Return a lane whose limits allow one request more than the largest shape.

    So a step that no graph holds stays within the limits by which a plugin sizes its memory.
    """
    return lane.like(replace(lane.config, room=max(lane.config.room, 1)))


def _run_as_fitted(
    lane: UnderTest, rig: Subject, problem: Problem, asked: GraphShape | EagerReason | None
) -> Findings:
    """Run a batch: the lane replays the shape that ``fit`` gave, or runs eagerly and counts the reason."""
    best = asked if isinstance(asked, GraphShape) else None
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
    replayed, counted = list(dict.fromkeys(step.replayed)), step.eager_runs
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
    if not wrong:
        return
    found = compare_with_capture(lane, rig, "graph", problem)
    otherwise = [each for each in found if each.rule in ("GP08", "GP10")]
    if lane.kind == "attention_backend":
        yield from otherwise  # its shapes are not its own
    elif otherwise:
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
    lane: UnderTest, rig: Subject, batch: ForwardBatch, problem: Problem
) -> tuple[GraphShape | EagerReason | None, Finding | None]:
    """Return the result of ``fit``, called without host syncs, or a finding about its error."""
    guard = TapeDriver(lane.device, strict=True)
    host = batch.host_tensors() if lane.device.type == "cpu" else [*batch.tensors().values()]
    try:
        with guard.preparation(host, read_only=[*batch.tensors().values()]):
            return rig.fit(batch), None
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        return None, lane.of_error(
            error,
            expected="fit() returns a shape or an EagerReason for any batch, from host data",
            rule="GP12",
            problem=problem,
            hook="prepare_replay",
            help="return an EagerReason where no shape holds the batch, and raise no error",
        )


def _sizes(config: Config) -> list[Problem]:
    """Return batches of short requests: every small size, the largest shape, one more, and an idle batch.

    In ragged modes also chunks of as many tokens as a verified draft has.
    """
    most = config.most_requests
    sizes = [*range(1, min(most, 9) + 1), most, most + 1]
    idle = Problem(config.case, [], 0)
    if config.case.mode is ForwardMode.IDLE:
        return [idle]
    chunks = [of_size(config, size, DRAFT_WIDTH) for size in (1, most)] if config.case.mode.is_ragged else []
    return [*(of_size(config, size) for size in dict.fromkeys(sizes)), *chunks, idle]


def _one_token_more(config: Config) -> Problem:
    """Return the largest batch of a ragged mode with one token more."""
    shape = config.shapes[-1]
    return corner(replace(config, capture_shapes=(replace(shape, num_tokens=shape.num_tokens + 1),)))


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


def _planned(lane: UnderTest, rig: Subject, shapes: Sequence[GraphShape]) -> Findings:
    """Check that the runner's shapes are captured and cover the largest step."""
    planned = rig.planned
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


def _default_shapes(lane: UnderTest, rig: Subject) -> Findings:
    """Check that the runner's default shapes cover the largest step, or end at one fixed cap."""
    capture_sizes: dict[int, list[int]] = {}
    each = lane.config.case.rows_per_request
    for most in (each * number for number in MOST):
        try:
            own = lane.default_shapes(most)
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
    yield from _fit_defaults(lane, rig)


def _fit_defaults(lane: UnderTest, rig: Subject) -> Findings:
    """Fit batches of every size to the default capture sizes: each takes the smallest that holds it."""
    most = _MOST_SIZES * lane.config.case.rows_per_request
    shapes = lane.default_shapes(most)
    for problem in of_default_sizes(lane.config, _MOST_SIZES) if shapes else ():
        batch = rig.batch_of(problem)
        asked, held_by = lane.fit_default(most, batch), _smallest(shapes, batch)
        if asked in rig.declines or asked in held_by or (not held_by and isinstance(asked, EagerReason)):
            continue
        yield lane.finding(
            "GP12",
            hook="prepare_replay",
            field=f"fit() with the default capture sizes for max_bs = {most}",
            expected=f"{' or '.join(map(str, held_by))} for {batch.batch_size} requests",
            actual=str(asked),
            help="return the smallest captured shape that holds the batch: CaptureSizes.fit()",
        )
        return


def _in_any_order(lane: UnderTest, rig: Subject) -> Findings:
    """Fit requests of different lengths in two orders. In mixed batches the order says which ones decode."""
    problem = short_and_long(lane.config.unbounded)
    if lane.config.case.mode is ForwardMode.MIXED:
        return
    orders = problem, replace(problem, requests=problem.requests[::-1])
    answers = [_ask(lane, rig, rig.batch_of(each), each) for each in orders]
    if any(refused is not None for _, refused in answers) or answers[0] == answers[1]:
        return  # what refuses any batch is found above
    yield lane.finding(
        "GP12",
        hook="prepare_replay",
        field="fit()",
        expected=f"one answer for requests in any order: {answers[0][0]}",
        actual=f"{answers[1][0]} with the requests in reverse",
        problem=problem,
        help="look at all requests, such as at the largest of seq_lens_cpu, not at the first or the last",
    )


def _other_kinds(lane: UnderTest, rig: Subject) -> Findings:
    """Fit batches of other modes and widths: none may take this graph."""
    problem = of_size(lane.config, 1)
    batch = rig.batch_of(problem)
    others = [
        (f"a batch of this size and of mode {mode.value}", replace(batch, forward_mode=mode))
        for mode in ForwardMode
        if mode not in (ForwardMode.IDLE, batch.forward_mode, lane.config.case.lane_mode)
    ]
    others += [(what, rig.batch_of(other)) for what, other in of_other_kinds(lane.config)]
    if batch.batch_size and not batch.forward_mode.is_ragged:
        twice = {
            name: getattr(batch, name).repeat_interleave(2, dim=0)
            for name in ("input_ids", "positions", "out_cache_loc")
        }
        mode = lane.config.case.lane_mode  # an idle batch has no tokens
        doubled = replace(batch, forward_mode=mode, **twice)
        others.append(("a batch with twice as many tokens per request", doubled))
    for what, other in others:
        asked, refused = _ask(lane, rig, other, problem)
        if refused is not None:
            yield refused
        elif isinstance(asked, GraphShape):
            width = asked.num_tokens // asked.batch_size
            is_uniform = not asked.mode.is_ragged
            if asked.mode is other.forward_mode and (not is_uniform or width == other.tokens_per_request):
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


def declared_graph_support(lane: UnderTest, _: Drawn) -> Findings:
    """Check that a lane captures shapes unless its backend or its runner declares no graphs of the mode."""
    if lane.captures_nothing and lane.no_graphs_declared is None:
        support = lane.graph_support
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


def ranks_agree(lane: UnderTest, steps: Drawn) -> Findings:
    """Capture and step as each rank: shapes, recorded work and gathered rows must be equal.

    In lanes with optional fields also as the last of some ranks that do not gather: it has all rows.
    """
    config = lane.config
    counted = lane.like(replace(config, counts=True))
    together = counted if config.case.width is None else _with_room(counted)  # for one request too many
    yield from _as_ranks(lane, together, range(config.ranks), (steps.padded, steps.small, steps.idle))
    if config.fields:
        alone = lane.like(replace(config, counts=True, gathers=False))
        yield from _as_ranks(lane, alone, [config.ranks - 1], [steps.padded])


def _as_ranks(
    lane: UnderTest, counted: UnderTest, numbers: Sequence[int], problems: Sequence[Problem]
) -> Findings:
    """Capture and step as some ranks.

    Args:
        lane: The lane of one rank.
        counted: The lane whose layers read the counts of tokens.
        numbers: The ranks.
        problems: The batches.
    """
    rigs: dict[int, Subject] = {}
    at_capture: list[Finding] = []
    ranks = lane.config.ranks
    for rank in numbers:
        with _as_rank(rank, ranks):
            try:
                rig = rigs[rank] = counted.build(capture=False)
                if all(slot.name != COUNT for slot in rig.slots):
                    yield _without_count(counted, problems[0])
                    return
                at_capture += _captured_counts(counted, rank, rig)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
                if not _captures(lane):
                    return  # the error depends neither on ranks nor on counts
                if not _captures(counted):
                    yield lane.of_error(
                        error,
                        expected="a lane whose layers read the count of live tokens is captured too",
                        rule="GP11",
                        help=_COUNTED_HELP,
                    )
                    return
                yield lane.of_error(
                    error,
                    expected=f"rank {rank} of {ranks} captures like a single rank",
                    rule="GP17",
                    help=_RANK_HELP,
                )
                return
    yield from _same_captures(lane, [*rigs.values()])
    is_wrong_in_steps = False
    for number in range(1, len(problems) + 1):
        for found in _same_steps(lane, counted, rigs, problems[:number]):
            is_wrong_in_steps |= (found.field or "").startswith(f"view.{COUNT}")
            yield found
    if not is_wrong_in_steps:  # a count that is wrong at capture alone
        yield from at_capture
    if counted.config.gathers:
        yield from _uneven(lane, [*rigs.values()])
        yield from _uneven_by_default(lane, rigs[numbers[0]])


def _as_rank(rank: int, ranks: int) -> AbstractContextManager[object]:
    return get_parallel().override(attn_tp_rank=rank, attn_tp_size=ranks)


def _captures(lane: UnderTest) -> bool:
    """Return whether a single rank captures a lane."""
    try:
        with get_parallel().override(attn_tp_rank=0, attn_tp_size=1):
            lane.rig()
    except CannotCaptureError:
        return False
    return True


_COUNTED_HELP = (
    "declare the slot and set the field in dummy() for each lane by its own context: keep nothing of another"
    " lane on the class or in the module"
)


@torch.inference_mode()
def _captured_counts(lane: UnderTest, rank: int, rig: Subject) -> Findings:
    """Capture, and check that the count of live tokens is that of a replay of the same dummy."""
    counts: list[torch.Tensor | None] = []

    def see(view: ForwardBatch, _: object) -> None:
        count = view.num_token_non_padded
        counts.append(None if count is None else count.clone())

    rig.capture(ready=see)
    ranks = lane.config.ranks
    for shape, count in zip(rig.captured, counts, strict=False):
        _, rows = own_rows(lane.config, shape.num_tokens)
        if count is not None and int(count) != rows:
            yield lane.finding(
                "GP11",
                hook="populate",
                field=f"view.num_token_non_padded at the capture of {shape}, on rank {rank} of {ranks}",
                expected=f"{rows}, as at replay: all rows of a dummy are live, and this rank has {rows} of"
                f" them",
                actual=str(int(count)),
                help="compute the count at capture as at replay:"
                " graphpact.parallel.local_num_token_non_padded(count, padded tokens); all tokens of a"
                " dummy are live",
            )
            return


def _without_count(lane: UnderTest, problem: Problem) -> Finding:
    return lane.finding(
        "GP05",
        hook="populate",
        field=f"view.{COUNT}",
        expected="a slot of that name where layers need the number of live tokens",
        actual="slots() declares none, and Lane.run() refuses the batch",
        problem=problem,
        help=_COUNT_HELP,
    )


def _same_captures(lane: UnderTest, rigs: Sequence[Subject]) -> Findings:
    for rank, rig in enumerate(rigs[1:], 1):
        orders = [each.captured for each in (rigs[0], rig)]
        if orders[0] != orders[1]:
            yield lane.finding(
                "GP17",
                field="captured shapes",
                expected=f"the same shapes in the same order on all ranks: {', '.join(map(str, orders[0]))}",
                actual=f"on rank {rank}: {', '.join(map(str, orders[1]))}",
                help="do not let shapes depend on the rank",
            )
            return
        for shape in orders[0]:
            found = _other_work(rigs[0].trace(shape), rig.trace(shape))
            if found is not None:
                at, first, other = found
                yield lane.finding(
                    "GP17",
                    hook="init_metadata_capture",
                    field=f"{shape}: recorded operation {at}",
                    expected=f"the same on all ranks; rank 0 has {first}",
                    actual=f"rank {rank} has {other}",
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


def _same_steps(
    plain: UnderTest, lane: UnderTest, rigs: Mapping[int, Subject], problems: Sequence[Problem]
) -> Findings:
    """Step all ranks of a tensor-parallel group with one batch: each rank has a share of the padded rows.

    Args:
        plain: The lane without a count of live tokens.
        lane: The lane.
        rigs: The rig of each rank.
        problems: The batches so far; the ranks have stepped all but the last.
    """
    answers: list[GraphShape | EagerReason | None] = []
    declined: EagerReason | None = None
    problem = problems[-1]
    for rank, rig in rigs.items():
        with _as_rank(rank, lane.config.ranks):
            step = rig.step(problem, may_decline=True)
            answers.append(step.reason or step.shape)
            if step.declined is not None:
                declined = step.declined
                continue
            if step.error is not None:
                if _is_right_alone(plain, problems):
                    yield lane.of_error(
                        step.error,
                        expected=f"rank {rank} replays like a single rank",
                        rule="GP17" if _is_right_alone(lane, problems) else None,
                        step=step,
                        help=_RANK_HELP,
                    )
                return
            if step.shape is not None:
                shares = [*_share(lane, rank, step, problems)]
                yield from shares
                if shares:
                    continue  # wrong rows follow from a wrong count
            yield from _compare_rows(plain, lane, rig, rank, step, problems)
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


def _compare_rows(
    plain: UnderTest,
    lane: UnderTest,
    rig: Subject,
    rank: int,
    step: StepRecord,
    problems: Sequence[Problem],
) -> Findings:
    """Compare the results of a rank's step with the oracle, and with other contents of padding rows."""
    leaks = [*pads_leak(lane, rig, step)] if step.outputs is not None else []
    yield from leaks
    wrong = differences(rig, step, rig.answer(problems[-1]))
    if not wrong or not _is_right_alone(plain, problems):
        return  # right, or wrong without ranks and counts too
    is_of_ranks = _is_right_alone(lane, problems)
    if is_of_ranks or not leaks:
        yield lane.finding(
            "GP17" if is_of_ranks else "GP05",
            field=f"rank {rank}: {wrong[0].what}",
            expected=wrong[0].expected,
            actual=wrong[0].actual,
            step=step,
            help="pool on each rank the live tokens among its rows of the padded shape",
        )


def _is_right_alone(lane: UnderTest, problems: Sequence[Problem]) -> bool:
    """Return whether a single rank in a new lane runs all batches, and the last one right."""
    with get_parallel().override(attn_tp_rank=0, attn_tp_size=1):
        try:
            rig = lane.build()
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return False
        for problem in problems[:-1]:
            rig.step(problem, may_decline=True)
        return is_right(lane, rig, problems[-1], may_decline=True) and _has_count(rig, problems[-1])


def _has_count(rig: Subject, problem: Problem) -> bool:
    """Return whether the view of a batch counts all its tokens, if it counts tokens."""
    count = rig.step(problem, may_decline=True).leaves.get(f"view.{COUNT}")
    return count is None or int(count.value) == len(problem.tokens)


def _share(lane: UnderTest, rank: int, step: StepRecord, problems: Sequence[Problem]) -> Findings:
    """Check the counts of tokens of a replay on a rank: its own live ones, and those that ranks gather.

    A count of live tokens that is wrong for a single rank too breaks GP05.
    """
    shape, ranks = step.shape, lane.config.ranks
    assert shape is not None  # noqa: S101  it was replayed
    first, rows = own_rows(lane.config, shape.num_tokens)
    real = min(max(len(step.problem.tokens) - first, 0), rows)
    asked = {COUNT: (real, f"{real}: the live tokens among its {rows} rows of {shape}", _COUNT_HELP)}
    if lane.config.gathers:
        padded = f"{shape.num_tokens}: every rank gathers the padded tokens of {shape}"
        asked |= dict.fromkeys(GATHERED, (shape.num_tokens, padded, _GATHERED_HELP))
    for name, (right, expected, help_) in asked.items():
        leaf = step.leaves.get(f"view.{name}")
        counts = [] if leaf is None else leaf.value.tolist()
        if any(count != right for count in counts) or (name == COUNT and not counts):
            is_of_ranks = name == COUNT and _is_right_alone(lane, problems)
            yield lane.finding(
                "GP17" if is_of_ranks else "GP05",
                hook="populate",
                field=f"view.{name} on rank {rank} of {ranks}",
                expected=expected,
                actual="the view has no such field" if leaf is None else ", ".join(map(str, counts)),
                step=step,
                help=help_,
            )


def _groups(lane: UnderTest, rig: Subject) -> list[list[Problem]]:
    """Return unequal batches of data-parallel ranks, each of which alone takes the right graph."""
    config = lane.config
    if config.case.width is None:
        most = min(config.shapes[-1].num_tokens, config.context - 1)
        chunks = _of_ranks(config, (most, 1), (most // 2, 1))
        groups = [[of_size(config, 1, chunk or 1) for chunk in each] for each in (*chunks, chunks[0][::-1])]
    else:
        most = config.most_requests
        requests = _of_ranks(config, (most, 1), (most, 0), (1, 0), (most + 1, 1))
        groups = [
            [of_size(config, size) if size else Problem(config.case, [], 0) for size in sizes]
            for sizes in (*requests, requests[0][::-1])
        ]
    declined = next(filter(lane.declined, (corner(config.unbounded), *_sizes(config))), None)
    if declined is not None:
        groups += [[declined, *[of_size(config, config.most_requests)] * (config.ranks - 1)]]
    # another graph without other ranks too is a finding of `graph_choice`
    return [group for group in groups if not any(_takes_another_graph(rig, problem) for problem in group)]


def _uneven(lane: UnderTest, rigs: Sequence[Subject]) -> Findings:
    """Step data-parallel ranks with unequal batches: all replay the shape of the largest."""
    if lane.config.case.mode is ForwardMode.IDLE:
        return
    for group in _groups(lane, rigs[0]):
        together = tuple(len(problem.tokens) for problem in group)
        answers: list[GraphShape | EagerReason | None] = []
        for rig, problem in zip(rigs, group, strict=True):
            batch = replace(rig.batch_of(problem), global_num_tokens_cpu=together)
            asked, refused = _ask(lane, rig, batch, problem)
            if refused is not None:
                return  # a finding of `graph_choice`
            if isinstance(asked, GraphShape):
                step = rig.step(problem, batch=batch, may_decline=True)
                if step.error is not None:
                    if rig.step(problem, may_decline=True).error is None:
                        what = f"{len(problem.tokens)} tokens, with {together} on the ranks"
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
        yield from _of_answers(lane, rigs[0], together, answers)


def _uneven_by_default(lane: UnderTest, rig: Subject) -> Findings:
    """Fit unequal batches of ranks by a runner's default settings: in ragged modes they may limit padding."""
    if lane.kind != "runner" or lane.config.case.width is not None:
        return
    for group in _groups(lane, rig):
        together = tuple(len(problem.tokens) for problem in group)
        batches = [replace(rig.batch_of(problem), global_num_tokens_cpu=together) for problem in group]
        try:
            answers = [lane.fit_default(_MOST_SIZES, batch) for batch in batches]
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return  # a finding of `graph_choice`
        yield from _of_answers(lane, rig, together, answers)


def _of_answers(
    lane: UnderTest,
    rig: Subject,
    together: tuple[int, ...],
    answers: Sequence[GraphShape | EagerReason | None],
) -> Findings:
    """Yield a finding if ranks with these numbers of tokens take other shapes, or only some of them one."""
    if len({*answers}) == 1 or not any(isinstance(answer, GraphShape) for answer in answers):
        return
    shown = [
        f"rank {rank} with {tokens} tokens: {answer or 'no graph'}"
        for rank, (tokens, answer) in enumerate(zip(together, answers, strict=True))
    ]
    yield lane.finding(
        "GP17",
        field="the replayed shape",
        expected=f"the same on all ranks for global_num_tokens_cpu = {together}",
        actual="; ".join(shown),
        help=_DECLINE_RANK_HELP
        if any(answer in rig.declines for answer in answers)
        else "where layers gather over ranks, all take the shape of the largest: CaptureSizes.fit()"
        " uses global_num_tokens_cpu",
    )


def _of_ranks(config: Config, *sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the numbers of each rank: the given ones of two ranks, then 0 and 1 in turn."""
    return [(*two, *islice(cycle((0, 1)), config.ranks - len(two))) for two in sizes]


def _takes_another_graph(rig: Subject, problem: Problem) -> bool:
    """Return whether a batch alone is fitted to another shape than the smallest that holds it."""
    batch = rig.batch_of(problem)
    try:
        asked = rig.fit(batch)
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return True
    held_by = _smallest(rig.captured, batch)
    is_shape = isinstance(asked, GraphShape) or bool(held_by)
    return asked not in held_by and is_shape and asked not in rig.declines
