"""Graph drivers under ``graphpact check``: their promises, strict modes, results, and the ends of processes.

The bugs of `graphpact_museum.drivers` break most promises. The drivers here break the others.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import graphpact
from fake_site import installed
from graphpact.errors import UnknownPluginError, UsageError
from graphpact.graphs import Graph, GraphDriver
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_conformance import suite
from graphpact_conformance.contracts.examine import examine_contract, examine_contract_lane
from graphpact_conformance.drivers import acts, promises, strictness
from graphpact_conformance.drivers.driver_lanes import OF_DRIVERS, DriverLane
from graphpact_conformance.isolation import supervise
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.merge import merged
from graphpact_conformance.results import Environment, ExitCode, Outcome, PluginResults, Report, Result
from graphpact_conformance.rules import EVERY_RULE, RULES
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.xfails import Xfails
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cuda_graph.driver import CudaDriver
from graphpact_tape.tape import TapeDriver
from support import ListedCatalog

CPU = torch.device("cpu")
FULL = Options()
TAPE = Target("graph_driver", "tape")


class Notes:
    """A listener that keeps all work and results."""

    def __init__(self) -> None:
        self.works: list[str] = []
        self.results: list[Result] = []

    def begins(self, work: str) -> None:
        """Keep the name of the work."""
        self.works.append(work)

    def found(self, result: Result) -> None:
        """Keep the result."""
        self.results.append(result)


def outcomes(lane: DriverLane, options: Options = FULL) -> dict[str | None, Outcome]:
    """Return the outcome of each rule in one lane."""
    return {result.rule: result.outcome for result in examine_contract_lane(lane, options)}


def test_a_driver_of_an_earlier_contract_is_not_held_to_a_later_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rule since version 2 is not checked of a driver of version 1, and the reason has both versions."""
    monkeypatch.setitem(EVERY_RULE, "GP14", replace(RULES["GP14"], since=2))
    lane = DriverLane(KeepsWorking, is_strict=False)
    for contract, expected in ((1, Outcome.UNSUPPORTED), (2, Outcome.FAIL)):
        works: list[str] = []
        results = examine_contract_lane(lane, FULL, works.append, version=contract)
        found = {result.rule: result for result in results}
        assert found["GP14"].outcome is expected
        assert any("released" in work for work in works) is (contract == 2)
    (old,) = examine_contract_lane(lane, Options(only=frozenset({"GP14"})), version=1)
    assert old.reason == "the plugin has contract version 1; the rule is in force since 2"


# -- the checks --------------------------------------------------------------------------------------


class KeepsWorking(TapeDriver):
    """A driver that replays released graphs."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Return a graph that does not release."""
        graph = super().capture(fn, warmup=warmup)
        graph.release = lambda: None  # type: ignore[method-assign]
        return graph


class NoName(TapeDriver):
    """A driver whose name is no string."""

    name: Any = None


class DropsActivations(TapeDriver):
    """A driver that does not record `relu_`."""

    dropped = "relu_"

    def record(self, recorder: Any, fn: Callable[[], Any]) -> Any:
        """Record, and drop some calls."""
        recording = super().record(recorder, fn)
        for segment in recording.segments:
            segment.calls[:] = [call for call in segment.calls if self.dropped not in str(call.op)]
        return recording


class DropsCustomOperators(DropsActivations):
    """A driver that does not record operators that torch does not know."""

    dropped = "gather_into"


class HasOneGraph(TapeDriver):
    """A driver whose graphs all replay the last one that it captured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.graphs: list[Callable[[], None]] = []

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Capture, and forget the graphs before."""
        graph: Any = super().capture(fn, warmup=warmup)
        self.graphs.append(graph.replay)

        def replays() -> None:
            self.graphs[-1]()

        graph.replay = replays
        captured: Graph = graph
        return captured


class TakesAnyForm(TapeDriver):
    """A driver whose replays make eager calls and drop their results."""

    def record(self, recorder: Any, fn: Callable[[], Any]) -> Any:
        """Record, and take the results of the capture."""
        recording = super().record(recorder, fn)
        for call in recording.parts[1::2]:
            call.fn = lambda *args, fn=call.fn, result=call.result: (fn(*args), result)[1]
        return recording


class AlwaysCaptures(TapeDriver):
    """A driver that says that it captures after its first capture."""

    is_capturing = True  # type: ignore[assignment]


class Nests(TapeDriver):
    """A driver that accepts a capture inside another."""

    def refuse_nested_capture(self) -> None:
        """Refuse nothing."""


class LeavesGarbage(TapeDriver):
    """A driver that disables the garbage collector, and enables it again only after a success."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Capture without garbage collection."""
        gc.disable()
        graph = super().capture(fn, warmup=warmup)
        gc.enable()
        return graph


