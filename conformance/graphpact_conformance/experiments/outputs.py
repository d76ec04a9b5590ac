"""Outputs and KV cache against attention in float64, in eager steps and in replays.

GP02, GP04 to GP10, GP12, GP13, GP15, GP19. Wrong results of an eager run are findings without a rule.

Does not: find the field that causes a wrong output (see `graphpact_conformance.experiments.parity` and
``refresh``), or the effects of padding rows (see ``padding``).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact.batch import ForwardMode
from graphpact.tensors import same
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import (
    at_tiers,
    corner,
    edges,
    half_size_batch,
    of_size,
    shortened,
)
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import (
    Difference,
    differences,
    is_right,
    said_of,
    spell,
    values_at,
    wrong_results,
)
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.look_alikes import takes_live_rows_for_padding
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.experiments.unlike_eager import is_right_with_copies, unlike_eager
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.raised import DeclinedError
from graphpact_conformance.records.steps import StepRecord
from graphpact_conformance.results import Finding

# -- eager -------------------------------------------------------------------------------------------


def answers_eagerly(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Run batches without a graph, after replays and between them, and compare with attention in float64."""
    rig = lane.rig()
    largest = corner(lane.config.unbounded)
    is_wrong = False
    for problem in (*steps, largest):
        step = rig.step(problem, eagerly=True)
        for found in _judge_eager(lane, rig, step):
            is_wrong = True
            yield found
    if is_wrong or not rig.captured:
        return
    for replayed, problem in ((steps.exact, largest), (steps.padded, steps.exact)):
        rig.step(replayed, may_decline=True)  # `answers_replayed` reports errors of this step
        yield from _judge_eager(lane, rig, rig.step(problem, eagerly=True), after="after a replay")


def _judge_eager(lane: LaneUnderTest, rig: Rig, step: StepRecord, after: str = "") -> Findings:
    if step.error is not None:
        expected = "a declared kind of batch runs eagerly" + (f", also {after}" if after else "")
        yield lane.of_error(step.error, expected=expected, step=step)
        return
    for name in step.changed_fields:
        yield lane.finding(
            None,
            field=f"an eager run: batch.{name}",
            expected="the batch is read-only",
            actual="the step changed it",
            step=step,
            help="copy a tensor before you write it: in an eager step the view is the engine's batch",
        )
    if step.changed_fields or not differences(rig, step, lane.answer(rig, step.problem)):
        return
    help_ = "no graph is involved: check the kernels and their metadata"
    if lane.kind == "runner":
        help_ = "no graph is involved: check in `compose` the inputs of each pass and the use of its results"
    if rig.captured and is_right(lane, lane.build(capture=False), step.problem, eagerly=True):
        after = after or "after the captures"
        help_ = (
            "in a lane without graphs it is right: eager steps must not use state that captures and replays"
            " keep, nor state that all lanes of a process share"
        )
    what = f"an eager run {after}".strip()
    yield from wrong_results(lane, rig, step, what=what, help=help_)


# -- replayed ----------------------------------------------------------------------------------------


