"""Outputs and KV cache against attention in float64, and the effects of padding rows on both.

GP02 to GP06, GP10, GP12, GP13, GP19, and findings without a rule: wrong results of an eager run.

Does not: find the field at fault; see `graphpact_conformance.experiments.parity` and ``refresh``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from graphpact.batch import ForwardMode
from graphpact.buffers import BoundSlot
from graphpact.tensors import equal, same
from graphpact_conformance.experiments.base import (
    Difference,
    Findings,
    altered,
    differences,
    is_right,
    put,
    same_tensors,
    spell,
    values_at,
    wrong_results,
)
from graphpact_conformance.experiments.look_alikes import takes_live_rows_for_padding
from graphpact_conformance.experiments.parity import compare_with_capture
from graphpact_conformance.model import IDS_OF_PASS, ROWS_OF_PASS, own_rows
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.raised import causes, message_of
from graphpact_conformance.subject.records import NAN, StepRecord, live_rows
from graphpact_conformance.subject.under_test import DeclinedError, Subject, UnderTest
from graphpact_conformance.world.fields import MROPE, SAFE, words, wrong_rows
from graphpact_conformance.world.lanes import HIDDEN, VOCAB, Config
from graphpact_conformance.world.problems import (
    Drawn,
    Problem,
    ProblemRequest,
    at_tiers,
    corner,
    edges,
    half_size_batch,
    next_id,
    of_size,
    shortened,
)
from graphpact_tape.writes import write

# -- eager -------------------------------------------------------------------------------------------


def answers_eagerly(lane: UnderTest, steps: Drawn) -> Findings:
    """Run batches without a graph, before replays and between them, and compare with attention in float64."""
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
        rig.step(replayed, may_decline=True)  # what is wrong with it is a finding of `answers_replayed`
        yield from _judge_eager(lane, rig, rig.step(problem, eagerly=True), after="after a replay")


def _judge_eager(lane: UnderTest, rig: Subject, step: StepRecord, after: str = "") -> Findings:
    if step.error is not None:
        expected = "an eager run of a declared kind of batch" + (f", also {after}" if after else "")
        yield lane.of_error(step.error, expected=expected, step=step)
        return
    for name in step.changed_fields:
        yield lane.finding(
            None,
            field=f"an eager run: batch.{name}",
            expected="the batch is read-only",
            actual="the step changed it",
            step=step,
            help="write copies: in an eager step the view is the engine's own batch",
        )
    if step.changed_fields or not differences(rig, step, lane.answer(rig, step.problem)):
        return
    help_ = "no graph is involved: check the kernels and their metadata"
    if lane.kind == "runner":
        help_ = "no graph is involved: check what `compose` gives to each pass, and makes of its results"
    if rig.captured and is_right(lane, lane.build(capture=False), step.problem, eagerly=True):
        after = after or "after the captures"
        help_ = (
            "in a lane without graphs it is right: let eager steps use nothing that captures and replays"
            " keep, and keep nothing for all lanes of a process"
        )
    what = f"an eager run {after}".strip()
    yield from wrong_results(lane, rig, step, what=what, help=help_)


# -- replayed ----------------------------------------------------------------------------------------


def answers_replayed(lane: UnderTest, steps: Drawn) -> Findings:
    """Replay a sequence of batches, and compare with attention in float64."""
    rig = lane.rig()
    slots = {slot.name for slot in rig.slots}
    without = [name for name in rig.batch_of(steps[0]).tensors() if name not in slots]
    for name in without:
        yield lane.finding(
            "GP02",
            hook="populate",
            field=f"batch.{name}",
            expected="a slot of that name: a graph ignores a field without a slot, and Lane.run() refuses"
            " the batch",
            actual="slots() declares none",
            problem=steps[0],
            help="declare a slot for every tensor that the batches of a mode carry",
        )
    if without:
        return
    declined: StepRecord | None = None
    for problem in (*steps, steps.exact, steps.small):
        step = rig.step(problem, may_decline=True)
        if step.declined is not None:
            declined = declined or step
            continue
        if step.error is not None:
            yield lane.of_error(
                step.error, expected="a batch that fits a captured shape is replayed", step=step
            )
            continue
        yield from _judge_run(lane, rig, step)
        for found in differences(rig, step, lane.answer(rig, problem)):
            yield from _of_difference(lane, rig, step, found, steps.exact)
    yield from _at_edges(lane, rig)
    yield from takes_live_rows_for_padding(lane, rig, steps)
    if declined is not None and declined.declined is not None:
        yield from _every_batch_declined(lane, declined, steps)
        raise DeclinedError(declined.declined)


def _at_edges(lane: UnderTest, rig: Subject) -> Findings:
    """Replay requests at whose lengths counts or graphs change, and requests of equal lengths.

    No other experiment has these batches, so what a capture of the wrong one has is compared here.
    """
    for problem in (*edges(lane.config), *_at_tiers(lane, rig)):
        step = rig.step(problem, may_decline=True)
        if step.error is not None:
            expected = "requests at the end of a page, a window or a graph, or of equal lengths, are replayed"
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
            yield from wrong
            return


def _at_tiers(lane: UnderTest, rig: Subject) -> list[Problem]:
    """Return requests at the lengths at which the runner takes another graph; none if it cannot be asked."""
    try:
        return at_tiers(lane.config, lambda problem: rig.fit(rig.batch_of(problem)))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything: see `graph_choice`
        return []


_EDGES = (
    "the requests of this batch end a page or a window, or begin one, have lengths at which the runner takes"
    " another graph, or share a first page at one length: look for a comparison that is off by one, and for"
    " requests that are told apart by their lengths or pages"
)


def _every_batch_declined(lane: UnderTest, step: StepRecord, steps: Drawn) -> Findings:
    """Check that the runner replays a batch with requests; in a lane of idle batches, an idle one."""
    config = lane.config
    others = (of_size(config, 1), half_size_batch(config), corner(config))
    asked = [p for p in (*steps, *others) if p.requests or config.case.mode is ForwardMode.IDLE]
    if all(map(lane.declined, asked)):
        yield lane.finding(
            "GP12",
            hook="prepare_replay",
            field="fit()",
            expected="replays of some batches: the runner captures graphs for them",
            actual=f"every batch is declined: {step.declined}",
            step=step,
            help="return a captured shape for the batches that the graphs are made for; a runner that"
            " captures nothing returns no shapes()",
        )


def _judge_run(lane: UnderTest, rig: Subject, step: StepRecord) -> Findings:
    """Check that the step was one replay, and changed neither page table nor batch."""
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
            help="return from fit() the captured shape that holds the batch, or a reason of the runner's own"
            " that its `declines` lists; a wrapper of run_step must not replace the step",
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
    lane: UnderTest, rig: Subject, step: StepRecord, found: Difference, exact: Problem
) -> Findings:
    """Yield a finding about a wrong replay, with the rule where the step itself shows it."""
    shape, problem = step.shape, step.problem
    padded = shape is not None and (
        shape.batch_size > problem.batch_size or shape.num_tokens > len(problem.tokens)
    )
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
        rule = "GP10"
        help_ = (
            "the hooks prepare the same as a capture of this batch, so the recorded work is wrong for it:"
            " look for work that runs once, outside the hooks"
        )
    yield lane.finding(
        rule,
        field=f"a replay: {found.what}",
        expected=found.expected,
        actual=found.actual,
        step=step,
        help=help_,
    )


_OVERWRITTEN_HELP = (
    "with a copy of each result of attention it is right: the eager call of a later layer writes the memory"
    " of this result while a segment still needs it. Return a copy that belongs to the segment after the"
    " call, or give each layer memory of its own"
)


def _is_overwritten(lane: UnderTest, rig: Subject, step: StepRecord) -> bool:
    """Return whether a wrong replay in segments is right if the model copies each result of attention."""
    if step.shape is None or rig.num_segments(step.shape) == 1:
        return False
    copying = lane.build(copies_attention=True)
    return is_right(lane, copying, step.problem, may_decline=True)


def _other_input(lane: UnderTest, rig: Subject, step: StepRecord) -> Finding | None:
    """Return a finding about the first field whose live rows are not those of the batch; None if all are."""
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
                help="copy what the batch has; a model reads nothing else of this step",
            )
    return None


def _writes_foreign_slots(problem: Problem, slots: Sequence[int]) -> bool:
    """Return whether the batch's own tokens do not write one of the slots."""
    own = {slot for token in problem.tokens for slot in token.slots}
    return bool(set(slots) - own)


