"""The effects of padding rows on outputs and KV cache: GP03 to GP06. It also runs `host_rows`.

Does not: compare padding rows with those of a capture; see `graphpact_conformance.experiments.parity`.
"""

from collections.abc import Callable, Sequence

import torch

from graphpact.buffers import BoundSlot
from graphpact.tensors import equal, same
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import corner, of_size
from graphpact_conformance.draws.fields import MROPE, SAFE, words, wrong_rows
from graphpact_conformance.draws.lanes import HIDDEN, VOCAB
from graphpact_conformance.draws.problems import Problem, ProblemRequest, next_id
from graphpact_conformance.experiments.attended_slots import first_slot, other_numbers_in, owner_of
from graphpact_conformance.experiments.comparison import (
    TensorEdit,
    altered,
    differences,
    is_right,
    put,
    same_tensors,
    spell,
    values_at,
)
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.host_rows import host_rows
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.model import IDS_OF_PASS, ROWS_OF_PASS, own_rows
from graphpact_conformance.records.raised import causes, message_of
from graphpact_conformance.records.steps import NAN, Leaf, StepRecord, live_rows
from graphpact_tape.writes import write


def padding(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a batch with other contents in its padding rows and in memory outside live requests."""
    rig = lane.rig()
    exact = rig.step(steps.exact)
    exact_is_right = exact.error is None and not differences(rig, exact, lane.answer(rig, steps.exact))
    if exact.error is None and exact.outputs is not None:
        yield from _scratch_leaks(lane, rig, exact)
    padded = [steps.small, steps.padded]
    if lane.config.case.tokens_per_request is None:  # as many requests as the shape holds, but fewer tokens
        padded.append(of_size(lane.config, lane.config.most_requests))
    for problem in padded:
        rig.step(steps.exact)  # fills all rows, so that stale values may remain
        base = rig.step(problem)
        if base.error is not None or base.outputs is None:
            yield from _only_padded_fails(lane, rig, base, steps.exact)
            continue
        yield from _extents(lane, base)
        yield from _sentinels(lane, rig, base)
        yield from host_rows(lane, rig, base)
        found = [
            *pads_leak(lane, rig, base),
            *_scratch_leaks(lane, rig, base),
            *_leftovers_leak(lane, rig, base, steps.exact),
        ]
        if found and not exact_is_right:  # rows are wrong without padding too: padding is not their cause
            yield from (each for each in found if each.rule != "GP06")
            continue
        found = found or [*_pads_count(lane, rig, base, steps.exact)]
        yield from found or _pads_read(lane, rig, base)


def _only_padded_fails(lane: LaneUnderTest, rig: Rig, step: StepRecord, exact: Problem) -> Findings:
    """Yield findings about a batch that fails, although a batch without padding rows passes.

    The cause is stale or wrong contents of padding rows, or their number. It is not a value that all padding
    rows have: dummies consist of padding rows only, and were captured without error.
    """
    if step.error is None or lane.hook_raised(step):
        return
    if rig.step(step.problem).error is None or rig.step(exact).error is not None:
        return  # the cause is the order of batches, or every batch fails: padding is not the cause
    expected = "a batch with padding rows is replayed like a batch without them"
    is_stale = rig.step(step.problem, fill=_clear).error is None
    if is_stale or lane.build().step(step.problem).error is None:  # a first replay has no stale values
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
    "GP04": "point padding rows to request row 0 and KV slot 0; do not use other indices, such as -1",
    "GP05": "count the same rows everywhere: offsets end at the padded rows of q; if padding tokens form a"
    " fake request, count it in queries, keys and pages",
}
_STALE_HELP = (
    "the step is right with zeroed slots, or as the first replay, so it reads values of an earlier batch:"
    " write all rows up to the padded count in every step"
)


def _extents(lane: LaneUnderTest, step: StepRecord) -> Findings:
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
                help="slice the view by the padded counts: BoundSlot.slice_for(padded_bs, padded_num_tokens)",
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


def _sentinels(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> Findings:
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


def _scratch_leaks(lane: LaneUnderTest, rig: Rig, base: StepRecord) -> Findings:
    """Write other numbers into scratch, then NaN: live rows must not change."""
    for what, value in (("other numbers", 3.0), ("NaN", NAN)):

        def spoil(value: float = value) -> None:
            rig.cache.spoil_scratch(value)

        step = rig.step(base.problem, after_load=spoil)
        yield from _compare_real(lane, rig, base, step, f"{what} in scratch")


_SMALL = ("positions", MROPE, "encoder_lens", "mamba_track_seqlens")
"""Fields whose padding rows may hold any small number."""


def other_tokens(base: StepRecord) -> dict[str, TensorEdit]:
    """Return edits that give padding rows other tokens and positions, by path; empty without padding rows."""
    changes = {}
    edits = {"input_ids": VOCAB - 1, "input_embeds": 3, "mamba_track_mask": 1}
    for name, value in {**dict.fromkeys(_SMALL, 2), **edits}.items():
        leaf = base.leaves.get(f"view.{name}")
        if leaf is not None and leaf.tail is not None:
            changes[leaf.path] = put(leaf.in_tail, value)
    return changes


def pads_leak(lane: LaneUnderTest, rig: Rig, base: StepRecord) -> Findings:
    """Change tokens and positions of padding rows: KV slots and live rows must not change."""
    changes = other_tokens(base)
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
                actual="it changes with the tokens of padding rows, so a padding row writes it",
                step=step,
                help="keep KV slot 0, which the runner sets for padding tokens: -1 would index the last slot,"
                " and the slot of the first token belongs to a live request",
            )
            return  # this difference causes the later ones
    yield from _compare_real(lane, rig, base, step, "other tokens in padding rows")


def _leftovers_leak(lane: LaneUnderTest, rig: Rig, base: StepRecord, exact: Problem) -> Findings:
    """Write NaN into memory that outlives steps: live rows must not change.

    Memory that batches without padding read is left out.
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


def _compare_real(lane: LaneUnderTest, rig: Rig, base: StepRecord, step: StepRecord, what: str) -> Findings:
    if step.error is not None:
        yield lane.of_error(step.error, expected=f"{what} does not change live rows", rule="GP06", step=step)
        return
    if same_tensors(base.rows, step.rows) or not same_tensors(base.rows, rig.step(base.problem).rows):
        return  # the rows are equal, or the step is not deterministic: `repeated` reports that
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
        help=_LEAK_HELP if step.has_padding else _SCRATCH_HELP,
    )


