"""`ObservedLanes`: lanes, steps and phases of an engine around which an observer is checked.

The lanes are those of `graphpact_conformance.lane.rig`, with graphs on a tape.

Does not: judge; see `graphpact_conformance.observers.observing`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.hooks import Hooks
from graphpact.hookspecs import hookimpl
from graphpact.step import StepOutputs
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.choice import configs_of, plainest
from graphpact_conformance.draws.chosen_batches import of_size
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.observers.probes import HookLog, Inner, Outer, Planned
from graphpact_conformance.records.global_state import Call, StateWatch

PHASES = ("step", "schedule", "sample", "wait", "commit", "a phase of another engine")
"""Names of phases. Each engine has its own."""


def observed_config(mode: ForwardMode) -> Config:
    """Return the plainest configuration of a mode, with a request more than the largest shape holds."""
    for config in plainest(configs_of(ReferenceBackend.capabilities)):
        if config.case.mode is mode and not config.case.branches > 1:
            return config
    raise AssertionError(f"no lane has the mode {mode}")


class ObservedLanes:
    """Lanes that one observer, or none, observes.

    Args:
        observer: Builds an observer.
        config: The configuration of the lanes.
        seed: Seed of the batches.
        examples: Number of drawn sequences of batches.

    Attributes:
        log: What the probes of the last lane saw.
    """

    def __init__(self, observer: type[Any], config: Config, seed: int, examples: int) -> None:
        self.build = observer
        self.config = config
        self.log = HookLog()
        self.problems: list[Problem] = [
            problem for steps in draw(config, examples, seed) for problem in steps
        ]
        self.idle = Problem(config.case, [], 0)
        self.too_large = of_size(config, config.most_requests + 1)

    def rig(self, *observers: object, log: HookLog | None = None, watch: StateWatch | None = None) -> Rig:
        """Return a captured lane with observers between the probes."""
        log = self.log if log is None else log
        return Rig(
            self.config,
            backend=ReferenceBackend,
            runner=ReferenceRunner.of(self.config),
            observers=[Outer(log), *observers, Inner(log), Planned(log)],
            watch=watch,
        )

    def sequence(self) -> list[tuple[str, Problem]]:
        """Return the kinds of steps with their batches, in the order in which they run."""
        steps = [("replay", problem) for problem in self.problems]
        if self.config.case.mode is ForwardMode.DECODE:
            steps.append(("idle", self.idle))
        return [*steps, ("eager", self.problems[0]), ("too large", self.too_large), *steps[:2]]

    def every_kind(self, rig: Rig, watch: StateWatch | None = None) -> list[Any]:
        """Run every kind of step of a lane, and all phases, and return what they gave, copied.

        Raises:
            BaseException: A step raised it.
        """
        found: list[Any] = []
        for kind, problem in self.sequence():
            step = rig.step(problem, eagerly=kind == "eager")
            if step.error is not None:
                raise step.error
            slots = {slot.name: slot.buffer.clone() for slot in rig.slots if slot.buffer is not None}
            leaves = {path: leaf.value for path, leaf in step.leaves.items()}
            parts: dict[str, Any] = {"outputs": step.rows, "slots": slots, "static inputs": leaves}
            parts |= {"the KV cache": step.caches, "the page table": {"": step.table}}
            parts["host numbers"] = {n: v for n, v in step.numbers.items() if isinstance(v, int | float)}
            parts["replays"] = {"": (step.replays, step.eager_runs)}
            parts["fields of the batch that the step changed"] = {"": step.changed_fields}
            found.append((kind, problem.words, parts))
        run_ahead(rig, self.problems[0])
        for shape in rig.planned:
            rig.capture(shape)
        self.phases(rig.lane.hooks, watch)
        return found

    def phases(self, hooks: Hooks, watch: StateWatch | None = None) -> None:
        """Run each phase of an engine, with the observers of a lane.

        The probes are outermost and innermost in any order of registration.

        Raises:
            AssertionError: A phase ran more or less than once.
        """
        observers = [each for each in hooks.manager.get_plugins() if _observes_phases(each)]
        engine = Hooks([_Engine()], observers)
        run = engine.resolve("engine_phase")
        assert run is not None  # noqa: S101  the engine implements it
        for phase in PHASES:
            ran: list[object] = []

            def work(ran: list[object] = ran) -> object:
                ran.append(object())
                return ran[-1]

            with (StateWatch() if watch is None else watch).during(Call(f"the phase {phase!r}")):
                result = run(phase=phase, call=work)
            if len(ran) != 1:
                raise AssertionError(f"the phase {phase!r} ran {len(ran)} times")
            if result is not ran[0]:
                raise AssertionError(f"the phase {phase!r} returned {result!r}, not the result of its call")


class _Engine:
    """The part of an engine that runs phases."""

    @hookimpl
    def engine_phase(self, phase: str, call: Callable[[], object]) -> object:
        """Run the phase."""
        del phase
        return call()


def _observes_phases(plugin: object) -> bool:
    method = getattr(type(plugin), "engine_phase", None)
    return method is not None and hasattr(method, "graphpact_impl")


def first_difference_of(with_it: Sequence[Any], without: Sequence[Any]) -> str | None:
    """Return in words where two results of `ObservedLanes.every_kind` differ; None if they do not."""
    for (kind, words, parts), (_, _, others) in zip(with_it, without, strict=True):
        for part, values in parts.items():
            for name, value in (values or {}).items():
                if not _equal(value, (others[part] or {}).get(name)):
                    where = f"{part} {name}".strip()
                    return f"{where} of a step ({kind}): {words}"
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        with suppress(RuntimeError):  # complex and quantized tensors have no bytes
            return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return bool(a == b)


def run_batch(rig: Rig, problem: Problem) -> tuple[ForwardBatch, StepOutputs]:
    """Run one batch of a lane without a record; return it and its outputs, uncopied."""
    rig.load(problem)
    batch = rig.batch_of(problem)
    return batch, rig.run(batch)


@torch.inference_mode()
def run_ahead(rig: Rig, problem: Problem) -> StepOutputs:
    """Prepare a step, as an engine does while another runs, then launch it; return its outputs, uncopied."""
    rig.load(problem)
    return rig.lane.launch(rig.lane.prepare(rig.batch_of(problem)))