def _is_prepared_otherwise(lane: UnderTest, rig: Subject, problem: Problem) -> bool:
    return any(True for _ in compare_with_capture(lane, rig, "graph", problem))


# -- corners -----------------------------------------------------------------------------------------


def largest_step(lane: UnderTest, _: Drawn) -> Findings:
    """Replay the largest batches that the limits allow, each after a smaller batch of the same kind."""
    rig = lane.rig()
    for smaller, largest in _corners(lane.config):
        if not is_right(lane, rig, smaller):
            continue  # the size is not the cause
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
    """Return pairs of a smaller and a largest batch; for ragged modes also a pair with padding tokens."""
    largest = corner(config)
    found = [(half_size_batch(config), largest)]
    if config.case.width is None:
        requests = [
            replace(r, cached=r.table[:-1], tokens=[replace(r.tokens[-1], parent=None, depth=0)])
            for r in largest.requests
        ]
        requests = [shortened(r, min(len(r.cached), config.longest)) for r in requests]
        found.append((of_size(config, len(requests)), replace(largest, requests=requests)))
    return found


# -- padding -----------------------------------------------------------------------------------------


def padding(lane: UnderTest, steps: Drawn) -> Findings:
    """Replay a batch with other contents of its padding rows and of the memory around them."""
    rig = lane.rig()
    exact = rig.step(steps.exact)
    if exact.error is None and exact.outputs is not None:
        yield from _scratch_leaks(lane, rig, exact)
    padded = [steps.small, steps.padded]
    if lane.config.case.width is None:  # all requests of the shape, and fewer tokens
        padded.append(of_size(lane.config, lane.config.most_requests))
    for problem in padded:
        rig.step(steps.exact)  # may leave stale rows
        base = rig.step(problem)
        if base.error is not None or base.outputs is None:
            yield from _only_padded_fails(lane, rig, base, steps.exact)
            continue
        yield from _extents(lane, base)
        yield from _sentinels(lane, rig, base)
        found = [
            *pads_leak(lane, rig, base),
            *_scratch_leaks(lane, rig, base),
            *_leftovers_leak(lane, rig, base, steps.exact),
        ]
        found = found or [*_pads_count(lane, rig, base, steps.exact)]
        yield from found or _pads_read(lane, rig, base)