_LEAK_HELP = (
    "mask padding rows in work across rows (routing, pooling, scales) by num_token_non_padded, and write"
    " every output row in every kernel"
)
_SCRATCH_HELP = (
    "no row of this batch is padding, and a live row reads scratch (row 0, or the page of KV slot 0): look"
    " for metadata of live rows that still names scratch, as in a dummy batch"
)


def _pads_read(lane: LaneUnderTest, rig: Rig, base: StepRecord) -> Findings:
    """Change unowned memory, then memory of live requests: padding rows, which use scratch, must not change.

    Unowned memory comes first, because live rows do not read it. With work across rows, padding rows may
    depend on live rows, and so on the memory of live requests. Such lanes are recognised by a change of the
    queries of live rows; the memory of live requests is not changed there.
    """
    was = _padded_outputs(rig, base)
    ids = _real_ids(rig, base)
    live = {slot for r in base.problem.requests for slot in (*r.table, *_written(r))}
    scratch = range(rig.config.page_size)

    def spoiled(
        *, everything: bool, fill: Callable[[BoundSlot], None] | None = None, rig: Rig = rig
    ) -> StepRecord:
        def spoil() -> None:
            rig.cache.fill(2.0, keep=scratch if everything else [*scratch, *live])

        with rig.other_weights((_KEYS, _VALUES), ids if everything else ()):
            return rig.step(base.problem, after_load=spoil, fill=fill)

    everything = False
    seen = _padded_outputs(rig, spoiled(everything=False))
    if same_tensors(was, seen):
        with rig.other_weights((_QUERIES,), ids):
            other = rig.step(base.problem)
        if _rows_meet(rig, base, other):
            yield from _copied_rows(lane, rig, base, other)
            return
        everything = True
        seen = _padded_outputs(rig, spoiled(everything=True))
    if seen is None or was is None or same_tensors(was, seen):
        return
    if not same_tensors(was, _padded_outputs(rig, rig.step(base.problem))):
        return  # the step is not deterministic: `repeated` reports it
    clean = _padded_outputs(rig, rig.step(base.problem, fill=_clear))
    anew = _padded_outputs(rig, spoiled(everything=everything, fill=_clear))
    is_stale = clean is None or same_tensors(clean, anew)
    if not is_stale:  # stale values may also come from memory that is filled once
        fresh = lane.build()
        first = _padded_outputs(fresh, fresh.step(base.problem))
        is_stale = same_tensors(first, _padded_outputs(fresh, spoiled(everything=everything, rig=fresh)))
    name = next(name for name, tensor in was.items() if not equal(tensor, seen[name]))
    real = len(live_rows(base)[name])
    row = int((~same(was[name], seen[name])).flatten(1).any(dim=1).nonzero()[0]) + real
    read = None if is_stale else _slot_read(rig, base, was, scratch)
    yield lane.finding(
        "GP03" if is_stale else "GP04",
        hook="init_metadata_replay",
        field=f"row {row} of the graph's outputs, a padding row",
        expected="an output that depends only on scratch",
        actual=read
        or "it changes with keys of live requests or unowned KV slots"
        + (", but not without earlier batches: it reads stale values of one of them" if is_stale else ""),
        step=base,
        help=_STALE_HELP
        if is_stale
        else "point padding rows to request row 0 and scratch pages: their metadata must name only these",
    )


