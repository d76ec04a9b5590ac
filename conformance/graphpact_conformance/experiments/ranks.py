"""The agreement of ranks that step together with one batch: GP04 to GP06, GP11, GP17.

Ranks are simulated: they run one after another in this process, with the rank set by `graphpact.parallel`.
Real ranks would synchronise in collectives, so the recorded operations and the gathered rows must be equal.

Does not: start processes or run collectives; give ranks unequal batches (see ``uneven_ranks``).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import torch

from graphpact.batch import ForwardBatch
from graphpact.parallel import get_parallel
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.fields import COUNT, GATHERED
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences, is_right
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.graph_choice import with_room
from graphpact_conformance.experiments.padding import pads_leak
from graphpact_conformance.experiments.uneven_ranks import VARIANT_HELP, differ_in_variant, uneven_ranks
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.model import own_rows
from graphpact_conformance.records.raised import CannotCaptureError, DeclinedError
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.trace import TracedCall

_RANK_HELP = (
    "with one rank the batch runs: check sizes that depend on attn_tp_size and offsets that depend on"
    " attn_tp_rank"
)
_COUNT_HELP = (
    "declare the slot whenever layers need it (RunnerContext.num_token_non_padded). With"
    " require_gathered_buffer ranks split the padded tokens: fill it with"
    " graphpact.parallel.local_num_token_non_padded(count, padded tokens); otherwise with the batch's count"
)
_GATHERED_HELP = (
    "let a post_fill of the slot write the padded count of FillContext, as"
    " build_decode_registry(require_gathered_buffer=True) does; the batch's counts include only live tokens"
)


def ranks_agree(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture and step as each rank: shapes, recorded work and gathered rows must be equal.

    Lanes with optional fields also run as the last rank of a group that does not gather. Such a rank has all
    rows.
    """
    config = lane.config
    counted = lane.like(replace(config, counts=True).divided(config.ranks))
    together = (
        counted if config.case.tokens_per_request is None else with_room(counted)
    )  # has room for one more request
    yield from _as_ranks(lane, together, range(config.ranks), (steps.padded, steps.small, steps.idle))
    if config.fields:
        alone = lane.like(replace(config, counts=True, gathers=False))
        yield from _as_ranks(lane, alone, [config.ranks - 1], [steps.padded])


def _as_ranks(
    lane: LaneUnderTest, counted: LaneUnderTest, numbers: Sequence[int], problems: Sequence[Problem]
) -> Findings:
    """Capture and step as each of some ranks, and compare them.

    Args:
        lane: The lane of a single rank, whose layers do not read the counts of tokens.
        counted: The lane whose layers read the counts of tokens.
        numbers: The ranks.
        problems: The batches.
    """
    rigs: dict[int, Rig] = {}
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
                        expected="a lane whose layers read the count of live tokens can be captured too",
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
    in_steps: list[Finding] = []
    for number in range(1, len(problems) + 1):
        for found in _same_steps(lane, counted, rigs, problems[:number]):
            in_steps.append(found)
            yield found
    if not _is_about_the_count(in_steps):
        yield from at_capture  # one finding about the count is enough
    if counted.config.gathers:
        compare = None if in_steps else partial(_compare_uneven, counted)
        yield from uneven_ranks(lane, rigs, partial(_as_rank, ranks=ranks), compare)


def _is_about_the_count(found: Sequence[Finding]) -> bool:
    """Return whether any finding is about the count of live tokens."""
    return any((each.field or "").startswith(f"view.{COUNT}") for each in found)


def _as_rank(rank: int, ranks: int) -> AbstractContextManager[object]:
    return get_parallel().override(attn_tp_rank=rank, attn_tp_size=ranks)


def _captures(lane: LaneUnderTest) -> bool:
    """Return whether the lane can be captured as a single rank."""
    try:
        with get_parallel().override(attn_tp_rank=0, attn_tp_size=1):
            lane.rig()
    except CannotCaptureError:
        return False
    return True


_COUNTED_HELP = (
    "declare the slot, and set the field in dummy(), according to the context of each lane: do not keep state"
    " of a lane on the class or in the module"
)


@torch.inference_mode()
def _captured_counts(lane: LaneUnderTest, rank: int, rig: Rig) -> Findings:
    """Capture, and check that the dummy's count of live tokens is the count that a replay would have."""
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


