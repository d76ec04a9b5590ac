"""Declared invariants of plans: a stale plan breaks them, a right one keeps them, an empty one is found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from recipes.two_bodies import TwoBodies

from conformance_reports import plugin
from graphpact import ForwardBatch, GraphSlot, Limits
from graphpact.attention import AttentionBackend
from graphpact.plugins import PluginCatalog
from graphpact_conformance import suite
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.experiment import Experiment
from graphpact_conformance.experiments.when import in_full_lanes_of_one_plugin
from graphpact_conformance.lane.reference_backend import ReferenceBackend, ReferenceMetadata
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.merge import merged
from graphpact_conformance.results import Finding, PluginResults
from graphpact_conformance.suite import target as target_module
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.traits import HAS_INVARIANTS, HAS_PLAN, TWO_BODIES, traits_of
from support import ListedCatalog

OPTIONS = Options(size="quick", examples=1, shrink=False, only=frozenset({"GP09"}))
OF_PLANS = [each for each in EXPERIMENTS if each.name == "plan_invariants"]
COUNTS = "the plan counts the keys of each request"


def counts_keys(_: Any, view: ForwardBatch, metadata: ReferenceMetadata) -> bool:
    """Return whether the plan has the keys of each request."""
    return torch.equal(metadata.most, view.seq_lens + view.uncounted_keys)


class Planned(ReferenceBackend):
    """The suite's backend, whose number of keys is declared as a plan, with an invariant."""

    plan_invariants = {COUNTS: counts_keys}  # noqa: RUF012  a ClassVar there

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots; that of the keys is a plan."""
        return [
            replace(slot, role="plan") if slot.name == "reference.most" else slot
            for slot in super().declare_slots(limits)
        ]


class KeepsTheLongest(Planned):
    """Plans every request for the longest request of all steps so far: the outputs are right."""

    longest = 0

    def plan_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Plan for the longest request of this and of earlier steps."""
        self.longest = max([self.longest, *view.seq_lens_cpu.tolist()])
        lens = torch.full_like(view.seq_lens_cpu, self.longest)
        super().plan_metadata(replace(view, seq_lens_cpu=lens), metadata)


def declaring(base: type[AttentionBackend], **invariants: Any) -> type[AttentionBackend]:
    """Return the backend with other invariants."""
    return type("Declares", (base,), {"plan_invariants": invariants, "__module__": base.__module__})


def found(
    backend: type[AttentionBackend],
    kind: str = "decode",
    experiments: Sequence[Experiment] = OF_PLANS,
    options: Options = OPTIONS,
) -> list[Finding]:
    """Return the findings of GP09 in the plain lane of a kind of step."""
    plans = suite.planned_lanes(backend, ReferenceRunner, OPTIONS, values=())
    (plan,) = [plan for plan in plans if str(plan.lane.config.case) == kind]
    results = list(suite.examine_lane(replace(plan, is_full=True), options, experiments=experiments))
    assert results
    assert not [result.reason for result in results if result.outcome == "error"]
    return [finding for result in results for finding in result.findings]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["decode", "draft_decode", "extend"])
def test_a_stale_plan_with_right_outputs_breaks_its_invariant(kind: str) -> None:
    """A plan that depends on earlier steps breaks its invariant, and no output shows it."""
    assert found(declaring(KeepsTheLongest), kind, EXPERIMENTS) == []
    told = found(KeepsTheLongest, kind, EXPERIMENTS)
    assert {(each.field, each.experiment) for each in told} == {(COUNTS, "plan_invariants")}
    (finding,) = [each for each in told if each.hook == "init_metadata_replay"]
    assert "false" in finding.actual
    assert ("in draft step" in finding.actual) is (kind == "draft_decode")
    assert finding.help
    assert finding.shape


@pytest.mark.parametrize("kind", ["decode", "draft_decode", "draft_decode_tree", "extend"])
def test_a_right_plan_keeps_its_invariant(kind: str) -> None:
    """An invariant that notices every other plan, of a backend that plans rightly, has no finding."""
    assert found(Planned, kind) == []


def test_an_invariant_that_is_always_true_is_found_out() -> None:
    """An invariant that is true with the plan of another batch is a finding that names the slot."""
    (finding,) = found(declaring(Planned, always=lambda *_: True))
    assert finding.field is not None
    assert "reference.most" in finding.field
    assert finding.actual == "no declared invariant notices the plan of another batch"


def test_one_invariant_that_notices_is_enough() -> None:
    """Beside an invariant that notices the plan of another batch, one that does not is no finding."""
    assert found(declaring(Planned, always=lambda *_: True, counts=counts_keys)) == []


def test_an_invariant_that_cannot_tell_is_no_finding() -> None:
    """An invariant of a plan that only a library can read returns None, for every plan."""
    assert found(declaring(Planned, opaque=lambda *_: None)) == []


def test_an_invariant_that_raises_is_a_finding_with_its_line() -> None:
    """An error of an invariant is the same as False; the finding has the error and the line."""

    def raises(backend: Any, view: ForwardBatch, metadata: Any) -> bool:
        raise ZeroDivisionError("no chunks")

    told = found(declaring(Planned, raises=raises))
    assert {finding.hook for finding in told} == {
        *("init_metadata_replay", "init_metadata_capture", "init_metadata_eager")
    }
    for finding in told:
        assert finding.field == "raises"
        assert finding.actual == "ZeroDivisionError: no chunks"


