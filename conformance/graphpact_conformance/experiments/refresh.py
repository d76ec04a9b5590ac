"""Entries that a replay does not write, or that depend on earlier steps: GP02, GP03, GP09, GP10.

A batch is replayed twice, after different batches and over different poison. An entry that still holds poison
was not written. An entry that was written and differs depends on an earlier step. Entries are reported only
if the replay reads them, that is, if poison in them has an effect. A plan is also wrong if the step is right
with another plan.

Does not: check that values are right; see `graphpact_conformance.experiments.parity`.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from graphpact.buffers import BoundSlot, PaddingPolicy
from graphpact.tensors import same
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import assorted, corner, neighbours, steady
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import (
    TensorEdit,
    altered,
    differences,
    excess,
    put,
    same_step,
    spell,
    tolerance_in,
    values_at,
)
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.snapshots import poison_slot
from graphpact_conformance.records.steps import Leaf, StepRecord
from graphpact_conformance.results import Finding
from graphpact_tape.poison import poison_of
from graphpact_tape.strict_observer import is_due


def is_plan(leaf: Leaf) -> bool:
    """Return whether a tensor is in a slot of the role ``plan``."""
    return leaf.slot is not None and leaf.slot.role == "plan"


def keeps_rows(slot: BoundSlot | None) -> bool:
    """Return whether the padding rows of a slot are filled only once, and so keep values of earlier steps."""
    is_once = slot is not None and slot.padding_policy is PaddingPolicy.FILL_ONCE
    return is_once and slot is not None and slot.axis != "none" and slot.role != "staging"


class Before:
    """A copy of the slots before a step, to repeat the step over the same contents."""

    def __init__(self, rig: Rig) -> None:
        self._held = {
            slot.name: slot.buffer.clone()
            for slot in rig.slots
            if slot.buffer is not None and (is_due(slot) or keeps_rows(slot))
        }
        self._kept = [slot for slot in rig.slots if slot.buffer is not None and keeps_rows(slot)]

    def put_back(self, slot: BoundSlot) -> None:
        """Restore the contents of a slot."""
        if slot.buffer is not None:
            slot.buffer.copy_(self._held[slot.name])

    def _put_rows_back(self) -> None:
        for slot in self._kept:
            self.put_back(slot)

    def shows(
        self,
        rig: Rig,
        base: StepRecord,
        leaf: Leaf,
        mask: torch.Tensor,
        other: torch.Tensor | float,
    ) -> bool:
        """Return whether ``other``, where ``mask`` is set, changes the results of the step."""
        return self.show(rig, base, {leaf.path: put(mask, other)})

    def show(self, rig: Rig, base: StepRecord, changes: dict[str, TensorEdit]) -> bool:
        """Return whether edits of tensors, by path, change the results of the step."""
        ready = altered(changes)
        changed = rig.step(base.problem, fill=self.put_back, ready=ready, after_load=self._put_rows_back)
        return not same_step(base, changed, first_slot=rig.config.page_size)


def unwritten_and_stale(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Replay a batch after two histories and over two kinds of poison, and compare what hooks wrote."""
    exact, small, _, padded = steps[:4]
    long = assorted(lane.config)
    for way in lane.ways:
        rig = lane.rig(way)
        for problem, before in ((padded, long), (small, small), (exact, padded)):
            # this history fills all rows, so that every row differs between the two histories
            yield from after_two_histories(lane, way, problem, [before], [exact, small])
        if lane.config.case.tokens_per_request is not None and long.requests:
            now, earlier = steady(lane.config)
            for previous in earlier:
                yield from after_two_histories(lane, way, now, [previous], [small])
        if way != lane.ways[-1]:
            continue  # plans are kept on the host in both ways, so one way is enough
        for neighbour in neighbours(lane.config, long):
            yield from after_two_histories(lane, way, long, [long, neighbour], [small])
        yield from _plans_at_fault(lane, rig, long)


