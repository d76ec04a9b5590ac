"""``graphpact check``, ``report`` and ``explain``: options, output and exit status."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conformance_reports import plugin, report, result
from graphpact.errors import UnknownPluginError
from graphpact_cli import main
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.isolation import supervise
from graphpact_conformance.real_bugs import REAL_BUGS
from graphpact_conformance.report import FILES
from graphpact_conformance.results import Report
from graphpact_conformance.rules import EVERY_RULE, RULES
from graphpact_conformance.targets import Options

Suite = Callable[..., dict[str, Any]]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Return a function that installs a fake suite with report ``made`` and returns the suite's arguments."""

    def put(made: Report | None = None) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def check(names: Sequence[str], options: Options, **more: Any) -> Report:
            asked.update(names=names, options=options, **more)
            print("a plugin prints this")  # noqa: T201  as plugins do
            return made or report()

        monkeypatch.setattr(supervise, "check_plugins", check)
        return asked

    return put


def test_a_terminated_run_prints_what_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM ends a run as Ctrl-C does: what was found is printed and written, and the status is 143."""
    before = signal.getsignal(signal.SIGTERM)

    def check(*_: Any, **__: Any) -> Report:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as interrupt:
            raise supervise.StoppedError(report(), signal.Signals(interrupt.args[0])) from interrupt
        raise AssertionError("SIGTERM did not stop it")

    monkeypatch.setattr(supervise, "check_plugins", check)
    assert main(["check", "some_backend", "--report", str(tmp_path)]) == 128 + signal.SIGTERM
    assert report().plugins[0].name in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], {}),
        (["--only", "gp03", "--only", "stale-plan"], {"only": frozenset({"GP03", "GP09"})}),
        (["--lane", "decode*", "--lane", "*page 16*"], {"lanes": ("decode*", "*page 16*")}),
        (["--device", "cuda"], {"device": "cuda"}),
        (["--strict"], {"strict": True}),
        (["--quick"], {"size": "quick"}),
        (["--thorough"], {"size": "thorough"}),
        (["--fail-fast"], {"fail_fast": True}),
        (["--seed", "0", "--examples", "5"], {"seed": 0, "examples": 5}),
    ],
)
def test_options_reach_the_suite(arguments: list[str], asked: dict[str, Any], suite: Suite) -> None:
    """Each option reaches the suite; options that are not given have the suite's defaults."""
    got = suite()
    assert main(["check", "flashinfer", "runner:cuda_graph", *arguments]) == 0
    assert got["names"] == ["flashinfer", "runner:cuda_graph"]
    assert got["options"] == Options(**asked)
    assert got["workers"] is None


