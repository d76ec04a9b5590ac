"""Tests of the job that checks released builders: verdicts and table, with our builders and no wheel."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphpact_conformance.results import Environment, Finding, Outcome, PluginResults, Report, Result
from graphpact_conformance.targets import Options
from peers import __main__ as command
from peers.job import Known, Row, Verdict, as_json, is_as_known, run, table, verdicts

TWINS = Path(__file__).parents[2] / "adapters" / "tests"
FRESH = Known("GP01", "seq_lens", "a cast makes a new tensor in each build")


def row(name: str, known: tuple[Known, ...] = (), not_run: str = "") -> Row:
    """Return a row whose builder is one of ours."""
    return Row("ours 1.0", name, f"adapter:vllm:vllm_builders:{name}", not_run, known)


def report(name: str, *results: Result) -> Report:
    """Return a report of one target."""
    plugin = PluginResults(
        kind="adapter",
        name=f"vllm_builders:{name}",
        distribution="d",
        version="1",
        contract="1",
        results=list(results),
    )
    here = Environment(graphpact="1", python="3", torch="2", platform="p", device="cpu")
    return Report(environment=here, seed=0, examples=1, options={}, started="", seconds=0.0, plugins=[plugin])


def result(outcome: Outcome, *fields: str, rule: str | None = "GP01", **more: Any) -> Result:
    """Return the result of one rule in a lane, with a finding for each field."""
    findings = [
        Finding(rule=rule, hook=None, field=field, expected="1\n2", actual="x" * 300, batch="decode")
        for field in fields
    ]
    given = {"check": "captures, replays", "lane": "decode"} | more
    return Result(rule=rule, outcome=outcome, findings=findings, **given)


@pytest.mark.sweep
def test_builders_are_checked_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct builder is conformant; a broken one has its rule and field; a third one is not run."""
    monkeypatch.setenv("PYTHONPATH", str(TWINS))
    rows = [row("PagedBuilder"), row("FreshLengths", (FRESH,)), row("Absent", not_run="it needs a GPU")]
    right, broken, absent = run(rows, Options(size="quick", lanes=("decode-*",), shrink=False))
    assert (right.conformant, right.findings, right.fault) == (True, (), "")
    assert right.replayed == right.lanes > 0
    assert broken.conformant is False
    assert {f.rule for f in broken.findings} == {"GP01"}
    assert all(f.batch and f.expected != f.actual for f in broken.findings)
    assert is_as_known([right, broken, absent])
    cells = [*table([right, broken, absent])]
    assert cells[0] == ("PagedBuilder", "ours 1.0", f"{right.lanes} of {right.lanes}", "yes", "", "", "")
    assert cells[1][3:5] == ("no", "GP01")
    assert cells[1][5].startswith("seq_lens[")
    assert cells[1][6] == "real"
    assert cells[2] == ("Absent", "ours 1.0", "", "not run", "", "it needs a GPU", "")


def test_a_finding_that_was_not_looked_into_is_new() -> None:
    """Rule and field decide: another field or another rule is new, and the job is not as known."""
    found = result(Outcome.FAIL, "seq_lens[0:2]", "block_table[1]")
    (verdict,) = verdicts([row("a", (FRESH,))], report("a", found))
    assert [f.field for f in verdict.new] == ["block_table[1]"]
    assert not is_as_known([verdict])
    assert [line[6] for line in table([verdict])] == ["real", "new"]
    (verdict,) = verdicts([row("a", (FRESH,))], report("a", result(Outcome.FAIL, "seq_lens", rule="GP02")))
    assert len(verdict.new) == 1


@pytest.mark.parametrize(
    ("field", "raised_at", "known", "is_known"),
    [
        (None, "attention/utils.py:172 in fits", "attention/utils.py", True),
        (None, "attention/other.py:3 in fits", "attention/utils.py", False),
        (None, None, "", True),
        (None, "attention/utils.py:172 in fits", "", False),
        ("seq_lens", None, "", False),
        ("seq_lens", "attention/utils.py:172 in fits", "seq_lens", True),
    ],
)
def test_a_finding_without_a_field_is_known_by_its_place(
    field: str | None, raised_at: str | None, known: str, *, is_known: bool
) -> None:
    """The raising line identifies it; a reason without field and place explains no other finding."""
    finding = Finding(
        rule=None, hook=None, field=field, raised_at=raised_at, expected="1", actual="2", batch="decode"
    )
    assert Known(None, known, "why").explains(finding) is is_known


