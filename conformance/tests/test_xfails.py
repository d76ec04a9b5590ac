"""Lists of known failures: valid entries, their effect on results, and stale entries."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, ForwardMode
from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_conformance import suite
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.results import Outcome, PluginResults, Result
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.xfails import Xfail, Xfails, plugin_home
from support import ListedCatalog

FULL = Options()
BACKEND, RUNNER = Target("attention_backend", "fake_one"), Target("runner", "fake_run")
PAIR = Target("attention_backend", "fake_one", "fake_run")
ENTRY = Xfail("attention_backend", "fake_one", "GP07", "draft*", "known", None, "p/xfails.toml, entry 1,")

Read = Callable[..., Xfails]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return a function that reads a list from the package of a fake wheel with the named plugins."""

    def with_list(text: str | bytes, *names: str, asked: tuple[Target, ...] = (BACKEND,)) -> Xfails:
        package = tmp_path / "fake_one"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        data = text if isinstance(text, bytes) else text.encode()
        (package / "xfails.toml").write_bytes(data)
        info = tmp_path / "fake_one-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-one\nVersion: 1.0\n")
        lines = ["[graphpact.attention_backends]"]
        for name in names or ("fake_one",):
            kind, _, plain = name.rpartition(":")
            lines += ["[graphpact.runners]"] if kind else []
            lines.append(f"{plain} = fake_one.deeper:Plugin")
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(tmp_path))
        return Xfails.read(asked, PluginCatalog.scan(env={}))

    return with_list


def result(lane: str, outcome: Outcome, rule: str | None = "GP07", check: str = "c") -> Result:
    """Return a result of one rule in one lane."""
    return Result(rule=rule, check=check, lane=lane, outcome=outcome)


def plugin(*results: Result, target: Target = BACKEND) -> PluginResults:
    """Return the results of a target."""
    return PluginResults(
        kind=target.kind,
        name=target.name,
        partner=target.partner,
        distribution="d",
        version="1",
        contract="1",
        results=list(results),
    )


def judged(
    *results: Result, entry: Xfail = ENTRY, options: Options = FULL, target: Target = BACKEND
) -> list[tuple[str, str]]:
    """Return lane and outcome of each result after a run is judged with one entry."""
    xfails = Xfails([entry])
    found = plugin(*(xfails.expect(target, r) for r in results), target=target)
    return [(r.lane, r.outcome.value) for r in xfails.judge([found], options)[0].results]


GOOD = '[[xfail]]\nrule = "GP07"\nreason = "known"\n'


class MissesOne(ReferenceBackend):
    """A backend whose replays do not write one tensor."""

    capabilities = replace(ReferenceBackend.capabilities, modes=frozenset({ForwardMode.DECODE}))
    fill_is_device_only = False

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Refresh all but one tensor."""
        self.fill_metadata(view, replace(metadata, request=metadata.request.clone()))


@pytest.mark.sweep
def test_a_backend_with_known_failures_alone_is_conformant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken rule is the only failure of a whole run, and no claim fails; if listed, none."""
    catalog = ListedCatalog(mine=MissesOne)
    monkeypatch.setattr(PluginCatalog, "scan", lambda: catalog)
    target = Target("attention_backend", "mine")
    results: list[Result] = []
    options = Options(size="quick", examples=1, shrink=False)
    found = suite.examine(target, options, Mock(found=results.append))
    assert {c.shown for c in found.claims if c.capability == "mode decode"} == {"fail"}
    assert {(r.rule, r.check == "claims") for r in results if r.outcome.is_failure} == {("GP02", False)}
    xfails = Xfails([Xfail("attention_backend", "mine", "GP02", "*", "known", None, "e")])
    listed = found.model_copy(update={"results": [xfails.expect(target, r) for r in results]})
    assert listed.is_conformant


def test_a_list_is_read_without_an_import(read: Read) -> None:
    """The list is read without an import; a listed failure becomes an xfail with reason and issue."""
    xfails = read(GOOD + 'lane = "draft*"\nissue = "https://example.org/7"\n')
    told = xfails.expect(BACKEND, result("draft bs4", Outcome.FAIL))
    assert (told.outcome, told.reason) == (Outcome.XFAIL, "known (https://example.org/7)")
    assert "fake_one" not in sys.modules


@pytest.mark.parametrize(
    "other",
    [
        result("decode", Outcome.FAIL),
        result("draft bs4", Outcome.FAIL, rule="GP08"),
        result("draft bs4", Outcome.FAIL, rule=None),
        result("draft bs4", Outcome.ERROR),
        result("draft bs4", Outcome.PASS),
        result("Draft bs4", Outcome.FAIL),
    ],
)
def test_an_entry_excuses_nothing_else(other: Result) -> None:
    """A result with another lane or rule, without a rule, or with the outcome error or pass is unchanged."""
    assert Xfails([ENTRY]).expect(BACKEND, other) == other