class ReleasesNothing(TapeDriver):
    """A driver whose released graphs keep outputs and memory, and refuse their replay."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Capture a graph that keeps everything."""
        graph: Any = super().capture(fn, warmup=warmup)
        release, kept = graph.release, (graph.outputs, graph.pool_nbytes)

        def keeps() -> None:
            release()
            graph.outputs, graph.pool_nbytes = kept

        graph.release = keeps
        captured: Graph = graph
        return captured


LOCAL = {
    "it_says_where_it_is_available": NoName,
    "a_model_sized_region": DropsActivations,
    "graphs_of_one_driver_interleave": HasOneGraph,
    "what_an_operator_of_ones_own_writes_is_written": DropsCustomOperators,
    "an_eager_call_may_not_change_its_form": TakesAnyForm,
    "outputs_that_are_kept_are_copied": HasOneGraph,
    "it_says_when_it_captures": AlwaysCaptures,
    "captures_do_not_nest": Nests,
    "garbage_is_not_collected_into_a_graph": LeavesGarbage,
    "it_says_how_much_it_keeps": ReleasesNothing,
    "release_lets_go_of_outputs": ReleasesNothing,
}
"""A driver that breaks a promise, for each promise that no exhibit of the museum breaks."""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LOCAL)
def test_a_broken_promise_is_found(name: str) -> None:
    """A driver that breaks one promise fails its check; its evidence is one sentence or more."""
    lane = DriverLane(LOCAL[name], is_strict=False)
    options = Options(only=frozenset({promises.CHECKS[name].rule} - {None}))  # type: ignore[arg-type]
    broken = [
        f for r in examine_contract_lane(lane, options) for f in r.findings if f.field and name in f.field
    ]
    assert [f.expected for f in broken] == [promises.CHECKS[name].sentence]
    assert broken[0].actual
    assert broken[0].help


def test_every_check_is_complete() -> None:
    """A check has a unique name, a sentence, a part of the interface, a fix, and a known rule or none."""
    checks = [*promises.CHECKS.values(), *strictness.CHECKS.values()]
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.sentence.endswith(".")
        assert check.at
        assert check.fix
        assert check.rule is None or check.rule in RULES


@pytest.mark.parametrize(
    ("verdict", "outcome", "passes"),
    [
        ("fails", "refused", True),
        ("fails", "same", False),
        ("fails", "hidden", False),
        ("wrong result", "same", True),
        ("wrong result", "hidden", False),
        ("undefined", "shows", True),
        ("undefined", "same", False),
        ("undefined", "hidden", False),
        ("frozen", "same", True),
        ("frozen", "hidden", False),
        ("legal", "same", True),
        ("legal", "refused", True),
        ("legal", "shows", False),
    ],
)
def test_a_strict_driver_may_do_more_than_cuda_and_hide_nothing(
    verdict: str, outcome: strictness.ActOutcome, *, passes: bool
) -> None:
    """A strict driver passes an act exactly if it refuses it, shows it, or does what CUDA does."""
    name = next(
        n for n, row in strictness.ROWS.items() if n in acts.ACTS and strictness.cuda_verdict(row) == verdict
    )
    done = strictness.Performed(outcome, "the evidence", ValueError() if outcome == "refused" else None)
    with patch.object(strictness, "perform", return_value=done):
        breach = strictness.CHECKS[name].breach(lambda: TapeDriver(CPU, strict=True))
    assert (breach is None) == passes
    assert passes or "the evidence" in str(breach)


# -- the results -------------------------------------------------------------------------------------


def test_the_tape_keeps_every_promise() -> None:
    """The tape passes every rule of its lanes; the lane ``strict`` has the acts, and the result its names."""
    heard = Notes()
    found = examine_contract(OF_DRIVERS, TAPE, FULL, heard)
    assert (found.kind, found.name, found.drivers) == ("graph_driver", "tape", ["tape"])
    assert {result.outcome for result in heard.results} == {Outcome.PASS}
    assert [r.lane for r in heard.results] == sorted(r.lane for r in heard.results)
    works = [f"fast :: {name}" for name in promises.CHECKS]
    works += [f"strict :: {name}" for name in (*promises.CHECKS, *strictness.CHECKS)]
    assert [work for work in heard.works if "unavailable" not in work] == works
    checked = sum(result.examples for result in heard.results)
    assert checked == 2 * len(promises.CHECKS) + len(strictness.CHECKS)
    assert any("acts" in text for text in found.not_shown)


