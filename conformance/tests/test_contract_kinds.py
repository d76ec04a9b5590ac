"""Names, reports, known failures and crashes of algorithms and observers under ``graphpact check``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import graphpact
from fake_site import Site, installed
from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_conformance import suite
from graphpact_conformance.algorithms import drafting
from graphpact_conformance.cli.check import complete_plugin, complete_rule
from graphpact_conformance.contract_rules import ALGORITHM_RULES, OBSERVER_RULES
from graphpact_conformance.contracts.examine import examine_contract_lane
from graphpact_conformance.isolation import supervise
from graphpact_conformance.observers import observing
from graphpact_conformance.results import ExitCode, Outcome, Report, Result
from graphpact_conformance.rules import EVERY_RULE, causes_first, concern_of, find_rule
from graphpact_conformance.suite.contract_kinds import CONTRACTS
from graphpact_conformance.target_kinds import TargetKind
from graphpact_conformance.targets import Options, Target
from graphpact_conformance.xfails import Xfails

EAGLE, TRACE = Target("speculation", "eagle"), Target("observer", "trace")

SOURCE = """
    import os
    from graphpact import hookimpl
    from graphpact_speculative import FrozenKvMtp

    class Leaves(FrozenKvMtp):
        def decode(self, step):
            os._exit(0)

    class Prints:
        @hookimpl(wrapper=True)
        def run_step(self):
            print("a step")
            return (yield)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Install an algorithm that ends its process, and an observer that prints."""
    with installed(tmp_path / "site", monkeypatch) as made:
        made.add("leaving", SOURCE, offers={"leaves": "Leaves"}, group="graphpact.speculation")
        made.add("printing", SOURCE, offers={"prints": "Prints"}, group="graphpact.observers")
        yield made


@pytest.mark.parametrize(
    ("name", "target"),
    [("eagle", EAGLE), ("speculation:eagle", EAGLE), ("trace", TRACE), ("observer:trace", TRACE)],
)
def test_a_name_needs_its_kind_only_where_two_have_it(name: str, target: Target) -> None:
    """Algorithms and observers are found by their names, with and without the kind."""
    assert suite.targets([name], PluginCatalog.scan()) == [target]


def test_the_name_of_a_runner_and_of_an_algorithm_is_asked_about() -> None:
    """A name of two kinds is refused with both spellings, which work and which a shell completes."""
    catalog = PluginCatalog.scan()
    with pytest.raises(UsageError, match="a runner and of a speculation algorithm") as refused:
        suite.targets(["frozen_kv_mtp"], catalog)
    assert "runner:frozen_kv_mtp or speculation:frozen_kv_mtp" in str(refused.value.hint)
    for kind in ("runner", "speculation"):
        (target,) = suite.targets([f"{kind}:frozen_kv_mtp"], catalog)
        assert target.kind == kind
        assert complete_plugin(kind).count(f"{kind}:frozen_kv_mtp") == 1
    assert "frozen_kv_mtp" not in complete_plugin("frozen")
    assert complete_plugin("observer:") == ["observer:metrics", "observer:trace"]


@pytest.mark.parametrize(("kind", "name"), [("speculation", "eagle"), ("observer", "trace")])
def test_other_devices_are_not_run(kind: TargetKind, name: str) -> None:
    """A run on a GPU does not claim what the suite checks on a CPU."""
    contract = CONTRACTS[kind]
    plugin = PluginCatalog.scan().select(kind, name)
    options = Options(device="cuda", size="quick")
    for lane in contract.lanes_of(plugin, options):
        found = [*examine_contract_lane(lane, options)]
        assert {(r.outcome, r.reason) for r in found} == {
            (Outcome.NOT_RUN, "the suite has these checks on cpu alone")
        }


def test_the_rules_of_every_contract_are_found() -> None:
    """A rule is found by its id and name, is completed, has a place in the order of causes, and a check."""
    for rule in EVERY_RULE.values():
        assert {find_rule(text) for text in (rule.id.lower(), rule.name, f"{rule.id}-{rule.name}")} == {rule}
        assert (rule.id, rule.name) in complete_rule(rule.id[:2].lower())
        assert concern_of(rule.id)
    assert len({rule.name for rule in EVERY_RULE.values()}) == len(EVERY_RULE)
    assert set(causes_first(EVERY_RULE)) == set(EVERY_RULE)
    assert [check.rule for check in drafting.CHECKS.values()] == [*ALGORITHM_RULES]
    assert [check.rule for check in observing.CHECKS.values()] == [*OBSERVER_RULES]


def test_the_requirements_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` has the requirements of each lane, without a run; ``--only`` and ``--lane`` select."""
    asked = ["check", "speculation:eagle", "observer:trace", "--list", "--json"]
    assert main(asked) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {(row["plugin"], row["lane"]) for row in listed} >= {
        ("eagle", "chain-steps3-tokens4"),
        ("eagle", "tree-topk2-steps3-tokens6"),
        ("trace", "decode"),
    }
    assert main([*asked, "--only", "swallowed-error", "--lane", "decode"]) == 0
    assert {
        "plugin": "trace",
        "lane": "decode",
        "experiments": ["passes_errors_on"],
    } in json.loads(capsys.readouterr().out)
    assert main(["explain", "tree-topk2-steps3-tokens6"]) == 0
    assert "drafts with 2 branches" in capsys.readouterr().out


