"""Tests of the suite: targets, lanes, random batches, outcomes, smaller batches, and claims."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from conformance_reports import report
from graphpact import ForwardBatch, ForwardMode, GraphShape, hookimpl
from graphpact.attention import AttentionBackend, GraphSupport
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.errors import ConfigError, ContractError, UnknownPluginError, UsageError
from graphpact.plugins import Kind, PluginCatalog, PluginInfo
from graphpact_conformance import suite
from graphpact_conformance.claims import claims_of, undeclared
from graphpact_conformance.draws.batches import Drawn, draw
from graphpact_conformance.draws.cases import CASES, EMBEDS, SEGMENTS
from graphpact_conformance.draws.choice import combinations, configs_of
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.experiment import Experiment
from graphpact_conformance.experiments.when import everywhere
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend, ReferenceMetadata
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.merge import merged
from graphpact_conformance.records.raised import CannotCaptureError
from graphpact_conformance.results import ExitCode, Finding, Outcome, PluginResults, Result
from graphpact_conformance.rules import RULES
from graphpact_conformance.shrink import TRIALS, shrunk
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.suite.plan import cost_of, in_parts
from graphpact_conformance.suite.target import contract_of
from graphpact_conformance.targets import Options, Target
from graphpact_cuda_graph import CudaGraphRunner
from support import ListedCatalog

CATALOG = ListedCatalog(mine=ReferenceBackend, fast=CudaGraphRunner)
QUICK = Options(size="quick")


def config_of(name: str) -> Any:
    """Return the configuration with the given name."""
    return next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == name)


DECODE = config_of("decode-page16-gqa-float32")


def lane() -> LaneUnderTest:
    """Return a lane of the suite's own backend and runner."""
    return LaneUnderTest(DECODE)


# -- targets and lanes -----------------------------------------------------------------------------


def test_every_name_is_a_target_and_so_is_every_pair() -> None:
    """Targets are backends, then runners, then their pairs; a repeated name counts once."""
    found = suite.targets(["fast", "mine", "mine", "runner:fast"], CATALOG)
    assert found == [
        Target("attention_backend", "mine"),
        Target("runner", "fast"),
        Target("attention_backend", "mine", "fast"),
    ]


def test_a_pair_without_a_common_mode_is_no_target() -> None:
    """A backend and a runner without a common mode are no pair, and neither is a runner without graphs."""
    decodes = replace(ReferenceBackend.capabilities, modes=frozenset({ForwardMode.DECODE}))
    catalog = ListedCatalog(
        mine=ReferenceBackend,
        decodes=type("Decodes", (ReferenceBackend,), {"capabilities": decodes}),
        extends=type("Extends", (ReferenceRunner,), {"modes": frozenset({ForwardMode.EXTEND})}),
        never=DeclaresNoGraphs,
    )
    found = suite.targets(["mine", "decodes", "extends", "never"], catalog)
    assert [str(target) for target in found if target.partner] == ["mine + extends"]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("mein", UnknownPluginError, "did you mean 'mine'"),
        ("command:mine", UsageError, "plugins of kind 'command' cannot be checked"),
        (
            "nobody",
            UnknownPluginError,
            "no attention backend, runner, graph driver, speculation algorithm or observer",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(name: str, error: type[UsageError], says: str) -> None:
    """An unknown name, or a kind that cannot be checked, is a usage error that says which of the two."""
    with pytest.raises(error, match=says):
        suite.targets([name], CATALOG)


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("engine", "these are checked: attention backend, runner, graph driver"),
        ("command", "these are checked: attention backend, runner, graph driver"),
    ],
)
def test_the_error_for_a_plugin_of_another_kind_names_the_kind(kind: Kind, hint: str) -> None:
    """The name of an engine or a command is known; the hint says which kinds are checked.

    The error is the same if the kind precedes the name.
    """
    info = PluginInfo(kind, "other", "a test", "0", "a:B", "1")
    catalog = Mock(infos=lambda asked: [info] if asked == kind else [])
    for name in ("other", f"{kind}:other"):
        with pytest.raises(UsageError, match=f"'{name}': plugins of kind '{kind}' cannot be checked") as told:
            suite.targets([name], catalog)
        assert hint in str(told.value.hint)