def _only_padded_fails(lane: UnderTest, rig: Subject, step: StepRecord, exact: Problem) -> Findings:
    """Yield findings about a batch that fails where one without padding rows passes.

    The cause is the contents or the number of padding rows. It is no value that all padding rows have: the
    dummies consist of them, and were captured.
    """
    if step.error is None or lane.hook_raised(step):
        return
    if rig.step(step.problem).error is None or rig.step(exact).error is not None:
        return  # an error of the order of batches, or of every batch, not of padding
    expected = "a batch with padding rows is replayed like one without"
    is_stale = rig.step(step.problem, fill=_clear).error is None
    if is_stale or lane.build().step(step.problem).error is None:  # the first replay has nothing stale
        found = lane.of_error(step.error, expected=expected, step=step)
        yield found.model_copy(update={"rule": "GP03", "help": _STALE_HELP})
        return
    out_of_range = any(
        text in message_of(e) for e in causes(step.error) for text in ("out of bounds", "out of range")
    )
    rule = "GP04" if out_of_range else "GP05"
    found = lane.of_error(step.error, expected=expected, rule=rule, step=step, help=_PADDED_HELP[rule])
    yield found
    if found.rule in ("GP04", "GP07") and not out_of_range:
        yield found.model_copy(update={"rule": "GP05", "help": _PADDED_HELP["GP05"]})


