"""Tiers of plugins: what ``graphpact.toml`` may say, the tier that follows, and statements that are wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_conformance.report import to_badge
from graphpact_conformance.report.digest import tier_text
from graphpact_conformance.results import (
    Claim,
    Environment,
    Outcome,
    PluginResults,
    Report,
    Result,
    TierVerdict,
)
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.tier_rules import TIER_RULES, TIERS
from graphpact_conformance.tiers import judge_tiers
from graphpact_conformance.tiers.proofs import HAS_INVARIANTS, HAS_PLAN, PROOFS, TWO_BODIES
from graphpact_conformance.xfails import Xfails

METADATA = """\
Metadata-Version: 2.4
Name: fake-tiered
Version: 1.0
License-Expression: Apache-2.0
Requires-Dist: graphpact>=0.1,<0.2

# fake_tiered, a backend
"""
GOOD = Result(rule="GP01", check="c", lane="decode", outcome=Outcome.PASS)
BAD = Result(rule="GP01", check="c", lane="decode", outcome=Outcome.FAIL)
PROVEN = Claim(capability="mode decode", declared="full", shown="pass")


def table(**changed: Any) -> str:
    """Return a ``graphpact.toml`` of a silver backend, with changed values of rules."""
    values: dict[str, Any] = {
        name: "done" if rule.takes is None else "to do"
        for name, rule in TIER_RULES.items()
        if rule.concerns("attention_backend")
    }
    values |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            ((key, text),) = value.items()
            lines.append(f"{name} = {{ {key} = {json.dumps(text)} }}")
        elif value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(["[fake_tiered]", *lines])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the package of a fake wheel with one backend, which is silver."""
    folder = tmp_path / "fake_tiered"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A backend."""\nraise RuntimeError("imported")\n')
    (folder / "graphpact.toml").write_text(table())
    info = tmp_path / "fake_tiered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    lines = ["[graphpact.attention_backends]", "fake_tiered = fake_tiered.backend:Plugin"]
    lines += ["[graphpact.contract]", "1 = graphpact.hookspecs:CONTRACT_VERSION"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def results(**changed: Any) -> PluginResults:
    """Return the results of a whole, conformant run of the backend."""
    values: dict[str, Any] = {
        "kind": "attention_backend",
        "name": "fake_tiered",
        "distribution": "fake-tiered",
        "version": "1.0",
        "contract": "1",
        "claims": [PROVEN],
        "results": [GOOD],
    }
    return PluginResults(**values | changed)


def judged(options: Options | None = None, **changed: Any) -> PluginResults:
    """Return the results of a run after the statements of the backend were verified."""
    catalog = PluginCatalog.scan(env={})
    known = Xfails.read([Target("attention_backend", "fake_tiered")], catalog)
    (found,) = judge_tiers([results(**changed)], catalog, known, options or Options())
    return found


def verdict(options: Options | None = None, **changed: Any) -> TierVerdict:
    """Return the tier of the backend."""
    tier = judged(options, **changed).tier
    assert tier is not None
    return tier


def wrong(**changed: Any) -> dict[str, str]:
    """Return what is wrong with each rule that is not as stated."""
    return {rule.rule: rule.wrong for rule in verdict(**changed).rules if rule.wrong is not None}


def test_a_tier_is_what_its_rules_and_those_below_say(package: Path) -> None:
    """Each rule that is to do takes its tier and those above; an exemption with a reason keeps it."""
    found = judged()
    assert found.tier is not None
    assert found.tier.tier == "silver"
    assert found.results == [GOOD]
    assert tier_text(found) == "tier silver; gold needs gpu-run, recordings, guarded"
    for name, rule in TIER_RULES.items():
        (package / "graphpact.toml").write_text(table(**{name: "to do"}))
        below = {"bronze": None, "silver": "bronze", "gold": "silver"}[rule.tier]
        assert verdict().tier == below, name
        if rule.exempt:
            (package / "graphpact.toml").write_text(table(**{name: {"exempt": "it has a reason"}}))
            assert verdict().tier == "silver", name
    everything = {name: {"exempt": "no GPU at hand"} for name, rule in TIER_RULES.items() if rule.takes}
    (package / "graphpact.toml").write_text(table(**everything))
    assert verdict().tier == "gold"
    assert tier_text(judged()) == "tier gold"


def test_a_plugin_that_states_nothing_has_no_tier(package: Path) -> None:
    """Without the file, or without its table, a run is as before; pairs have no tier."""
    assert judged(partner="a_runner").tier is None
    (package / "graphpact.toml").write_text("[another]\n")
    assert judged().tier is None
    (package / "graphpact.toml").unlink()
    assert judged() == results()
    assert tier_text(judged()) is None


def test_a_wrong_statement_is_a_failure_of_the_run(package: Path) -> None:
    """What is stated as done and is not makes the plugin fail, and names the rule and the reason."""
    found = judged(traits=[TWO_BODIES])
    assert found.tier is not None
    assert found.tier.tier == "bronze"
    assert not found.is_conformant
    (failure,) = (result for result in found.results if result.check == "tiers")
    (finding,) = failure.findings
    assert finding.field == "graphpact.toml: one-body"
    assert finding.expected == TIER_RULES["one-body"].sentence
    assert "another body" in finding.actual
    (package / "graphpact.toml").write_text(table(one_body={"exempt": "the host knows the longest request"}))
    assert judged(traits=[TWO_BODIES]).is_conformant


def test_a_failure_of_the_run_is_not_told_twice(package: Path) -> None:
    """That the run fails takes the tier, and is no finding beside those of the run."""
    del package
    found = judged(results=[GOOD, BAD], claims=[PROVEN])
    assert found.tier is not None
    assert found.tier.tier is None
    assert [rule.rule for rule in found.tier.rules if rule.wrong] == ["conformant"]
    assert found.results == [GOOD, BAD]


def write_metadata(package: Path, old: str, new: str) -> None:
    """Change the metadata of the wheel."""
    file = package.parent / "fake_tiered-1.0.dist-info/METADATA"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


BREAKS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "declared": (
        lambda package: write_metadata(package, ">=0.1,<0.2", ">=0.1"),
        {},
        "the requirement 'graphpact>=0.1' has no upper bound",
    ),
    "licensed": (
        lambda package: write_metadata(package, "License-Expression: Apache-2.0\n", ""),
        {},
        "the metadata of its distribution has no licence",
    ),
    "conformant": (lambda _: None, {"results": [GOOD, BAD]}, "this run is not conformant"),
    "documented": (
        lambda package: (package / "deep.py").write_text('"""Deep."""\nclass Kernel:\n    pass\n'),
        {},
        "deep.py: Kernel has no docstring",
    ),
    "known-failures": (
        lambda package: (package / "xfails.toml").write_text('[[xfail]]\nrule = "GP07"\nreason = "slow"\n'),
        {},
        "fake_tiered/xfails.toml, entry 1, names no issue",
    ),
    "proven": (
        lambda _: None,
        {"claims": [PROVEN, Claim(capability="feature sinks", declared="full", shown="not_run")]},
        "no lane of the run proves feature sinks",
    ),
    "one-body": (lambda _: None, {"traits": [TWO_BODIES]}, "its replays fill metadata by another body"),
    "plan-invariants": (lambda _: None, {"traits": [HAS_PLAN]}, "it has a plan, and declares no"),
}


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ('graphpact[conformance]; extra == "test"', "conformant"),
        ('graphpact-tape; extra == "test"', "wrong"),
        ("graphpact[conformance]", "conformant"),
    ],
)
def test_a_bound_that_always_holds_is_enough(more: str, outcome: str, package: Path) -> None:
    """A requirement without a bound is one more on a distribution that has a bound in every installation."""
    write_metadata(package, ">=0.1,<0.2\n", f">=0.1,<0.2\nRequires-Dist: {more}\n")
    assert judged().is_conformant is (outcome == "conformant")


@pytest.mark.parametrize("rule", BREAKS)
def test_each_rule_is_verified(rule: str, package: Path) -> None:
    """A plugin that lacks just what a rule asks for has just this statement wrong."""
    assert wrong() == {}
    lack, changed, says = BREAKS[rule]
    lack(package)
    found = wrong(**changed)
    assert list(found) == [rule]
    assert says in found[rule]


def test_more_of_a_rule_is_read_than_its_first_case(package: Path) -> None:
    """No contract, no README, a README about something else, a module without docstring, a plan with both."""
    assert "no entry point" in wrong(contract=None)["declared"]
    assert wrong(traits=[HAS_PLAN, HAS_INVARIANTS]) == {}
    (package / "_private.py").write_text("class Kernel:\n    pass\n")
    (package / "deep.py").write_text('"""Deep."""\ndef _hidden():\n    pass\n')
    assert wrong() == {}
    setter = "    @run.setter\n    def run(self, value):\n        pass\n"
    (package / "deep.py").write_text('"""A."""\nclass A:\n    """A."""\n' + setter)
    assert wrong() == {}
    (package / "deep.py").write_text('class A:\n    """A."""\n    def run(self):\n        pass\n')
    assert wrong()["documented"] == "deep.py and 1 more has no docstring"
    (package / "deep.py").unlink()
    write_metadata(package, "# fake_tiered, a backend\n", "# another\n")
    assert wrong()["documented"] == "its README does not name fake_tiered"
    write_metadata(package, "# another\n", "")
    assert wrong()["licensed"] == "the metadata of its distribution has no README"
    assert set(PROOFS) == set(TIER_RULES)
    assert set(BREAKS) == {name for name, rule in TIER_RULES.items() if rule.takes is None}


def report_of(device: str, *plugins: PluginResults) -> str:
    """Return a ``results.json``."""
    made = Environment(graphpact="0.1", python="3.12", torch="2.11", platform="Linux", device=device)
    values: dict[str, Any] = {"environment": made, "seed": 0, "examples": 2, "started": "", "seconds": 1.0}
    return Report(**values, plugins=list(plugins)).model_dump_json()


def test_a_proof_in_a_file_is_read(package: Path) -> None:
    """Reports of a GPU and of a guarded engine, and a recording, prove what is stated; others do not."""
    (package / "graphpact.toml").write_text(table(gpu_run={"done": "gpu.json"}))
    assert "gpu.json cannot be read" in wrong()["gpu-run"]
    for text, says in (
        (report_of("cpu", results()), "was made on a CPU"),
        (report_of("cuda"), "has no results of fake_tiered"),
        (report_of("cuda", results(results=[BAD])), "is not conformant"),
        (report_of("cuda", results(contract="2")), "of contract version 2, not 1"),
    ):
        (package / "gpu.json").write_text(text)
        assert says in wrong()["gpu-run"]
    (package / "gpu.json").write_text(report_of("cuda", results()))
    assert wrong() == {}
    (package / "graphpact.toml").write_text(table(gpu_run={"done": "../gpu.json"}))
    assert "is not in the package" in wrong()["gpu-run"]

    (package / "graphpact.toml").write_text(table(recordings={"done": "steps.jsonl"}))
    (package / "steps.jsonl").write_text("{}\n")
    assert "steps.jsonl, line 1" in wrong()["recordings"]

    (package / "graphpact.toml").write_text(table(guarded={"done": "run.json"}))
    guard: dict[str, Any] = {"graphs": {"decode": {"replays": 3}}, "faults": []}
    for states, says in (
        ([], "no replay that the guard checked"),
        ([{"guard": guard | {"faults": ["GP01"]}}], "has 1 fault"),
        ([{}], "is no report of an engine under the guard: KeyError"),
    ):
        (package / "run.json").write_text(json.dumps({"tape": {"states": states}}))
        assert says in wrong()["guarded"]
    (package / "run.json").write_text(json.dumps({"tape": {"states": [None, {"guard": guard}]}}))
    assert wrong() == {}


@pytest.mark.parametrize(
    "narrowed", [{"size": "quick"}, {"only": frozenset({"GP01"})}, {"lanes": ("decode*",)}]
)
def test_a_part_of_the_suite_judges_no_whole_run(package: Path, narrowed: dict[str, Any]) -> None:
    """A narrowed run leaves open what only a whole one shows; the badge then has no tier."""
    found = judged(Options(**narrowed))
    text = tier_text(found) or ""
    assert text.startswith(
        "tier silver, if a run of the whole suite confirms conformant, proven; gold needs gpu-run"
    )
    report = TypeAdapter(Report).validate_json(report_of("cpu", found))
    assert "<title>graphpact: conformant</title>" in to_badge(report)
    assert "this run is not conformant" in wrong(results=[BAD])["conformant"]
    idle = Result(rule="GP01", check="c", lane="fast", outcome=Outcome.NOT_RUN)  # for want of a device
    assert [rule.rule for rule in verdict(results=[idle]).unjudged] == ["conformant"]


def test_the_badge_has_the_verdict_and_the_lowest_tier(package: Path) -> None:
    """It says conformant with the lowest tier of all plugins, or what the verdict is instead."""
    silver = judged()
    for plugins, says in (
        ([silver], "conformant, silver"),
        ([silver, results()], "conformant, silver"),
        ([silver, results(tier=TierVerdict(tier="bronze", rules=[]))], "conformant, bronze"),
        ([silver, results(tier=TierVerdict(tier=None, rules=[]))], "conformant"),
        ([silver, results(results=[BAD])], "not conformant"),
        ([results(results=[])], "no verdict"),
    ):
        picture = to_badge(TypeAdapter(Report).validate_json(report_of("cpu", *plugins)))
        assert f"<title>graphpact: {says}</title>" in picture
        assert f'aria-label="graphpact: {says}"' in picture


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[fake_tiered", "is not valid TOML", None),
        ("fake_tiered = 1", "fake_tiered is not a table", "[fake_tiered]"),
        (table(declared=None), "fake_tiered does not state declared", 'declared = "to do"'),
        (table(gpu_rum="done"), "unknown rule 'gpu-rum'", "did you mean 'gpu-run'?"),
        (table(declared="yes"), "declared = 'yes'", '"to do"'),
        (table(declared=3), "declared = 3", '"to do"'),
        (table(documented={"exempt": " "}), "has an empty text", "the reason"),
        (table(documented={"because": "x"}), "documented = {'because': 'x'}", "exempt"),
        (table(documented={"done": "x.json"}), "documented = {'done': 'x.json'}", '"done"'),
        (table(conformant={"exempt": "no time"}), "no plugin is exempt from it", '"to do"'),
        (table(gpu_run="done"), "gpu-run = 'done' names no proof", 'done = "FILE"'),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused(
    package: Path, text: str, says: str, hint: str | None
) -> None:
    """Each fault of the file is a usage error that names the file, what it says, and what to write."""
    (package / "graphpact.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        judged()
    assert says in error.value.message
    assert f"{package / 'graphpact.toml'}" in error.value.message
    assert hint is None or hint in (error.value.hint or "")


def test_a_rule_of_another_kind_is_refused(package: Path) -> None:
    """A line that does not concern the kind of the plugin is a mistake, not a claim."""
    lines = (package / "graphpact.toml").read_text().replace("fake_tiered", '"driver:fake_tiered"')
    (package / "graphpact.toml").write_text(lines)
    points = package.parent / "fake_tiered-1.0.dist-info/entry_points.txt"
    points.write_text(points.read_text().replace("attention_backends", "graph_drivers"))
    with pytest.raises(UsageError, match="does not concern plugins of kind graph_driver"):
        judge_tiers([results(kind="graph_driver")], PluginCatalog.scan(env={}), Xfails([]), Options())


def test_explain_knows_the_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    """`graphpact explain tiers` has every rule in the order of the tiers; the name of one shows its proof."""
    assert main(["explain", "tiers"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"{name} ({rule.tier})") for name, rule in TIER_RULES.items()]
    assert places == sorted(places)
    assert [tier for tier in TIERS if f"({tier})" in said] == list(TIERS)
    assert main(["explain", "gpu-run"]) == 0
    assert "--device cuda --report DIR" in capsys.readouterr().out
    assert main(["explain", "gpu-rum"]) == 2
    assert "did you mean gpu-run?" in capsys.readouterr().err
