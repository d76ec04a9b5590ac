"""Captures: whether they succeed, their side effects, and the recorded work.

GP10, GP11, GP12, GP13, GP18, GP19, GP20, and every other rule that an error of a strict capture names.

Does not: replay batches, except to compare.
"""

from dataclasses import replace

import torch

from graphpact.attention import kv_tensors
from graphpact.buffers import PaddingPolicy
from graphpact.errors import SlotError
from graphpact.tensors import same
from graphpact_conformance.experiments.base import (
    Findings,
    spell,
    values_at,
)
from graphpact_conformance.experiments.parity import TRACE_HELP, compare_traces, trace_of
from graphpact_conformance.problems import Case, Drawn, Problem, of_size
from graphpact_conformance.results import Finding
from graphpact_conformance.rig import Rig
from graphpact_conformance.subject import (
    CannotCaptureError,
    LaneUnderTest,
    Way,
    caches_of,
    causes,
    planned_shapes,
    reset_slot,
    rule_of,
)

# -- whether -----------------------------------------------------------------------------------------


def captures(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture every shape, fast and strict, with metadata made by the graph and by the hook."""
    found: list[Finding] = []
    ways: tuple[Way, ...] = ("graph",)
    try:
        lane.rig()
        ways = lane.ways
    except CannotCaptureError as stopped:
        found += _of_failure(lane, stopped.error, steps.exact)
    can_capture = not found
    for clear in caches_of(lane):  # other lanes' graphs may hold them
        clear()
    for way in ways:
        try:
            lane.guarded(way)
        except CannotCaptureError as stopped:
            error = stopped.error
            if can_capture:
                found.append(_of_strict_failure(lane, error))
            else:
                found += _of_failure(lane, error, steps.exact)
    yield from {f.model_dump_json(): f for f in found}.values()


def _of_strict_failure(lane: LaneUnderTest, error: BaseException) -> Finding:
    """Return a finding about a lane that is captured on a fast tape and not over poison."""
    return lane.of_error(
        error,
        expected="every shape is captured with poison in all memory that hooks have to write",
        hook="init_metadata_capture",
        help=_UNWRITTEN,
    )


_UNWRITTEN = "write every row that the kernels read, also at capture: see GP02 and GP03 in this lane"


def _of_failure(lane: LaneUnderTest, error: BaseException, live: Problem) -> list[Finding]:
    expected = "every shape of the runner is captured"
    rule = rule_of(error) or _rule_of_dummy(lane, live) or _rule_of_size(lane)
    hook, help_ = "init_metadata_capture", _FAILED.get(rule or "")
    found = [lane.of_error(error, expected=expected, rule=rule, hook=hook, help=help_)]
    if rule is None and not any(isinstance(cause, SlotError) for cause in causes(error)):
        found.append(found[0].model_copy(update={"rule": "GP12", "help": _SUPPORT}))
    return found


_FAILED = {
    "GP04": "a dummy batch is padding in every row, request row 0 and KV slot 0: the kernels must accept"
    " padding rows, and read no other row and no other page for them",
    "GP11": "a live batch can be captured, and the runner's dummy cannot: make dummies like live batches",
    "GP13": "size buffers by Limits, and by the shape's own counts",
}
_SUPPORT = "declare in capabilities.graph_support only the support that the kernels have"


def _rule_of_dummy(lane: LaneUnderTest, live: Problem) -> str | None:
    """Return the rule of dummies or of padding if a live batch can be captured; None elsewhere."""
    config = lane.config
    if not live.requests:  # an idle lane is captured for decode batches
        lane = lane.like(replace(config, case=Case(config.case.lane_mode)))
        live = of_size(lane.config, lane.config.most_requests)
    try:
        with torch.inference_mode():
            rig = lane.build(capture=False)
            rig.load(live)
            rig.lane.capture(rig.config.shapes[-1], rig.batch_of(live))
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return None
    return "GP11" if lane.kind == "runner" else "GP04"


def _rule_of_size(lane: LaneUnderTest) -> str | None:
    """Return GP13 if smaller shapes can be captured and the largest cannot, None elsewhere."""
    try:
        with torch.inference_mode():
            rig = lane.build(capture=False)
            shapes = planned_shapes(rig.runner)
            if len(shapes) < 2:
                return None
            rig.lane.capture(shapes[0])
    except (Exception, SystemExit):  # noqa: BLE001  the plugin's code may raise anything
        return None
    return "GP13"


_SEED = 0x6772_6170
"""A seed that no plugin uses."""

# -- side effects ------------------------------------------------------------------------------------


def capture_side_effects(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture again with live requests in the index buffers: their memory must not change."""
    problem = steps.exact
    rig = lane.rig()
    rig.step(problem)
    rig.load(problem)
    before = {n: t.clone() for n, t in kv_tensors(rig.kv).items()}
    table, random = rig.table.clone(), torch.get_rng_state()
    torch.manual_seed(_SEED)
    with torch.inference_mode():
        rig.capture()
        once = _state_of(rig)
        rig.capture()
        twice = _state_of(rig)
    seed = torch.initial_seed()
    torch.set_rng_state(random)
    if seed != _SEED:
        yield lane.finding(
            "GP19",
            hook="init_metadata_capture",
            field="the seed of the default generator",
            expected="a capture does not seed random numbers",
            actual="the capture seeded it",
            problem=problem,
            help="draw from the default generator, and do not seed it",
        )
    first = rig.config.page_size
    for name, cache in kv_tensors(rig.kv).items():
        differs = ~same(cache[first:], before[name][first:]).flatten(1).all(dim=1)
        if bool(differs.any()):
            yield lane.finding(
                "GP19",
                hook="init_metadata_capture",
                field=f"{name} in KV slot {int(differs.nonzero()[0]) + first}",
                expected="a capture writes only scratch",
                actual="the capture overwrote it",
                problem=problem,
                help="capture a dummy batch on request row 0 and KV slot 0, and write all index buffers for"
                " it before the region runs",
            )
    if not torch.equal(table, rig.table):
        yield lane.finding(
            "GP19",
            field="req_to_token" + spell((table != rig.table).cpu()),
            expected="the page table is read-only",
            actual=values_at(rig.table, table != rig.table),
            problem=problem,
            help="do not write it: the scheduler owns the page table; for rows and slots of your own use"
            " scratch, row 0 and slot 0",
        )
    for name, state in once.items():
        if name not in twice or not bool(same(state, twice[name]).all()):
            yield lane.finding(
                "GP19",
                hook="init_metadata_capture",
                field=name,
                expected="the same contents after one capture and after two",
                actual="every capture changes it",
                problem=problem,
                help="protect the state of live requests from warm-up and capture: save and restore it"
                " around the capture, or use scratch rows of it for the dummy",
            )


def _state_of(rig: Rig) -> dict[str, torch.Tensor]:
    """Return copies of state that outlives a step: tensors of the backend, and slots that are filled once.

    A tensor with a row per request row or per KV slot is returned without its scratch rows.
    """
    scratch = {
        rig.config.num_rows: 1,
        rig.config.num_pages * rig.config.page_size: rig.config.page_size,
    }

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        first = scratch.get(tensor.shape[0], 0) if tensor.dim() else None
        return (tensor if first is None else tensor[first:]).clone()

    slots = {
        slot.label: owned(slot.buffer)
        for slot in rig.registry
        if slot.buffer is not None and slot.padding_policy is PaddingPolicy.FILL_ONCE
    }
    held = {
        f"{type(rig.backend).__name__}.{name}": owned(value)
        for name, value in vars(rig.backend).items()
        if isinstance(value, torch.Tensor) and rig.registry.slot_of(value) is None
    }
    return slots | held


# -- recorded work -----------------------------------------------------------------------------------


def cold_and_warm(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Capture cold, after eager steps, and after replays: the recorded work must be the same."""
    cold = lane.rig()
    warm = lane.build(capture=False)
    for problem in steps:
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
        for shape in cold.lane.captured:
            found = compare_traces(trace_of(warm, shape), trace_of(cold, shape))
            if found is not None:
                yield lane.finding(
                    "GP10",
                    hook="init_metadata_capture",
                    field=found["field"],
                    expected=f"as in a cold capture of {shape}: {found['there']}",
                    actual=f"{when}: {found['here']}",
                    problem=steps.exact,
                    help=TRACE_HELP["GP10"],
                )
                return
        for problem in steps:
            step = warm.step(problem, fill=reset_slot)
            if step.error is not None and cold.step(problem, fill=reset_slot).error is None:
                yield lane.of_error(
                    step.error,
                    expected=f"a graph captured {when} replays like one captured cold",
                    rule="GP10",
                    step=step,
                )
                return
