"""Tests that the page of the job has the results of a run and every builder of the tables."""

from dataclasses import replace

import pytest

from graphpact_conformance.results import Outcome
from peers import (
    other_builders,
    other_checks,
    other_sglang,
    sglang_adapted,
    sglang_checks,
    vllm_builders,
    vllm_checks,
)
from peers.job import Known, Verdict, verdicts
from peers.page import BEGIN, END, PAGE, findings, with_verdicts
from peers.test_job import FRESH, report, result, row


def test_a_run_writes_its_part_of_the_page_alone() -> None:
    """A run replaces its earlier verdicts; the text around them and parts of other engines stay."""
    other = f"{BEGIN.format('theirs')}kept\n{END.format('theirs')}"
    page = f"above\n{BEGIN.format('ours')}old\n{END.format('ours')}{other}below\n"
    found = [*verdicts([row("a", (FRESH,))], report("a", result(Outcome.FAIL, "seq_lens", "block_table")))]
    written = with_verdicts(page, [*found, Verdict(row("b", not_run="it needs a GPU"))])
    assert written.startswith(f"above\n{BEGIN.format('ours')}")
    assert written.endswith(f"{END.format('ours')}{other}below\n")
    assert "old" not in written
    assert "| `a` | ours 1.0 | 1 of 1 | **no** | GP01 |\n" in written
    assert "| `b` | ours 1.0 | | not run | it needs a GPU |\n" in written
    assert with_verdicts(written, found) == with_verdicts(page, found)


def test_each_finding_stands_in_the_file_of_findings_with_its_reason() -> None:
    """A finding has its builder's heading, the expected value and the reason or a note that it is unknown."""
    found = [*verdicts([row("a", (FRESH,))], report("a", result(Outcome.FAIL, "seq_lens", "block_table")))]
    written = findings([*found, Verdict(row("b", not_run="it needs a GPU"))])
    assert "\n## ours: `a`\n" in written
    assert f"`seq_lens`: expected 1 2; actual {'x' * 97}...; batch decode. {FRESH.why}\n" in written
    assert "`block_table`: expected 1 2" in written
    assert written.count("Not looked into yet.") == 1
    assert "`b`" not in written


def test_rows_of_several_engines_may_share_a_part() -> None:
    """A row that names a part is listed there, and its heading has engine and version."""
    page = f"{BEGIN.format('others')}old\n{END.format('others')}"
    (found,) = verdicts([row("a", (FRESH,))], report("a", result(Outcome.FAIL, "seq_lens")))
    written = with_verdicts(page, [replace(found, row=replace(found.row, part="others"))])
    assert "| `a` | ours 1.0 | 1 of 1 | **no** | GP01 |\n" in written
    assert "old" not in written
    assert "\n## ours 1.0: `a`\n" in findings([replace(found, row=replace(found.row, part="others"))])


def test_an_engine_without_a_part_of_the_page_is_named() -> None:
    """Verdicts without a place on the page are an error that names the engine."""
    with pytest.raises(ValueError, match="no part for ours"):
        with_verdicts("above\n", [Verdict(row("b", not_run="it needs a GPU"))])


def test_the_page_has_each_builder_and_each_reason() -> None:
    """Each builder has a row, with the rule of each finding that was looked into, or why it is not run."""
    page = PAGE.read_text(encoding="utf-8")
    vllm = {name: builder.absent for name, builder in vllm_builders.BUILDERS.items()}
    sglang = {name: sglang_checks.NOT_RUN.get(name, "") for name in sglang_adapted.ADAPTED}
    _assert_shown(page, f"vLLM {vllm_builders.VLLM.version}", vllm, vllm_checks.KNOWN)
    _assert_shown(page, f"SGLang {sglang_checks.SGLANG.version}", sglang, sglang_checks.KNOWN)
    others = {name: row.engine for name, row in other_builders.OTHERS.items()}
    others |= {name: f"SGLang {wheel.version}" for name, wheel in other_sglang.WHEELS.items()}
    assert other_checks.KNOWN.keys() <= others.keys()
    for name, engine in others.items():
        assert f"| `{name}` | {engine} | " in page
        _assert_named(page, engine, name, other_checks.KNOWN.get(name, ()))
    assert "unknown |" not in page


def _assert_shown(
    page: str, engine: str, not_run: dict[str, str], known: dict[str, tuple[Known, ...]]
) -> None:
    for name, why in not_run.items():
        assert f"| `{name}` | {engine} | " in page
        assert why in page
    assert known.keys() <= not_run.keys()
    for name, each in known.items():
        _assert_named(page, engine, name, each)


def _assert_named(page: str, engine: str, name: str, known: tuple[Known, ...]) -> None:
    """Assert that the last cell of a builder's row has the rules of its findings, and no other."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` | {engine} | ")]
    if "| not run |" not in row:
        rules = row.rstrip(" |").split(" | ")[4] if "| yes |" not in row else ""
        assert set(filter(None, rules.split(", "))) == {each.rule or "no rule" for each in known}, row