def after_two_histories(
    lane: LaneUnderTest,
    way: Way,
    problem: Problem,
    history: Sequence[Problem],
    other: Sequence[Problem],
) -> Findings:
    """Replay a batch after two histories, over two kinds of poison, and compare what the hooks wrote.

    Args:
        lane: The lane.
        way: How metadata is made.
        problem: The batch.
        history: The batches before the first replay.
        other: The batches before the second replay.
    """
    rig = lane.rig(way)
    before = Before(rig)
    base = rig.step(problem)
    if base.error is not None:
        return  # an error without poison: other experiments report it
    for each in history:
        rig.step(each)
    one = rig.step(problem, fill=poison_slot)
    for each in other:
        rig.step(each)
    two = rig.step(problem, fill=_other_poison)
    compared = [*_compared(one, two)]
    # Few steps read entries that were not written. One run with garbage in all of them shows whether this
    # step does, before each entry is tried.
    missed = [(leaf, never | once) for leaf, never, once, _ in compared if bool((never | once).any())]
    is_read = any(
        before.show(rig, base, {leaf.path: put(mask, _garbage(leaf, leaf)[at][1]) for leaf, mask in missed})
        for at in range(2 if missed else 0)
    )
    for leaf, never, once, stale in compared:
        if is_read and bool((never | once).any()):
            yield from _unwritten(lane, way, (before, base), leaf, never, once)
        if bool(stale.any()):
            yield from _stale(lane, rig, (before, base), leaf, stale, (one, two))