_PADDED_HELP = {
    "GP04": "point padding rows to request row 0 and KV slot 0: use no other number, such as -1, as an index",
    "GP05": "count the same rows everywhere: offsets end at the padded rows of q; a fake request for"
    " padding tokens must be counted in queries, keys and pages",
}
_STALE_HELP = (
    "with zeroed slots, or as the first replay, it passes, so the step reads values of an earlier batch:"
    " write all rows up to the padded count in every step"
)


def _extents(lane: UnderTest, step: StepRecord) -> Findings:
    """Check the rows of the view against the shape, and its count of live tokens against the batch."""
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
                expected=f"{rows} rows, as in the shape",
                actual=f"shape {tuple(leaf.value.shape)}",
                step=step,
                help="cut the view by the padded counts: BoundSlot.slice_for(padded_bs, padded_num_tokens)",
            )
    count = step.leaves.get("view.num_token_non_padded")
    if count is not None:
        first, rows = own_rows(lane.config, shape.num_tokens)
        real = min(max(len(step.problem.tokens) - first, 0), rows)
        if int(count.value) != real:
            yield lane.finding(
                "GP05",
                hook="populate",
                field=count.name,
                expected=f"{real}: the live tokens among this rank's rows of the padded shape",
                actual=str(int(count.value)),
                step=step,
                help="use graphpact.parallel.local_num_token_non_padded(count, padded tokens)",
            )


def _sentinels(lane: UnderTest, rig: Subject, step: StepRecord) -> Findings:
    """Check the contents of the padding rows of the runner's inputs."""
    length, config = rig.padded_seq_len, rig.config
    inputs = {path.removeprefix("view."): leaf for path, leaf in step.leaves.items() if path[:5] == "view."}
    tensors = {name: leaf.value for name, leaf in inputs.items()}
    for name, leaf in inputs.items():
        value = leaf.value
        if leaf.tail is None:
            continue
        if name in ("seq_lens", "seq_lens_cpu"):
            wrong = value != length
            expected = f"{length}, the length of a padding row that the backend declares"
        elif name in SAFE or name == "input_embeds":
            wrong, expected = wrong_rows(name, tensors, config), words(name, config)
        else:
            continue
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


def _scratch_leaks(lane: UnderTest, rig: Subject, base: StepRecord) -> Findings:
    """Write other numbers, then NaN, into scratch: live rows must not change."""
    for what, value in (("other numbers", 3.0), ("NaN", NAN)):

        def spoil(value: float = value) -> None:
            rig.cache.spoil_scratch(value)

        step = rig.step(base.problem, after_load=spoil)
        yield from _compare_real(lane, rig, base, step, f"{what} in scratch")


_SMALL = ("positions", MROPE, "encoder_lens", "mamba_track_seqlens")
"""Fields whose padding rows may hold any small number."""


def pads_leak(lane: UnderTest, rig: Subject, base: StepRecord) -> Findings:
    """Change tokens and positions of padding rows: KV slots and live rows must not change."""
    changes = {}
    edits = {"input_ids": VOCAB - 1, "input_embeds": 3, "mamba_track_mask": 1}
    for name, value in {**dict.fromkeys(_SMALL, 2), **edits}.items():
        leaf = base.leaves.get(f"view.{name}")
        if leaf is not None and leaf.tail is not None:
            changes[leaf.path] = put(leaf.in_tail, value)
    if not changes:
        return
    step = rig.step(base.problem, ready=altered(changes))
    first = rig.config.page_size
    for name, cache in step.caches.items() if step.error is None else ():
        differs = ~same(base.caches[name][first:], cache[first:])
        if bool(differs.any()):
            slot = rig.cache.slot_at(int(differs.flatten(1).any(dim=1).nonzero()[0]) + first)
            yield lane.finding(
                "GP04",
                field=f"{name} in KV slot {slot}",
                expected="padding tokens write only scratch, KV slot 0",
                actual="it changes with the tokens of padding rows, so one of them writes it",
                step=step,
                help="let padding tokens keep KV slot 0 from the runner: as an index, -1 is the last slot;"
                " the slot of the first token belongs to a live request",
            )
            return  # further differences follow from this one
    yield from _compare_real(lane, rig, base, step, "other tokens in padding rows")