@pytest.mark.parametrize(
    ("target", "excused"),
    [(BACKEND, True), (PAIR, True), (RUNNER, False), (Target("runner", "fake_one"), False)],
)
def test_an_entry_concerns_its_plugin_alone_and_in_pairs(target: Target, *, excused: bool) -> None:
    """An entry applies to its plugin alone and in pairs, not to its partner or a runner of the same name."""
    told = Xfails([ENTRY]).expect(target, result("draft", Outcome.FAIL))
    assert (told.outcome is Outcome.XFAIL) == excused


def test_an_entry_of_a_runner_holds_in_its_pairs() -> None:
    """An entry of a runner applies in its pairs with backends."""
    entry = Xfail("runner", "fake_run", "GP12", "*", "known", None, "e")
    told = Xfails([entry]).expect(PAIR, result("pair", Outcome.FAIL, rule="GP12"))
    assert told.outcome is Outcome.XFAIL


def test_a_pass_is_an_xpass_only_where_every_lane_passes() -> None:
    """One failing lane keeps an entry valid; with none, each covered pass is an xpass that names it."""
    failing = [result("draft a", Outcome.PASS), result("draft b", Outcome.FAIL)]
    assert judged(*failing) == [("draft a", "pass"), ("draft b", "xfail")]
    passing = [result("draft a", Outcome.PASS), result("decode", Outcome.PASS)]
    assert judged(*passing) == [("draft a", "xpass"), ("decode", "pass")]
    (told,) = Xfails([ENTRY]).judge([plugin(passing[0])], Options())[0].results
    assert "remove the entry" in (told.reason or "")
    assert "p/xfails.toml, entry 1" in (told.reason or "")
    assert told.counts_against


def test_an_entry_is_judged_over_all_targets_of_its_plugin() -> None:
    """A failure in a pair keeps the entry valid for the plugin alone; without one, both are xpasses."""
    xfails = Xfails([ENTRY])
    alone = plugin(result("draft", Outcome.PASS))
    pair = plugin(xfails.expect(PAIR, result("draft", Outcome.FAIL)), target=PAIR)
    assert xfails.judge([alone, pair], Options()) == [alone, pair]
    mended = plugin(result("draft", Outcome.PASS), target=PAIR)
    told = [r.outcome for p in xfails.judge([alone, mended], Options()) for r in p.results]
    assert told == [Outcome.XPASS, Outcome.XPASS]


@pytest.mark.parametrize("outcome", [Outcome.NOT_RUN, Outcome.UNSUPPORTED])
def test_what_was_not_run_says_nothing(outcome: Outcome) -> None:
    """A result that is not_run or unsupported makes an entry neither stale nor an xpass."""
    assert judged(result("draft", outcome)) == [("draft", outcome.value)]


def test_an_entry_that_covers_nothing_is_a_failure() -> None:
    """An entry without results in a full run is stale: a failure that names the entry."""
    told = Xfails([ENTRY]).judge([plugin(result("decode", Outcome.PASS))], Options())[0]
    assert told.results[0].outcome is Outcome.PASS
    stale = told.results[1]
    assert (stale.outcome, stale.check, stale.rule) == (Outcome.FAIL, "xfails", None)
    assert stale.findings[0].field == ENTRY.entry
    assert stale.counts_against


@pytest.mark.parametrize(
    "options",
    [Options(only=frozenset({"GP01"})), Options(lanes=("decode*",)), Options(size="quick")],
)
def test_a_narrowed_run_calls_nothing_stale(options: Options) -> None:
    """A run of selected rules or lanes, or a quick run, reports no stale entry."""
    assert judged(result("decode", Outcome.PASS), options=options) == [("decode", "pass")]


def test_a_run_of_some_lanes_makes_no_xpass() -> None:
    """A run of selected lanes has no xpass, since another lane may fail; a run of selected rules has one."""
    passed = result("draft a", Outcome.PASS)
    assert judged(passed, options=Options(lanes=("draft a",))) == [("draft a", "pass")]
    assert judged(passed, options=Options(only=frozenset({"GP07"}))) == [("draft a", "xpass")]


@pytest.mark.parametrize(
    "lost",
    [
        result("w", Outcome.ERROR, rule=None, check="suite"),
        result("w", Outcome.FAIL, rule=None, check="ends"),
    ],
)
def test_a_run_that_lost_work_judges_no_entry(lost: Result) -> None:
    """If a process was lost or the suite had a fault, no entry is an xpass or stale."""
    kept = result("draft", Outcome.PASS)
    lost_lane = (lost.lane, lost.outcome.value)
    assert judged(kept, lost) == [("draft", "pass"), lost_lane]
    assert judged(lost) == [lost_lane]


