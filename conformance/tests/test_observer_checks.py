"""Observers under ``graphpact check``: ours pass, and each planted bug is caught by its rule."""

import contextlib
import gc
import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from recipes.observer import SlowStepsObserver

from graphpact import ForwardBatch, Lane, StepOutputs, hookimpl
from graphpact.batch import ForwardMode
from graphpact_conformance.contract_rules import OBSERVER_RULES
from graphpact_conformance.contracts.examine import examine_contract_lane
from graphpact_conformance.observers.observed import ObservedLanes, observed_config
from graphpact_conformance.observers.observer_lanes import OF_OBSERVERS, ObserverLane
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.targets import Options
from graphpact_engine.metrics import StepMetrics
from graphpact_engine.trace import HookTrace

Around = Generator[None, Any, Any]
ONCE = Options(examples=1)
RIGHT = (HookTrace, StepMetrics, SlowStepsObserver)


def results(observer: type[Any], options: Options = ONCE) -> dict[str | None, Result]:
    """Return the result of each rule around decode steps."""
    lane = ObserverLane(observer, ForwardMode.DECODE)
    return {result.rule: result for result in examine_contract_lane(lane, options)}


# -- right observers ---------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("observer", RIGHT)
def test_right_observers_pass(observer: type[Any]) -> None:
    """The engine's observers and the recipe pass every rule."""
    found = results(observer)
    assert list(found) == list(OBSERVER_RULES)
    assert {result.outcome for result in found.values()} == {Outcome.PASS}, found


@pytest.mark.sweep
@pytest.mark.parametrize("observer", RIGHT)
def test_right_observers_pass_around_every_kind_of_step(observer: type[Any]) -> None:
    """They pass a thorough run, with steps of every mode."""
    options = Options(size="thorough")
    for lane in OF_OBSERVERS.lanes_of(observer, options):
        for result in examine_contract_lane(lane, options):
            assert result.outcome is Outcome.PASS, result


def test_every_hook_is_called_around_an_observer() -> None:
    """The steps of the suite call every hook that an observer may wrap, in every kind of step."""
    lanes = ObservedLanes(HookTrace, observed_config(ForwardMode.DECODE), 0, 1)
    kinds = {kind for kind, _ in lanes.sequence()}
    assert kinds == {"replay", "idle", "eager", "too large"}
    lanes.every_kind(lanes.rig())
    assert {hook for hook, _ in lanes.log.inside} == {
        "populate",
        "prepare_replay",
        "init_metadata_capture",
        "init_metadata_replay",
        "run_step",
        "launch",
        "capture",
        "engine_phase",
    }


# -- planted bugs ------------------------------------------------------------------------------------


class NeedsAFile:
    """It needs an argument at its second instance."""

    built: ClassVar[list[object]] = []

    def __init__(self) -> None:
        self.built.append(self)
        if len(self.built) % 2 == 0:
            raise OSError("the file is open already")

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Observe."""
        return (yield)


class CopiesOutputs:
    """It returns a copy of the outputs."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Return a copy."""
        outputs = yield
        return outputs.clone()


class ReturnsNothing:
    """It returns nothing from a hook of the runner, where None passes as a result."""

    @hookimpl(wrapper=True)
    def init_metadata_replay(self) -> Around:
        """Forget the result."""
        yield


class RunsThePhaseItself:
    """It calls the phase, to measure it alone."""

    @hookimpl(wrapper=True)
    def engine_phase(self, call: Any) -> Around:
        """Run it twice."""
        call()
        return (yield)


class YieldsTwice:
    """It yields again after the step."""

    @hookimpl(wrapper=True)
    def launch(self) -> Around:
        """Yield twice."""
        outputs = yield
        yield
        return outputs


class ClampsTheBatch:
    """It clamps lengths of the batch before they are copied into slots."""

    @hookimpl(wrapper=True)
    def populate(self, batch: ForwardBatch) -> Around:
        """Write the batch."""
        batch.seq_lens.clamp_(max=3)
        return (yield)


class ScalesOutputs:
    """It scales outputs in place."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Write the outputs."""
        outputs: StepOutputs = yield
        for tensor in outputs.values():
            tensor.mul_(2)
        return outputs


class ClearsASlot:
    """It clears the tail of a slot after the view was made."""

    @hookimpl(wrapper=True)
    def prepare_replay(self) -> Around:
        """Write the static inputs."""
        view = yield
        view.positions.zero_()
        return view


class CountsAReplay:
    """It runs each graph once more, to warm caches."""

    @hookimpl(wrapper=True)
    def launch(self, lane: Lane, prepared: Any) -> Around:
        """Replay twice."""
        outputs = yield
        captured = lane.captured.get(prepared.fit)
        if captured is not None:
            captured.stats.replays += 1
        return outputs


class SeedsTorch:
    """It samples steps by torch's default generator."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Draw."""
        torch.rand(1)
        return (yield)


class SamplesByRandom:
    """It samples phases by Python's default generator."""

    @hookimpl(wrapper=True)
    def engine_phase(self) -> Around:
        """Draw."""
        random.random()
        return (yield)