def _leftovers_leak(lane: UnderTest, rig: Subject, base: StepRecord, exact: Problem) -> Findings:
    """Write NaN into memory that outlives steps: live rows must not change.

    Only memory that batches without padding do not read counts.
    """
    right = rig.step(exact)
    if right.shape != base.shape:
        return  # another graph may have its own memory
    for name, tensor in rig.states().items():
        if not tensor.dtype.is_floating_point:
            continue
        kept = tensor.clone()

        def spoil(tensor: torch.Tensor = tensor) -> None:
            tensor.fill_(NAN)

        is_unread = same_tensors(right.rows, rig.step(exact, after_load=spoil).rows)
        step = rig.step(base.problem, after_load=spoil)
        write(tensor, kept)
        if is_unread:
            what = f"NaN in {name}, which batches without padding do not read"
            yield from _compare_real(lane, rig, base, step, what)


def _compare_real(lane: UnderTest, rig: Subject, base: StepRecord, step: StepRecord, what: str) -> Findings:
    if step.error is not None:
        yield lane.of_error(step.error, expected=f"{what} does not change live rows", rule="GP06", step=step)
        return
    if same_tensors(base.rows, step.rows) or not same_tensors(base.rows, rig.step(base.problem).rows):
        return  # equal; or the step is not deterministic, a finding of `repeated`
    assert base.rows is not None  # noqa: S101  both ended
    assert step.rows is not None  # noqa: S101  both ended
    name = next(name for name, tensor in base.rows.items() if not equal(tensor, step.rows[name]))
    was, now = base.rows[name], step.rows[name]
    at = int((~same(was, now)).flatten().nonzero()[0])
    row, column = divmod(at, was[0].numel())
    yield lane.finding(
        "GP06",
        field=f"{'request' if step.axes[name] == 'bs' else 'token'} {row} of the batch,"
        f" {rig.where(name, column)}",
        expected=f"the same bits with {what}: {was.flatten()[at].item():.9g}",
        actual=f"{now.flatten()[at].item():.9g}",
        step=step,
        help="mask padding rows in work across rows (routing, pooling, scales) by num_token_non_padded, and"
        " write every output row in every kernel",
    )


def _pads_read(lane: UnderTest, rig: Subject, base: StepRecord) -> Findings:
    """Change unowned memory, then memory of live requests: padding rows, on scratch, must not change.

    Unowned memory comes first, since live rows do not read it. With work across rows, padding rows may depend
    on live rows and so on their memory; such lanes are recognised by other queries of live rows.
    """
    was = _padded_outputs(rig, base)
    ids = _real_ids(rig, base)
    live = {slot for r in base.problem.requests for slot in (*r.table, *_written(r))}
    scratch = range(rig.config.page_size)

    def spoiled(
        *, everything: bool, fill: Callable[[BoundSlot], None] | None = None, rig: Subject = rig
    ) -> StepRecord:
        def spoil() -> None:
            rig.cache.fill(2.0, keep=scratch if everything else [*scratch, *live])

        with rig.other_weights((_KEYS, _VALUES), ids if everything else ()):
            return rig.step(base.problem, after_load=spoil, fill=fill)

    everything = False
    seen = _padded_outputs(rig, spoiled(everything=False))
    if same_tensors(was, seen) and not _rows_meet(rig, base, ids):
        everything = True
        seen = _padded_outputs(rig, spoiled(everything=True))
    if seen is None or was is None or same_tensors(was, seen):
        return
    if not same_tensors(was, _padded_outputs(rig, rig.step(base.problem))):
        return  # not deterministic, a finding of `repeated`
    clean = _padded_outputs(rig, rig.step(base.problem, fill=_clear))
    anew = _padded_outputs(rig, spoiled(everything=everything, fill=_clear))
    is_stale = clean is None or same_tensors(clean, anew)
    if not is_stale:  # stale rows may come through memory that is filled once
        fresh = lane.build()
        first = _padded_outputs(fresh, fresh.step(base.problem))
        is_stale = same_tensors(first, _padded_outputs(fresh, spoiled(everything=everything, rig=fresh)))
    name = next(name for name, tensor in was.items() if not equal(tensor, seen[name]))
    real = len(live_rows(base)[name])
    row = int((~same(was[name], seen[name])).flatten(1).any(dim=1).nonzero()[0]) + real
    yield lane.finding(
        "GP03" if is_stale else "GP04",
        hook="init_metadata_replay",
        field=f"row {row} of the graph's outputs, a padding row",
        expected="an output that depends only on scratch",
        actual="it changes with keys of live requests or unowned KV slots"
        + (", and without earlier batches it does not: it reads values of one of them" if is_stale else ""),
        step=base,
        help=_STALE_HELP
        if is_stale
        else "point padding rows to request row 0 and scratch pages: their metadata must name no other page",
    )