def test_the_parts_of_a_run_are_the_whole() -> None:
    """Two parts of a run, joined, have the results of one run, in its order."""
    options = Options(only=frozenset({"GP16", "GP08"}))
    whole = Notes()
    examine_contract(OF_DRIVERS, TAPE, options, whole)
    parts = []
    for first in (0, 1):
        heard = Notes()
        part = examine_contract(OF_DRIVERS, TAPE, options, heard, part=(first, 2))
        parts.append(part.model_copy(update={"results": heard.results}))
    joined = merged(parts)
    told = [(r.rule, r.check, r.lane, r.outcome) for r in joined.results]
    assert told == [(r.rule, r.check, r.lane, r.outcome) for r in whole.results]
    assert joined.drivers == ["tape"]


def test_a_driver_without_a_strict_mode_has_one_lane() -> None:
    """A driver that claims no strict mode is checked in the lane ``fast`` alone; ``--lane`` selects lanes."""
    assert [str(lane) for lane in OF_DRIVERS.lanes_of(InductorDriver, FULL)] == ["fast"]
    assert [str(lane) for lane in OF_DRIVERS.lanes_of(TapeDriver, FULL)] == ["fast", "strict"]
    assert [str(lane) for lane in OF_DRIVERS.lanes_of(TapeDriver, Options(lanes=("str*",)))] == ["strict"]


def test_an_unavailable_driver_is_not_run_and_says_why() -> None:
    """Where a driver cannot record, each rule is not run with its reason, and the exit code says so."""
    heard = Notes()
    with patch.object(CudaDriver, "unavailable", return_value="no device here"):
        found = examine_contract(OF_DRIVERS, Target("graph_driver", "cuda"), FULL, heard)
    assert {(r.outcome, r.reason) for r in heard.results} == {(Outcome.NOT_RUN, "no device here")}
    assert found.drivers == []
    assert report_of(found, heard).exit_code is ExitCode.NOTHING_RAN


def report_of(found: PluginResults, heard: Notes) -> Report:
    """Return the report of one driver."""
    return Report(
        environment=Environment(graphpact="0", python="3", torch="2", platform="here", device="cpu"),
        seed=0,
        examples=1,
        started="",
        seconds=0,
        plugins=[found.model_copy(update={"results": heard.results})],
    )


class CannotSay(TapeDriver):
    """A driver whose `unavailable` raises."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Raise an error."""
        raise OSError(f"no library for {device}")


class NeverEndsACapture(TapeDriver):
    """A driver that remains in a capture after an error."""

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Capture, and stay in the region if it raises."""
        try:
            return super().capture(fn, warmup=warmup)
        except Exception:
            GraphDriver._capturing = self
            raise


def test_a_driver_that_cannot_say_where_it_runs_fails_that_promise() -> None:
    """An error of `unavailable` is the finding of one promise; the others are checked."""
    told = outcomes(DriverLane(CannotSay, is_strict=False))
    assert {rule for rule, outcome in told.items() if outcome is Outcome.FAIL} == {None}


def test_what_a_check_leaves_behind_fails_no_other() -> None:
    """A driver that stays in a capture after an error fails what is about errors, and no later promise."""
    told = outcomes(DriverLane(NeverEndsACapture, is_strict=False))
    broken = {rule for rule, outcome in told.items() if outcome is Outcome.FAIL}
    assert broken <= {"GP19", "GP20"}
    assert "GP19" in broken
    assert GraphDriver._capturing is None


class StrictInName(TapeDriver):
    """A driver that claims a strict mode but has only the fast one."""

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device)
        self.strict = strict


def test_a_strict_mode_that_is_not_kept_fails_by_its_acts() -> None:
    """A strict mode that is the fast one fails for freed inputs, poison, waits and captures that run."""
    told = outcomes(DriverLane(StrictInName, is_strict=True))
    broken = {rule for rule, outcome in told.items() if outcome is Outcome.FAIL}
    assert {"GP14", "GP15", "GP16", "GP19"} <= broken
    assert Outcome.FAIL not in outcomes(DriverLane(StrictInName, is_strict=False)).values()


def test_an_act_that_a_device_cannot_perform_is_not_run() -> None:
    """On a GPU, acts without a defined outcome are not run, and their result says why."""
    lane = DriverLane(TapeDriver, is_strict=True, device=torch.device("cuda"))
    for name, check in strictness.CHECKS.items():
        assert (lane.leaves_out(check) is None) == acts.ACTS[name].gpu
    assert all(lane.leaves_out(check) is None for check in promises.CHECKS.values())


def test_pytest_has_a_test_for_each_rule_of_a_driver() -> None:
    """`graphpact.conformance("driver:tape")` passes its rules, and skips those that no check has."""
    mark = graphpact.conformance("driver:tape", lanes=("fast",))
    checks = {check.rule.id: check for (check,) in (p.values for p in mark.args[1]) if check.rule}
    checks["GP16"]()
    with pytest.raises(pytest.skip.Exception, match="no lane that checks GP17"):
        checks["GP17"]()


# -- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tape", "driver:tape", "graph_driver:tape"])
def test_a_driver_has_three_spellings(name: str) -> None:
    """A driver is found by its name, where no other kind has it, and by its kind and name."""
    assert suite.targets([name], PluginCatalog.scan()) == [TAPE]


def test_a_name_of_two_kinds_is_asked_about() -> None:
    """A name of a driver and of another plugin is refused; the hint has both spellings, which work."""

    class Both(TapeDriver):
        """A driver."""

    catalog = ListedCatalog(mine=Both)
    runner = ListedCatalog(mine=ReferenceRunner)
    infos = catalog.infos
    with patch.object(catalog, "infos", lambda kind=None: [*runner.infos(kind), *infos(kind)]):
        with pytest.raises(UsageError, match="a runner and of a graph driver") as refused:
            suite.targets(["mine"], catalog)
        assert "runner:mine or graph_driver:mine" in str(refused.value.hint)
        assert suite.targets(["driver:mine"], catalog) == [Target("graph_driver", "mine")]


def test_an_unknown_driver_is_refused() -> None:
    """An unknown name is refused in the same way with and without a kind."""
    with pytest.raises(UnknownPluginError):
        suite.targets(["driver:tapes"], PluginCatalog.scan())


def test_a_list_of_checks_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """``check --list driver:tape`` prints the checks of each lane; ``--only`` selects those of a rule."""
    assert main(["check", "--list", "driver:tape"]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert all(name in out for name in (*promises.CHECKS, *strictness.CHECKS))
    assert main(["check", "--list", "driver:tape", "--only", "GP16", "--lane", "fast"]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert "side_streams_fork_and_join" in out
    assert "replay_runs_no_python" not in out


# -- processes ---------------------------------------------------------------------------------------

HOSTILE = """
    import os, time
    from graphpact_tape.tape import TapeDriver

    class Nests(TapeDriver):
        has_strict_mode = False

        def refuse_nested_capture(self):
            if self.is_capturing:
                self.end()

    class Hangs(Nests):
        name = "hangs"

        def end(self):
            time.sleep(600)

    class Leaves(Nests):
        name = "leaves"

        def end(self):
            os._exit(0)