def test_a_known_finding_that_is_gone_is_said() -> None:
    """A known finding that disappeared (a fixed builder, or a weaker suite) is reported."""
    (verdict,) = verdicts([row("a", (FRESH,))], report("a", result(Outcome.PASS)))
    assert verdict.gone == [FRESH]
    assert not is_as_known([verdict])
    assert [line[4:] for line in table([verdict])] == [("GP01", "seq_lens: not found any more", "gone")]
    assert Verdict(row("a", (FRESH,), "why")).gone == []


def test_a_fault_of_the_suite_is_no_verdict() -> None:
    """An error leaves open whether a builder is conformant, and is not as known."""
    (verdict,) = verdicts(
        [row("a")], report("a", result(Outcome.ERROR, reason="oh\nno"), result(Outcome.PASS))
    )
    assert (verdict.conformant, verdict.fault) == (None, "oh\nno")
    assert not is_as_known([verdict])
    ((*_, said, finding, _),) = table([verdict])
    assert (said, finding) == ("", "fault of the suite: oh no")
    assert next(table([verdict]))[3] == "unknown"


def test_a_field_has_one_line_for_all_lanes_and_groups() -> None:
    """Indices, groups and token numbers differ between lanes; the first finding of a field stands for all."""
    fields = (
        "block_tables[0][1:2], lent",
        "block_tables[1][0:1], lent",
        "an eager run: token 1",
        "an eager run: token 4",
    )
    found = [result(Outcome.FAIL, *fields), result(Outcome.FAIL, fields[1], lane="verify")]
    (verdict,) = verdicts([row("a")], report("a", *found))
    assert [f.field for f in verdict.findings] == [fields[0], fields[2]]
    assert verdict.lanes == 2


def test_a_cell_is_one_short_line() -> None:
    """Values are shortened, and have no line breaks."""
    (verdict,) = verdicts([row("a")], report("a", result(Outcome.FAIL, "seq_lens")))
    (line,) = table([verdict])
    assert line[5] == f"seq_lens: expected 1 2; actual {'x' * 97}...; decode"


def test_lanes_without_graphs_are_counted_apart() -> None:
    """Lanes without captures do not count as replayed; printed output does not count as a lane."""
    results = [
        result(Outcome.PASS),
        result(Outcome.UNSUPPORTED, lane="extend"),
        result(Outcome.FAIL, "stdout", rule=None, check="quiet", lane="decode :: captures"),
    ]
    (verdict,) = verdicts([row("a")], report("a", *results))
    assert (verdict.replayed, verdict.lanes, verdict.findings) == (1, 2, ())


class _Engine:
    """An engine whose wheel is not available, or whose rows are not run."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def rows(self) -> list[Row]:
        """Return one row."""
        if self.error:
            raise RuntimeError(self.error)
        return [row("a", not_run="why"), row("b", not_run="why")]


def test_the_command_writes_a_table_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of all engines are printed, those asked for are written as JSON, and the status is 0."""
    monkeypatch.setattr(command, "ENGINES", {"ours": _Engine()})
    file = tmp_path / "new" / "results.json"
    assert command.main(["b", "--results", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["builder", "b"]
    (written,) = json.loads(file.read_text(encoding="utf-8"))
    assert (written["name"], written["not_run"], written["conformant"]) == ("b", "why", None)


def test_the_command_says_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown name has status 2, an unavailable wheel 3; the error names each."""
    monkeypatch.setattr(command, "ENGINES", {"ours": _Engine()})
    assert command.main(["c"]) == 2
    monkeypatch.setattr(command, "ENGINES", {"ours": _Engine("thing==2.0 cannot be downloaded")})
    assert command.main([]) == 3
    assert capsys.readouterr().err.splitlines() == ["no such builder: c", "thing==2.0 cannot be downloaded"]


def test_results_have_each_finding_and_the_reasons() -> None:
    """The JSON has the evidence of each finding, the known findings and the new ones."""
    found = report("a", result(Outcome.FAIL, "seq_lens", "block_table"))
    (written,) = json.loads(as_json([*verdicts([row("a", (FRESH,))], found)]))
    assert [f["batch"] for f in written["findings"]] == ["decode", "decode"]
    assert written["known"][0]["why"] == FRESH.why
    assert written["new"] == ["block_table"]
