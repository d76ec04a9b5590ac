"""The inputs of a replay against a capture of the same batch: GP01 to GP03, GP05, GP07 to GP11.

Capture is a replay of a dummy batch, plus binding. So a capture of a live batch has the inputs that its
replay must have: the same types, fields, host numbers, shapes, and contents. It also records the same
operations as the graph of the dummy, with the same host numbers. If the replay has other results, the memory
that both graphs read is compared too, and the recorded run with the warm-up before it.

Does not: check outputs of attention (see `graphpact_conformance.experiments.outputs`), or find stale values
of earlier batches (see ``refresh``).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import Breach
from graphpact.pact import ANY, Promise, is_readable, walk
from graphpact.shapes import GraphShape
from graphpact.tensors import equal, same
from graphpact_conformance.draws.batches import Drawn, assorted
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import first_off, sides_of, spell, values_at
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.experiments.refresh import Before, help_for, hook_of, is_plan
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.snapshots import reset_slot
from graphpact_conformance.records.raised import message_of
from graphpact_conformance.records.steps import Leaf, StepRecord, live_rows
from graphpact_conformance.results import Finding
from graphpact_tape.poison import poison_of
from graphpact_tape.trace import TracedCall, first_difference
from graphpact_tape.writes import write


def replay_against_capture(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture each batch, and compare with the inputs of its replay and with the recorded work."""
    problems = [*steps, assorted(lane.config)]
    if lane.config.case.mode is ForwardMode.IDLE:
        problems = problems[:1]  # all idle batches are equal
    replayed: dict[Way, list[StepRecord]] = {}
    for way in lane.ways:
        rig = lane.rig(way)
        replayed[way] = []
        is_wrong = False
        for problem in problems:
            compared = _compare(lane, rig, way, problem)
            step, seen = compared.step, compared.seen
            replayed[way].append(step)
            yield from compared.found
            if seen is None or compared.explained:
                continue
            if not is_wrong and not _gives_the_same(rig, step, seen):
                is_wrong = True
                yield from _compare_with_warm_up(lane, way, step)
    for by_graph, by_hook in zip(replayed["graph"], replayed.get("hook", ()), strict=False):
        yield from _compare_ways(lane, by_graph, by_hook)


def compare_with_capture(lane: LaneUnderTest, rig: Rig, way: Way, problem: Problem) -> Findings:
    """Compare the replay of a batch with a capture of it on a new lane; include stale values."""
    compared = _compare(lane, rig, way, problem)
    yield from (*compared.found, *compared.past)


class _Compared(NamedTuple):
    """The differences between the replay of a batch and a capture of it.

    Args:
        step: The replay.
        seen: The capture; None where there is none.
        found: Findings about the differences.
        past: Findings about stale slots, which `refresh` also reports.
        explained: Whether a finding is the cause of wrong results, shown by a right replay without it.
    """

    step: StepRecord
    seen: StepRecord | None
    found: list[Finding]
    past: Sequence[Finding] = ()
    explained: bool = False


def _compare(lane: LaneUnderTest, rig: Rig, way: Way, problem: Problem) -> _Compared:
    before = Before(rig)
    step = rig.step(problem)
    if lane.hook_raised(step):
        return _Compared(step, None, [])  # a finding of `answers_replayed`, and no evidence of anything else
    found = of_breaches(lane, step, step.breaches)
    shape = step.shape
    if shape is None or not step.leaves:
        return _Compared(step, None, found)
    if not problem.requests and shape.mode is not ForwardMode.DECODE:
        # An idle batch has no tokens per request, and cannot be captured.
        return _Compared(step, None, found)
    twin = lane.build(way, capture=False)
    try:
        seen = _capture(twin, problem, shape)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
        failed = lane.of_error(
            error,
            expected="a batch that can be replayed can be captured",
            rule="GP11",
            problem=problem,
            hook="init_metadata_capture",
        )
        return _Compared(step, None, [*found, failed])
    found += _compare_numbers(lane, rig, step, seen)
    past: list[Finding] = []
    fresh = cache(lambda: lane.build(way).step(problem))
    for is_past, each in _compare_contents(lane, rig, before, step, seen, fresh):
        (past if is_past else found).append(each)
    found += _compare_traces(lane, way, step, rig.trace(shape), twin.trace(shape))
    found += _compare_tasks(lane, rig, step, seen, fresh) if step.tasks else []
    if found or past or _gives_the_same(rig, step, seen):
        return _Compared(step, seen, found, past)
    found += _compare_memory(lane, rig, twin, before, (step, seen))
    found += [] if found else _compare_eager_calls(lane, rig, (step, seen))
    return _Compared(step, seen, found, explained=bool(found))


