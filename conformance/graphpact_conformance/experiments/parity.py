"""The inputs of a replay against a capture of the same batch: GP01, GP02, GP05, GP07 to GP11.

Capture is a replay of a dummy batch, plus binding. So a capture of a live batch has the inputs that its
replay must have: the same types, fields, host numbers, shapes, and contents. It also records the same
operations as the graph of the dummy, with the same host numbers. If the replay has other results, the memory
that both graphs read is compared too, and the recorded run with the warm-up before it.

Does not: check outputs of attention (see `graphpact_conformance.experiments.values`), or find stale values of
earlier batches (see `graphpact_conformance.experiments.refresh`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import Breach
from graphpact.graphs import Graph
from graphpact.memory_map import MemoryMap
from graphpact.pact import Promise, is_readable
from graphpact.shapes import GraphShape
from graphpact.tensors import equal, same, storage_id
from graphpact_conformance.experiments.base import (
    Findings,
    first_off,
    sides_of,
    spell,
    values_at,
)
from graphpact_conformance.experiments.refresh import Before, help_for, hook_of, is_plan
from graphpact_conformance.problems import Drawn, Problem, assorted
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import Leaf, Rig, StepRecord, copies, live_rows
from graphpact_conformance.subject import LaneUnderTest, Way, reset_slot
from graphpact_tape.poison import poison_of
from graphpact_tape.tape import Tape
from graphpact_tape.trace import TracedCall, first_difference

__tracebackhide__ = True  # traced calls then name the line of the plugin


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
            if seen is not None and not is_wrong and not _gives_the_same(rig, step, seen):
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
    """

    step: StepRecord
    seen: StepRecord | None
    found: list[Finding]
    past: Sequence[Finding] = ()


def _compare(lane: LaneUnderTest, rig: Rig, way: Way, problem: Problem) -> _Compared:
    before = Before(rig)
    step = rig.step(problem)
    found = [_of_breach(lane, step, breach) for breach in step.breaches]
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
    for is_past, each in _compare_contents(lane, rig, before, step, seen):
        (past if is_past else found).append(each)
    found += _compare_traces(lane, way, step, trace_of(rig, shape), trace_of(twin, shape))
    if not (found or past or _gives_the_same(rig, step, seen)):
        found += _compare_memory(lane, rig, twin, before, (step, seen))
        found += [] if found else _compare_eager_calls(lane, rig, (step, seen))
    return _Compared(step, seen, found, past)


@torch.inference_mode()
def _capture(twin: Rig, problem: Problem, shape: GraphShape, batch: ForwardBatch | None = None) -> StepRecord:
    """Capture a batch in place of the runner's dummy, replay it once, and return the record."""
    twin.load(problem)
    twin.lane.capture(shape, twin.batch_of(problem) if batch is None else batch)
    graph = twin.lane.captured[shape].graph
    graph.replay()
    step = StepRecord(problem, stage="done", shape=shape)
    step.leaves, step.numbers = twin.prepared(problem)
    step.outputs, step.axes = copies(graph.outputs), graph.outputs.axes
    return step


def _gives_the_same(rig: Rig, step: StepRecord, other: StepRecord) -> bool:
    """Return whether two runs of one batch have equal live rows, except for rounding."""
    if step.error is not None or step.outputs is None or other.outputs is None:
        return step.error is None and other.error is None
    mine, theirs = (live_rows(each) for each in (step, other))
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (mine, theirs)]
    return shapes[0] == shapes[1] and first_off(rig, mine, theirs) is None


# -- the pact ----------------------------------------------------------------------------------------


def _of_breach(lane: LaneUnderTest, step: StepRecord, breach: Breach) -> Finding:
    rule = breach.broken
    if breach.rule == "shape" and _counts_real_rows(step, breach):
        rule = "GP05"
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
    """Return whether a shape has live rows where the captured shape has padded rows."""
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (breach.captured, breach.replayed)]
    raw = len(step.problem.requests), len(step.problem.tokens)
    padded = shape.batch_size, shape.num_tokens
    return any(
        c - n in (padded[0] - raw[0], padded[1] - raw[1]) and c != n for c, n in zip(*numbers, strict=False)
    )


# -- host numbers ------------------------------------------------------------------------------------


