"""The requirements on observers: `CHECKS`, one function for each rule ``OB``.

Does not: choose lanes; see `graphpact_conformance.observers.observer_lanes`.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.graphs import GraphDriver
from graphpact.plugin_calls import describe_error
from graphpact.step import StepOutputs
from graphpact_conformance.contracts.host_reads import host_reads_refused
from graphpact_conformance.contracts.requirement import Requirement, require
from graphpact_conformance.contracts.rule_checks import rule_check_decorator
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.observers.observed import ObservedLanes, first_difference_of, run_ahead, run_batch
from graphpact_conformance.observers.probes import HOOKS, HookLog
from graphpact_conformance.records.global_state import Call, StateWatch

CHECKS: dict[str, Requirement[ObservedLanes]] = {}
"""The requirements by name, in order."""
_rule_check = rule_check_decorator(CHECKS)


@_rule_check("OB01", "the constructor", "give every argument a default, and read configuration lazily")
def _built_without_arguments(lanes: ObservedLanes) -> None:
    for _ in range(3):
        lanes.rig(lanes.build()).close()


@_rule_check("OB02", "every hook", "write `result = yield`, and return `result` itself")
def _same_result(lanes: ObservedLanes) -> None:
    rig = lanes.rig(lanes.build())
    lanes.every_kind(rig)
    _require_same(lanes.log)


@_rule_check("OB03", "every hook", "read tensors, or copy them, and write only memory of your own")
def _changes_nothing(lanes: ObservedLanes) -> None:
    without = lanes.every_kind(lanes.rig())
    difference = first_difference_of(lanes.every_kind(lanes.rig(lanes.build())), without)
    require(f"equal bits with the observer and without it; they differ in {difference}", difference is None)


@_rule_check("OB04", "every hook", "use a generator of your own, and restore a setting in the same call")
def _changes_no_setting(lanes: ObservedLanes) -> None:
    watch = StateWatch()
    with watch.during(Call("the constructor")):
        observer = lanes.build()
    running: list[AbstractContextManager[None]] = []

    def enters() -> None:
        running.append(watch.during(Call("code of the observer")))
        running[-1].__enter__()

    def leaves() -> None:
        running.pop().__exit__(None, None, None)

    lanes.log.enters, lanes.log.leaves = enters, leaves
    lanes.every_kind(lanes.rig(observer, watch=watch), watch)
    changes = [
        f"{change.call.where}: {', '.join(change.names)}: {change.before} became {change.after}"
        for change in watch.changes.values()
    ]
    require(f"no changed setting; {'; '.join(changes)}", not changes)


_ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: RuntimeError("planted by the suite"),
    lambda: AssertionError("planted by the suite"),
    lambda: StopIteration("planted by the suite"),
    lambda: StopAsyncIteration("planted by the suite"),
    lambda: GeneratorExit("planted by the suite"),
    lambda: KeyboardInterrupt("planted by the suite"),
    lambda: SystemExit("planted by the suite"),
)


@_rule_check("OB05", "every hook", "use `try` and `finally` around `yield`, and re-raise what you catch")
def _passes_errors_on(lanes: ObservedLanes) -> None:
    problem = lanes.problems[0]
    expected = run_batch(lanes.rig(), problem)[1].clone()
    rig = lanes.rig(lanes.build())
    for hook in HOOKS[:-1]:
        for make in _ERRORS:
            for at_end in (False, True):
                error = make()
                if at_end and isinstance(error, StopIteration):
                    continue  # generators of the suite cannot raise it
                _raise_in(lanes, rig, hook, error, at_end=at_end)
                _require_same(lanes.log)
                outputs = run_batch(rig, problem)[1]
                _require_equal(f"the step after {describe_error(error)} in {hook}", outputs, expected)
                lanes.log.clear()
    for make in _ERRORS:
        error = make()
        _raising(lanes.log, "engine_phase", error, at_end=False)
        _require_raised(lambda: lanes.phases(rig.lane.hooks), error, "engine_phase")
        _quiet(lanes.log)
        lanes.phases(rig.lane.hooks)


def _raise_in(lanes: ObservedLanes, rig: Rig, hook: str, error: BaseException, *, at_end: bool) -> None:
    """Run what calls ``hook`` with an error in it, and require that it comes out unchanged."""
    _raising(lanes.log, hook, error, at_end=at_end)

    def call() -> None:
        if hook in ("capture", "init_metadata_capture"):
            rig.lane.capture(rig.planned[0])
        else:
            run_batch(rig, lanes.problems[0])

    _require_raised(call, error, hook)
    GraphDriver._capturing, GraphDriver._calling = None, False  # noqa: SLF001
    _quiet(lanes.log)
    if hook in ("capture", "init_metadata_capture"):
        rig.lane.capture(rig.planned[0])


def _raising(log: HookLog, hook: str, error: BaseException, *, at_end: bool) -> None:
    def plan(name: str) -> None:
        if name == hook:
            raise error

    _quiet(log)
    setattr(log, "after" if at_end else "plan", plan)


def _quiet(log: HookLog) -> None:
    log.plan = log.after = lambda _: None


def _require_raised(call: Callable[[], object], error: BaseException, hook: str) -> None:
    try:
        call()
    except BaseException as raised:  # noqa: BLE001  the suite raised it
        what = f"{describe_error(error)} of {hook}; {describe_error(raised)} came out"
        require(what, raised is error)
    else:
        require(f"{describe_error(error)} of {hook} passes the observer; nothing was raised", holds=False)


@_rule_check("OB06", "every hook", "handle this kind of step: fields may be None, and results without rows")
def _observes_every_kind(lanes: ObservedLanes) -> None:
    lanes.every_kind(lanes.rig(lanes.build()))


@_rule_check("OB07", "every hook", "keep what belongs to one call in local variables around `yield`")
def _keeps_lanes_apart(lanes: ObservedLanes) -> None:
    first, second = lanes.problems[:2]
    alone = [run_batch(lanes.rig(), problem)[1].clone() for problem in (first, second)]
    observer = lanes.build()
    logs = HookLog(), HookLog()
    a, b = (lanes.rig(observer, log=log) for log in logs)
    with torch.inference_mode():
        for rig, problem in ((a, first), (b, second)):
            rig.load(problem)
        in_a = a.lane.prepare(a.batch_of(first))
        in_b = b.lane.prepare(b.batch_of(second))
        outputs = a.lane.launch(in_a), b.lane.launch(in_b)
    for each, expected in zip(outputs, alone, strict=True):
        _require_equal("a step that interleaves with one of another lane", each, expected)
    for hook, at_end, is_ahead in product(("run_step", "populate", "launch"), (False, True), (False, True)):
        nested: list[StepOutputs] = []

        def inside(
            name: str, hook: str = hook, nested: list[StepOutputs] = nested, *, is_ahead: bool = is_ahead
        ) -> None:
            if name == hook and not nested:
                nested.append(run_ahead(b, second) if is_ahead else run_batch(b, second)[1])

        setattr(logs[0], "after" if at_end else "plan", inside)
        _require_equal(f"a step around another in {hook}", run_batch(a, first)[1], alone[0])
        _require_equal(f"a step inside {hook} of another lane", nested[0], alone[1])
        _quiet(logs[0])
    for log in logs:
        _require_same(log)


@_rule_check("OB08", "every hook", "keep numbers, or copies, and drop batches and outputs after the step")
def _keeps_no_tensor(lanes: ObservedLanes) -> None:
    observer = lanes.build()
    rig = lanes.rig(observer)
    alive: dict[str, weakref.ref[torch.Tensor]] = {}
    for at, problem in enumerate(lanes.problems[:3]):
        alive |= _step_tensors(rig, problem, at)
        lanes.log.clear()
    rig.lane._pending = None  # noqa: SLF001  the lane's own reference to the last batch
    for captured in rig.lane.captured.values():
        captured.context.live = captured.context.attended = captured.context.view
    gc.collect()
    kept = [name for name, tensor in alive.items() if tensor() is not None]
    require(f"no tensor of an earlier step is alive; alive: {', '.join(kept)}", not kept)


def _step_tensors(rig: Rig, problem: Any, at: int) -> dict[str, "weakref.ref[torch.Tensor]"]:
    """Run a step, and return weak references to its batch and outputs by name."""
    batch, outputs = run_batch(rig, problem)
    named = {f"{name} of the batch": t for name, t in _own_tensors(batch).items()}
    named |= {f"output {name}": t for name, t in outputs.items()}
    return {f"{name}, step {at}": weakref.ref(tensor) for name, tensor in named.items()}


def _own_tensors(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    return batch.tensors()


@_rule_check("OB09", "every hook", "read shapes, counts and host tensors; leave the contents to the device")
def _reads_no_device_tensor(lanes: ObservedLanes) -> None:
    observer = lanes.build()
    rig = lanes.rig(observer)
    problem = lanes.problems[0]
    rig.load(problem)
    batch = rig.batch_of(problem)
    slots = [slot.buffer for slot in rig.slots if slot.name.endswith("_cpu") and slot.buffer is not None]
    host = [*batch.host_tensors(), *slots]
    with torch.inference_mode(), host_reads_refused(host, "in code of the observer") as guard:

        def enters() -> None:
            guard.paused = False

        def leaves() -> None:
            guard.paused = True

        leaves()
        lanes.log.enters, lanes.log.leaves = enters, leaves
        try:
            rig.lane.run(batch)
            rig.lane.capture(rig.planned[0])
        except Exception:
            if guard.refused is None:
                raise
        finally:
            lanes.log.enters = lanes.log.leaves = leaves
    require(f"no host read; {guard.refused}", guard.refused is None)


def _require_same(log: HookLog) -> None:
    """Require that what came out of the observer is what came out of the hooks."""
    require("each call ends inside and outside of the observer", len(log.inside) == len(log.outside))
    for (hook, inside), (other, outside) in zip(log.inside, log.outside, strict=True):
        what = f"`{hook}` gives what it gave without the observer, {_in_words(inside)}"
        require(f"{what}; it gave {_in_words(outside)}", hook == other and inside is outside)


def _in_words(value: object) -> str:
    if isinstance(value, BaseException):
        return describe_error(value)
    return "None" if value is None else f"the {type(value).__name__} at {id(value):#x}"


def _require_equal(what: str, outputs: StepOutputs, expected: StepOutputs) -> None:
    for name, tensor in expected.items():
        is_equal = name in outputs and bool((outputs[name] == tensor).all())
        require(f"{what} has the outputs of a step alone; {name!r} differs", is_equal)