@settings(derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["draft a", "draft b", "decode"]),
            st.sampled_from(["GP07", "GP08"]),
            st.sampled_from([Outcome.PASS, Outcome.FAIL, Outcome.NOT_RUN]),
        ),
        max_size=6,
    )
)
def test_no_failure_gets_lost(drawn: list[tuple[str, str, Outcome]]) -> None:
    """Results keep their number and order, and only covered results change; a stale entry adds a failure."""
    found = [result(lane, outcome, rule) for lane, rule, outcome in drawn]
    told = judged(*found)
    covered = [lane.startswith("draft") and rule == "GP07" for lane, rule, _ in drawn]
    fails = any(c and o is Outcome.FAIL for c, (_, _, o) in zip(covered, drawn, strict=True))
    expected = []
    for is_covered, (lane, _, outcome) in zip(covered, drawn, strict=True):
        changed = {Outcome.FAIL: "xfail", Outcome.PASS: "pass" if fails else "xpass"}
        expected.append((lane, changed.get(outcome, outcome.value) if is_covered else outcome.value))
    assert told == expected + ([] if any(covered) else [("draft*", "fail")])


BAD = {
    "no toml": ("[[xfail]\n", "is not valid TOML: .*line 1"),
    "no text": (b"\xff", "is not valid TOML"),
    "another table": ("[[xfails]]\n", "unknown key 'xfails'"),
    "no array": ("[xfail]\n", "not an array of tables"),
    "no tables": ("xfail = [1]", "entry 1 is not a table"),
    "no reason": (GOOD + '[[xfail]]\nrule = "GP07"\n', "entry 2 has no reason"),
    "an empty reason": (
        '[[xfail]]\nrule = "GP07"\nreason = " "\n',
        "entry 1: reason = ' ' is not a string",
    ),
    "no rule": ('[[xfail]]\nreason = "r"\n', "entry 1 has no rule"),
    "an unknown rule": (
        '[[xfail]]\nrule = "GP77"\nreason = "r"\n',
        "entry 1: unknown rule 'GP77'",
    ),
    "an unknown key": (
        GOOD + 'lanes = "x"\n',
        "entry 1: unknown key 'lanes'\n  help: did you mean 'lane'",
    ),
    "a number": (GOOD + "lane = 3\n", "entry 1: lane = 3 is not a string"),
    "another's plugin": (
        GOOD + 'plugin = "fake_onne"\n',
        "plugin = 'fake_onne'.*\n.*mean 'fake_one'",
    ),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_a_bad_list_is_a_usage_error(read: Read, text: str | bytes, says: str) -> None:
    """An invalid list is a usage error that names the file, the line or the entry, and the fault."""
    with pytest.raises(UsageError, match=f"(?s)fake_one/xfails.toml.*{says}"):
        read(text)


TWO = ("fake_one", "runner:fake_run")


def test_a_wheel_of_two_plugins_says_which(read: Read) -> None:
    """If a distribution has two plugins, an entry without a plugin is refused, and the hint names both."""
    with pytest.raises(UsageError, match="use one of attention_backend:fake_one, runner:fake_run"):
        read(GOOD, *TWO)


@pytest.mark.parametrize("spelling", ["fake_run", "runner:fake_run"])
def test_an_entry_of_another_plugin_of_the_wheel(read: Read, spelling: str) -> None:
    """An entry for the other plugin of the wheel has no effect on this plugin."""
    xfails = read(GOOD + f'plugin = "{spelling}"\n', *TWO)
    failed = result("draft", Outcome.FAIL)
    assert xfails.expect(BACKEND, failed) == failed
    assert xfails.judge([plugin(failed)], Options()) == [plugin(failed)]


def test_both_plugins_of_a_wheel_read_one_list_once(read: Read) -> None:
    """Two targets of one wheel share one list, each with its own entries, and a stale entry fails once."""
    text = "".join(GOOD + f'plugin = "{name}"\n' for name in ("fake_one", "fake_run"))
    xfails = read(text, *TWO, asked=(BACKEND, RUNNER))
    told = xfails.judge([plugin(), plugin(target=RUNNER)], Options())
    assert [len(p.results) for p in told] == [1, 1]


def test_the_home_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's home is its outermost package, without namespaces, or its one module; it is not imported."""
    for name in ("fake_ns/mine/deep/__init__.py", "fake_ns/mine/__init__.py", "fake_single.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugin_home("fake_ns.mine.deep:Plugin") == tmp_path / "fake_ns" / "mine"
    assert plugin_home("fake_single:Plugin") == tmp_path / "fake_single.py"
    assert plugin_home("fake_absent.deep:Plugin") is None
