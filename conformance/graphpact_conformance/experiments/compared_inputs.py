"""Comparison of the inputs of a replay with those of a capture of the same batch.

The inputs are host numbers, arguments of tasks, and contents of tensors.

Does not: capture the batch; see `graphpact_conformance.experiments.parity`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.pact import ANY, Promise, is_readable
from graphpact.tensors import equal, same
from graphpact_conformance.experiments.comparison import first_off, gives_the_same, spell, values_at
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import Before, hook_of, is_plan, refresh_help
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.snapshots import reset_slot
from graphpact_conformance.records.steps import Leaf, StepRecord, live_rows
from graphpact_conformance.results import Finding
from graphpact_tape.poison import poison_of


def compare_numbers(lane: LaneUnderTest, rig: Rig, step: StepRecord, seen: StepRecord) -> Findings:
    """Yield a finding for each frozen host number that is different in a capture of the batch."""
    if step.shape is None or step.shape not in rig.captured:
        return
    promised = rig.promises(step.shape)
    for path in {**step.numbers, **seen.numbers}:
        if not path.startswith("metadata"):
            continue
        if (path in step.numbers) is not (path in seen.numbers):
            missing = "replay" if path not in step.numbers else "a capture of this batch"
            yield lane.finding(
                "GP10",
                hook="init_metadata_replay",
                field=path,
                expected="the same fields at capture and at replay",
                actual=f"{missing} lacks it",
                step=step,
                help="return one type with the same fields from both hooks, for every batch",
            )
            continue
        now, then = step.numbers[path], seen.numbers[path]
        if not (is_readable(now) and is_readable(then)) or now == then or now != now:  # noqa: PLR0124  NaN
            continue
        if then is ForwardMode.IDLE:
            continue  # only a capture of an idle batch has this mode, and lanes never capture one
        promise = promised.get(path)
        if _is_updated(promised, path) or (promise is not None and _keeps_bound(promise, then)):
            continue
        yield lane.finding(
            "GP08",
            hook="init_metadata_capture",
            field=path,
            expected=f"one value for all batches of {step.shape}: a capture of this batch has {then!r}",
            actual=f"the graph recorded {now!r}",
            step=step,
            help="use a number that is valid for every batch of the shape (from the limits), put it into a"
            " tensor, declare it bounded() and capture its largest value, or declare it updated() if it is an"
            " argument of tasks that each replay updates",
        )


def _is_updated(promised: Mapping[str, Promise], path: str) -> bool:
    """Return whether a host number, or the list that contains it, is declared as an argument of tasks."""
    found = promised.get(path) or promised.get(path.rpartition("[")[0])
    return found is not None and found.value is ANY


def _keeps_bound(promise: Promise, value: Any) -> bool:
    if not promise.bounded or promise.value is None:
        return False
    return bool(value <= promise.value)


def compare_tasks(
    lane: LaneUnderTest, rig: Rig, step: StepRecord, seen: StepRecord, fresh: Callable[[], StepRecord]
) -> Findings:
    """Yield a finding about arguments of tasks that do not belong to this step.

    There are two proofs. The arguments differ from those of ``fresh``, a replay without earlier batches. Or
    the replay is wrong, and a graph that was captured with other arguments is right. It proves nothing that a
    capture only has other arguments, because any arguments may be right at capture.
    """
    other, who = fresh(), "of this batch in a new lane"
    if other.error is not None or not (names := _other_tasks(step, other)):
        if gives_the_same(rig, step, seen) or not _is_right(lane, rig, seen):
            return
        other, who, names = seen, "of a capture of this batch", _other_tasks(step, seen)
    if names:
        yield lane.finding(
            "GP21",
            hook="init_metadata_replay",
            field=", ".join(names),
            expected=f"the arguments {who}: {'; '.join(str(other.tasks[name]) for name in names)}",
            actual="; ".join(str(step.tasks[name]) for name in names),
            step=step,
            help="compute the arguments of a task in one function of view and layer, for the capture and for"
            " each update, padding rows included",
        )


def _other_tasks(step: StepRecord, other: StepRecord) -> list[str]:
    return [name for name, value in other.tasks.items() if step.tasks.get(name, value) != value]


def _is_right(lane: LaneUnderTest, rig: Rig, seen: StepRecord) -> bool:
    """Return whether the live rows of a captured and replayed batch agree with the oracle."""
    right = lane.answer(rig, seen.problem).rows
    live = live_rows(seen)
    return first_off(rig, live, {name: right[name] for name in live if name in right}) is None


def compare_contents(
    lane: LaneUnderTest,
    rig: Rig,
    before: Before,
    step: StepRecord,
    seen: StepRecord,
    fresh: Callable[[], StepRecord],
) -> Iterator[tuple[bool, Finding]]:
    """Yield pairs: whether a difference disappears after a reset of the slots, and a finding about it.

    Padding rows are stale if they are right in ``fresh``, a replay without earlier batches.
    """
    after_reset: StepRecord | None = None
    breached = {breach.path for breach in step.breaches if breach.rule != "address"}
    for path in {**step.leaves, **seen.leaves}:
        if (path in step.leaves) is not (path in seen.leaves):
            if path.startswith("metadata"):
                yield (
                    False,
                    lane.finding(
                        "GP10",
                        hook="init_metadata_replay",
                        field=path,
                        expected="the same fields at capture and at replay",
                        actual="replay lacks it" if path not in step.leaves else "capture lacks it",
                        step=step,
                        help="return one type with the same fields from both hooks, for every batch",
                    ),
                )
            continue
        replayed, captured = step.leaves[path], seen.leaves[path]
        facts = [(tuple(x.value.shape), x.value.stride(), x.value.dtype) for x in (replayed, captured)]
        if facts[0] != facts[1] and path in breached:
            continue
        if facts[0] != facts[1]:
            is_eager = lane.eager_attention and path.startswith("metadata")
            yield (
                False,
                lane.finding(
                    "GP08" if is_eager else "GP07",
                    hook="init_metadata_eager" if is_eager else hook_of(replayed),
                    field=replayed.name,
                    expected=f"the shape, stride and dtype of a capture of this batch: {facts[1]}",
                    actual=str(facts[0]),
                    step=step,
                    help=COUNTED_HELP
                    if is_eager
                    else "let the layout depend only on the shape, not on the contents of the batch",
                ),
            )
            continue
        differs = _differs(replayed, captured)
        if bool(differs.any()) and before.shows(rig, step, replayed, differs, captured.value):
            after_reset = after_reset or rig.step(step.problem, fill=reset_slot)
            reset = after_reset.leaves.get(path)
            is_stale_slot = reset is not None and not bool((differs & _differs(reset, captured)).any())
            who = "a capture of this batch"
            given = rig.batch_of(step.problem).tensors().get(path.removeprefix("view."))
            rules = [] if given is None else _of_input(given.cpu(), replayed, captured)
            if not rules and not is_stale_slot and not bool((differs & ~replayed.in_tail).any()):
                rules = _of_first_replay(fresh().leaves.get(path), captured, differs)
            rules = rules or _rules_of(lane, replayed, captured, differs)
            if "GP02" in rules and reset is not None and bool((differs & _differs(reset, replayed)).any()):
                rules = ["GP02"]  # what lay there before decides, so no layout is at fault
            for found in _of_contents(lane, rig, step, replayed, captured, differs, who, rules):
                yield is_stale_slot, found


def _differs(mine: Leaf, theirs: Leaf) -> torch.Tensor:
    """Return a mask of the entries for which two runs of one batch wrote different values."""
    differs = ~same(mine.value, theirs.value)
    garbage = torch.full_like(mine.value, poison_of(mine.value.dtype))
    differs &= ~same(mine.value, garbage) & ~same(theirs.value, garbage)
    return differs if mine.is_resident else torch.zeros_like(differs)


def _of_contents(
    lane: LaneUnderTest,
    rig: Rig,
    step: StepRecord,
    mine: Leaf,
    theirs: Leaf,
    differs: torch.Tensor,
    who: str,
    rules: Sequence[str],
) -> Findings:
    is_constant = mine.slot is not None and mine.slot.role == "constant"
    texts = {**_CONTENT_HELP, "GP02": _CONSTANT_HELP} if is_constant else _CONTENT_HELP
    label = f" ({mine.slot.label})" if mine.slot is not None else ""
    for rule in rules:
        yield lane.finding(
            rule,
            hook=hook_of(mine),
            field=f"{mine.path}{spell(differs)}{label}",
            expected=f"the values of {who}: {values_at(theirs.value, differs)}",
            actual=values_at(mine.value, differs),
            step=step,
            help=refresh_help(lane, rig, mine, rule, texts),
        )


def _rules_of(lane: LaneUnderTest, mine: Leaf, theirs: Leaf, differs: torch.Tensor) -> list[str]:
    """Return the rules that are broken if the contents of a tensor differ between replay and capture."""
    if mine.slot is not None and mine.slot.name == "num_token_non_padded":
        return ["GP05"]
    if is_plan(mine):
        return ["GP09"]
    is_offsets = mine.slot is not None and mine.slot.role == "offsets"
    is_of_padding = not bool((differs & ~mine.in_tail).any())
    if is_offsets and _is_strided(theirs.value, lane.config.case.tokens_per_request):
        return ["GP05" if is_of_padding else "GP07"]  # a uniform stride does not depend on the batch
    if _is_moved(mine.value, theirs.value):
        return ["GP07"]
    if is_offsets:
        return ["GP07", "GP02"]
    return ["GP05" if is_of_padding else "GP02"]


def _of_first_replay(first: Leaf | None, captured: Leaf, differs: torch.Tensor) -> list[str]:
    """Return GP03 if rows that differ from a capture are right in a replay without earlier batches."""
    if first is None or first.value.shape != differs.shape:
        return []
    return [] if bool((differs & _differs(first, captured)).any()) else ["GP03"]


def _of_input(given: torch.Tensor, mine: Leaf, theirs: Leaf) -> list[str]:
    """Return the rule of an input whose live rows are not those of the batch, at replay or at capture."""
    region = tuple(map(slice, given.shape))
    for rule, leaf in (("GP02", mine), ("GP11", theirs)):
        rows = leaf.value[region] if leaf.value.dim() == given.dim() else given
        if rows.shape == given.shape and not equal(rows.to(given.dtype), given):
            return [rule]
    return []


def _is_strided(offsets: torch.Tensor, width: int | None) -> bool:
    """Return whether the offsets are 0, ``width``, 2 * ``width`` and so on."""
    if width is None or offsets.dim() != 1:
        return False
    return torch.equal(offsets.long(), torch.arange(len(offsets)) * width)


def _is_moved(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether ``mine`` has the numbers of ``theirs`` at other indices: another stride, order or width.

    Compares how often each number occurs. A comparison of sets would be too weak, because most tables contain
    the small numbers.
    """
    here, there = (Counter(t[t != 0].flatten().tolist()) for t in (mine, theirs))
    if bool((mine[mine != 0] == theirs[mine != 0]).all()):
        return False  # some numbers are missing, but none has moved
    return len(here) > 1 and here <= there and 2 * here.total() >= there.total()