@pytest.mark.usefixtures("site")
def test_reports_have_algorithms_and_observers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run writes its three reports; an observer that prints breaks no rule and is told so."""
    names = ["speculation:eagle", "observer:prints"]
    only = ["--only", "SP03", "--only", "OB02", "--quick", "--lane", "chain*", "--lane", "decode"]
    assert main(["check", *names, *only, "--report", str(tmp_path / "report")]) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert "✓ SP03 bad-verification" in shown
    report = Report.model_validate_json((tmp_path / "report/results.json").read_text(encoding="utf-8"))
    eagle, prints = report.plugins
    assert [(r.rule, r.lane, r.outcome) for r in eagle.results] == [
        ("SP03", "chain-steps3-tokens4", Outcome.PASS)
    ]
    assert {(r.rule, r.check, r.outcome) for r in prints.results} == {
        ("OB02", "same_result", Outcome.PASS),
        (None, "quiet", Outcome.FAIL),
    }
    for file in ("junit.xml", "report.html"):
        text = (tmp_path / "report" / file).read_text(encoding="utf-8")
        assert "SP03" in text
        assert "OB02" in text


@pytest.mark.sweep
@pytest.mark.usefixtures("site")
def test_an_algorithm_that_ends_the_process_fails_the_requirement_at_fault() -> None:
    """The requirement during which an algorithm ends its process fails; the others are checked."""
    options = Options(only=frozenset({"SP02", "SP03"}), lanes=("chain-steps3*",), size="quick")
    report = supervise.check_plugins(["speculation:leaves"], options, workers=1)
    (plugin,) = report.plugins
    (ended,) = [result for result in plugin.results if result.check == "ends"]
    assert ended.lane == "chain-steps3-tokens4 :: verifies_once"
    assert "it ended the process: exit status 0" in ended.findings[0].actual
    assert "graphpact check speculation:leaves" in str(ended.findings[0].reproduce)
    assert [(r.rule, r.outcome) for r in plugin.results if r is not ended] == [("SP02", Outcome.PASS)]
    assert report.exit_code is ExitCode.NOT_CONFORMANT


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("plugin", [None, "prints", "observer:prints"])
def test_a_known_failure_of_an_observer_is_listed(plugin: str | None, tmp_path: Path) -> None:
    """A list in an observer's package excuses a rule, by name or as the only plugin of its distribution."""
    lines = ["[[xfail]]", 'rule = "kept-tensors"', 'reason = "known"']
    lines += [] if plugin is None else [f'plugin = "{plugin}"']
    (tmp_path / "xfails.toml").write_text("\n".join(lines))
    target = Target("observer", "prints")
    with patch("graphpact_conformance.xfails.plugin_home", return_value=tmp_path):
        known = Xfails.read([target], PluginCatalog.scan())
    failed = Result(rule="OB08", check="c", lane="decode", outcome=Outcome.FAIL)
    assert known.expect(target, failed).outcome is Outcome.XFAIL


@pytest.mark.parametrize(
    ("name", "lane", "rule", "rules"),
    [
        ("speculation:eagle", "chain*", "SP03", ALGORITHM_RULES),
        ("observer:trace", "decode", "OB02", OBSERVER_RULES),
    ],
)
def test_pytest_has_a_test_for_each_rule_of_the_contract(
    name: str, lane: str, rule: str, rules: dict[str, Any]
) -> None:
    """`graphpact.conformance` makes a test for each rule of the plugin's own contract, and they pass."""
    mark = graphpact.conformance(name, lanes=(lane,), examples=1)
    checks = {check.rule.id: check for (check,) in (p.values for p in mark.args[1]) if check.rule}
    assert [*checks] == [*rules]
    checks[rule]()