def _compare_numbers(lane: LaneUnderTest, rig: Rig, step: StepRecord, seen: StepRecord) -> Findings:
    if step.shape is None or step.shape not in rig.lane.captured:
        return
    promised = {p.path: p for p in rig.lane.captured[step.shape].pact.promises}
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
        promise = promised.get(path)
        if promise is not None and _keeps_bound(promise, then):
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


def _keeps_bound(promise: Promise, value: Any) -> bool:
    if not promise.bounded or promise.value is None:
        return False
    return bool(value <= promise.value)


# -- contents ----------------------------------------------------------------------------------------


def _compare_contents(
    lane: LaneUnderTest, rig: Rig, before: Before, step: StepRecord, seen: StepRecord
) -> Iterator[tuple[bool, Finding]]:
    """Yield findings about different contents, each with whether it disappears after a reset of slots."""
    as_new: StepRecord | None = None
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
        if facts[0] != facts[1]:
            is_anew = lane.runner.eager_attention and path.startswith("metadata")
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
            for found in _of_contents(lane, rig, step, mine, theirs, differs, "a capture of this batch"):
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
) -> Findings:
    is_constant = mine.slot is not None and mine.slot.role == "constant"
    texts = {**_CONTENT_HELP, "GP02": _CONSTANT_HELP} if is_constant else _CONTENT_HELP
    label = f" ({mine.slot.label})" if mine.slot is not None else ""
    for rule in _rules_of(lane, mine, theirs, differs):
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
    if is_offsets and _is_strided(theirs.value, lane.config.case.width):
        return ["GP07"]  # a uniform stride does not depend on the batch
    if _is_moved(mine.value, theirs.value):
        return ["GP07"]
    if is_offsets:
        return ["GP07", "GP02"]
    return ["GP02"] if bool((differs & ~mine.in_tail).any()) else ["GP05"]


def _is_strided(offsets: torch.Tensor, width: int | None) -> bool:
    """Return whether offsets have a stride of ``width`` queries per request."""
    if width is None or offsets.dim() != 1:
        return False
    return torch.equal(offsets.long(), torch.arange(len(offsets)) * width)