def test_a_fill_that_is_wrong_only_at_capture_or_in_eager_steps_is_found() -> None:
    """The finding names the hook that wrote the plan."""

    class WrongFirst(Planned):
        """Plans for one key too many outside replays."""

        replays = False

        def init_metadata_replay(self, view: ForwardBatch, shape: Any, captured: Any) -> Any:
            """Note the replay."""
            self.replays = True
            try:
                return super().init_metadata_replay(view, shape, captured)
            finally:
                self.replays = False

        def plan_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
            """Plan for one key more, except in a replay."""
            lens = view.seq_lens_cpu if self.replays else view.seq_lens_cpu + 1
            super().plan_metadata(replace(view, seq_lens_cpu=lens), metadata)

    assert {finding.hook for finding in found(WrongFirst)} == {"init_metadata_capture", "init_metadata_eager"}


class LateInTheLane(Planned):
    """Plans every request for one key more, once it has prepared many steps: the outputs are right."""

    after = 20
    steps = 0

    def plan_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
        """Count the steps, and plan for one key more after many of them."""
        self.steps += 1
        lens = view.seq_lens_cpu + int(self.steps > self.after)
        super().plan_metadata(replace(view, seq_lens_cpu=lens), metadata)


def test_invariants_are_evaluated_after_every_preparation() -> None:
    """A plan that is wrong only late in the life of a lane is found by name."""
    assert found(LateInTheLane) == []
    after = [each for each in EXPERIMENTS if each.name == "padding"]
    told = found(LateInTheLane, experiments=after, options=replace(OPTIONS, only=frozenset()))
    assert {each.field for each in told} == {COUNTS}
    assert not any("--only" in str(each.reproduce) for each in told)  # this experiment has other rules
    assert any(each.batch for each in told)


@pytest.mark.sweep
@pytest.mark.parametrize("kernels", ["auto", "portable"])
@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_invariants_of_shipped_backends_hold_and_notice(name: str, kernels: Any) -> None:
    """Every lane of a quick run keeps GP09, with the experiment of the invariants in all full lanes."""
    options = replace(OPTIONS, kernels=kernels)
    catalog = PluginCatalog.scan()
    for plan in suite.lanes_of(Target("attention_backend", name), options, catalog):
        results = list(suite.examine_lane(plan, options))
        assert [finding for result in results for finding in result.findings] == []
        assert any("plan_invariants" in result.check for result in results) is in_full_lanes_of_one_plugin(
            plan, options.size
        )


# -- traits ----------------------------------------------------------------------------------------


def traits(backend: type[AttentionBackend], **more: Any) -> list[str]:
    """Return the traits of a backend in the results of a short run."""
    options = replace(OPTIONS, lanes=("decode-*",), only=frozenset({"GP01"}), **more)
    catalog: Any = ListedCatalog(mine=backend)
    listener = Listener()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_module.PluginCatalog, "scan", lambda: catalog)
        results = suite.examine(Target("attention_backend", "mine"), options, listener)
    assert listener.works[-1] == "traits"
    return results.traits


class Listener:
    """A listener that keeps the names of the work."""

    def __init__(self) -> None:
        self.works: list[str] = []

    def begins(self, work: str) -> None:
        """Keep the name."""
        self.works.append(work)

    def found(self, result: Any) -> None:
        """Ignore a result."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("flashinfer", [HAS_PLAN, HAS_INVARIANTS]), ("fa3", [HAS_PLAN, HAS_INVARIANTS]), ("trtllm_mla", [])],
)
def test_traits_of_shipped_backends(name: str, expected: list[str]) -> None:
    """Shipped backends have one body, and those with a plan declare its invariants."""
    assert traits(PluginCatalog.scan().select("attention_backend", name)) == expected


def test_traits_of_a_backend_with_two_bodies() -> None:
    """A backend that overrides the refresh has two bodies; it reads host lengths, and declares nothing."""
    assert traits(TwoBodies) == [TWO_BODIES, HAS_PLAN]


@pytest.mark.parametrize("hook", ["refresh_metadata", "init_metadata_replay", "init_metadata_capture"])
def test_every_hook_of_its_own_is_a_second_body(hook: str) -> None:
    """A backend that overrides one of the methods of captures or replays has two bodies."""

    class Own(ReferenceBackend):
        """A backend with a hook of its own."""

    setattr(Own, hook, lambda self, *arguments: None)
    assert traits_of(Own, []) == [TWO_BODIES, HAS_PLAN]


def test_a_slot_of_the_role_plan_is_a_plan() -> None:
    """A backend without host work has a plan by its slot alone; without the slot it has none."""
    fa3 = PluginCatalog.scan().select("attention_backend", "fa3")
    assert fa3.plan_metadata is None
    assert traits_of(fa3, []) == [HAS_INVARIANTS]


def test_a_backend_that_cannot_be_built_has_no_trait_of_its_slots() -> None:
    """The run reports the error in its lanes; the traits of the class are there."""

    class Unbuilt(Planned):
        """A backend that raises in its constructor."""

        def __init__(self, context: Any) -> None:
            raise ValueError("not today")

    assert traits(Unbuilt) == [HAS_PLAN, HAS_INVARIANTS]


def test_parts_of_a_run_keep_the_traits() -> None:
    """The joined results of several processes have the traits of all parts, each once."""
    parts: list[PluginResults] = [plugin(traits=[HAS_PLAN]), plugin(traits=[HAS_PLAN, TWO_BODIES]), plugin()]
    assert merged(parts).traits == [HAS_PLAN, TWO_BODIES]
