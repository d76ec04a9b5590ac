"""The page of the job has what a run wrote, and every builder of the tables."""

from graphpact_conformance.results import Outcome
from peers import vllm_builders, vllm_checks
from peers.job import Verdict, verdicts
from peers.page import BEGIN, END, PAGE, with_verdicts
from peers.test_job import FRESH, report, result, row


def test_a_run_writes_its_part_of_the_page_alone() -> None:
    """What stands around the verdicts stays; those of an earlier run go."""
    page = f"above\n{BEGIN}old\n{END}below\n"
    found = [*verdicts([row("a", (FRESH,))], report("a", result(Outcome.FAIL, "seq_lens", "block_table")))]
    written = with_verdicts(page, [*found, Verdict(row("b", not_run="it needs a GPU"))])
    assert written.startswith(f"above\n{BEGIN}")
    assert written.endswith(f"{END}below\n")
    assert "old" not in written
    assert "| `a` | ours 1.0 | 1 of 1 | **no** | GP01 |\n" in written
    assert "| `b` | ours 1.0 | | not run | it needs a GPU |\n" in written
    assert f"`seq_lens`: expected 1 2; actual {'x' * 97}...; batch decode. {FRESH.why}\n" in written
    assert "`block_table`: expected 1 2" in written
    assert written.count("Not looked into yet.") == 1
    assert with_verdicts(written, found[:0]) == with_verdicts(page, [])


def test_the_page_has_each_builder_and_each_reason() -> None:
    """A row of the tables, and a finding that was looked into, stand on the page; nothing is left open."""
    page = PAGE.read_text(encoding="utf-8")
    for name, builder in vllm_builders.BUILDERS.items():
        assert f"| `{name}` | vLLM {vllm_builders.VLLM.version} | " in page
        assert builder.absent in page
    for name, known in vllm_checks.KNOWN.items():
        assert f"\n### `{name}`\n" in page
        assert all(each.why in page for each in known)
    assert "Not looked into yet." not in page
    assert "unknown |" not in page