def _is_moved(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors hold the same numbers at other indices: another stride, order or width."""
    a, b = (set(t[t != 0].flatten().tolist()) for t in (mine, theirs))
    return len(a) > 1 and a <= b and 2 * len(a) >= len(b)


_CONTENT_HELP = {
    "GP02": "write the same values to `{name}` in {body} as for a capture, from the view, in place: use one"
    " function for both",
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
    if by_hook.error is not None or _gives_the_same(lane.rig(), by_graph, by_hook):
        return
    by_graph, by_hook = (  # reset slots, since the lanes have replayed different batches
        lane.rig(way).step(by_graph.problem, fill=reset_slot) for way in lane.ways
    )
    rig = lane.rig("hook")
    who = f"{lane.body_of(rig)}, where the graph records no metadata work"
    for path, mine in by_graph.leaves.items():
        theirs = by_hook.leaves.get(path)
        if theirs is None or not mine.is_due or mine.value.shape != theirs.value.shape:
            continue
        differs = _differs(mine, theirs)
        if bool(differs.any()):
            yield from _of_contents(lane, rig, by_graph, mine, theirs, differs, who)


# -- memory outside the registry ---------------------------------------------------------------------


def _compare_memory(
    lane: LaneUnderTest, rig: Rig, twin: Rig, before: Before, pair: tuple[StepRecord, StepRecord]
) -> Findings:
    """Find memory outside the registry that makes the replay right with the contents of a capture."""
    step, seen = pair
    shape = step.shape
    assert shape is not None  # noqa: S101  it was replayed
    pairs = [*zip(_outside(rig, shape), _outside(twin, shape), strict=False)]
    if any((mine.shape, mine.dtype) != (theirs.shape, theirs.dtype) for mine, theirs in pairs):
        return  # other recorded work, a finding of the traces
    differing = [at for at, (mine, theirs) in enumerate(pairs) if not equal(mine, theirs)]
    alone = [[at] for at in differing]
    for chosen in [*alone, differing] if len(alone) > 1 else alone:
        renewed = _with_memory(rig, step, before, [pairs[at] for at in chosen])
        if not _gives_the_same(rig, renewed, seen):
            continue
        mine = pairs[chosen[0]][0]
        is_held = storage_id(mine) in _held_by(rig.backend)
        is_between = rig.lane.captured[shape].graph.num_segments > 1
        more = f", and {len(chosen) - 1} more" if len(chosen) > 1 else ""
        other = (
            ", and an eager call made another tensor"
            if is_between
            else ", and the backend holds another tensor now"
        )
        yield lane.finding(
            "GP02" if is_held else "GP01",
            hook=None if is_between else "init_metadata_replay",
            field=f"a tensor of {mine.dtype} {tuple(mine.shape)}, number {chosen[0]} outside the registry"
            + more,
            expected="the memory that the graph reads is written for this batch",
            actual="not written since capture" + ("" if is_held else other),
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
            mine.copy_(theirs)

    renewed = rig.step(step.problem, fill=before.put_back, ready=renew)
    for (mine, _), value in zip(pairs, kept, strict=True):
        mine.copy_(value)
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
    if rig.lane.captured[shape].graph.num_segments == 1:
        return
    right = lane.answer(rig, step.problem).rows
    live = live_rows(seen)
    if first_off(rig, live, {name: right[name] for name in live if name in right}) is not None:
        return
    is_past = _gives_the_same(rig, rig.step(step.problem), seen)
    wrong = "other results" if step.error is None else f"{type(step.error).__name__}: {step.error}"
    yield lane.finding(
        "GP02" if is_past else "GP08",
        field="the eager calls between segments",
        expected="results that depend on this batch alone: a graph captured with it is right",
        actual=f"{wrong.splitlines()[0]}; "
        + (
            "a second replay of the batch is right"
            if is_past
            else "the graph was captured with another batch"
        ),
        step=step,
        help=_COUNTED_HELP,
    )


_COUNTED_HELP = (
    "an eager call may keep nothing of a step, nor of the capture: take counts and metadata of this replay"
    " from `Step.rows`, `Step.live` and `Step.metadata` inside the call, or let `Step.attend` do it"
)


def _outside(rig: Rig, shape: GraphShape) -> list[torch.Tensor]:
    """Return the tensors that a graph reads outside slots, KV cache and page table, in the order of use."""
    memory = MemoryMap(rig.registry, rig.backend)
    graph = rig.lane.captured[shape].graph
    return [t for t in graph.external_tensors() or () if not memory.is_declared(t)]


def _held_by(backend: object) -> set[int]:
    """Return the identities of the storages of all tensors in a backend's attributes, at any depth."""
    found, todo, seen = set(), [vars(backend)], set()
    while todo:
        value: Any = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.add(storage_id(value))
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += value
        elif type(value).__module__.partition(".")[0] == type(backend).__module__.partition(".")[0]:
            todo += vars(value).values() if hasattr(value, "__dict__") else ()
    return found


# -- recorded work -----------------------------------------------------------------------------------


def trace_of(rig: Rig, shape: GraphShape) -> list[TracedCall]:
    """Return the recorded calls of the graph of a shape; empty where its driver has no trace."""
    graph = rig.lane.captured[shape].graph
    return (graph.trace or []) if isinstance(graph, Tape) else []


class _Tracer(TorchDispatchMode):
    """A dispatch mode that keeps every dispatched operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.calls: list[TracedCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is not torch.ops.aten.detach.default:  # torch dispatches more of them under a recorder
            self.calls.append(TracedCall.of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _compare_with_warm_up(lane: LaneUnderTest, way: Way, step: StepRecord) -> Findings:
    """Compare the recorded run of a batch that replays wrong with the warm-up before it."""
    twin = lane.build(way, capture=False)
    driver, runs = twin.lane.driver, []
    if driver is None or step.shape is None:
        return
    capture: Callable[..., Graph] = driver.capture

    def traced(fn: Callable[[], Any], **options: Any) -> Graph:
        def region() -> Any:
            with _Tracer() as tracer:
                runs.append(tracer.calls)
                return fn()

        return capture(region, **options)

    driver.capture = traced  # type: ignore[method-assign]
    _capture(twin, step.problem, step.shape)
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
    batch, dummy = twin.batch_of(step.problem), twin.runner.dummy(step.shape)
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
        if compare_traces(wanted, trace_of(twin, step.shape)) is None:
            return True
    return False


TRACE_HELP = {
    "GP07": "slice tensors for recorded operations by the counts of the shape",
    "GP08": "pass a bound that holds for every batch of the shape, or a tensor; do not branch on the"
    " lengths of this batch, or make the branch part of the shape (`variant`)",
    "GP10": "record the same work for every batch, independent of what ran before: no cache that is filled"
    " on first use, no branch on contents, no flag of an earlier phase",
}