def test_off_a_terminal_there_is_no_progress(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the suite gets no progress callbacks, and stdout has only the report."""
    got = suite()
    assert main(["check", "flashinfer", "--workers", "3"]) == 0
    assert got["workers"] == 3
    assert not {"on_begin", "on_result"} & set(got)
    out, err = capsys.readouterr()
    assert err == "a plugin prints this\n"
    assert out.startswith("flashinfer  attention backend")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (report(), 0),
        (report(plugin([result("fail")])), 1),
        (report(plugin([result("error")])), 3),
        (report(plugin([result("not_run")])), 5),
        (report(plugin([result()], hints=["x"]), options={"strict": True}), 1),
    ],
)
@pytest.mark.parametrize("how", [[], ["--json"]])
def test_the_status_is_that_of_the_report(made: Report, status: int, how: list[str], suite: Suite) -> None:
    """The exit status is that of the report, with and without ``--json``."""
    suite(made)
    assert main(["check", "flashinfer", *how]) == status


def test_json_is_the_report_and_nothing_else(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json`` stdout is one report, equal to the suite's; output of plugins goes to stderr."""
    made = report(plugin([result("fail")]))
    suite(made)
    main(["check", "flashinfer", "--json"])
    out, err = capsys.readouterr()
    assert Report.model_validate_json(out) == made
    assert err == "a plugin prints this\n"


def test_a_report_is_written_whatever_the_status(
    tmp_path: Path, suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--report`` writes all files to a new directory, even after a failure, and says so on stderr."""
    suite(report(plugin([result("fail")])))
    assert main(["check", "flashinfer", "--json", "--report", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    assert (tmp_path / "out/results.json").read_text() == out
    assert f"written to {tmp_path / 'out'}" in err


def test_nothing_runs_for_a_report_that_cannot_be_written(
    tmp_path: Path, suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that cannot be created is a usage error before the suite starts."""
    (tmp_path / "file").write_text("")
    got = suite()
    assert main(["check", "flashinfer", "--report", str(tmp_path / "file/out")]) == 2
    assert got == {}
    assert "Not a directory" in capsys.readouterr().err


def test_lanes_of_plugins_are_listed(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """``NAME --list`` lists each lane with its experiments, and runs nothing."""
    got = suite()
    assert main(["check", "fa3", "cuda_graph", "--list", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert got == {}
    assert {t["plugin"] for t in told} == {"fa3", "cuda_graph", "fa3 + cuda_graph"}
    assert all("answers_replayed" in t["experiments"] for t in told)


def test_a_lane_without_graphs_lists_what_runs(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` names for a runner without graphs the experiments that need none, and no other."""
    suite()
    assert main(["check", "eager", "--list", "--quick", "--json"]) == 0
    needs = {e.name: e.needs_graphs for e in EXPERIMENTS}
    (listed, *others) = [t["experiments"] for t in json.loads(capsys.readouterr().out)]
    assert all(not needs[name] for name in {*listed}.union(*others))
    assert "answers_eagerly" in listed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "there is nothing to check"),
        ([], "flashinfer"),
        ([], "cuda_graph"),
        (["x", "--only", "GP99"], "unknown rule 'GP99'"),
        (["x", "--quick", "--thorough"], "contradict"),
        (["x", "--device", "tpu"], "--device"),
        (["x", "--examples", "0"], "--examples"),
        (
            ["x", "--list"],
            "no attention backend, runner, graph driver, speculation algorithm or observer 'x'",
        ),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    arguments: list[str], says: str, suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid command line ends with status 2 and the reason, and the suite does not start."""
    got = suite()
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, got) == ("", {})
    assert says in err


def test_errors_of_the_suite_keep_their_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error of the suite, such as an unknown plugin, keeps its message, hint and exit status."""

    def check(*_: object, **__: object) -> Report:
        raise UnknownPluginError("nobody offers 'x'", hint="did you mean fa3?")

    monkeypatch.setattr(supervise, "check_plugins", check)
    assert main(["check", "x"]) == 2
    assert capsys.readouterr() == ("", "error: nobody offers 'x'\n  help: did you mean fa3?\n")


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("hypothesis", ["check", "flashinfer"]),
        ("jinja2", ["check", "flashinfer", "--report", "out"]),
        ("jinja2", ["report", "some.json", "--html", "some.html"]),
    ],
)
def test_without_the_extra_the_command_says_what_to_install(
    missing: str,
    arguments: list[str],
    suite: Suite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without hypothesis, or jinja2 if a page is requested, nothing starts and the error names the extra."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    got = suite()
    assert main(arguments) == 2
    assert got == {}
    assert list(tmp_path.iterdir()) == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"error: this needs {missing}, which is not installed",
        '  help: pip install "graphpact[conformance]"',
    ]


def test_a_terminal_report_needs_no_jinja2(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report without a page does not need jinja2."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    suite()
    assert main(["check", "flashinfer"]) == 0
    assert capsys.readouterr().out


def test_commands_stay_light() -> None:
    """The help of each command and the lists of rules import neither the suite nor its dependencies."""
    code = """
import sys
from graphpact_cli import main
for name in ("check", "explain", "report"):
    assert main([name, "--help"]) == 0
assert main(["check", "--list"]) == main(["explain"]) == 0
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    imported = {*done.stderr.split()}
    ours = "graphpact_conformance"
    assert {f"{ours}.cli.{name}" for name in ("check", "explain", "report")} <= imported
    heavy = {f"{ours}.{name}" for name in ("suite", "isolation", "real_bugs", "results")}
    assert not imported & (heavy | {"hypothesis", "jinja2", "pytest"})


# -- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["check", "--list"], ["explain"]])
def test_rules_are_listed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Both lists have every rule with level, requirement and hooks; ``--json`` has every field of a rule."""
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    for rule in EVERY_RULE.values():
        (line,) = [line for line in lines if line.startswith(str(rule))]
        assert all(said in line for said in (rule.level, rule.requirement, *rule.hooks))
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == [{**asdict(rule), "hooks": [*rule.hooks]} for rule in EVERY_RULE.values()]


def test_a_list_can_be_of_some_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """``--only`` selects the rules of the list, as it does for a check."""
    assert main(["check", "--list", "--only", "GP05", "--json"]) == 0
    assert [rule["id"] for rule in json.loads(capsys.readouterr().out)] == ["GP05"]


@pytest.mark.parametrize("rule", sorted(EVERY_RULE.keys() - RULES.keys()))
def test_rules_of_other_contracts_are_explained_by_their_checks(
    rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule of algorithms or observers is printed with its requirement and the fix of its check."""
    assert main(["explain", EVERY_RULE[rule].name]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert EVERY_RULE[rule].requirement in out
    assert main(["explain", rule, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["checks"]
    assert all(check["fix"] in out for check in told["checks"])


@pytest.mark.parametrize("rule", RULES.values(), ids=str)
def test_every_rule_is_explained(rule: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule, by id or name, is printed with its requirement, hooks, and every part of its story."""
    assert main(["explain", rule.id.lower()]) == 0
    text = capsys.readouterr().out
    story = REAL_BUGS[rule.id]
    for said in (
        str(rule),
        rule.level,
        f"since contract {rule.since}",
        rule.requirement,
        *rule.hooks,
    ):
        assert said in text
    for said in (story.story, story.detection, story.fix, story.thread, story.url):
        assert said in text
    assert main(["explain", rule.name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["url"], told["detection"]) == (rule.id, story.url, story.detection)


def test_an_unknown_rule_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown rule is a usage error with the nearest name."""
    assert main(["explain", "stale-pad-tails"]) == 2
    assert "did you mean GP03 stale-pad-tail?" in capsys.readouterr().err


# -- saved reports -------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, Report], str]:
    """Return a function that writes a report to a file and returns its path."""

    def save(name: str, made: Report) -> str:
        (tmp_path / name).write_text(made.model_dump_json())
        return str(tmp_path / name)

    return save


def test_a_saved_report_is_shown_as_it_was(
    saved: Callable[[str, Report], str],
    suite: Suite,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``report A`` prints what ``check`` printed, writes the same JSON and page, and ends with status 0."""
    made = report(plugin([result("fail")]))
    suite(made)
    main(["check", "flashinfer", "--report", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    file, page = saved("a.json", made), tmp_path / "a.html"
    assert main(["report", file, "--html", str(page)]) == 0
    assert capsys.readouterr() == (printed, f"written to {page}\n")
    assert page.read_text() == (tmp_path / "out/report.html").read_text()
    assert main(["report", file, "--json"]) == 0
    assert Report.model_validate_json(capsys.readouterr().out) == made


def test_two_reports_are_compared(
    saved: Callable[[str, Report], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``report A B`` ends with 1 if something became worse, else 0, and shows the changes in every format."""
    good, bad = saved("good.json", report()), saved("bad.json", report(plugin([result("fail")])))
    page = tmp_path / "changes.html"
    assert main(["report", good, bad, "--html", str(page)]) == 1
    assert "1 worse, 0 appeared" in capsys.readouterr().out
    assert "1 worse" in page.read_text()
    assert bad in page.read_text()
    assert main(["report", bad, good, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(c["what"], c["before"], c["after"]) for c in told["changes"]] == [("better", "fail", "pass")]
    assert main(["report", good, good]) == 0
    assert "1 unchanged" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_a_usage_error(
    saved: Callable[[str, Report], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad ``--html`` path and a missing report each end with status 2 and the reason."""
    assert main(["report", saved("a.json", report()), "--html", str(tmp_path)]) == 2
    assert "cannot be written: Is a directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