@torch.inference_mode()
def _capture(twin: Rig, problem: Problem, shape: GraphShape, batch: ForwardBatch | None = None) -> StepRecord:
    """Capture a batch in place of the runner's dummy, replay it once, and return the record.

    A region may write its own inputs, in the warm-up too. So they are restored before the replay.
    """
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(view: ForwardBatch, metadata: Any) -> None:
        tensors = (value for _, value in walk({"view": view, "metadata": metadata}))
        given.extend((each, each.clone()) for each in tensors if isinstance(each, torch.Tensor))

    twin.load(problem)
    twin.capture(shape, twin.batch_of(problem) if batch is None else batch, ready=keep)
    for tensor, before in given:
        if not equal(tensor, before):
            write(tensor, before)
    return twin.replay(problem, shape)


def _gives_the_same(rig: Rig, step: StepRecord, other: StepRecord) -> bool:
    """Return whether two runs of one batch have equal live rows, except for rounding."""
    if step.error is not None or step.outputs is None or other.outputs is None:
        return step.error is None and other.error is None
    mine, theirs = (live_rows(each) for each in (step, other))
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (mine, theirs)]
    return shapes[0] == shapes[1] and first_off(rig, mine, theirs) is None


# -- the pact ----------------------------------------------------------------------------------------


def of_breaches(lane: LaneUnderTest, step: StepRecord, breaches: Iterable[Breach]) -> list[Finding]:
    """Return a finding for each breach of the pact; one for a field that counts live rows.

    A field that is cut by live rows has another shape, and often other strides and another address.
    """
    by_path: dict[str, list[Breach]] = {}
    for breach in breaches:
        by_path.setdefault(breach.path, []).append(breach)
    found = []
    for group in by_path.values():
        counted = [breach for breach in group if _counts_real_rows(step, breach)]
        found += [
            _of_breach(lane, step, each, "GP05" if counted else each.broken) for each in counted or group
        ]
    return found


def _of_breach(lane: LaneUnderTest, step: StepRecord, breach: Breach, rule: str) -> Finding:
    hook = "populate" if breach.path.startswith("view") else "init_metadata_replay"
    whose = f" ({breach.owner})" if breach.owner else ""
    expected, actual = sides_of(breach)
    return lane.finding(
        rule,
        hook=hook,
        field=f"{breach.path}{whose}",
        expected=expected,
        actual=actual,
        step=step,
        help=breach.advice,
    )


def _counts_real_rows(step: StepRecord, breach: Breach) -> bool:
    """Return whether a shape or a number counts live rows where the captured one counts padded rows."""
    shape = step.shape
    if shape is None or breach.rule not in ("shape", "value"):
        return False
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (breach.captured, breach.replayed)]
    raw = step.problem.batch_size, len(step.problem.tokens)
    padded = shape.batch_size, shape.num_tokens
    if breach.rule == "value":
        return any(numbers == [[p], [r]] for p, r in zip(padded, raw, strict=True) if p != r)
    return any(
        c - n in (padded[0] - raw[0], padded[1] - raw[1]) and c != n for c, n in zip(*numbers, strict=False)
    )