def test_the_name_of_an_adapter_leads_to_its_option() -> None:
    """Code of another engine is checked by ``--adapter``, and the error for its bare name says so."""
    info = PluginInfo("adapter", "acme", "a test", "0", "a:B", "1")
    catalog = Mock(infos=lambda asked: [info] if asked == "adapter" else [])
    with pytest.raises(UsageError, match="'acme' is code of another engine") as told:
        suite.targets(["acme"], catalog)
    assert told.value.hint == "graphpact check --adapter acme"


def test_a_quick_run_has_one_lane_for_each_kind_of_step() -> None:
    """A quick run has one plain lane per kind of step, and only some of these lanes run all experiments.

    Light lanes follow with every other value of every dimension. A normal run has the same plain lanes, all
    with all experiments, and lanes with every pair of values of two dimensions. A thorough run has more.
    """
    quick = suite.lanes_of(Target("attention_backend", "mine"), QUICK, CATALOG)
    plain = [*CASES, SEGMENTS]
    assert [p.lane.config.case for p in quick[: len(plain)]] == plain
    assert not any(p.is_full for p in quick[len(plain) :])
    assert {str(p.lane.config.case) for p in quick if p.is_full} == {
        *("decode", "extend", "target_verify", "draft_decode", "draft_extend", "extend_segments")
    }
    normal = suite.lanes_of(Target("attention_backend", "mine"), Options(), CATALOG)
    plains = [(str(p), True) for p in quick[: len(plain)]]
    assert plains == [(str(p), p.is_full) for p in normal][: len(plain)]
    thorough = suite.lanes_of(Target("attention_backend", "mine"), Options(size="thorough"), CATALOG)
    for strength, fewer, more in ((1, quick, normal), (2, normal, thorough)):
        met, possible = (
            {
                c
                for plan in plans
                for c in combinations(plan.lane.config, strength)
                if "middle" not in dict(c).values()  # of the lanes with every unusual value at once
            }
            for plans in (fewer, more)
        )
        assert met == possible
    assert len(quick) < len(normal) < len(thorough)


@pytest.mark.parametrize("parts", [1, 2, 3, 40])
def test_parts_of_a_run_share_its_lanes_evenly(parts: int) -> None:
    """Each lane is in one part; no part ends later than another by more than one lane."""
    plans = suite.lanes_of(Target("attention_backend", "mine"), QUICK, CATALOG)
    shared = in_parts(plans, parts, QUICK)
    assert len(shared) == parts
    assert sorted(str(p) for part in shared for p in part) == sorted(map(str, plans))
    ends = [sum(cost_of(p, QUICK) for p in part) for part in shared]
    assert max(ends) - min(ends) <= max(cost_of(p, QUICK) for p in plans)


def test_a_runner_is_held_to_its_own_modes() -> None:
    """A runner gets lanes for its modes and for idle ranks, with the suite's own backend."""
    plans = suite.lanes_of(Target("runner", "fast"), Options(), CATALOG)
    assert {p.lane.config.case.mode for p in plans} == {*CudaGraphRunner.modes, ForwardMode.IDLE}
    assert {(p.lane.backend, p.lane.runner) for p in plans} == {(ReferenceBackend, CudaGraphRunner)}


def test_lanes_are_chosen_by_patterns() -> None:
    """A pattern selects the lanes whose names match; a pattern without a match selects none."""
    target = Target("attention_backend", "mine")
    some = suite.lanes_of(target, replace(QUICK, lanes=("draft_*",)), CATALOG)
    assert [str(p) for p in some] == [
        str(p) for p in suite.lanes_of(target, QUICK, CATALOG) if str(p).startswith("draft_")
    ]
    assert {str(p).partition("-")[0] for p in some} >= {"draft_decode", "draft_decode_tree", "draft_extend"}
    assert suite.lanes_of(target, replace(QUICK, lanes=("nothing",)), CATALOG) == []


def test_equal_seeds_draw_equal_batches() -> None:
    """Two draws with one seed are equal in every KV slot number; another seed draws other batches."""
    one, two, other = (draw(DECODE, 4, seed) for seed in (5, 5, 6))
    assert repr(one) == repr(two)
    assert repr(one) != repr(other)
    assert len(one) == 4


def test_every_rule_is_examined() -> None:
    """Every rule is examined by at least one experiment, and the names of experiments are unique."""
    assert {rule for e in EXPERIMENTS for rule in e.examines} == set(RULES)
    assert len({e.name for e in EXPERIMENTS}) == len(EXPERIMENTS)