_CONTENT_HELP = {
    "GP02": "write `{name}` in {body} in place, from the view, with the same values as for a capture: use one"
    " function for both",
    "GP03": "reset the padding rows of `{name}` in {body} in every step, also where they are copied from"
    " memory that is filled once",
    "GP05": "include padding rows where the graph does: use the counts of the shape, not of the batch",
    "GP11": "write it from the batch at capture too, by the same code as for a replay",
    "GP07": "use the same stride, order and element width at replay as at capture; a uniform stride of"
    " queries does not depend on accepted lengths",
    "GP09": "plan at replay as at capture, with the arguments and lengths of the recorded kernel",
}
_CONSTANT_HELP = (
    "a constant must be the same for every batch: give the slot of `{name}` another role and write it"
    " in {body}, or do not write it in any capture and declare its `contents`"
)


def compare_ways(lane: LaneUnderTest, by_graph: StepRecord, by_hook: StepRecord) -> Findings:
    """Compare the metadata that the graph writes with that of the hook, if the results differ.

    Args:
        lane: The lane.
        by_graph: A replay whose graph records the metadata work.
        by_hook: A replay of the same batch whose metadata the hook writes.
    """
    if by_graph.error is not None or by_hook.error is not None:
        return
    if gives_the_same(lane.rig(), by_graph, by_hook):
        return
    by_graph, by_hook = (  # resets slots, because the two lanes have replayed different batches
        lane.rig(way).step(by_graph.problem, fill=reset_slot) for way in lane.ways
    )
    rig = lane.rig("hook")
    who = f"{rig.writer}, where the graph records no metadata work"
    for path, mine in by_graph.leaves.items():
        theirs = by_hook.leaves.get(path)
        if theirs is None or not mine.is_due or mine.value.shape != theirs.value.shape:
            continue
        differs = _differs(mine, theirs)
        if bool(differs.any()):
            rules = _rules_of(lane, mine, theirs, differs)
            yield from _of_contents(lane, rig, by_graph, mine, theirs, differs, who, rules)


COUNTED_HELP = (
    "an eager call must not keep anything of an earlier step or of the capture: inside the call, read the"
    " counts and metadata of this replay from `step.attended`, `step.live` and `step.metadata`, or use"
    " `step.attend`"
)