def answers_replayed(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a sequence of batches, and compare with attention in float64."""
    rig = lane.rig()
    slots = {slot.name for slot in rig.slots}
    without = [name for name in rig.batch_of(steps[0]).tensors() if name not in slots]
    for name in without:
        yield lane.finding(
            "GP02",
            hook="populate",
            field=f"batch.{name}",
            expected="a slot of that name: a graph ignores a field without a slot, so Lane.run() refuses"
            " the batch",
            actual="slots() declares none",
            problem=steps[0],
            help="declare a slot for every tensor that the batches of a mode carry",
        )
    if without:
        return
    declined: StepRecord | None = None
    are_right = True
    for problem in (*steps, steps.exact, steps.small):
        step = rig.step(problem, may_decline=True)
        if step.declined is not None:
            declined = declined or step
            continue
        if step.error is not None:
            are_right = False
            yield lane.of_error(
                step.error, expected="a batch that fits a captured shape is replayed", step=step
            )
            continue
        yield from _judge_run(lane, rig, step)
        for found in differences(rig, step, lane.answer(rig, problem)):
            are_right = False
            yield from _of_difference(lane, rig, step, found, steps.exact)
    yield from _at_edges(lane, rig, are_special=are_right)
    yield from takes_live_rows_for_padding(lane, rig, steps, are_special=are_right)
    if declined is not None and declined.declined is not None:
        yield from _every_batch_declined(lane, declined, steps)
        raise DeclinedError(declined.declined)


def _at_edges(lane: LaneUnderTest, rig: Rig, *, are_special: bool) -> Findings:
    """Replay requests whose lengths are at page, window or graph boundaries, and requests of equal lengths.

    No other experiment uses these batches, so a wrong replay is compared with a capture here. Their lengths
    are the cause only if they are special: other batches are right.
    """
    for problem in (*edges(lane.config), *_at_tiers(lane, rig)):
        step = rig.step(problem, may_decline=True)
        if step.error is not None:
            expected = "requests at page, window or graph boundaries, or of equal lengths, are replayed"
            yield lane.of_error(step.error, expected=expected, step=step)
            return
        if step.declined is not None:
            continue
        wrong = [*wrong_results(lane, rig, step, what="a replay", help=_EDGES)]
        if wrong:
            if (other := _other_input(lane, rig, step)) is not None:
                yield other
                return
            named = compare_with_capture(lane, rig, "graph", problem)
            yield from (found for found in named if lane.listed is None or found.rule in lane.listed)
            if are_special:
                yield from wrong
            return


def _at_tiers(lane: LaneUnderTest, rig: Rig) -> list[Problem]:
    """Return requests at the lengths where the runner changes graphs, or an empty list if ``fit`` raises."""
    try:
        return at_tiers(lane.config, lambda problem: rig.fit(rig.batch_of(problem)))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything: see `graph_choice`
        return []


_EDGES = (
    "the requests of this batch are at page, window or graph boundaries, or have equal lengths and share a"
    " first page: look for an off-by-one comparison, or for code that identifies a request by its length or"
    " pages"
)


def _every_batch_declined(lane: LaneUnderTest, step: StepRecord, steps: Drawn) -> Findings:
    """Check that the runner does not decline every batch.

    Idle batches count only in a lane of idle batches.
    """
    config = lane.config
    others = (of_size(config, 1), half_size_batch(config), corner(config))
    asked = [p for p in (*steps, *others) if p.requests or config.case.mode is ForwardMode.IDLE]
    if all(map(lane.declined, asked)):
        yield lane.finding(
            "GP12",
            hook="prepare_replay",
            field="fit()",
            expected="some batches are replayed, because the runner captures graphs",
            actual=f"every batch is declined: {step.declined}",
            step=step,
            help="return a captured shape for the batches that the graphs are made for; if the runner"
            " captures nothing, return no shapes from shapes()",
        )


def _judge_run(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> Findings:
    """Check that the step was one replay, and that it did not change the page table or the batch."""
    if step.replays != 1:
        how = f"counted {step.replays} replays"
        if step.reason is not None:
            held = step.problem
            how = f"ran {len(held.requests)} requests of {len(held.tokens)} tokens eagerly: {step.reason}"
        yield lane.finding(
            "GP02" if step.reason is None else "GP12",
            field="Lane.stats",
            expected="one replay, prepared by the hooks, for a batch that fits a captured shape",
            actual=f"the lane {how}",
            step=step,
            help="return from fit() the captured shape that holds the batch, or a reason that the runner"
            " lists in `declines`; a wrapper of run_step must not replace the step",
        )
    table = step.problem.page_table(rig.config)
    if step.table is not None and not torch.equal(step.table, table):
        yield lane.finding(
            "GP19",
            field="req_to_token" + spell(step.table != table),
            expected="the page table is read-only",
            actual=values_at(step.table, step.table != table),
            step=step,
            help="do not write it: the scheduler owns the page table",
        )
    for name in step.changed_fields:
        yield lane.finding(
            "GP19",
            hook="populate",
            field=name,
            expected="the batch is read-only",
            actual="the step changed it",
            step=step,
            help="copy it into the slots of the registry, and write there",
        )


def _of_difference(
    lane: LaneUnderTest, rig: Rig, step: StepRecord, found: Difference, exact: Problem
) -> Findings:
    """Yield a finding about a wrong replay, with the broken rule if the step itself shows it."""
    problem, padded = step.problem, step.has_padding
    rule, help_ = (
        None,
        "run the lane strict, or with verification, to find the first field that differs",
    )
    if found.kind == "extent":
        rule, help_ = (
            "GP06",
            "return only the rows of the batch's requests or tokens, without padding rows",
        )
    elif found.kind == "cache" and padded and _writes_foreign_slots(problem, found.slots):
        rule, help_ = (
            "GP04",
            "padding tokens must write KV slot 0: reset the tail of out_cache_loc to 0",
        )
    elif (other := _other_input(lane, rig, step)) is not None:
        yield other
        return
    elif padded and is_right(lane, rig, exact, may_decline=True):
        help_ = "batches without padding are right: check the contents and the counts of padding rows"
    elif _is_overwritten(lane, rig, step):
        rule, help_ = "GP15", _OVERWRITTEN_HELP
    elif not _is_prepared_otherwise(lane, rig, problem) and is_right(lane, rig, problem, eagerly=True):
        if (cause := unlike_eager(lane, rig, step)) is not None:
            yield cause
            return
        rule, help_ = "GP10", _ALIKE_HELP
    yield lane.finding(
        rule,
        hook="compose" if rule == "GP15" else None,
        field=f"a replay: {found.what}",
        expected=found.expected,
        actual=said_of(rig, step, found),
        step=step,
        help=help_,
    )


_ALIKE_HELP = (
    "the hooks prepare the same inputs as for a capture of this batch, and an eager run is right. Metadata of"
    " an eager run has the same dtypes and is no larger, and no layer overwrites the result of another: so"
    " the recorded work is wrong for this batch; look for work that runs once, outside the hooks"
)
_OVERWRITTEN_HELP = (
    "if each result of attention is copied, it is right: the eager call of a later layer overwrites this"
    " result while a segment still needs it. Return a copy that belongs to the segment after the call, such"
    " as `driver.eager_call(...).clone()`, or give each layer separate memory"
)


def _is_overwritten(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> bool:
    """Return whether a wrong replay in segments is right if the model copies each result of attention."""
    has_segments = step.shape is not None and rig.num_segments(step.shape) > 1
    return has_segments and is_right_with_copies(lane, step)


def _other_input(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> Finding | None:
    """Return a finding about the first field whose live rows differ from the batch, or None."""
    for name, given in rig.batch_of(step.problem).tensors().items():
        leaf = step.leaves.get(f"view.{name}")
        if leaf is None or leaf.value.dim() != given.dim():
            continue
        region = tuple(map(slice, given.shape))
        mine = leaf.value[region]
        if mine.shape != given.shape:
            continue
        differs = ~same(mine, given.cpu()) & ~leaf.in_tail[region]
        if bool(differs.any()):
            return lane.finding(
                "GP02",
                hook="populate",
                field=f"{leaf.path}{spell(differs)}",
                expected=f"the values of the batch: {values_at(given.cpu(), differs)}",
                actual=values_at(mine, differs),
                step=step,
                help="copy the values of the batch: they are the only input of the model in this step",
            )
    return None


def _writes_foreign_slots(problem: Problem, slots: Sequence[int]) -> bool:
    """Return whether one of the slots is not written by the tokens of the batch."""
    own = {slot for token in problem.tokens for slot in token.slots}
    return bool(set(slots) - own)


def _is_prepared_otherwise(lane: LaneUnderTest, rig: Rig, problem: Problem) -> bool:
    return any(True for _ in compare_with_capture(lane, rig, "graph", problem))


# -- corners -----------------------------------------------------------------------------------------


def largest_step(lane: LaneUnderTest, _: Drawn) -> Findings:
    """Replay the largest batches that the limits allow, each after a smaller batch of the same kind."""
    rig = lane.rig()
    for smaller, largest in _corners(lane.config):
        if not is_right(lane, rig, smaller):
            continue  # the smaller batch is wrong, so the size is not the cause
        step = rig.step(largest)
        expected = "the largest batch that the limits allow is replayed correctly"
        if step.error is not None:
            found = lane.of_error(step.error, expected=expected, rule="GP13", step=step, help=_SIZES)
            yield found
            if found.rule != "GP13":
                yield found.model_copy(update={"rule": "GP13", "help": _SIZES})
            continue
        yield from wrong_results(
            lane, rig, step, rule="GP13", what="a replay", expected=expected, help=_SIZES
        )


_SIZES = (
    "a smaller batch of the same kind is right: size buffers and bounds by Limits (max_context_len with"
    " drafts,"
    " max_num_tokens, draft.num_steps, draft.topk, draft.num_draft_tokens), and by the shape's counts"
)


def _corners(config: Config) -> list[tuple[Problem, Problem]]:
    """Return pairs of a smaller and a largest batch; in ragged modes also a pair with padding tokens."""
    largest = corner(config)
    found = [(half_size_batch(config), largest)]
    if config.case.tokens_per_request is None:
        requests = [
            replace(r, cached=r.table[:-1], tokens=[replace(r.tokens[-1], parent=None, depth=0)])
            for r in largest.requests
        ]
        requests = [shortened(r, min(len(r.cached), config.max_cached_keys)) for r in requests]
        found.append((of_size(config, len(requests)), replace(largest, requests=requests)))
    return found