class SetsThreads:
    """Its constructor sets the number of threads."""

    def __init__(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Observe."""
        return (yield)


class SwallowsErrors:
    """It reports errors of captures and goes on."""

    @hookimpl(wrapper=True)
    def capture(self) -> Around:
        """Swallow."""
        with contextlib.suppress(Exception):
            return (yield)


class RenamesErrors:
    """It wraps errors of steps in its own."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Wrap."""
        try:
            return (yield)
        except Exception as error:
            raise RuntimeError("a step failed") from error


class ReturnsAtExit:
    """It returns at `GeneratorExit`, as generators do when they are closed."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Return early."""
        try:
            return (yield)
        except GeneratorExit:
            return None


class ForgetsAFlag:
    """It sets a flag before a step, and a step that failed leaves it set."""

    def __init__(self) -> None:
        self.busy = False

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Refuse a second step inside the first."""
        if self.busy:
            raise AssertionError("a step inside a step")
        self.busy = True
        outputs = yield
        self.busy = False
        return outputs


class NeedsRequests:
    """It divides by the number of requests."""

    @hookimpl(wrapper=True)
    def run_step(self, batch: ForwardBatch) -> Around:
        """Divide."""
        outputs = yield
        self.mean = batch.num_tokens / batch.batch_size
        return outputs


class NeedsAShape:
    """It takes every launch for a replay."""

    @hookimpl(wrapper=True)
    def launch(self, prepared: Any) -> Around:
        """Read the shape."""
        self.tokens = prepared.fit.num_tokens
        return (yield)


class NeedsABatch:
    """It reads the batch of a capture, which may be None."""

    @hookimpl(wrapper=True)
    def capture(self, batch: ForwardBatch) -> Around:
        """Read the batch."""
        self.tokens = batch.num_tokens
        return (yield)


class KnowsItsPhases:
    """It knows the phases of one engine."""

    @hookimpl(wrapper=True)
    def engine_phase(self, phase: str) -> Around:
        """Look the phase up."""
        self.at = ("step", "schedule", "sample", "wait", "commit").index(phase)
        return (yield)


class KeepsTheResultInItself:
    """It keeps the outputs in an attribute between launch and the end of the step."""

    @hookimpl(wrapper=True)
    def launch(self) -> Around:
        """Keep them."""
        self.outputs = yield
        return self.outputs

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Return those that are kept."""
        outputs = yield
        kept, self.outputs = self.outputs, None
        return outputs if kept is None else kept


class KnowsOneLane:
    """It takes the first lane that it sees for the only one."""

    def __init__(self) -> None:
        self.lane: Lane | None = None

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane) -> Around:
        """Compare lanes."""
        self.lane = self.lane or lane
        if self.lane is not lane:
            raise AssertionError("another lane")
        return (yield)


class KeepsBatches:
    """It keeps the batches of all steps."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    @hookimpl(wrapper=True)
    def run_step(self, batch: ForwardBatch) -> Around:
        """Keep the batch."""
        self.batches.append(batch)
        return (yield)


class KeepsTheLastOutputs:
    """It keeps the outputs of the last step."""

    @hookimpl(wrapper=True)
    def run_step(self) -> Around:
        """Keep the outputs."""
        self.outputs = yield
        return self.outputs


class PrintsLengths:
    """It reads lengths from the device."""

    @hookimpl(wrapper=True)
    def run_step(self, batch: ForwardBatch) -> Around:
        """Read them."""
        self.longest = int(batch.seq_lens.max()) if batch.batch_size else 0
        return (yield)


class LooksForNan:
    """It looks for NaN in the outputs of every step."""

    @hookimpl(wrapper=True)
    def launch(self) -> Around:
        """Look."""
        outputs = yield
        self.bad = any(bool(tensor.isnan().any()) for tensor in outputs.values())
        return outputs


PLANTED: list[tuple[str, type[Any]]] = [
    ("OB01", NeedsAFile),
    ("OB02", CopiesOutputs),
    ("OB02", ReturnsNothing),
    ("OB02", RunsThePhaseItself),
    ("OB02", YieldsTwice),
    ("OB03", ClampsTheBatch),
    ("OB03", ScalesOutputs),
    ("OB03", ClearsASlot),
    ("OB03", CountsAReplay),
    ("OB04", SeedsTorch),
    ("OB04", SamplesByRandom),
    ("OB04", SetsThreads),
    ("OB05", SwallowsErrors),
    ("OB05", RenamesErrors),
    ("OB05", ReturnsAtExit),
    ("OB05", ForgetsAFlag),
    ("OB06", NeedsRequests),
    ("OB06", NeedsAShape),
    ("OB06", NeedsABatch),
    ("OB06", KnowsItsPhases),
    ("OB07", KeepsTheResultInItself),
    ("OB07", KnowsOneLane),
    ("OB08", KeepsBatches),
    ("OB08", KeepsTheLastOutputs),
    ("OB09", PrintsLengths),
    ("OB09", LooksForNan),
]
"""Bugs, each with the rule that catches it."""


@pytest.mark.few(9)
@pytest.mark.parametrize(("rule", "observer"), PLANTED)
def test_a_planted_bug_of_an_observer_is_caught(rule: str, observer: type[Any]) -> None:
    """Each bug fails its own rule, with evidence, a fix and the line that reproduces it."""
    gc.collect()
    (result,) = results(observer, replace(ONCE, only=frozenset({rule}))).values()
    assert result.outcome is Outcome.FAIL, result
    (finding,) = result.findings
    assert finding.actual
    assert finding.expected == OBSERVER_RULES[rule].requirement
    assert finding.help
    assert f"--only {rule} --lane 'decode'" in str(finding.reproduce)


def test_every_rule_of_observers_has_a_planted_bug() -> None:
    """A rule without a bug that breaks it would not be trusted."""
    assert {rule for rule, _ in PLANTED} == set(OBSERVER_RULES)


def test_reading_the_device_is_a_should() -> None:
    """An observer that reads outputs in every step keeps every other rule: verification does so."""
    found = results(LooksForNan, replace(ONCE, only=frozenset({"OB02", "OB03", "OB09"})))
    told = {rule: (result.outcome, result.counts_against) for rule, result in found.items()}
    assert told == {
        "OB02": (Outcome.PASS, False),
        "OB03": (Outcome.PASS, False),
        "OB09": (Outcome.FAIL, False),
    }
