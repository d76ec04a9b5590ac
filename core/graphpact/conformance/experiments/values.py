"""What steps give: real rows and the KV cache, against attention in float64; and what padded rows do to both.

GP02, GP04, GP05, GP06, GP12, GP13, GP19, and what is no rule's: a plugin that answers wrong without any graph.

Does not: tell which field is at fault; see `graphpact.conformance.experiments.parity` and ``refresh``.
"""

from collections.abc import Sequence

import torch

from graphpact.attention import kv_tensors
from graphpact.conformance.experiments.base import (
    Difference,
    Findings,
    altered,
    differences,
    put,
    same,
    same_rows,
    spell,
    values_at,
)
from graphpact.conformance.experiments.parity import compare_with_capture
from graphpact.conformance.problems import VOCAB, Problem, corner, nearly
from graphpact.conformance.rig import NAN, Rig, Step
from graphpact.conformance.subject import LaneUnderTest

# -- eager -------------------------------------------------------------------------------------------


def answers_eagerly(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Run each batch without a graph, and compare with attention in float64."""
    rig = lane.rig()
    for problem in (*steps, corner(lane.config)):
        step = rig.step(problem, eagerly=True)
        yield from _judge_eager(lane, rig, step)


def _judge_eager(lane: LaneUnderTest, rig: Rig, step: Step) -> Findings:
    if step.error is not None:
        yield lane.of_error(
            step.error, expected="an eager run of a batch that is declared", step=step
        )
        return
    for found in differences(rig, step, lane.answer(rig, step.problem)):
        yield lane.finding(
            None,
            field=f"an eager run: {found.what}",
            expected=found.expected,
            actual=found.actual,
            step=step,
            help="no graph is part of it: look at the kernels and at what metadata they are given",
        )


# -- replayed ----------------------------------------------------------------------------------------


def answers_replayed(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay batches one after another, and compare with attention in float64."""
    rig = lane.rig()
    for problem in (*steps, steps[0], steps[1]):
        eager_runs = rig.lane.stats.eager.total()
        step = rig.step(problem)
        yield from _judge_run(lane, rig, step, rig.lane.stats.eager.total() - eager_runs)
        if step.error is not None:
            yield lane.of_error(
                step.error, expected="a batch that fits a captured shape is replayed", step=step
            )
            continue
        for found in differences(rig, step, lane.answer(rig, problem)):
            yield from _of_difference(lane, rig, step, found)


def _judge_run(lane: LaneUnderTest, rig: Rig, step: Step, eager_runs: int) -> Findings:
    """Look whether the step took the way of a replay, and left alone what is not its own."""
    if step.error is None and step.replays != 1:
        how = "ran eagerly" if eager_runs else f"counted {step.replays} replays"
        yield lane.finding(
            "GP12" if eager_runs else "GP02",
            field="Lane.stats",
            expected="one replay, prepared by the hooks, of a batch that a captured shape holds",
            actual=f"it {how}",
            step=step,
            help="a runner replays through Lane.replay(), where hooks and pact are; can_run() gives a reason"
            " for every batch that is not replayed",
        )
    table = step.problem.page_table(rig.config)
    if step.table is not None and not torch.equal(step.table, table):
        yield lane.finding(
            "GP19",
            field="req_to_token" + spell(step.table != table),
            expected="the page table is read and never written",
            actual=values_at(step.table, step.table != table),
            step=step,
            help="the table is the scheduler's",
        )
    for name in step.changed_fields:
        yield lane.finding(
            "GP19",
            hook="populate",
            field=name,
            expected="the batch is read and never written",
            actual="the step changed it",
            step=step,
            help="copy into the slots of the registry, and write there",
        )


def _of_difference(lane: LaneUnderTest, rig: Rig, step: Step, found: Difference) -> Findings:
    """Yield what a wrong replay is a breach of, as far as the step itself tells it."""
    shape, problem = step.shape, step.problem
    padded = shape is not None and (
        shape.batch_size > len(problem.requests) or shape.num_tokens > len(problem.tokens)
    )
    rule, help_ = (
        None,
        "run the lane strict, or verified: the first field that differs is named there",
    )
    if found.kind == "extent":
        rule, help_ = (
            "GP06",
            "return the rows of the batch's requests or tokens, and no padded ones",
        )
    elif found.kind == "cache" and padded and _are_nobodys(problem, found.slots):
        rule, help_ = "GP04", "padded tokens write KV slot 0: reset the tail of out_cache_loc to 0"
    elif not _is_prepared_otherwise(lane, rig, problem) and not _is_wrong_eagerly(
        lane, rig, problem
    ):
        rule = "GP10"
        help_ = (
            "all that hooks prepare is what a capture of this batch would prepare, so it is the recorded work"
            " that is not this batch's: something made once, outside what hooks refresh"
        )
    yield lane.finding(
        rule,
        field=f"a replay: {found.what}",
        expected=found.expected,
        actual=found.actual,
        step=step,
        help=help_,
    )


def _are_nobodys(problem: Problem, slots: Sequence[int]) -> bool:
    """Return whether one of the slots is none that the batch writes."""
    own = {slot for token in problem.tokens for slot in token.slots}
    return bool(set(slots) - own)


def _is_prepared_otherwise(lane: LaneUnderTest, rig: Rig, problem: Problem) -> bool:
    return any(True for _ in compare_with_capture(lane, rig, "graph", problem))


def _is_wrong_eagerly(lane: LaneUnderTest, rig: Rig, problem: Problem) -> bool:
    step = rig.step(problem, eagerly=True)
    return step.error is not None or bool(differences(rig, step, lane.answer(rig, problem)))


# -- corners -----------------------------------------------------------------------------------------


def largest_step(lane: LaneUnderTest, _: Sequence[Problem]) -> Findings:
    """Replay the largest batch that the limits allow, after one that is a little smaller."""
    rig = lane.rig()
    for problem, is_corner in ((nearly(lane.config), False), (corner(lane.config), True)):
        step = rig.step(problem)
        expected = "the largest batch that the limits allow is replayed as any other"
        if step.error is not None:
            if is_corner:
                found = lane.of_error(step.error, expected=expected, rule="GP13", step=step)
                yield found
                if found.rule != "GP13":
                    yield found.model_copy(update={"rule": "GP13"})
            else:
                return  # it is no matter of size
            continue
        wrong = differences(rig, step, lane.answer(rig, problem))
        if wrong and not is_corner:
            return
        for found_ in wrong:
            yield lane.finding(
                "GP13",
                field=f"a replay: {found_.what}",
                expected=f"{expected}: {found_.expected}",
                actual=found_.actual,
                step=step,
                help="size buffers by Limits: max_context_len, max_num_tokens, draft.num_steps,"
                " draft.topk, draft.num_draft_tokens, and the shape's own counts",
            )


# -- padding -----------------------------------------------------------------------------------------


def padding(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay a batch with other things in its padded rows, and in the memory that they may and may not read."""
    rig = lane.rig()
    padded = [steps[1], steps[-1]]
    for problem in padded:
        base = rig.step(problem)
        if base.error is not None or base.outputs is None:
            yield from _only_padded_fails(lane, rig, base, steps[0])
            continue
        yield from _extents(lane, base)
        yield from _sentinels(lane, rig, base)
        yield from _scratch_leaks(lane, rig, base)
        yield from _pads_leak(lane, rig, base)
        yield from _pads_read(lane, rig, base)


def _only_padded_fails(lane: LaneUnderTest, rig: Rig, step: Step, exact: Problem) -> Findings:
    """A batch that fails where one without padded rows passes: what padded rows hold, or how many there are."""
    if step.error is None or rig.step(exact).error is not None:
        return
    expected = "a batch with padded rows is replayed as one without"
    found = lane.of_error(step.error, expected=expected, rule="GP05", step=step)
    yield found
    if found.rule == "GP05":
        return
    if found.rule != "GP04":
        yield found.model_copy(update={"rule": "GP04"})


def _extents(lane: LaneUnderTest, step: Step) -> Findings:
    """See that the view's tensors have the shape's rows, and its count of real tokens the batch's."""
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    for path, leaf in step.leaves.items():
        if not path.startswith("view.") or leaf.slot is None or leaf.slot.axis == "none":
            continue
        rows = shape.batch_size if leaf.slot.axis == "bs" else shape.num_tokens
        if rows not in leaf.value.shape:
            yield lane.finding(
                "GP05",
                hook="prepare_replay",
                field=leaf.name,
                expected=f"{rows} rows, the shape's",
                actual=f"shape {tuple(leaf.value.shape)}",
                step=step,
                help="cut the view by the padded counts: GraphSlot.slice_for(padded_bs, padded_num_tokens)",
            )
    count = step.leaves.get("view.num_token_non_padded")
    if count is not None:
        first, rows = Rig._own_rows(shape.num_tokens)  # noqa: SLF001  the kit's own
        real = min(max(len(step.problem.tokens) - first, 0), rows)
        if int(count.value) != real:
            yield lane.finding(
                "GP05",
                hook="populate",
                field=count.name,
                expected=f"{real}: the real tokens among this rank's rows of the padded shape",
                actual=str(int(count.value)),
                step=step,
                help="graphpact.parallel.local_num_token_non_padded(count, padded tokens)",
            )


def _sentinels(lane: LaneUnderTest, rig: Rig, step: Step) -> Findings:
    """See what the padded rows of the runner's inputs hold."""
    case, page = rig.config.case, rig.config.page_size
    length = rig.backend.capabilities.padded_seq_len(case.lane_mode, case.width or 1)
    for name, expected in (
        ("req_pool_indices", "0: request row 0, which is scratch"),
        ("out_cache_loc", f"a KV slot below {page}: the page of scratch"),
        ("seq_lens", f"{length}, which the backend declares as the length of a padded row"),
        ("seq_lens_cpu", f"{length}, which the backend declares as the length of a padded row"),
    ):
        leaf = step.leaves.get(f"view.{name}")
        if leaf is None or leaf.tail is None:
            continue
        value = leaf.value
        wrong = (value < 0) | (value >= page) if name == "out_cache_loc" else value != 0
        if name.startswith("seq_lens"):
            wrong = value != length
        wrong &= leaf.in_tail
        if bool(wrong.any()):
            yield lane.finding(
                "GP04",
                hook="populate",
                field=f"view.{name}{spell(wrong)}" + (f" ({leaf.slot.label})" if leaf.slot else ""),
                expected=expected,
                actual=values_at(value, wrong),
                step=step,
                help="declare the slot with padding_policy=FILL_SENTINEL and that pad_value, or ZERO",
            )


def _scratch_leaks(lane: LaneUnderTest, rig: Rig, base: Step) -> Findings:
    """Put other numbers, then NaN, into scratch: real rows give the same bits."""
    for what, value in (("other numbers", 3.0), ("NaN", NAN)):

        def spoil(value: float = value) -> None:
            for cache in kv_tensors(rig.kv).values():
                cache[: rig.config.page_size] = value

        yield from _compare_real(
            lane, rig, base, rig.step(base.problem, after_load=spoil), f"{what} in scratch"
        )


def _pads_leak(lane: LaneUnderTest, rig: Rig, base: Step) -> Findings:
    """Give padded rows other tokens at other positions: real rows give the same bits."""
    changes = {}
    for name, value in (("input_ids", VOCAB - 1), ("positions", 2)):
        leaf = base.leaves.get(f"view.{name}")
        if leaf is not None and leaf.tail is not None:
            changes[leaf.path] = put(leaf.in_tail, value)
    if changes:
        step = rig.step(base.problem, ready=altered(changes))
        yield from _compare_real(lane, rig, base, step, "other tokens in padded rows")


def _compare_real(lane: LaneUnderTest, rig: Rig, base: Step, step: Step, what: str) -> Findings:
    help_ = (
        "mask padded rows where rows meet (routing, pooling, scales): num_token_non_padded says how many are"
        " real; and let no kernel leave an output row unwritten"
    )
    if step.error is not None:
        yield lane.of_error(
            step.error, expected=f"{what} changes nothing for real rows", rule="GP06", step=step
        )
        return
    first = rig.config.page_size
    if not same_rows(base.rows, step.rows):
        assert base.rows is not None  # noqa: S101  both ended
        assert step.rows is not None  # noqa: S101  both ended
        differs = ~same(base.rows, step.rows)
        token, column = (int(i) for i in differs.nonzero()[0])
        yield lane.finding(
            "GP06",
            field=f"token {token} of the batch, {rig.where(column)}",
            expected=f"the same bits with {what}: {float(base.rows[token, column]):.9g}",
            actual=f"{float(step.rows[token, column]):.9g}",
            step=step,
            help=help_,
        )
    for name, cache in step.caches.items():
        differs = ~same(base.caches[name][first:], cache[first:])
        if bool(differs.any()):
            slot = int(differs.flatten(1).any(dim=1).nonzero()[0]) + first
            yield lane.finding(
                "GP06",
                field=f"{name} in KV slot {slot}",
                expected=f"the same bits with {what}",
                actual="other values",
                step=step,
                help=help_,
            )
            return


def _pads_read(lane: LaneUnderTest, rig: Rig, base: Step) -> Findings:
    """Change what live requests own and what nobody owns: padded rows, which read scratch, do not see it."""

    def spoil() -> None:
        for cache in kv_tensors(rig.kv).values():
            cache[rig.config.page_size :] = 2.0

    step = rig.step(base.problem, after_load=spoil)
    if step.error is not None or step.outputs is None or base.outputs is None:
        return
    real = len(base.rows) if base.rows is not None else 0
    pads = [s.outputs[real:, : _own_columns(rig)] for s in (base, step)]
    if not same_rows(pads[0], pads[1]):
        differs = ~same(pads[0], pads[1])
        row = int(differs.any(dim=1).nonzero()[0]) + real
        yield lane.finding(
            "GP04",
            hook="init_metadata_replay",
            field=f"row {row} of the graph's outputs, which is padding",
            expected="what it gives depends on scratch alone",
            actual="it changes with keys of live requests, or of nobody",
            step=base,
            help="padded rows are request row 0 and pages of scratch: let metadata of theirs name no other page",
        )


def _own_columns(rig: Rig) -> int:
    """Return the columns of the model's output that a row makes from its own attention."""
    heads, case = rig.config.heads, rig.config.case
    return heads.num_q_heads * heads.v_head_dim * len(rig.layers) * case.num_steps
