"""Results: the combined outcome, the exit status, strict checks, claims, and the file format."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance_reports import finding, plugin, report, result, words
from graphpact_conformance.results import Claim, ExitCode, Outcome, Report, worst
from support import load_reference

ROOT = Path(__file__).parents[2]
quick = settings(derandomize=True)
some_outcomes = st.lists(st.sampled_from(Outcome), max_size=6)
RAN = {"pass", "fail", "xfail", "xpass", "error"}


@quick
@given(some_outcomes)
def test_one_outcome_stands_for_many(outcomes: list[Outcome]) -> None:
    """The combined outcome is the worst that ran, else not_run, else unsupported, in any order of lanes."""
    expected = "unsupported"
    for name in ("not_run", "pass", "xfail", "error", "xpass", "fail"):
        if name in outcomes:
            expected = name
    assert worst(outcomes) == expected
    assert worst(reversed(outcomes)) == expected


@quick
@given(st.lists(some_outcomes, min_size=1, max_size=3))
def test_the_exit_status_follows_from_the_outcomes(plugins: list[list[Outcome]]) -> None:
    """The exit status is 1 after a failed MUST, else 3 after an error of the suite, else 5 if nothing ran."""
    outcomes = {str(outcome) for one in plugins for outcome in one}
    if outcomes & {"fail", "xpass"}:
        expected = 1
    elif "error" in outcomes:
        expected = 3
    else:
        expected = 0 if outcomes & RAN else 5
    made = report(*(plugin([result(outcome) for outcome in one]) for one in plugins))
    assert made.exit_code == expected


SHORT = [
    pytest.param({"results": [result(), result("not_run", "GP17")]}, "GP17", id="not run"),
    pytest.param(
        {"results": [result(), result("fail", None, check="quiet", level="SHOULD")]},
        "quiet",
        id="a SHOULD",
    ),
    pytest.param({"hints": ["look here"]}, "1 hint", id="a hint"),
    pytest.param(
        {"claims": [Claim(capability="page size 64", declared="full", shown="not_run")]},
        "page size 64",
        id="a claim that was not shown",
    ),
    pytest.param(
        {"claims": [Claim(capability="trees", declared="since", since="1", shown="fail")]},
        "trees",
        id="a claim that failed",
    ),
]


@pytest.mark.parametrize(("changes", "named"), SHORT)
def test_strict_counts_what_was_not_shown(changes: dict[str, Any], named: str) -> None:
    """A missing proof allows a plain pass and prevents a strict pass, and the shortfall names it."""
    held = plugin(**{"results": [result()], **changes})
    assert held.is_conformant
    assert report(held).exit_code is ExitCode.CONFORMANT
    assert report(held, options={"strict": True}).exit_code is ExitCode.NOT_CONFORMANT
    (told,) = held.shortfalls
    assert named in told


def test_strict_asks_for_no_more_than_what_is_claimed() -> None:
    """Undeclared capabilities, known failures and shown claims pass a strict check."""
    claims = [
        Claim(capability="trees", declared="unsupported", shown="not_run"),
        Claim(capability="sinks", declared="unknown", shown="pass"),
        Claim(capability="decode", declared="full", shown="pass"),
    ]
    results = [result(), result("unsupported", "GP09"), result("xfail", "GP16")]
    held = plugin(results, claims=claims, not_shown=["native kernels: no GPU"])
    assert held.shortfalls == []
    assert report(held, options={"strict": True}).exit_code is ExitCode.CONFORMANT


def test_where_nothing_ran_a_strict_check_says_so() -> None:
    """If nothing ran the exit status is 5, strict or not; with a failure of another plugin it is 1."""
    idle = plugin([result("not_run", "GP17")])
    for options in ({}, {"strict": True}):
        assert report(idle, options=options).exit_code is ExitCode.NOTHING_RAN
        mixed = report(idle, plugin([result("fail")]), options=options)
        assert mixed.exit_code is ExitCode.NOT_CONFORMANT


def test_claims_that_disagree() -> None:
    """A claim disagrees if it is made and fails, or is not made and passes; never if it did not run."""
    shown = ("pass", "fail", "not_run")
    declared = ("unknown", "unsupported", "not_implemented", "since", "full")
    disagree = {
        (said, seen)
        for said, seen in itertools.product(declared, shown)
        if Claim(capability="trees", declared=said, shown=seen).disagrees
    }
    assert disagree == {
        ("full", "fail"),
        ("since", "fail"),
        ("unknown", "pass"),
        ("unsupported", "pass"),
        ("not_implemented", "pass"),
    }


@quick
@given(words, words)
def test_any_text_survives_the_file(one: str, two: str) -> None:
    """A report with any text of a plugin, even undecodable bytes, is equal after writing and reading."""
    told = finding(field=one, actual=two, help=one)
    held = plugin([result("fail", lane=two, reason=one, findings=[told])], hints=[one, two])
    made = report(held)
    text = made.model_dump_json()
    text.encode()
    assert Report.model_validate_json(text) == made
    assert Report.model_validate(json.loads(text)) == made


def test_a_rule_that_nobody_wrote_is_refused() -> None:
    """A result with an unknown rule is refused."""
    with pytest.raises(ValueError, match="GP99"):
        result(rule="GP99")


def test_timeless_leaves_out_times_and_nothing_else() -> None:
    """Reports that differ only in times are equal without times; any other difference remains."""
    one = report(plugin([result(seconds=1.0)]))
    two = report(plugin([result(seconds=2.0)]), started="2027-01-01T00:00:00+00:00", seconds=9.0)
    assert one != two
    assert one.timeless() == two.timeless()
    assert one.timeless() != report(plugin([result("fail")])).timeless()
    assert one.timeless() != report(plugin([result()]), seed=1).timeless()


def test_the_schema_is_what_the_models_give() -> None:
    """results.schema.json is up to date: `python docs/tools/reference.py` would change nothing."""
    text = (ROOT / "conformance/graphpact_conformance/results.schema.json").read_text(encoding="utf-8")
    assert text == load_reference().results_schema()
    schema = json.loads(text)
    written = json.loads(report().model_dump_json())
    assert set(schema["required"]) == set(written)
    assert set(schema["$defs"]["Result"]["required"]) == set(written["plugins"][0]["results"][0])