# -- host numbers ------------------------------------------------------------------------------------


def _compare_numbers(lane: LaneUnderTest, rig: Rig, step: StepRecord, seen: StepRecord) -> Findings:
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
            continue  # of a capture of an idle batch, which no lane makes
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
            " tensor, or declare it bounded() and capture the largest",
        )


def _is_updated(promised: Mapping[str, Promise], path: str) -> bool:
    """Return whether a host number, or the list that has it, is declared as an argument of tasks."""
    found = promised.get(path) or promised.get(path.rpartition("[")[0])
    return found is not None and found.value is ANY


def _keeps_bound(promise: Promise, value: Any) -> bool:
    if not promise.bounded or promise.value is None:
        return False
    return bool(value <= promise.value)


# -- tasks ---------------------------------------------------------------------------------------------


def _compare_tasks(
    lane: LaneUnderTest, rig: Rig, step: StepRecord, seen: StepRecord, fresh: Callable[[], StepRecord]
) -> Findings:
    """Yield a finding about arguments of tasks that are not those of this step.

    They differ from those of ``fresh``, a replay without earlier batches; or the replay is wrong, and a graph
    that was captured with other arguments is right. Those of a capture alone prove nothing: they may be any.
    """
    other, who = fresh(), "of this batch in a new lane"
    if other.error is not None or not (names := _other_tasks(step, other)):
        if _gives_the_same(rig, step, seen) or not _is_right(lane, rig, seen):
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
            " each update; padding rows too",
        )


def _other_tasks(step: StepRecord, other: StepRecord) -> list[str]:
    return [name for name, value in other.tasks.items() if step.tasks.get(name, value) != value]


def _is_right(lane: LaneUnderTest, rig: Rig, seen: StepRecord) -> bool:
    """Return whether the replay of a captured batch has the oracle's results in its live rows."""
    right = lane.answer(rig, seen.problem).rows
    live = live_rows(seen)
    return first_off(rig, live, {name: right[name] for name in live if name in right}) is None


# -- contents ----------------------------------------------------------------------------------------


def _compare_contents(
    lane: LaneUnderTest,
    rig: Rig,
    before: Before,
    step: StepRecord,
    seen: StepRecord,
    fresh: Callable[[], StepRecord],
) -> Iterator[tuple[bool, Finding]]:
    """Yield findings about different contents, each with whether it disappears after a reset of slots.

    Padding rows that are right in ``fresh``, a replay without earlier batches, are stale.
    """
    as_new: StepRecord | None = None
    told = {breach.path for breach in step.breaches if breach.rule != "address"}  # by the pact
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
        mine, theirs = step.leaves[path], seen.leaves[path]
        facts = [(tuple(x.value.shape), x.value.stride(), x.value.dtype) for x in (mine, theirs)]
        if facts[0] != facts[1] and path in told:
            continue
        if facts[0] != facts[1]:
            is_anew = lane.eager_attention and path.startswith("metadata")
            yield (
                False,
                lane.finding(
                    "GP08" if is_anew else "GP07",
                    hook="init_metadata_eager" if is_anew else hook_of(mine),
                    field=mine.name,
                    expected=f"shape, stride and dtype as in a capture of this batch: {facts[1]}",
                    actual=str(facts[0]),
                    step=step,
                    help=_COUNTED_HELP
                    if is_anew
                    else "let the layout depend only on the shape, not on the contents of the batch",
                ),
            )
            continue
        differs = _differs(mine, theirs)
        if bool(differs.any()) and before.shows(rig, step, mine, differs, theirs.value):
            as_new = as_new or rig.step(step.problem, fill=reset_slot)
            leaf = as_new.leaves.get(path)
            is_past = leaf is not None and not bool((differs & _differs(leaf, theirs)).any())
            who, rules = "a capture of this batch", _rules_of(lane, mine, theirs, differs)
            if not is_past and not bool((differs & ~mine.in_tail).any()):
                anew = fresh().leaves.get(path)
                is_stale = anew is not None and anew.value.shape == differs.shape
                if anew is not None and is_stale and not bool((differs & _differs(anew, theirs)).any()):
                    rules = ["GP03"]
            for found in _of_contents(lane, rig, step, mine, theirs, differs, who, rules):
                yield is_past, found


