"""What a replay leaves unwritten, and what it writes from the past: GP02, GP03, GP09.

A batch is replayed twice, after other batches and over other garbage each time. What still holds the garbage
nobody wrote; what was written and yet differs came from an earlier step. Only what the replay reads counts:
poison is put there, and has to show.

Does not: know what should have been written; see `graphpact.conformance.experiments.parity`.
"""

import re
from collections.abc import Sequence

import torch

from graphpact.buffers import GraphSlot
from graphpact.conformance.experiments.base import (
    Findings,
    is_read,
    matters,
    same,
    spell,
    values_at,
)
from graphpact.conformance.problems import Problem, neighbours
from graphpact.conformance.results import Finding
from graphpact.conformance.rig import Leaf, Rig, Step
from graphpact.conformance.subject import LaneUnderTest
from graphpact.graphs.poison import poison_of

_PLANNED = re.compile(r"plan|sched|split|chunk|tile|partition|o_indptr|work_?item", re.IGNORECASE)
"""Names of what is planned; FlashInfer's, FA3's and FlashMLA's words."""


def unwritten_and_stale(lane: LaneUnderTest, steps: Sequence[Problem]) -> Findings:
    """Replay a batch after two histories and over two kinds of garbage, and compare what hooks wrote."""
    exact, small, *_, padded = steps
    for way in lane.ways:
        rig = lane.rig(way)
        for problem, before in ((padded, exact), (small, small), (exact, padded)):
            yield from _after_two_histories(lane, rig, problem, [before], [small])
        if way != lane.ways[-1]:
            continue  # what is kept on the host is kept for both
        for neighbour in neighbours(lane.config, padded):
            yield from _after_two_histories(lane, rig, padded, [padded, neighbour], [small])


def _after_two_histories(
    lane: LaneUnderTest,
    rig: Rig,
    problem: Problem,
    history: Sequence[Problem],
    other: Sequence[Problem],
) -> Findings:
    base = rig.step(problem)
    if base.error is not None:
        return  # what goes wrong without any garbage, others tell
    for each in history:
        rig.step(each)
    one = rig.step(problem, fill=_first)
    for each in other:
        rig.step(each)
    two = rig.step(problem, fill=_second)
    for path, leaf in one.leaves.items():
        twin = two.leaves.get(path)
        if not leaf.is_due or leaf.is_alias or twin is None or twin.value.shape != leaf.value.shape:
            continue
        left = [same(x.value, torch.full_like(x.value, g)) for x, g in _garbage(leaf, twin)]
        never, once = left[0] & left[1], left[0] ^ left[1]
        if leaf.value.dtype.itemsize == 1:
            once = torch.zeros_like(once)  # garbage is a value like any other there
        stale = ~same(leaf.value, twin.value) & ~left[0] & ~left[1]
        yield from _judge(lane, rig, base, leaf, never, once, stale, (one, two))


def _garbage(leaf: Leaf, twin: Leaf) -> list[tuple[Leaf, float | int]]:
    dtype = leaf.value.dtype
    return [(leaf, poison_of(dtype)), (twin, _other_garbage(dtype))]


def _judge(
    lane: LaneUnderTest,
    rig: Rig,
    base: Step,
    leaf: Leaf,
    never: torch.Tensor,
    once: torch.Tensor,
    stale: torch.Tensor,
    pair: tuple[Step, Step],
) -> Findings:
    """Yield a finding for each part of a tensor that the replay reads and did not write for itself."""
    slot = leaf.slot
    assert slot is not None  # noqa: S101  it is due
    is_plan = bool(_PLANNED.search(leaf.path) or _PLANNED.search(slot.name))
    hook = hook_of(leaf)
    tail = leaf.in_tail
    expected = (
        "every entry that the replay reads is written in this step, whatever was there before"
    )
    kept = f"; it is kept: {slot.reason}" if slot.reason and slot.copy_from_fb else ""
    parts: list[tuple[str, torch.Tensor, str]] = []
    if is_plan:
        parts += [("GP09", never | once, "nobody wrote it anew for this batch")]
    else:
        parts += [
            ("GP02", never & ~tail, "nobody wrote it in this step"),
            ("GP03", never & tail, "it holds what an earlier batch left" + kept),
            ("GP02", once & ~tail, "after one history it is written, after another it is not"),
            ("GP03", once & tail, "after one history it is written, after another it is not"),
        ]
        parts += [("GP09", once, "whether it is written depends on the batches before")]
    for rule, mask, why in parts:
        if bool(mask.any()) and is_read(rig, base, leaf, mask):
            yield _finding(lane, base, leaf, rule, mask, expected, why, hook)
    for rule, mask in (("GP09", stale), ("GP03", stale & tail)):
        if bool(mask.any()) and (
            matters(rig, base, leaf, mask, pair[0].leaves[leaf.path].value)
            or matters(rig, base, leaf, mask, pair[1].leaves[leaf.path].value)
        ):
            first, second = (values_at(s.leaves[leaf.path].value, mask) for s in pair)
            why = f"{first} after one history, {second} after another"
            yield _finding(lane, base, leaf, rule, mask, "this batch alone decides", why, hook)


def _finding(
    lane: LaneUnderTest,
    base: Step,
    leaf: Leaf,
    rule: str,
    mask: torch.Tensor,
    expected: str,
    why: str,
    hook: str,
) -> Finding:
    now = values_at(base.leaves[leaf.path].value, mask)
    return lane.finding(
        rule,
        hook=hook,
        field=f"{leaf.path}{spell(mask)}" + (f" ({leaf.slot.label})" if leaf.slot else ""),
        expected=expected,
        actual=f"{why}; in this run {now}",
        step=base,
        help=_HELP[rule].format(name=leaf.path.rsplit(".", 1)[-1]),
    )


_HELP = {
    "GP02": "write `{name}` in the replay hook (fill_metadata), from the view, in place",
    "GP03": "reset the tail in every step: padding_policy=ZERO or FILL_SENTINEL where a fill copies the head,"
    " or write all rows of the padded extent",
    "GP09": "plan in every replay, from the lengths of the batch at hand (plan_metadata); a key that decides"
    " whether to plan again has to hold all that the plan depends on",
}


def hook_of(leaf: Leaf) -> str:
    """Return the hook that writes a tensor."""
    if leaf.slot is not None and (leaf.slot.copy_from_fb or leaf.slot.post_fill is not None):
        return "populate"
    return "populate" if leaf.path.startswith("view.") else "init_metadata_replay"


def _first(slot: GraphSlot) -> None:
    if slot.buffer is not None:
        slot.buffer.fill_(poison_of(slot.dtype))


def _second(slot: GraphSlot) -> None:
    if slot.buffer is not None:
        slot.buffer.fill_(_other_garbage(slot.dtype))


def _other_garbage(dtype: torch.dtype) -> float | int:
    """Return a second poison of ``dtype``, which is no index and no length either."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("inf")
    if dtype is torch.bool:
        return 0
    return poison_of(dtype) - 1 if dtype.itemsize == 1 else poison_of(dtype) - 4242