"""
XFAIL = """
    [[xfail]]
    rule = "GP10"
    reason = "known"
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install drivers that hang and that end their process inside a nested capture."""
    with installed(tmp_path / "site", monkeypatch) as site:
        offers = {"hangs": "Hangs", "leaves": "Leaves"}
        site.add("drivers", HOSTILE, offers=offers, group="graphpact.graph_drivers")
        yield site


@pytest.mark.sweep
@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("hangs", "did not finish within 8 s", marks=pytest.mark.sweep),
        ("leaves", "it ended the process: exit status 0"),
    ],
)
def test_a_driver_that_hangs_or_ends_the_process_fails_the_check_at_fault(name: str, why: str) -> None:
    """The check during which a driver hangs or ends its process fails; the others of its rule are checked."""
    report = supervise.check_plugins(
        [f"driver:{name}"], Options(only=frozenset({"GP20"})), timeout=8, workers=1
    )
    (plugin,) = report.plugins
    (ended,) = [r for r in plugin.results if r.check == "ends"]
    assert ended.lane == "fast :: captures_do_not_nest"
    (found,) = ended.findings
    assert why in found.actual
    assert f"graphpact check driver:{name} --only GP20 --lane 'fast'" in str(found.reproduce)
    assert [r.outcome for r in plugin.results if r is not ended] == [Outcome.PASS]
    assert report.exit_code is ExitCode.NOT_CONFORMANT


@pytest.mark.parametrize("plugin", [None, "hangs", "driver:hangs", "graph_driver:hangs"])
def test_a_known_failure_of_a_driver_is_listed(
    plugin: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list in a driver's package excuses its rule, by name or as the only plugin of its distribution."""
    lines = [] if plugin is None else [f'plugin = "{plugin}"']
    target = Target("graph_driver", "hangs")
    failed = Result(rule="GP10", check="c", lane="fast", outcome=Outcome.FAIL)
    with installed(tmp_path / "site", monkeypatch) as site:
        site.add("drivers", HOSTILE, offers={"hangs": "Hangs"}, group="graphpact.graph_drivers")
        text = XFAIL.replace("    ", "") + "\n".join(lines)
        with patch("graphpact_conformance.xfails.plugin_home", return_value=tmp_path):
            (tmp_path / "xfails.toml").write_text(text)
            known = Xfails.read([target], PluginCatalog.scan())
    assert known.expect(target, failed).outcome is Outcome.XFAIL