def _differs(mine: Leaf, theirs: Leaf) -> torch.Tensor:
    """Return where two runs of one batch wrote different values."""
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
            help=help_for(lane, rig, mine, rule, texts),
        )


def _rules_of(lane: LaneUnderTest, mine: Leaf, theirs: Leaf, differs: torch.Tensor) -> list[str]:
    """Return the rules that are broken if a tensor has other contents at replay than at capture."""
    if mine.slot is not None and mine.slot.name == "num_token_non_padded":
        return ["GP05"]
    if is_plan(mine):
        return ["GP09"]
    is_offsets = mine.slot is not None and mine.slot.role == "offsets"
    is_of_padding = not bool((differs & ~mine.in_tail).any())
    if is_offsets and _is_strided(theirs.value, lane.config.case.width):
        return ["GP05" if is_of_padding else "GP07"]  # a uniform stride does not depend on the batch
    if _is_moved(mine.value, theirs.value):
        return ["GP07"]
    if is_offsets:
        return ["GP07", "GP02"]
    return ["GP05" if is_of_padding else "GP02"]


def _is_strided(offsets: torch.Tensor, width: int | None) -> bool:
    """Return whether offsets have a stride of ``width`` queries per request."""
    if width is None or offsets.dim() != 1:
        return False
    return torch.equal(offsets.long(), torch.arange(len(offsets)) * width)