def _compared(
    one: StepRecord, two: StepRecord
) -> Iterator[tuple[Leaf, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each tensor that both steps have to write, with three masks.

    The masks are set where neither step wrote, where only one step wrote, and where the steps wrote different
    values.
    """
    for path, leaf in one.leaves.items():
        twin = two.leaves.get(path)
        if twin is None or twin.value.shape != leaf.value.shape:
            continue
        if leaf.is_resident and keeps_rows(leaf.slot):
            none = torch.zeros_like(leaf.in_tail)
            yield leaf, none, none, ~same(leaf.value, twin.value) & leaf.in_tail
        if not leaf.is_written:
            continue
        left = [same(x.value, torch.full_like(x.value, g)) for x, g in _garbage(leaf, twin)]
        never, once = left[0] & left[1], left[0] ^ left[1]
        if leaf.value.dtype.itemsize == 1:
            once = torch.zeros_like(once)  # a hook may write the poison value into a byte
        yield leaf, never, once, ~same(leaf.value, twin.value) & ~left[0] & ~left[1]


def _garbage(leaf: Leaf, twin: Leaf) -> list[tuple[Leaf, float | int]]:
    dtype = leaf.value.dtype
    return [(leaf, poison_of(dtype)), (twin, _other_poison_of(dtype))]


def _unwritten(
    lane: LaneUnderTest,
    way: Way,
    run: tuple[Before, StepRecord],
    leaf: Leaf,
    never: torch.Tensor,
    once: torch.Tensor,
) -> Findings:
    """Yield a finding for each part of a tensor that the replay reads but the hooks did not write."""
    rig, (before, base) = lane.rig(way), run
    slot, tail = leaf.slot, leaf.in_tail
    assert slot is not None  # noqa: S101  a tensor that hooks have to write has a slot
    expected = "every entry that the replay reads is written in this step"
    kept = f"; declared reason: {slot.reason}" if slot.reason and slot.copy_from_fb else ""
    sometimes = "written after one history, not written after another"
    is_missed = bool(never.all()) and not bool(tail.all())  # one finding includes the tail
    beside = torch.zeros_like(never) if is_missed else never
    parts: list[tuple[str, torch.Tensor, str]]
    if is_plan(leaf):
        parts = [("GP09", never | once, "not written for this batch")]
    else:
        parts = [
            ("GP02", never & ~tail, "not written in this step"),
            ("GP03", beside & tail, "holds values of an earlier batch" + kept),
            ("GP02", once & ~tail, sometimes),
            ("GP03", once & tail, sometimes),
            ("GP09", once, "written or not, depending on earlier batches"),
        ]
    garbage = [value for _, value in _garbage(leaf, leaf)]
    found = False
    for rule, mask, why in parts:
        if bool(mask.any()) and any(before.shows(rig, base, leaf, mask, g) for g in garbage):
            found = True
            asked = expected
            if rule == "GP03" and slot.copy_from_fb:
                asked = f"padding rows hold {slot.initial_value} in every step, after any batch"
            yield _finding(lane, rig, base, leaf, rule, mask, asked, why)
    is_input = hook_of(leaf) == "populate"
    if found and way == "graph" and not is_input and _hook_writes(lane, base.problem, leaf, never):
        body = lane.rig("hook").writer
        yield lane.finding(
            "GP10",
            hook="init_metadata_capture",
            field=f"{leaf.path}{spell(never)} ({slot.label})",
            expected=f"the recorded work writes every entry that {body} writes where the graph records no"
            " metadata work",
            actual="the recorded work does not write the entry",
            step=base,
            help="record the same body (fill_metadata) for every step of a draft and in every run, without"
            " work that runs only once and without branches on contents",
        )


def _hook_writes(lane: LaneUnderTest, problem: Problem, leaf: Leaf, mask: torch.Tensor) -> bool:
    """Return whether hooks, in a lane where they make the metadata, write entries that the graph does not."""
    if "hook" not in lane.ways or not bool(mask.any()):
        return False
    theirs = lane.rig("hook").step(problem, fill=poison_slot).leaves.get(leaf.path)
    if theirs is None or theirs.value.shape != mask.shape:
        return False
    left = same(theirs.value, torch.full_like(theirs.value, poison_of(theirs.value.dtype)))
    return bool((mask & ~left).any())


def _stale(
    lane: LaneUnderTest,
    rig: Rig,
    run: tuple[Before, StepRecord],
    leaf: Leaf,
    stale: torch.Tensor,
    pair: tuple[StepRecord, StepRecord],
) -> Findings:
    """Yield findings about entries that were written but depend on earlier batches."""
    before, base = run
    tail = leaf.in_tail
    values = [step.leaves[leaf.path].value for step in pair]
    parts = [("GP09", stale)]
    if not is_plan(leaf):
        live = stale & ~tail
        of_rows = [("GP02", live), ("GP03", stale & tail)]
        parts = [*parts, *of_rows] if bool(live.any()) else of_rows
    for rule, mask in parts:
        if bool(mask.any()) and any(before.shows(rig, base, leaf, mask, v) for v in values):
            first, second = (values_at(v, mask) for v in values)
            why = f"{first} after one history, {second} after another"
            yield _finding(lane, rig, base, leaf, rule, mask, "a value that depends only on this batch", why)


def _finding(
    lane: LaneUnderTest,
    rig: Rig,
    base: StepRecord,
    leaf: Leaf,
    rule: str,
    mask: torch.Tensor,
    expected: str,
    why: str,
) -> Finding:
    now = base.leaves[leaf.path].value
    initial = 0 if leaf.slot is None else leaf.slot.initial_value
    if bool((now[mask] != initial).any()):  # otherwise nothing was ever written there
        why = f"{why}; in this run {values_at(now, mask)}"
    return lane.finding(
        rule,
        hook=hook_of(leaf),
        field=f"{leaf.path}{spell(mask)}" + (f" ({leaf.slot.label})" if leaf.slot else ""),
        expected=expected,
        actual=why,
        step=base,
        help=refresh_help(lane, rig, leaf, rule, _HELP),
    )


def _plans_at_fault(lane: LaneUnderTest, rig: Rig, problem: Problem) -> Findings:
    """Repeat a wrong step with the plans of the largest batch: if rows become right, the plan is wrong."""
    base = rig.step(problem)
    plans = [leaf for leaf in base.leaves.values() if leaf.is_written and is_plan(leaf)]
    if base.error is not None or not plans:
        return
    wrong_parts = differences(rig, base, lane.answer(rig, problem))
    if not any(each.kind == "rows" for each in wrong_parts):
        return
    wrong = _rows_off(lane, rig, base)
    largest = rig.step(corner(lane.config))
    if largest.error is not None or largest.shape != base.shape:
        return
    changes = {
        leaf.path: put(torch.ones_like(leaf.value, dtype=torch.bool), largest.leaves[leaf.path].value)
        for leaf in plans
    }
    for chosen in (*([leaf] for leaf in plans), plans):
        step = rig.step(problem, ready=altered({leaf.path: changes[leaf.path] for leaf in chosen}))
        if step.error is not None:
            continue
        still = _rows_off(lane, rig, step)
        if still < wrong:
            yield lane.finding(
                "GP09",
                hook="init_metadata_replay",
                field=", ".join(leaf.name for leaf in chosen),
                expected=f"a plan that covers all work of this batch: {wrong_parts[0].what} is"
                f" {wrong_parts[0].expected}",
                actual=f"{wrong_parts[0].actual}; with the plan of a larger batch fewer rows are wrong",
                step=base,
                help="plan with the lengths and the arguments of the kernel, including drafts",
            )
            return


def _rows_off(lane: LaneUnderTest, rig: Rig, step: StepRecord) -> set[tuple[str, int]]:
    """Return the entries of a step's outputs that differ from the oracle: (output name, flat index).

    The step must have ended without error.
    """
    assert step.rows is not None  # noqa: S101  it ended
    off: set[tuple[str, int]] = set()
    for name, right in lane.answer(rig, step.problem).rows.items():
        wrong = excess(step.rows[name], right, tolerance_in(rig, name)) > 1
        off |= {(name, at) for at in wrong.flatten().nonzero().flatten().tolist()}
    return off


def refresh_help(lane: LaneUnderTest, rig: Rig, leaf: Leaf, rule: str, texts: Mapping[str, str]) -> str:
    """Return the help text of a rule for a tensor, with its name and the method that writes it.

    Args:
        lane: The lane.
        rig: The rig of the step.
        leaf: The tensor.
        rule: The broken rule.
        texts: The help of each rule, for metadata of a checked backend.
    """
    if hook_of(leaf) == "populate" and rule in ("GP02", "GP09"):
        return "copy it from the batch in every step: registry.fill_from() fills every slot of a registry"
    if hook_of(leaf) == "populate" and rule == "GP03":
        return (
            "reset the tail in every step: declare the slot with padding_policy=ZERO or FILL_SENTINEL, or"
            " write all rows up to the padded count"
        )
    if lane.kind == "runner" and hook_of(leaf) != "populate":
        return (
            "the suite's own backend writes it from the view: check the view, and whether the hook was"
            " called for this batch"
        )
    return texts[rule].format(name=leaf.path.rsplit(".", 1)[-1], body=rig.writer)


_HELP = {
    "GP02": "write `{name}` in {body} in place, from the view, or do not let the kernel read past the written"
    " part; if it is the same for every batch, declare its slot with role='constant' and its `contents`",
    "GP03": "write all rows of `{name}` in {body} up to the padded count, those of padding rows too, in every"
    " step",
    "GP09": "plan before every replay, from the lengths of this batch (plan_metadata); the key of a cached"
    " plan must include everything that the plan depends on",
}


def hook_of(leaf: Leaf) -> str:
    """Return the hook that writes a tensor."""
    if leaf.slot is not None and (leaf.slot.copy_from_fb or leaf.slot.post_fill is not None):
        return "populate"
    return "populate" if leaf.path.startswith("view.") else "init_metadata_replay"


def _other_poison(slot: BoundSlot) -> None:
    if slot.buffer is not None:
        slot.buffer.fill_(_other_poison_of(slot.dtype))


def _other_poison_of(dtype: torch.dtype) -> float | int:
    """Return a second poison value of ``dtype``. Like the first, it is not a valid index or length."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("inf")
    if dtype is torch.bool:
        return 0
    return poison_of(dtype) - 1 if dtype.itemsize == 1 else poison_of(dtype) - 4242