# -- outcomes --------------------------------------------------------------------------------------


def experiment(name: str, *examines: str, found: Any = ()) -> Experiment:
    """Return an experiment that yields findings for the given rules, or raises the given exception."""

    def run(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Yield the given findings, or raise the given exception."""
        if isinstance(found, BaseException):
            raise found
        for rule in found:
            yield lane.finding(rule, expected="this", actual="that", problem=steps[0])

    return Experiment(name, examines, run, everywhere)


def outcomes(*experiments: Experiment, **options: Any) -> dict[str | None, Result]:
    """Return the results of one lane by rule, after the given experiments."""
    plan = PlannedLane(lane(), is_full=True, names="mine")
    results = suite.examine_lane(
        plan, replace(QUICK, **{"shrink": False, **options}), experiments=experiments
    )
    return {result.rule: result for result in results}


def test_a_rule_passes_where_everything_that_examines_it_found_nothing() -> None:
    """A rule that no experiment examines has no result; a finding of one experiment fails the rule."""
    found = outcomes(experiment("a", "GP01", "GP02"), experiment("b", "GP02", "GP03", found=["GP02"]))
    assert {rule: r.outcome for rule, r in found.items()} == {
        "GP01": Outcome.PASS,
        "GP02": Outcome.FAIL,
        "GP03": Outcome.PASS,
    }
    assert found["GP02"].check == "a, b"
    (finding,) = found["GP02"].findings
    assert finding.reproduce == (
        "graphpact check mine --only GP02 --lane 'decode-page16-gqa-float32' --seed 0 --examples 2 --quick"
    )
    assert finding.batch is not None
    assert finding.batch.startswith("decode, ")


def test_the_finding_that_is_shown_first_names_hook_and_field() -> None:
    """Of the findings of a rule, those with a hook come before those that only see outputs."""
    seen = {"expected": "1", "actual": "2"}

    def run(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Yield findings, the least useful first."""
        yield lane.finding("GP02", **seen, help="an error")
        yield lane.finding("GP02", **seen, help="outputs", field="a replay: token 0 of the batch")
        yield lane.finding("GP02", **seen, help="a hook", hook="populate")
        yield lane.finding("GP02", **seen, help="both", hook="init_metadata_replay", field="metadata.a")

    found = outcomes(Experiment("a", ("GP02",), run, everywhere))["GP02"].findings
    assert [f.help for f in found] == ["both", "a hook", "outputs", "an error"]


def test_a_finding_of_a_rule_that_is_not_listed_is_a_fault_of_the_suite() -> None:
    """A finding under an unlisted rule is an error for the listed rules without findings.

    ``--only`` with the unlisted rule would not run the experiment, so it could not reproduce the finding.
    """
    found = outcomes(experiment("a", "GP01", "GP02", found=["GP20", "GP02", None]))
    assert {rule: r.outcome for rule, r in found.items()} == {
        None: Outcome.FAIL,
        "GP01": Outcome.ERROR,
        "GP02": Outcome.FAIL,
    }
    assert "GP20" in str(found["GP01"].reason)


@pytest.mark.parametrize(
    ("named", "listed", "told"),
    [
        ("GP13", ("GP13", "GP17"), "GP13"),
        ("GP13", ("GP17",), "GP17"),
        ("not a rule", ("GP17",), "GP17"),
    ],
)
def test_an_error_is_of_its_own_rule_where_the_experiment_lists_that(
    named: str, listed: tuple[str, ...], told: str
) -> None:
    """The error's own rule is used only if it exists and the experiment lists it, else the given rule."""
    error = ContractError("refused", rule=named)
    assert lane().anew(listed).of_error(error, expected="x", rule="GP17").rule == told


def test_faults_of_the_suite_are_errors_and_lanes_without_graphs_did_not_run() -> None:
    """A fault of the suite is an error, a failed capture is not_run, and a failure stays a failure."""
    found = outcomes(
        experiment("a", "GP01", "GP02", found=ZeroDivisionError("ours")),
        experiment("b", "GP02", "GP03", found=["GP02"]),
        experiment("c", "GP04", found=CannotCaptureError(RuntimeError("theirs"))),
    )
    assert {rule: r.outcome for rule, r in found.items()} == {
        "GP01": Outcome.ERROR,
        "GP02": Outcome.FAIL,
        "GP03": Outcome.PASS,
        "GP04": Outcome.NOT_RUN,
    }
    said = r"a: ZeroDivisionError: ours, at tests/test_suite\.py:\d+"
    assert re.fullmatch(said, str(found["GP01"].reason))
    assert found["GP01"].lane == str(DECODE)
    assert "theirs" in str(found["GP04"].reason)


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("raised", [ZeroDivisionError("ours"), CannotCaptureError(RuntimeError("theirs"))])
def test_an_error_hides_no_finding_before_it(raised: Exception, shrink: bool) -> None:  # noqa: FBT001  a parameter
    """A finding counts, and its rule fails, if the same experiment or another one of the rule then raises."""

    def run(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Yield a finding, then raise."""
        yield lane.finding("GP02", expected="this", actual="that", problem=steps[0])
        raise raised

    alone = outcomes(Experiment("a", ("GP01", "GP02"), run, everywhere), shrink=shrink)
    stopped = Outcome.NOT_RUN if isinstance(raised, CannotCaptureError) else Outcome.ERROR
    assert {rule: r.outcome for rule, r in alone.items()} == {"GP01": stopped, "GP02": Outcome.FAIL}
    both = outcomes(experiment("a", "GP02", found=["GP02"]), experiment("b", "GP02", found=raised))
    for found in (alone, both):
        assert len(found["GP02"].findings) == 1
        if stopped is Outcome.ERROR:
            assert str(found["GP02"].reason).startswith("incomplete: ")
            assert "ZeroDivisionError: ours" in str(found["GP02"].reason)


@pytest.mark.parametrize("raised", [AssertionError(), ValueError("")])
def test_an_error_without_a_message_is_reported_with_its_line(raised: Exception) -> None:
    """The experiment, the type, the file and the line are named, for a fault of the suite and of a plugin."""
    found = outcomes(experiment("a", "GP01", found=raised))["GP01"]
    said = rf"{type(raised).__name__}: no message, at (\w+/)*test_suite\.py:\d+"
    assert re.fullmatch(f"a: {said}", str(found.reason))
    finding = lane().of_error(raised, expected="x")
    assert re.fullmatch(said, finding.actual)


class NoShapes(CudaGraphRunner):
    """A runner without a shape to capture."""

    def shapes(self) -> list[GraphShape]:
        """Return no shape."""
        return []


class DeclaresNoGraphs(NoShapes):
    """A runner that declares that it captures nothing."""

    needs = GraphSupport.NEVER


class UniformDecode(ReferenceBackend):
    """A backend that supports graphs of decode only."""

    capabilities = replace(ReferenceBackend.capabilities, graph_support=GraphSupport.UNIFORM_DECODE)


@pytest.mark.parametrize(
    ("plan", "expected", "reason"),
    [
        (LaneUnderTest(DECODE, runner=NoShapes, kind="runner"), Outcome.NOT_RUN, "no shape"),
        (LaneUnderTest(DECODE, runner=NoShapes), Outcome.NOT_RUN, "no shape"),
        (
            LaneUnderTest(DECODE, runner=DeclaresNoGraphs, kind="runner"),
            Outcome.UNSUPPORTED,
            "declares that it captures nothing",
        ),
        (
            LaneUnderTest(config_of("target_verify-page16-gqa-float32"), UniformDecode),
            Outcome.UNSUPPORTED,
            "needs graph support 'uniform', declared 'uniform_decode'",
        ),
    ],
    ids=["a runner", "a pair", "a runner that declares it", "a backend that declares it"],
)
def test_a_lane_that_captures_nothing_is_a_finding_unless_it_is_declared(
    plan: LaneUnderTest, expected: Outcome, reason: str
) -> None:
    """Eager outputs are checked; GP12 fails if graphs are declared; other rules do not run."""
    results = {r.rule: r for r in suite.examine_lane(PlannedLane(plan, is_full=True), QUICK)}
    eager = results.pop(None, None)  # pairs have no check of eager outputs
    assert eager is None or eager.outcome is Outcome.PASS
    gp12 = results.pop("GP12")
    assert {r.outcome for r in results.values()} == {expected}
    assert all(reason in (r.reason or "") for r in results.values())
    if expected is Outcome.UNSUPPORTED:
        assert gp12.outcome is expected
        return
    (finding,) = gp12.findings
    assert gp12.outcome is Outcome.FAIL
    assert finding.actual == "the runner has no shape to capture"
    assert finding.reproduce


def test_what_a_plugin_raises_is_its_failure() -> None:
    """An exception from the plugin's own code is a finding, not a fault of the suite."""

    class Raises(CudaGraphRunner):
        """A runner that raises when it makes a dummy batch."""

        def dummy(self, shape: Any) -> Any:
            """Raise."""
            raise KeyError(shape)

    plans = suite.planned_lanes(ReferenceBackend, Raises, QUICK, kind="runner")
    asks = Experiment("asks", ("GP01",), _ask_for_a_dummy, everywhere)
    results = {r.rule: r for r in suite.examine_lane(plans[0], QUICK, experiments=(asks,))}
    assert results[None].outcome is Outcome.FAIL
    assert "KeyError" in results[None].findings[0].actual


def _ask_for_a_dummy(lane: LaneUnderTest, _: Drawn) -> Iterator[Finding]:
    """Request a dummy batch from the runner, as experiments do."""
    rig = lane.build(capture=False)
    rig.runner.dummy(rig.config.shapes[0])
    yield from ()


def test_only_some_rules_are_run_where_they_are_asked_for() -> None:
    """With ``only``, experiments for other rules do not run, and other rules have no result."""
    never = experiment("never", "GP05", found=AssertionError("it was made"))
    found = outcomes(never, experiment("a", "GP01", "GP02"), only=frozenset({"GP02"}))
    assert {rule: r.outcome for rule, r in found.items()} == {"GP02": Outcome.PASS}


def test_skipped_work_is_not_done() -> None:
    """An experiment that hung in an earlier run is skipped, by the name that it was announced with."""
    plan = PlannedLane(lane(), is_full=True)
    begun: list[str] = []
    never = experiment("never", "GP05", found=AssertionError("it was made"))
    results = suite.examine_lane(
        plan,
        QUICK,
        begun.append,
        skip={f"{plan} :: never"},
        experiments=(never, experiment("a", "GP01")),
    )
    assert [r.rule for r in results] == ["GP01"]
    assert begun == [f"{plan} :: a"]


@pytest.mark.sweep
def test_rows_that_are_kept_from_step_to_step_are_found() -> None:
    """A runner that copies no request rows while all lengths grow by one is caught when the rows change."""

    class KeepsRows(CudaGraphRunner):
        """A runner that keeps the request rows if every length is one more than in the last step."""

        next: list[int] | None = None

        @hookimpl
        def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
            """Fill, and restore the old request rows if every length has grown by one."""
            rows = registry.get_slot("req_pool_indices").slice_for(batch.batch_size, 0)
            kept, lens = rows.clone(), batch.seq_lens_cpu.tolist()
            super().populate(registry=registry, batch=batch, shape=shape)
            if lens == self.next:
                rows.copy_(kept)
            self.next = [n + 1 for n in lens]

    found = {}
    for runner in (CudaGraphRunner, KeepsRows):
        under_test = LaneUnderTest(DECODE, runner=runner, kind="runner")
        plan = PlannedLane(under_test, is_full=True)
        results = suite.examine_lane(plan, replace(QUICK, only=frozenset({"GP02"})))
        found[runner] = [f.field or "" for r in results for f in r.findings]
    assert not found[CudaGraphRunner]
    assert any("view.req_pool_indices[0:4]" in field for field in found[KeepsRows])


# -- smaller batches -------------------------------------------------------------------------------


def test_the_reported_batch_is_small() -> None:
    """A finding that needs one long request is reported with a batch of one request."""

    def long_ones(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Yield a finding for each batch with a request of at least 20 cached keys."""
        for problem in steps:
            if any(len(r.cached) >= 20 for r in problem.requests):
                yield lane.finding("GP08", expected="short", actual="long", problem=problem)

    one = Experiment("long", ("GP08",), long_ones, everywhere)
    under_test = lane()
    for steps in draw(DECODE, 30, 0):
        found = list(long_ones(under_test, steps))
        if not found:
            continue
        with torch.inference_mode():
            small = shrunk(under_test, one, steps, found)
        assert {f.rule for f in small} == {"GP08"}
        assert all(str(f.batch).count("row ") == 1 for f in small), small
        return
    pytest.fail("no long request was drawn")


def test_a_smaller_batch_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of trials and the reported batch do not depend on the speed of the machine."""

    def rows(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Yield a finding if the first batch has more than one request."""
        trials.append(steps)
        if len(steps.exact.requests) > 1:
            yield lane.finding("GP08", expected="one", actual="more", problem=steps.exact)

    one, told = Experiment("rows", ("GP08",), rows, everywhere), []
    (steps,) = draw(DECODE, 1, 0)
    ticks = iter(range(0, 10**6, 5))
    for slow in (False, True):
        trials: list[Drawn] = []
        if slow:
            monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
        small = shrunk(lane(), one, steps, list(rows(lane(), steps)))
        told.append((small[0].batch, len(trials)))
    assert told[0] == told[1]
    assert str(told[0][0]).count("row ") == 2
    assert told[0][1] <= TRIALS + 1


def test_a_smaller_batch_that_fails_otherwise_is_passed_over() -> None:
    """A finding is reported even if the experiment raises an exception for smaller batches."""

    def falls(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Yield a finding for the whole batch, and raise an exception for smaller ones."""
        if len(steps.exact.requests) < 4:
            raise KeyError(steps)
        yield lane.finding("GP08", expected="this", actual="that", problem=steps.exact)

    found = outcomes(Experiment("falls", ("GP08",), falls, everywhere), shrink=True)
    assert found["GP08"].outcome is Outcome.FAIL


# -- levels and versions ---------------------------------------------------------------------------


def test_a_rule_holds_for_plugins_of_its_contract_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with an earlier contract version is not held to a newer rule; the reason has both versions."""
    monkeypatch.setitem(RULES, "GP02", replace(RULES["GP02"], since=2))
    finds = experiment("a", "GP01", "GP02", found=["GP02"])
    told = {}
    for contract in (1, 2):
        plan = PlannedLane(lane(), is_full=True, contract=contract)
        (_, told[contract]) = suite.examine_lane(plan, QUICK, experiments=(finds,))
    assert told[1].outcome is Outcome.UNSUPPORTED
    assert told[1].reason == "the plugin has contract version 1; the rule is in force since 2"
    assert told[2].outcome is Outcome.FAIL


def test_a_pair_is_held_to_the_earlier_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair is held to the lower of the contract versions in the metadata of its distributions."""
    versions = {"mine": "3", "fast": "2"}
    infos = {
        name: replace(info, contract=versions[name])
        for name in versions
        for info in CATALOG.infos()
        if info.name == name
    }
    monkeypatch.setattr(CATALOG, "infos", lambda *_: list(infos.values()))
    alone, pair = (Target("attention_backend", "mine", partner) for partner in (None, "fast"))
    assert [contract_of(target, CATALOG) for target in (alone, pair)] == [3, 2]


def test_a_capability_that_works_undeclared_keeps_from_a_strict_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page size that works undeclared gives a hint; a hint prevents a strict pass, but not conformance."""
    capabilities = replace(ReferenceBackend.capabilities, page_sizes=frozenset({16, 64}))
    forgets = type("Forgets", (ReferenceBackend,), {"capabilities": capabilities})
    catalog = ListedCatalog(forgets=forgets)
    monkeypatch.setattr(PluginCatalog, "scan", lambda: catalog)
    monkeypatch.setattr("graphpact_conformance.suite.plan.planned_lanes", lambda *_, **__: [])
    found: list[Result] = []

    class Listener:
        """A listener that keeps results."""

        def begins(self, work: str) -> None:
            """Do nothing."""

        def found(self, result: Result) -> None:
            """Keep a result."""
            found.append(result)

    target = Target("attention_backend", "forgets")
    told = suite.examine(target, Options(), Listener())
    assert [hint.partition(":")[0] for hint in told.hints] == ["page_size 1"]
    whole = told.model_copy(update={"claims": [], "results": found})  # no lane ran
    assert whole.shortfalls == ["an answer to 1 hint"]
    assert whole.is_conformant
    assert report(whole).exit_code is ExitCode.CONFORMANT
    assert report(whole, options={"strict": True}).exit_code is ExitCode.NOT_CONFORMANT
    assert merged([told, told]).hints == told.hints
    stopped = told.model_copy(update={"claims": [], "hints": []})
    assert merged([stopped, told]).claims == merged([told]).claims


def test_parts_of_an_adapters_run_lose_nothing() -> None:
    """The joined results have all hints and notes once; the last part probes undeclared capabilities."""
    parts = [
        PluginResults(
            kind="adapter",
            name="a",
            distribution="d",
            version="1",
            contract="1",
            hints=hints,
            not_shown=notes,
        )
        for hints, notes in (([], ["kernels", "one"]), (["undeclared graphs work"], ["kernels", "two"]))
    ]
    whole = merged(parts)
    assert whole.hints == ["undeclared graphs work"]
    assert whole.not_shown == ["kernels", "one", "two"]


# -- isolation of draws and experiments ------------------------------------------------------------


@pytest.mark.sweep
def test_draws_do_not_depend_on_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of modules with numbers of their own does not change the batches of a seed."""
    script = (
        "import sys; from graphpact_conformance import suite;"
        "from graphpact_conformance.draws.choice import configs_of;"
        "from graphpact_conformance.lane.reference_backend import ReferenceBackend;"
        "from graphpact_conformance.draws.batches import draw as draws;"
        "configs = list(configs_of(ReferenceBackend.capabilities))[::7];"
        "draw_all = lambda: [repr(draws(c, 2, 0)) for c in configs];"
        "first = draw_all(); import graphpact_museum.collection, graphpact_cuda_graph, graphpact_engine;"
        "sys.exit(first != draw_all())"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_experiment_finds_no_trace_of_another() -> None:
    """Each experiment gets new lanes, empty caches of tensors, and the seed's random numbers.

    The global random state is restored.
    """
    seen: list[tuple[int, int, float]] = []

    @cache
    def zeros(rows: int) -> torch.Tensor:
        """Return a new tensor for each number of rows."""
        return torch.zeros(rows)

    class Caches(ReferenceBackend):
        """A backend whose fills cache a tensor."""

        def fill_metadata(self, view: ForwardBatch, metadata: ReferenceMetadata) -> None:
            """Fill, and cache a tensor."""
            super().fill_metadata(view, metadata)
            zeros(view.batch_size)

    def leaves_traces(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Run a step, and draw a random number."""
        cached = zeros.cache_info().currsize
        seen.append((lane.rig().lane.stats.replays, cached, float(torch.rand(1))))
        lane.rig().step(steps.exact)
        assert zeros.cache_info().currsize
        yield from ()

    plan = PlannedLane(LaneUnderTest(DECODE, Caches), is_full=True)
    both = [Experiment(name, ("GP01",), leaves_traces, everywhere) for name in "ab"]
    before = torch.get_rng_state()
    results = {r.rule: r.outcome for r in suite.examine_lane(plan, QUICK, experiments=both)}
    assert results == {"GP01": Outcome.PASS, "GP19": Outcome.FAIL}  # the draw of the experiment is noticed
    assert seen[0] == seen[1]
    assert seen[0][:2] == (0, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("trace", ["replays", "nothing"])
def test_what_is_found_on_used_captures_alone_does_not_count(trace: str) -> None:
    """An experiment may reuse captures of one without findings; its findings must recur on new captures.

    A lane with a finding is not used again.
    """
    seen: list[int] = []

    def leaves_a_replay(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Run a step, and yield a finding if it began after a replay, or always."""
        seen.append(lane.rig().lane.stats.replays)
        lane.rig().step(steps.exact)
        if trace == "replays" and seen[-1]:
            yield lane.finding("GP01", expected="no step before this one", actual="one step")

    plan = PlannedLane(LaneUnderTest(DECODE), is_full=True)
    three = [
        Experiment(name, ("GP01",), leaves_a_replay, everywhere, shares_captures=name != "a")
        for name in "abc"
    ]
    (result,) = (r for r in suite.examine_lane(plan, QUICK, experiments=three) if r.rule == "GP01")
    assert result.outcome is Outcome.PASS
    assert seen == ([0, 1, 0, 1, 0] if trace == "replays" else [0, 1, 2])


def test_a_lane_with_a_finding_is_not_used_again() -> None:
    """After an experiment with a finding, the next one captures anew, and each step counts once."""
    seen: list[int] = []

    def finds(lane: LaneUnderTest, steps: Drawn) -> Iterator[Finding]:
        """Run a step, with a finding in the second experiment."""
        seen.append(lane.rig().lane.stats.replays)
        lane.rig().step(steps.exact)
        assert lane.steps_by_reason == {None: 1}
        if len(seen) in (2, 3):  # on used captures, and on new ones
            yield lane.finding("GP01", expected="a right step", actual="a wrong one")

    plan = PlannedLane(LaneUnderTest(DECODE), is_full=True)
    three = [Experiment(name, ("GP01",), finds, everywhere, shares_captures=True) for name in "abc"]
    options = replace(QUICK, shrink=False)
    (result,) = (r for r in suite.examine_lane(plan, options, experiments=three) if r.rule == "GP01")
    assert result.outcome is Outcome.FAIL
    assert seen == [0, 1, 0, 0]


# -- claims ----------------------------------------------------------------------------------------


def test_a_capability_is_what_is_declared_and_what_was_shown() -> None:
    """A declared capability that a failed lane needs disagrees; so does an undeclared one that works.

    All other capabilities agree. Only the undeclared one has a hint.
    """
    cls = with_claims({"heads mla": "since 0.4", "page_size 1": "not_implemented"})
    cls.capabilities = replace(cls.capabilities, page_sizes=frozenset({16, 64}), sinks=False)
    small, large = (config_of(f"decode-page{n}-gqa-float32") for n in (16, 64))
    found = {
        c.capability: c for c in claims_of(cls, [(small, True), (large, False)], [("feature sinks", True)])
    }
    assert (found["page_size 16"].shown, found["page_size 64"].shown) == ("pass", "fail")
    assert found["page_size 64"].disagrees
    assert found["heads mla"].declared == "since"
    assert found["heads mla"].since == "0.4"
    assert found["heads mla"].shown == "not_run"
    assert found["page_size 1"].declared == "not_implemented"
    assert found["feature sinks"].declared == "unsupported"
    assert found["feature sinks"].disagrees
    assert "declare it" in str(found["feature sinks"].hint)
    assert found["feature trees"].declared == "full"
    needed = {*("mode decode", "page_size 64", "heads gqa", "dtype float32", "graphs uniform_decode")}
    features = {"feature sliding_window", "feature softcap", "feature sinks", "feature fill_is_device_only"}
    assert {name for name, claim in found.items() if claim.disagrees} == needed | features
    assert [name for name, claim in found.items() if claim.hint] == ["feature sinks"]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"page_size 3": "unknown"}, "unknown capability"),
        ({"heads gqa": "unknown"}, "use full or since VERSION"),
        ({"heads gqa": "sinse 3"}, "use full or since VERSION"),
    ],
)
def test_claims_that_say_nothing_known_are_refused(said: dict[str, str], says: str) -> None:
    """An unknown capability, or a value that contradicts the declaration, is a `ConfigError`."""
    with pytest.raises(ConfigError, match=says):
        claims_of(with_claims(said), [])


def test_what_is_not_declared_is_probed_in_a_lane_that_needs_it() -> None:
    """Each undeclared capability is probed in a decode lane that needs it, unless a claim lists the gap."""
    cls = with_claims({"feature softcap": "not_implemented"})
    cls.capabilities = replace(cls.capabilities, page_sizes=frozenset({16}), sinks=False, softcap=False)
    probes = {name: config for name, _, config in undeclared(cls)}
    assert {*probes} == {"page_size 1", "page_size 64", "feature sinks"}
    assert probes["page_size 64"].page_size == 64
    assert probes["feature sinks"].sinks
    assert {c.case.mode for c in probes.values()} == {ForwardMode.DECODE}


def with_claims(claims: dict[str, str]) -> type[AttentionBackend]:
    """Return the suite's own backend with the given claims."""
    return type("Claims", (ReferenceBackend,), {"claims": claims})


@pytest.mark.sweep
def test_the_kits_own_runner_passes_in_every_mode() -> None:
    """The suite's own runner passes all rules in every mode, including verify, drafts and padded prefill."""
    plans = suite.planned_lanes(ReferenceBackend, ReferenceRunner, QUICK, kind="runner")
    assert {p.lane.config.case.plain for p in plans} == {*CASES, EMBEDS}
    for plan in plans:
        full = replace(plan, is_full=True)
        results = list(suite.examine_lane(full, replace(QUICK, shrink=False)))
        assert {r.outcome for r in results} == {Outcome.PASS}, results