def _is_moved(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors hold the same numbers at other indices: another stride, order or width.

    Numbers count as often as they stand there: small ones are found somewhere in most tables.
    """
    here, there = (Counter(t[t != 0].flatten().tolist()) for t in (mine, theirs))
    if bool((mine[mine != 0] == theirs[mine != 0]).all()):
        return False  # some are missing, and none is elsewhere
    return len(here) > 1 and here <= there and 2 * here.total() >= there.total()


_CONTENT_HELP = {
    "GP02": "write the same values to `{name}` in {body} as for a capture, from the view, in place: use one"
    " function for both",
    "GP03": "reset the padding rows of `{name}` in {body} in every step, also where they are copied from"
    " memory that is filled once",
    "GP05": "count padding rows where the graph has them: use the counts of the shape, not of the batch",
    "GP07": "use the same stride, order and element width at replay as at capture; a uniform stride of"
    " queries does not depend on accepted lengths",
    "GP09": "plan at replay as at capture, with the arguments and lengths of the recorded kernel",
}
_CONSTANT_HELP = (
    "only what is the same for every batch is a constant: give the slot of `{name}` another role and write it"
    " in {body}, or let no capture write it and declare its `contents`"
)


def _compare_ways(lane: LaneUnderTest, by_graph: StepRecord, by_hook: StepRecord) -> Findings:
    """Compare the tensors that graph and hook write, if the results of the batch differ."""
    if by_graph.error is not None or by_hook.error is not None:
        return
    if _gives_the_same(lane.rig(), by_graph, by_hook):
        return
    by_graph, by_hook = (  # reset slots, since the lanes have replayed different batches
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


# -- memory outside the registry ---------------------------------------------------------------------


def _compare_memory(
    lane: LaneUnderTest, rig: Rig, twin: Rig, before: Before, pair: tuple[StepRecord, StepRecord]
) -> Findings:
    """Find memory, in slots or outside them, with which the replay is right if a capture has written it."""
    step, seen = pair
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    pairs = [*zip(rig.external(shape), twin.external(shape), strict=False)]
    if any((mine.shape, mine.dtype) != (theirs.shape, theirs.dtype) for mine, theirs in pairs):
        return  # other recorded work, a finding of the traces
    differing = [at for at, (mine, theirs) in enumerate(pairs) if not equal(mine, theirs)]
    alone = [[at] for at in differing]
    for chosen in [*alone, differing] if len(alone) > 1 else alone:
        renewed = _with_memory(rig, step, before, [pairs[at] for at in chosen])
        if not _gives_the_same(rig, renewed, seen):
            continue
        mine = pairs[chosen[0]][0]
        is_held = rig.holds(mine)
        is_between = rig.num_segments(shape) > 1
        more = f", and {len(chosen) - 1} more" if len(chosen) > 1 else ""
        other = (
            ", and an eager call made another tensor"
            if is_between
            else ", and the backend holds another tensor now"
        )
        yield lane.finding(
            "GP02" if is_held else "GP01",
            hook=_hook_between(lane) if is_between else "init_metadata_replay",
            field=rig.name_of(mine, shape) + more,
            expected="the memory that the graph reads is written for this batch",
            actual="other contents than a capture of this batch writes" + ("" if is_held else other),
            step=step,
            help=_HANDED_ON_HELP if is_between else _REBOUND_HELP,
        )
        return


def _with_memory(
    rig: Rig, step: StepRecord, before: Before, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> StepRecord:
    """Repeat a step with other contents of some tensors: each has those of the second of its pair."""
    kept = [mine.clone() for mine, _ in pairs]

    def renew(_: ForwardBatch, __: Any) -> None:
        for mine, theirs in pairs:
            write(mine, theirs)

    renewed = rig.step(step.problem, fill=before.put_back, ready=renew)
    for (mine, _), value in zip(pairs, kept, strict=True):
        write(mine, value)
    return renewed


_REBOUND_HELP = (
    "declare it in declare_slots() and write into it in place in every step: a graph reads the memory that it"
    " recorded, also after an attribute is rebound"
)
_HANDED_ON_HELP = (
    "let the next segment read what `eager_call` returns, or memory that the call is given and writes in"
    " every replay: a segment reads the tensor of the capture, whatever a list or an attribute holds now"
)


def _compare_eager_calls(lane: LaneUnderTest, rig: Rig, pair: tuple[StepRecord, StepRecord]) -> Findings:
    """Yield a finding if a replay in segments is wrong, and a capture of its batch is right.

    Inputs, recorded work and memory are the same, so the eager calls between segments differ: by what they
    hold of the capture, or of the step before if the same batch is right when it is replayed again.
    """
    step, seen = pair
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    if rig.num_segments(shape) == 1:
        return
    if not _is_right(lane, rig, seen):
        return
    is_past = _gives_the_same(rig, rig.step(step.problem), seen)
    wrong = "other results" if step.error is None else message_of(step.error)
    yield lane.finding(
        "GP02" if is_past else "GP08",
        hook=_hook_between(lane),
        field="the eager calls between segments",
        expected="results that depend on this batch alone: a graph captured with it is right",
        actual=f"{wrong}; "
        + (
            "a second replay of the batch is right"
            if is_past
            else "the graph was captured with another batch"
        ),
        step=step,
        help=_COUNTED_HELP,
    )


def _hook_between(lane: LaneUnderTest) -> str:
    """Return the method whose eager calls run between the segments of a graph."""
    return "compose" if lane.kind == "runner" else "init_metadata_eager"


_COUNTED_HELP = (
    "an eager call may keep nothing of a step, nor of the capture: take counts and metadata of this replay"
    " from `step.attended`, `step.live` and `step.metadata` inside the call, or let `step.attend` do it"
)


# -- recorded work -----------------------------------------------------------------------------------


def _compare_with_warm_up(lane: LaneUnderTest, way: Way, step: StepRecord) -> Findings:
    """Compare the recorded run of a batch that replays wrong with the warm-up before it."""
    if step.shape is None:
        return
    runs = lane.build(way, capture=False).runs_of_capture(step.problem, step.shape)
    if not runs:
        return
    found = compare_traces(runs[-1], runs[0])
    if found is not None and found["rule"] == "GP10":
        yield lane.finding(
            "GP10",
            hook="init_metadata_capture",
            field=found["field"],
            expected=f"the recorded run does the same work as the warm-up before it: {found['there']}",
            actual=found["here"],
            step=step,
            help=TRACE_HELP["GP10"],
        )


def compare_traces(recorded: Sequence[TracedCall], other: Sequence[TracedCall]) -> Mapping[str, str] | None:
    """Return the first difference of two recordings, its rule and both sides in words, or None."""
    found = first_difference(recorded, other)
    if found is None:
        return None
    mine, theirs = found.mine, found.theirs
    if found.argument is not None and mine is not None and theirs is not None:
        a, b = mine.arguments[found.argument], theirs.arguments[found.argument]
        return {
            "rule": "GP07" if isinstance(a, tuple) or isinstance(b, tuple) else "GP08",
            "field": f"argument {found.argument} of {mine.op} at {mine.line}",
            "here": str(a),
            "there": str(b),
        }
    if mine is not None and theirs is not None:
        return {
            "rule": "GP10",
            "field": f"operation {found.at}",
            "here": f"{mine.op} at {mine.line}",
            "there": f"{theirs.op} at {theirs.line}",
        }
    more = mine or theirs
    return {
        "rule": "GP10",
        "field": "" if more is None else f"{more.op} at {more.line}",
        "here": "not recorded" if mine is None else "recorded",
        "there": "not recorded" if theirs is None else "recorded",
    }


def _compare_traces(
    lane: LaneUnderTest,
    way: Way,
    step: StepRecord,
    recorded: Sequence[TracedCall],
    other: Sequence[TracedCall],
) -> Findings:
    found = compare_traces(recorded, other)
    if found is None:
        return
    rules = [found["rule"]]
    if rules != ["GP08"] and _lengths_decide(lane, way, step, recorded, other):
        rules = ["GP08"] if rules == ["GP07"] else ["GP08", *rules]
    for rule in rules:
        yield lane.finding(
            rule,
            hook="init_metadata_capture",
            field=found["field"],
            expected=f"as in a capture of this batch: {found['there']}",
            actual=f"the graph was recorded with {found['here']}",
            step=step,
            help=TRACE_HELP[rule],
        )


def _lengths_decide(
    lane: LaneUnderTest,
    way: Way,
    step: StepRecord,
    recorded: Sequence[TracedCall],
    other: Sequence[TracedCall],
) -> bool:
    """Return whether two recordings differ because of the lengths on the host.

    Then the batch with the dummy's lengths records the same as the dummy, or the dummy with the batch's
    lengths the same as the batch.
    """
    twin = lane.build(way, capture=False)
    assert step.shape is not None  # noqa: S101  it was replayed
    batch, dummy = twin.batch_of(step.problem), twin.dummy(step.shape)
    real = batch.batch_size
    lens = torch.cat([batch.seq_lens_cpu, dummy.seq_lens_cpu[real:]])
    for swapped, wanted in (
        (replace(batch, seq_lens_cpu=dummy.seq_lens_cpu[:real]), recorded),
        (replace(dummy, seq_lens_cpu=lens), other),
    ):
        try:
            _capture(twin, step.problem, step.shape, swapped)
        except (Exception, SystemExit):  # noqa: BLE001, S112  the lengths contradict each other
            continue
        if compare_traces(wanted, twin.trace(step.shape)) is None:
            return True
    return False


TRACE_HELP = {
    "GP07": "slice tensors for recorded operations by the counts of the shape",
    "GP08": "pass a bound that holds for every batch of the shape, or a tensor; do not branch on the"
    " lengths of this batch, or make the branch part of the shape (`variant`)",
    "GP10": "record the same work for every batch, independent of what ran before: no cache that is filled"
    " on first use, no branch on contents, no flag of an earlier phase",
}