def _without_count(lane: LaneUnderTest, problem: Problem) -> Finding:
    return lane.finding(
        "GP05",
        hook="populate",
        field=f"view.{COUNT}",
        expected="a slot of that name where layers need the number of live tokens",
        actual="slots() declares none, and Lane.run() refuses the batch",
        problem=problem,
        help=_COUNT_HELP,
    )


def _same_captures(lane: LaneUnderTest, rigs: Sequence[Rig]) -> Findings:
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
    """Return the index of the first operation that differs between two ranks, and a text for each rank.

    Only operations and tensor shapes are compared. Host numbers may differ, such as the first row of a rank.
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
    plain: LaneUnderTest, lane: LaneUnderTest, rigs: Mapping[int, Rig], problems: Sequence[Problem]
) -> Findings:
    """Step all ranks of a tensor-parallel group with one batch: each rank has a share of the padded rows.

    Args:
        plain: The lane without a count of live tokens.
        lane: The lane.
        rigs: The rig of each rank.
        problems: The batches so far. The ranks have already run all but the last.
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
                    continue  # the wrong count explains wrong rows
            yield from _compare_rows(plain, lane, rig, rank, step, problems)
    if len(set(answers)) > 1:
        yield lane.finding(
            "GP17",
            field="the replayed shape",
            expected=f"the same on all ranks: {answers[0]}",
            actual=", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers)),
            problem=problem,
            help=VARIANT_HELP
            if differ_in_variant(answers)
            else "let fit() depend only on data that all ranks have: the batch, and global_num_tokens_cpu",
        )
    elif declined is not None:
        raise DeclinedError(declined)


def _compare_rows(
    plain: LaneUnderTest,
    lane: LaneUnderTest,
    rig: Rig,
    rank: int,
    step: StepRecord,
    problems: Sequence[Problem],
) -> Findings:
    """Compare the results of a rank's step with the oracle, and with other contents of padding rows."""
    leaks = [*pads_leak(lane, rig, step)] if step.outputs is not None else []
    yield from leaks
    wrong = differences(rig, step, rig.answer(problems[-1]))
    if not wrong or not _is_right_alone(plain, problems):
        return  # the step is right, or it is also wrong without ranks and counts
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


def _compare_uneven(
    lane: LaneUnderTest, rank: int, rig: Rig, step: StepRecord, together: tuple[int, ...]
) -> Findings:
    """Compare counts and results of a replay on a rank, whose batch is not that of the others.

    Args:
        lane: The lane, whose layers read the counts of tokens. In steps with equal batches it is right.
        rank: The rank.
        rig: Its rig.
        step: Its step.
        together: The tokens of each rank.
    """
    problem, shape = step.problem, step.shape
    assert shape is not None  # noqa: S101  it was replayed
    words = f"with {together} tokens on the ranks"
    shares = [*_share(lane, rank, step, [problem])]
    for found in shares:
        yield found.model_copy(update={"rule": "GP17", "field": f"{found.field}, {words}"})
    wrong = [] if shares else differences(rig, step, rig.answer(problem, padded_tokens=shape.num_tokens))
    if wrong and _is_right_alone(lane, [problem]):
        yield lane.finding(
            "GP17",
            field=f"rank {rank}, {words}: {wrong[0].what}",
            expected=wrong[0].expected,
            actual=wrong[0].actual,
            step=step,
            help="with equal batches the ranks are right: prepare the rank's own batch, and pad it to the"
            " shape that fit() returned, which may be larger than the shape of its own tokens",
        )


def _is_right_alone(lane: LaneUnderTest, problems: Sequence[Problem]) -> bool:
    """Return whether a single rank, in a new lane, runs the last batch correctly after the others."""
    with get_parallel().override(attn_tp_rank=0, attn_tp_size=1):
        try:
            rig = lane.build()
        except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
            return False
        for problem in problems[:-1]:
            rig.step(problem, may_decline=True)
        return is_right(lane, rig, problems[-1], may_decline=True) and _has_count(rig, problems[-1])


def _has_count(rig: Rig, problem: Problem) -> bool:
    """Return whether the view's count of live tokens includes all tokens of the batch, if it has a count."""
    count = rig.step(problem, may_decline=True).leaves.get(f"view.{COUNT}")
    return count is None or int(count.value) == len(problem.tokens)


def _share(lane: LaneUnderTest, rank: int, step: StepRecord, problems: Sequence[Problem]) -> Findings:
    """Check the token counts of a replay on a rank: its live tokens, and the tokens that ranks gather.

    If the count of live tokens is wrong for a single rank too, it breaks GP05, otherwise GP17.
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