def _slot_read(
    rig: Rig, base: StepRecord, was: dict[str, torch.Tensor] | None, scratch: Sequence[int]
) -> str | None:
    """Return in words a KV slot that padding rows attend, or None if the step itself writes their keys."""

    def changes(slots: Sequence[int]) -> bool:
        again = rig.step(base.problem, after_load=other_numbers_in(rig, slots))
        return not same_tensors(was, _padded_outputs(rig, again))

    slot = first_slot([slot for slot in rig.cache.slots.tolist() if slot not in scratch], changes)
    if slot is None:
        return None
    places = [each for leaf in base.leaves.values() if (each := _place_in_tail(leaf, slot, rig)) is not None]
    named = f", which {places[0]} holds" if places else ""
    return f"it attends KV slot {slot}, {owner_of(slot, base.problem)}{named}"


def _place_in_tail(leaf: Leaf, slot: int, rig: Rig) -> str | None:
    """Return the entry of the padding rows of metadata that holds a KV slot or its page; None without one."""
    if not leaf.path.startswith("metadata.") or leaf.value.dtype not in (torch.int32, torch.int64):
        return None
    for value in (slot, slot // rig.config.page_size):
        held = (leaf.value == value) & leaf.in_tail
        if value and bool(held.any()):
            return f"{leaf.path}{spell(held)}" + (f" ({leaf.slot.label})" if leaf.slot else "")
    return None


def _written(request: ProblemRequest) -> list[int]:
    """Return the KV slots that a request's new tokens write."""
    return [slot for token in request.tokens for slot in token.slots]


def _rows_meet(rig: Rig, base: StepRecord, other: StepRecord) -> bool:
    """Return whether padding rows depend on the queries of live rows, which ``other`` changes.

    Also returns True if live rows do not depend on these queries, because then the change proves nothing.
    """
    met = not same_tensors(_padded_outputs(rig, base), _padded_outputs(rig, other))
    return met or same_tensors(base.rows, other.rows)


def _copied_rows(lane: LaneUnderTest, rig: Rig, base: StepRecord, other: StepRecord) -> Findings:
    """Yield a finding if attention of a padding row is that of a live row, before and after a change of it.

    Work across rows, such as a scale of all queries, also makes padding rows depend on live ones. It does not
    make them equal. If the largest batch is wrong, memory for fewer rows may be the cause of the copy:
    `largest_step` reports that.
    """
    if base.outputs is None or other.outputs is None or "rows" not in base.outputs:
        return
    width = base.outputs["rows"].shape[1] - rig.num_shared - rig.net.num_own
    tokens = len(base.problem.tokens)
    was, now = (step.outputs["rows"][:, :width] for step in (base, other) if step.outputs is not None)
    changed = (~same(was, now)).any(dim=1)
    for row in changed[tokens:].nonzero().flatten().tolist():
        equal_to = [
            same(each[tokens + row], each[:tokens]).all(dim=1) & changed[:tokens] for each in (was, now)
        ]
        copied = (equal_to[0] & equal_to[1]).nonzero().flatten().tolist()
        if copied and not _largest_is_wrong(lane, rig):
            yield lane.finding(
                "GP04",
                field=f"row {tokens + row} of the graph's outputs, a padding row",
                expected="attention of padding tokens depends only on their own queries and scratch",
                actual=f"that of token {copied[0]} of the batch, bit by bit, also when its query changes",
                step=base,
                help="let padding tokens attend scratch or write zeros; an index that is clamped to the last"
                " live token copies it",
            )
            return


def _largest_is_wrong(lane: LaneUnderTest, rig: Rig) -> bool:
    """Return whether the largest batch is replayed wrong; a batch that the runner declines shows nothing."""
    step = rig.step(corner(rig.config), may_decline=True)
    if step.declined is not None:
        return False
    return step.error is not None or bool(differences(rig, step, lane.answer(rig, step.problem)))


def _padded_outputs(rig: Rig, step: StepRecord) -> dict[str, torch.Tensor] | None:
    """Return the padding rows of the outputs, without the columns that depend on all rows.

    Returns None for a step that failed. In a ragged mode a padding request has no token, so its row of an
    output per request is that of another request; these outputs are left out.
    """
    if step.error is not None or step.outputs is None:
        return None
    found = {}
    for name, live in live_rows(step).items():
        if rig.config.case.tokens_per_request is None and step.axes[name] == "bs":
            continue
        padded = step.outputs[name][len(live) :] if live.dim() else live
        is_models = name == "rows" or name.startswith(ROWS_OF_PASS)
        found[name] = padded[:, : padded.shape[1] - rig.num_shared] if is_models else padded
    return found


def _real_ids(rig: Rig, base: StepRecord) -> list[int]:
    """Return the token ids that occur in live rows but not in padding rows, in any step of a draft.

    With embeddings there are no token ids. Then the indices of all table rows that embeddings weigh are
    returned, because the embeddings of padding rows are zeros.
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


def _pads_count(lane: LaneUnderTest, rig: Rig, base: StepRecord, exact: Problem) -> Findings:
    """Yield a finding if live rows are wrong only with padding, even if all slots were zeroed before."""
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
        help=_count_help(rig, step),
    )


def _count_help(rig: Rig, step: StepRecord) -> str:
    """Return what to look at if rows are wrong only with padding, and no contents of padding rows are."""
    more = ""
    if any(layer.sliding_window for layer in rig.backend.context.layers):
        more += "; count the pages of windows too, which may begin within a page"
    if any(path.startswith("view.mamba_track") for path in step.leaves):
        more += "; write the states of padding rows into scratch"
    return _PADDED_HELP["GP05"] + more


def _clear(slot: BoundSlot) -> None:
    if slot.buffer is not None:
        slot.buffer.zero_()


_QUERIES, _KEYS, _VALUES = range(3)
"""Indices of a layer's weights."""
