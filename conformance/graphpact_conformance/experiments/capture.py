"""Captures: their success, their side effects, and the recorded work.

GP10, GP11, GP12, GP13, GP18, GP19, GP20, and every other rule that an error of a strict capture names.

Does not: replay batches, except to compare.
"""

from dataclasses import replace

import torch

from graphpact.errors import SlotError
from graphpact.tensors import equal, same
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.chosen_batches import corner, of_size
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.compared_work import TRACE_HELP, compare_traces
from graphpact_conformance.experiments.comparison import spell, values_at
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest, Way
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.lane.snapshots import reset_slot
from graphpact_conformance.records.raised import CannotCaptureError, causes, rule_of
from graphpact_conformance.results import Finding

# -- success -----------------------------------------------------------------------------------------


def captures(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture every shape, fast and strict, with metadata made by the graph and by the hook.

    Lanes whose cache has high slot numbers are captured only fast: a strict driver would copy the cache.
    """
    found: list[Finding] = []
    ways: tuple[Way, ...] = ("graph",)
    try:
        lane.rig()
        ways = lane.ways
    except CannotCaptureError as stopped:
        found += _of_failure(lane, stopped.error, steps.exact)
    can_capture = not found
    lane.clear_caches()  # graphs of other subjects may hold them
    for way in () if lane.config.high else ways:
        try:
            lane.rig(way, strict=True)
        except CannotCaptureError as stopped:
            error = stopped.error
            if can_capture:
                found.append(_of_strict_failure(lane, error))
            else:
                found += _of_failure(lane, error, steps.exact)
    yield from {f.model_dump_json(): f for f in found}.values()


def _of_strict_failure(lane: LaneUnderTest, error: BaseException) -> Finding:
    """Return a finding about a lane that is captured on a fast tape, but fails over poison."""
    return lane.of_error(
        error,
        expected="every shape can be captured with poison in all memory that hooks have to write",
        hook="init_metadata_capture",
        help=_UNWRITTEN,
    )


_UNWRITTEN = "write every row that the kernels read, also at capture: see GP02 and GP03 in this lane"


def _of_failure(lane: LaneUnderTest, error: BaseException, live: Problem) -> list[Finding]:
    expected = "every shape of the runner can be captured"
    rule = rule_of(error) or _rule_of_dummy(lane, live) or _rule_of_size(lane)
    case = lane.config.case
    length = lane.backend.capabilities.padded_seq_len(case.lane_mode, case.tokens_per_request or 1)
    hook, help_ = "init_metadata_capture", _FAILED.get(rule or "", "").format(length=length) or None
    found = [lane.of_error(error, expected=expected, rule=rule, hook=hook, help=help_)]
    if rule is None and not any(isinstance(cause, SlotError) for cause in causes(error)):
        found.append(found[0].model_copy(update={"rule": "GP12", "help": _SUPPORT}))
    return found


_FAILED = {
    "GP04": "all rows of a dummy batch are padding, with request row 0, KV slot 0 and a length of {length},"
    " which the backend declares for padding rows: declare a length that the kernels accept, and let them"
    " read no other rows or pages",
    "GP11": "a live batch can be captured, but the runner's dummy cannot: make dummies like live batches",
    "GP13": "size buffers by Limits, and by the counts of the shape",
}
_SUPPORT = "declare in capabilities.graph_support only the support that the kernels have"


def _rule_of_dummy(lane: LaneUnderTest, live: Problem) -> str | None:
    """Return the rule that the dummy breaks if a live batch can be captured in its place, otherwise None.

    For a runner it is GP11, because the dummy is the runner's. For a backend it is GP04.
    """
    config = lane.config
    if not live.requests:  # an idle lane is captured for decode batches
        lane = lane.like(replace(config, case=Case(config.case.lane_mode)))
        live = of_size(lane.config, lane.config.most_requests)
    try:
        with torch.inference_mode():
            rig = lane.build(capture=False)
            rig.load(live)
            rig.capture(rig.config.shapes[-1], rig.batch_of(live))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return None
    return "GP11" if lane.kind == "runner" else "GP04"


def _rule_of_size(lane: LaneUnderTest) -> str | None:
    """Return GP13 if there are several shapes and the smallest can be captured, otherwise None."""
    try:
        with torch.inference_mode():
            rig = lane.build(capture=False)
            shapes = rig.planned
            if len(shapes) < 2:
                return None
            rig.capture(shapes[0])
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return None
    return "GP13"


# -- side effects ------------------------------------------------------------------------------------


def capture_side_effects(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture while the index buffers hold live requests: the memory of these requests must not change."""
    problem = steps.exact
    rig = lane.rig()
    rig.step(problem)
    rig.load(problem)
    before = rig.cache.contents()
    table = rig.table.clone()
    with torch.inference_mode():
        rig.capture()
        once = rig.held()
        rig.capture()
        twice = rig.held()
    left, caches = rig.table.clone(), rig.cache.contents()
    first = rig.config.page_size
    for name, cache in caches.items():
        differs = ~same(cache[first:], before[name][first:]).flatten(1).all(dim=1)
        if bool(differs.any()):
            at = int(differs.nonzero()[0]) + first
            if _is_written_by_replays(rig, steps.padded, name, at):
                continue  # padding tokens write it, at capture and at replay: `answers_replayed` reports GP04
            yield lane.finding(
                "GP19",
                hook="init_metadata_capture",
                field=f"{name} in KV slot {rig.cache.slot_at(at)}",
                expected="a capture writes only scratch",
                actual="the capture overwrote it",
                problem=problem,
                help="capture a dummy batch on request row 0 and KV slot 0, and write all its index buffers"
                " before the region runs",
            )
    if not torch.equal(table, left):
        yield lane.finding(
            "GP19",
            hook="init_metadata_capture",
            field="req_to_token" + spell((table != left).cpu()),
            expected="the page table is read-only",
            actual=values_at(left, table != left),
            problem=problem,
            help="do not write it: the scheduler owns the page table. If you need a row or a slot, use"
            " scratch: row 0 and slot 0",
        )
    for name, state in once.items():
        if name not in twice or not equal(state, twice[name]):
            yield lane.finding(
                "GP19",
                hook="init_metadata_capture",
                field=name,
                expected="the same contents after one capture and after two",
                actual="each capture changes the contents",
                problem=problem,
                help="protect the state of live requests from warm-up and capture: save and restore it"
                " around the capture, or use scratch rows of it for the dummy",
            )


def _is_written_by_replays(rig: Rig, problem: Problem, name: str, at: int) -> bool:
    """Return whether a replay with padding rows writes a slot of a cache that none of its tokens has."""
    own = {slot for request in problem.requests for token in request.tokens for slot in token.slots}
    rig.load(problem)
    before = rig.cache.contents()[name][at]
    step = rig.step(problem, may_decline=True)
    if step.error is not None or not step.replayed or rig.cache.slot_at(at) in own:
        return False
    return not equal(before, step.caches[name][at])


# -- recorded work -----------------------------------------------------------------------------------


def cold_and_warm(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture cold, after eager steps, and after replays: the recorded work must be the same."""
    cold = lane.rig()
    warm = lane.build(capture=False)
    for problem in (*steps, corner(lane.config.unbounded)):
        warm.step(problem, eagerly=True)
    for when in ("after eager steps", "after replays"):
        try:
            with torch.inference_mode():
                warm.capture()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            yield lane.of_error(
                error,
                expected=f"shapes can be captured {when}",
                rule="GP10",
                hook="init_metadata_capture",
            )
            return
        for shape in cold.captured:
            found = compare_traces(warm.trace(shape), cold.trace(shape))
            if found is not None:
                yield lane.finding(
                    "GP10",
                    hook="init_metadata_capture",
                    field=found["field"],
                    expected=f"the same as in a cold capture of {shape}: {found['there']}",
                    actual=f"{when}: {found['here']}",
                    problem=steps.exact,
                    help=TRACE_HELP["GP10"],
                )
                return
        for problem in steps:
            step, right = (each.step(problem, fill=reset_slot) for each in (warm, cold))
            if step.error is not None and right.error is None:
                yield lane.of_error(
                    step.error,
                    expected=f"a graph captured {when} replays like one captured cold",
                    rule="GP10",
                    step=step,
                )
                return