def _written(request: ProblemRequest) -> list[int]:
    """Return the KV slots that a request's new tokens write."""
    return [slot for token in request.tokens for slot in token.slots]


def _rows_meet(rig: Subject, base: StepRecord, ids: Sequence[int]) -> bool:
    """Return whether padding rows depend on the queries of live rows, or live rows do not."""
    with rig.other_weights((_QUERIES,), ids):
        other = rig.step(base.problem)
    met = not same_tensors(_padded_outputs(rig, base), _padded_outputs(rig, other))
    return met or same_tensors(base.rows, other.rows)


def _padded_outputs(rig: Subject, step: StepRecord) -> dict[str, torch.Tensor] | None:
    """Return the padding rows of the outputs, without work across rows; None for a step that failed.

    In a ragged mode a padding request has no token: its row of an output by request is that of another one.
    """
    if step.error is not None or step.outputs is None:
        return None
    found = {}
    for name, live in live_rows(step).items():
        if rig.config.case.width is None and step.axes[name] == "bs":
            continue
        padded = step.outputs[name][len(live) :] if live.dim() else live
        is_models = name == "rows" or name.startswith(ROWS_OF_PASS)
        found[name] = padded[:, : padded.shape[1] - rig.num_shared] if is_models else padded
    return found


_QUERIES, _KEYS, _VALUES = range(3)
"""Indices of a layer's weights."""


def _real_ids(rig: Subject, base: StepRecord) -> list[int]:
    """Return the token ids that live rows have, in any step of a draft, and padding rows do not.

    With embeddings, which are zeros in padding rows, the ids are those of the tables' rows that they weigh.
    """
    if rig.config.case.embeds:
        return [*range(HIDDEN)]
    leaf = base.leaves.get("view.input_ids")
    real = torch.tensor([t.token_id for t in base.problem.tokens], dtype=torch.int64)
    padded = real[:0] if leaf is None else leaf.value[leaf.in_tail]
    found: list[set[int]] = [{*real.tolist()}, {*padded.tolist()}]
    for step in range(rig.num_steps - 1):
        real, padded = next_id(real, step), next_id(padded, step)
        found[0] |= {*real.tolist()}
        found[1] |= {*padded.tolist()}
    for name, live in live_rows(base).items():
        if name.startswith(IDS_OF_PASS) and base.outputs is not None:
            found[0] |= {*live.tolist()}
            found[1] |= {*base.outputs[name][len(live) :].tolist()}
    return sorted(found[0] - found[1])


def _pads_count(lane: UnderTest, rig: Subject, base: StepRecord, exact: Problem) -> Findings:
    """Yield a finding if live rows are wrong only with padding, for any contents of padding and slots."""
    if not differences(rig, base, lane.answer(rig, base.problem)):
        return
    step = rig.step(base.problem, fill=_clear)
    wrong = [] if step.error else differences(rig, step, lane.answer(rig, base.problem))
    if not wrong or not is_right(lane, rig, exact) or not is_right(lane, rig, base.problem, eagerly=True):
        return
    yield lane.finding(
        "GP05",
        field=f"a replay: {wrong[0].what}",
        expected=f"{wrong[0].expected}; an eager run and batches without padding are right",
        actual=wrong[0].actual,
        step=step,
        help=_PADDED_HELP["GP05"],
    )


def _clear(slot: BoundSlot) -> None:
    if slot.buffer is not None:
        slot.buffer.zero_()
