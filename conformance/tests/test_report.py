"""Reports as trees, HTML pages and XML: they are complete, and a plugin's text is escaped."""

import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from conformance_reports import HOSTILE, drawn, finding, full_report, plugin, report, result, words
from graphpact.errors import UsageError
from graphpact_conformance.cli.results import Progress, print_comparison
from graphpact_conformance.report import (
    FILES,
    Comparison,
    compare,
    comparison_to_html,
    evidence,
    load_report,
    rows,
    save,
    summary,
    to_html,
    to_junit,
    verdict,
)
from graphpact_conformance.report.digest import (
    disagreements,
    plain,
    say,
    standing,
    to_fix,
    unchecked,
    why_first,
)
from graphpact_conformance.results import Claim, Outcome, PluginResults, Report, Result
from graphpact_conformance.rules import RULES, causes_first, concern_of

quick = settings(derandomize=True, max_examples=40)
_RULE_KEYS = st.sampled_from([None, "GP02", "GP03", "GP17", "GP20"])


class Page(HTMLParser):
    """A parsed page: tags with the names of their attributes, text, ids and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag."""
        told = dict(attrs)
        self.tags.append((tag, tuple(told)))
        self.elements.append((tag, attrs))
        self.ids += [told["id"] or ""] if "id" in told else []
        self.links += [told["href"] or ""] if "href" in told else []

    def handle_data(self, data: str) -> None:
        """Collect text."""
        self.text += data

    def of_class(self, name: str) -> list[tuple[str, list[tuple[str, str | None]]]]:
        """Return the elements of a class, with their attributes."""
        return [e for e in self.elements if name in (dict(e[1]).get("class") or "").split()]


def parsed(text: str) -> ET.Element:
    """Return the root element of XML that we wrote."""
    return ET.fromstring(text)  # noqa: S314


# -- texts ---------------------------------------------------------------------------------------


def test_evidence_is_everything_that_a_finding_has() -> None:
    """Every field of a finding is listed under its name, in a fixed order; empty fields are left out."""
    assert evidence(finding()) == [
        ("hook", "prepare_replay"),
        ("field", "view.req_pool_indices[3:4]"),
        ("expected", "0, scratch"),
        ("actual", "5, of the batch before"),
        ("batch", "decode, 3 requests"),
        ("shape", "decode bs=4 tokens=4"),
        ("help", "declare PaddingPolicy.ZERO"),
        ("reproduce", "graphpact check flashinfer --only GP03 --lane 'decode, page 16' --seed 0"),
    ]
    bare = finding(hook=None, field=None, batch=None, shape=None, help=None, reproduce=None)
    assert [name for name, _ in evidence(bare)] == ["expected", "actual"]


def test_rows_are_rules_in_their_order() -> None:
    """Each rule with results is one row, after the general results, with its lanes counted by outcome."""
    results = [result(rule=rule) for rule in ("GP20", None, "GP03")]
    results += [result("fail", "GP03"), result("unsupported", "GP03")]
    found = rows(plugin(results))
    assert [row.label for row in found] == [
        "general",
        "GP03 stale-pad-tail",
        "GP20 illegal-work-in-capture",
    ]
    assert found[1].counts == {"fail": 1, "pass": 1, "unsupported": 1}
    assert [row.share for row in found] == ["1", "1/2", "1"]
    assert found[1].requirement == RULES["GP03"].requirement


WHERE = "on the tape, portable kernels"
SHOWN, NEEDS = f"conformant {WHERE}", "a full claim would also need"
VERDICTS = [
    (plugin([result()]), False, SHOWN),
    (
        plugin([result(), result("not_run", "GP17")], not_shown=["native kernels: no GPU"]),
        False,
        f"{SHOWN}; {NEEDS} a run of GP17 in every lane; what this machine could not show",
    ),
    (
        plugin([result(), result("not_run", "GP17")]),
        True,
        f"not conformant: --strict also asks for a run of GP17 in every lane; all else holds {WHERE}",
    ),
    (
        plugin([result(), result("xfail", "GP16")], provider=None),
        True,
        "conformant on the tape, but for known failures of GP16 staging-race",
    ),
    (
        plugin([result(), result("fail"), result("fail", None, check="quiet")]),
        False,
        "not conformant: general (quiet), GP03 stale-pad-tail",
    ),
    (
        plugin([result("fail", "GP02"), result("fail", "GP05"), result("fail", "GP03")]),
        False,
        "not conformant: GP02 missed-refresh, GP03 stale-pad-tail, GP05 pad-extent",
    ),
    (
        plugin([result("fail"), result("error", "GP05")]),
        False,
        "not conformant: GP03 stale-pad-tail; the suite could not continue with GP05 pad-extent",
    ),
    (
        plugin([result(), result("error", "GP05")]),
        False,
        "no verdict: the suite could not continue with GP05 pad-extent",
    ),
    (plugin([result("unsupported")]), False, "no verdict: nothing passed, nothing failed"),
]


@pytest.mark.parametrize(("held", "strict", "said"), VERDICTS)
def test_a_verdict_says_what_was_shown_and_what_is_missing(
    held: PluginResults,
    strict: bool,  # noqa: FBT001  a parameter
    said: str,
) -> None:
    """A verdict names the exercised driver and kernels, the failures, and what a full claim needs."""
    assert verdict(held, strict=strict) == said


def test_every_rule_has_its_place_between_cause_and_consequence() -> None:
    """The order of causes has every rule once and does not depend on the order of its input."""
    assert sorted(causes_first(RULES)) == sorted(RULES)
    assert causes_first(reversed(RULES)) == causes_first(RULES)


@quick
@given(st.lists(st.sampled_from([*RULES]), unique=True))
def test_the_rule_to_begin_with_is_the_likeliest_cause(broken: list[str]) -> None:
    """Rules come by their order of causes, then general checks, then errors of the suite."""
    results = [result("fail", rule) for rule in broken]
    results += [result(rule=rule) for rule in RULES if rule not in broken]
    expected = causes_first(broken)
    assert [row.key for row in to_fix(rows(plugin(results)))] == expected
    worse = [*results, result("fail", None), result("error", "GP17", reason="a fault")]
    order = [row.key for row in to_fix(rows(plugin(worse)))]
    error = [] if "GP17" in expected else ["GP17"]
    assert order == [*expected, "general", *error]


@quick
@given(st.lists(st.tuples(st.sampled_from([*RULES]), st.booleans()), unique_by=lambda broken: broken[0]))
def test_what_names_a_hook_comes_before_what_only_sees_outputs(broken: list[tuple[str, bool]]) -> None:
    """A rule with a finding that names the hook comes before those without, also among its lanes."""

    def failed(rule: str, hook: str | None) -> Result:
        return result("fail", rule, lane=str(hook), findings=[finding(rule, hook=hook)])

    located = [rule for rule, is_located in broken if is_located]
    results = [failed(rule, None) for rule, _ in broken]
    results += [failed(rule, "populate") for rule in located]
    order = to_fix(rows(plugin(results)))
    others = [rule for rule, is_located in broken if not is_located]
    assert [row.key for row in order] == [*causes_first(located), *causes_first(others)]
    assert [row.failures[0].lane for row in order[: len(located)]] == ["populate"] * len(located)


def test_why_to_begin_with_a_rule_is_said_if_others_fail_too() -> None:
    """The first of several failures has a reason: what it concerns, or that the suite stopped."""

    def why(*results: Result) -> str:
        return why_first(to_fix(rows(plugin(results))))

    one, other, general = result("fail"), result("fail", "GP06"), result("fail", None)
    assert why(result()) == why(one) == ""
    assert why(one, other) == ("it concerns the contents of the buffers, and the other may follow from it")
    assert why(one, other, general).endswith("and the other 2 may follow from it")
    error = result("error", "GP06")
    assert why(one, error) == ""
    assert why(error, result("error", "GP07")) == (
        "the suite could not continue there, so the results are incomplete"
    )
    assert all(concern_of(rule) for rule in RULES)


@pytest.mark.parametrize(
    ("results", "strict", "stands"),
    [
        ([result()], False, "pass"),
        ([result(), result("not_run", "GP17")], False, "pass"),
        ([result(), result("not_run", "GP17")], True, "fail"),
        ([result(), result("fail")], False, "fail"),
        ([result(), result("xpass")], False, "xpass"),
        ([result("fail"), result("error", "GP05")], False, "fail"),
        ([result(), result("error", "GP05")], False, "error"),
        ([result("unsupported"), result("not_run", "GP17")], False, "not_run"),
        ([], False, "not_run"),
    ],
)
def test_a_plugin_stands_as_its_verdict_says(
    results: list[Result],
    strict: bool,  # noqa: FBT001  a parameter
    stands: str,
) -> None:
    """A plugin has the sign of a pass if and only if its verdict begins with conformant."""
    held = plugin(results)
    assert standing(held, strict=strict) == stands
    said = verdict(held, strict=strict)
    assert said.startswith("conformant") == (stands == "pass")
    assert said.startswith("no verdict") == (stands in ("error", "not_run"))


def test_the_summary_counts_plugins_and_results() -> None:
    """The last line has the number of conformant plugins, the count of each outcome, seed and time."""
    made = report(plugin([result(), result()]), plugin([result("fail"), result("not_run")]), seed=7)
    assert summary(made) == "1 of 2 plugins conformant; 1 fail, 2 pass, 1 not run; seed 7; 1.5 s"


# -- a terminal ----------------------------------------------------------------------------------


def test_a_failure_is_printed_whole_in_a_terminal() -> None:
    """The tree shows requirement, all evidence, claims, hints, parts that were not shown, and the verdict."""
    claim = Claim(capability="trees", declared="full", shown="fail")
    held = plugin(
        [result("fail"), result(rule="GP04"), result("not_run", "GP17", reason="one process")],
        claims=[claim],
        hints=["a hint"],
        not_shown=["native kernels: no GPU"],
    )
    text = drawn(report(held))
    for name, told in evidence(finding()):
        assert re.search(rf"│     {name} +{re.escape(told)}\n", text)
    for line in (
        "├── ✗ GP03 stale-pad-tail       1 fail  ← begin here",
        f"│   {RULES['GP03'].requirement}",
        "│   ✗ decode, page 16  shrink_after_grow",
        "├── ✓ GP04 bad-pad-sentinel     1 pass",
        "├── ○ GP17 collective-mismatch  1 not run",
        "│   GP17 in decode, page 16: one process (1 not run)",
        "│   affected by the broken rules: trees",
        "│   a hint",
        "    native kernels: no GPU",
        "not conformant: GP03 stale-pad-tail",
        f"not conformant: {summary(report(held))}",
    ):
        assert f"\n{line}\n" in text


def test_a_terminal_prints_the_rule_to_begin_with_first() -> None:
    """Broken rules come first, in the order in which to fix them; then the others by id."""
    broken = [result("fail", "GP02", findings=[finding("GP02", hook=None)]), result("fail", "GP09")]
    text = drawn(report(plugin([result(rule="GP01"), *broken])))
    begin = [line for line in text.splitlines() if line.startswith(("├── ", "└── "))]
    assert [line.split()[2] for line in begin[:3]] == ["GP09", "GP02", "GP01"]
    assert "begin here" in begin[0]


REASONS = ("no graphs: declared", "another machine", None)


@quick
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["decode-page1", "decode-page16", "extend-page1", "mixed"]), _RULE_KEYS),
        st.tuples(st.sampled_from(["pass", "fail", "unsupported", "not_run"]), st.sampled_from(REASONS)),
    )
)
def test_what_was_not_checked_is_grouped_by_reason(told: dict[Any, tuple[str, str | None]]) -> None:
    """Every result that did not run is counted in one line with its reason; the line names where.

    A kind of step stands for its lanes if none of them ran otherwise; few rules are named.
    """
    results = [
        result(outcome, rule, lane=lane, reason=reason) for (lane, rule), (outcome, reason) in told.items()
    ]
    lines = unchecked(plugin(results))
    held = Counter((r.reason or "no reason given", r.outcome) for r in results if not r.outcome.ran)
    assert len(lines) == len(held)
    for line, ((reason, outcome), number) in zip(lines, held.items(), strict=True):
        where, _, _ = line.partition(f": {reason} ")
        assert line == f"{where}: {reason} ({number} {say(outcome)})"
        mine = [r for r in results if (r.reason or "no reason given", r.outcome) == (reason, outcome)]
        kinds = {r.lane.partition("-")[0] for r in mine}
        lanes = {r.lane for r in mine}
        is_whole = {r.lane for r in results if r.lane.partition("-")[0] in kinds} <= lanes
        assert set(where.rpartition(" in ")[2].split(", ")) == (kinds if is_whole else lanes)
        rules = {r.rule for r in mine if r.rule}
        assert {rule for rule in RULES if rule in where} == (rules if len(rules) <= 3 else set())
    several = [result("not_run", lane=f"lane {n}", reason=f"reason {n}") for n in range(9)]
    assert len(unchecked(plugin(several))) == 7
    assert unchecked(plugin(several))[-1] == "and 3 more"


@pytest.mark.parametrize("outcome", ["fail", "xfail"])
def test_claims_that_follow_from_a_broken_rule_are_one_line(outcome: str) -> None:
    """Declared capabilities that fail with a rule are one line; without a broken rule each is a line.

    An undeclared capability that works has its own line in any case.
    """
    claims = [Claim(capability=f"page_size {n}", declared="full", shown="fail") for n in (1, 16)]
    claims += [Claim(capability="trees", declared="unsupported", shown="pass")]
    own = "trees: declared unsupported, shown pass"
    broken = plugin([result(outcome, reason="known")], claims=claims)
    assert disagreements(broken) == ["affected by the broken rules: page_size 1, page_size 16", own]
    general = plugin([result("fail", None)], claims=claims)
    each = [f"page_size {n}: declared full, shown fail" for n in (1, 16)]
    assert disagreements(general) == [*each, own]


def test_many_failures_of_a_rule_are_shortened() -> None:
    """Three lanes of a rule are printed in full and the others counted; so are further findings of a lane."""
    results = [result("fail", lane=f"lane {n}") for n in range(8)]
    results[0] = result("fail", lane="lane 0", findings=[finding(), finding(), finding()])
    text = drawn(report(plugin(results)))
    assert text.count("expected   0, scratch") == 3
    assert "and 2 more findings in this lane" in text
    assert "and in 5 more: lane 3, lane 4, lane 5 and 2 more" in text


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_narrow_terminal_folds_text_and_keeps_commands(width: int) -> None:
    """Evidence is wrapped in its own column without loss; the command to copy stays on one line."""
    long = "number " * 30
    command = "graphpact check flashinfer --only GP03 --lane 'decode, page 16' --seed 0 --examples 2"
    told = finding(actual=long, reproduce=command)
    text = drawn(report(plugin([result("fail", findings=[told])])), width)
    assert f"reproduce  {command}\n" in text
    assert text.count("number") == 30
    folded = [line for line in text.splitlines() if "number" in line]
    assert len(folded) > 1
    assert max(map(len, folded)) <= width
    assert {re.split("number|actual", line)[0].strip(" │") for line in folded} == {""}


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_commands_no_terminal(text: str) -> None:
    """Control characters of a plugin's text do not reach a terminal, and its markup is not interpreted."""
    shown = drawn(full_report(text))
    assert not set(re.findall(r"[^\x20-\x7e\n]", shown)) & {chr(c) for c in (*range(32), 127, 155)}
    harmless = drawn(full_report("x")).splitlines()
    begins = [line for line in shown.splitlines() if line[:4] in ("├── ", "└── ")]
    assert len(begins) == sum(line[:4] in ("├── ", "└── ") for line in harmless)
    if "markup" in text:
        assert text in shown


def test_progress_counts_and_tells_failures_at_once() -> None:
    """During a run a terminal shows the work, counts, each failure at once, and the rule to begin with."""
    file = io.StringIO()
    shown = Progress(Console(file=file, width=140, force_terminal=True, markup=False))
    with shown.shown():
        shown.found("fa3", result())
        shown.found("fa3", result("fail", rule="GP06", lane="verify\x1b[2J"))
        shown.begins("flashinfer", "decode :: three_replays")
        shown.found("fa3", result("fail", rule="GP03"))
        shown.begins("fa3", "decode :: padding")
    text = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert "GP06  verify\\x1b[2J  prepare_replay, view.req_pool_indices[3:4]" in text
    assert "2 results, 1 failed  flashinfer: decode :: three_replays" in text
    assert "3 results, 2 failed, begin with GP03 stale-pad-tail  fa3: decode :: padding" in text


# -- JUnit XML -----------------------------------------------------------------------------------


def test_junit_has_a_case_for_each_result() -> None:
    """Each result is a test case that passed, failed, had an error or was skipped, with its reason."""
    kinds = {
        "pass": None,
        "fail": "failure",
        "xpass": "failure",
        "error": "error",
        "xfail": "skipped",
        "unsupported": "skipped",
        "not_run": "skipped",
    }
    results = [result(o, lane=o, reason=None if o == "fail" else f"why {o}") for o in kinds]
    made = report(plugin(results), plugin([result()], partner="cuda_graph"))
    root = parsed(to_junit(made))
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["flashinfer", "flashinfer + cuda_graph"]
    cases = {(case.get("name") or "").partition(" ")[0]: case for case in suites[0].iter("testcase")}
    assert list(cases) == list(kinds)
    for outcome, kind in kinds.items():
        assert [child.tag for child in cases[outcome]] == ([kind] if kind else [])
        assert cases[outcome].get("classname") == "flashinfer.GP03 stale-pad-tail"
        if outcome not in ("pass", "fail"):
            assert cases[outcome][0].get("message") == f"why {outcome}"
    failure = cases["fail"][0]
    assert failure.get("message") == (
        "view.req_pool_indices[3:4]: expected 0, scratch, actual 5, of the batch before"
    )
    assert RULES["GP03"].requirement in (failure.text or "")
    assert all(told in (failure.text or "") for _, told in evidence(finding()))
    totals = {"tests": "7", "failures": "2", "errors": "1", "skipped": "3"}
    assert {name: suites[0].get(name) for name in totals} == totals
    assert root.get("tests") == "8"


@quick
@given(words)
def test_foreign_text_stays_text_in_xml(text: str) -> None:
    """With any text of a plugin the XML is well-formed, has the same elements, and has the escaped text."""
    root = parsed(to_junit(full_report(text)))
    harmless = parsed(to_junit(full_report("x")))
    assert [e.tag for e in root.iter()] == [e.tag for e in harmless.iter()]
    suite = root.find("testsuite")
    assert suite is not None
    stored = full_report(text).plugins[0].label
    assert suite.get("name") == plain(stored)


# -- a page --------------------------------------------------------------------------------------


def test_every_cell_of_the_matrix_opens_its_evidence() -> None:
    """Each rule with results in the matrix links to an article with its requirement and all evidence."""
    made = full_report("x")
    text = to_html(made)
    page = Page(text)
    cells = [dict(attrs)["href"] or "" for tag, attrs in page.of_class("cell") if tag == "a"]
    assert len(cells) == sum(len(rows(held)) for held in made.plugins)
    assert {link for link in page.links if link.startswith("#c-")} == {f"#c-{link[1:]}" for link in cells}
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links} <= set(page.ids)
    requirements = {row.key: row.requirement for held in made.plugins for row in rows(held)}
    for link in cells:
        article = text.partition(f'id="{link[1:]}"')[2].partition("</article>")[0]
        assert requirements[link.partition("-")[2]] in Page(article).text
    page = Page(to_html(report(plugin([result("fail")]))))
    assert all(part in page.text for _, part in evidence(finding()))


def test_a_page_needs_nothing_from_outside() -> None:
    """A page has no script and loads no address or file; every link stays in the page."""
    made = full_report("x")
    for text in (to_html(made), comparison_to_html(compare(report(), made), "a", "b")):
        page = Page(text)
        assert {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in page.tags} == set()
        assert not [name for _, names in page.tags for name in names if name in ("src", "srcset")]
        assert all(link.startswith("#") for link in page.links)
        assert "url(" not in text
        assert "@import" not in text
        assert "prefers-color-scheme: dark" in text


@quick
@given(words)
def test_foreign_text_stays_text_in_a_page(text: str) -> None:
    """With any text of a plugin a page has the same tags and attributes, and has the escaped text."""
    said = text or "-"  # empty texts are left out
    made, harmless = to_html(full_report(said)), to_html(full_report("x"))
    page = Page(made)
    assert page.tags == Page(harmless).tags
    assert all(c.isprintable() or c in "\n\t" for c in made)
    assert page.text.count(plain(full_report(said).plugins[0].hints[0])) >= 10
    changed = compare(full_report(said), report())
    told, calm = (comparison_to_html(changed, said, name) for name in (said, "x"))
    assert Page(told).tags == Page(calm).tags
    assert all(c.isprintable() or c in "\n\t" for c in told)


FAILURES = [
    [result("fail", "GP02"), result("fail", "GP05"), result("fail", "GP03"), result(rule="GP01")],
    [result("fail", rule) for rule in (None, *RULES)],
    [result("fail"), result("not_run", "GP17"), result("unsupported", "GP10")],
    [result("fail"), result("error", "GP05", reason="a fault"), result("xpass", "GP08")],
    [result("fail", None, check="quiet", level="SHOULD"), result()],
    [result("fail", "GP03", lane=f"lane {n}") for n in range(2000)],
]


@pytest.mark.parametrize("results", FAILURES)
def test_a_page_marks_the_rule_to_begin_with_as_the_terminal_does(results: list[Result]) -> None:
    """The verdict is above the matrix; it, a cell, an article and the terminal begin with one rule."""
    made = report(plugin(results), plugin([result()], name="fa3"))
    text, shown = to_html(made), drawn(made)
    (first, *others) = to_fix(rows(made.plugins[0]))
    (line,) = [line for line in shown.splitlines() if line.endswith("← begin here")]
    assert f" {first.label} " in line
    told = [line for line in shown.splitlines() if line.startswith("begin with ")]
    assert [line.partition(": ")[0] for line in told] == [f"begin with {first.label}"] * bool(others)
    assert text.count('<span class="begin">begin here</span>') == 2
    cell, article = (
        part.rpartition(' id="')[2].partition('"')[0] for part in text.split("begin here</span>")[:2]
    )
    assert (cell, article) == (f"c-p1-{first.key}", f"p1-{first.key}")
    places = [
        text.index(verdict(made.plugins[0])),
        text.index(f'<a class="first" href="#p1-{first.key}">{first.label}</a>'),
        text.index('class="matrix"'),
        *(text.index(f'id="p1-{row.key}"') for row in (first, *others)),
    ]
    assert places == sorted(places)
    assert why_first([first, *others]) in text


def test_a_page_without_failures_marks_no_rule() -> None:
    """Without failures the verdict is above the matrix, and there is no rule to begin with."""
    for outcome in ("pass", "not_run", "unsupported", "xfail"):
        made = report(plugin([result(outcome, rule) for rule in RULES]))
        text = to_html(made)
        assert text.index(verdict(made.plugins[0])) < text.index('class="matrix"')
        assert not Page(text).of_class("begin")
        assert "begin with" not in text
        assert "begin" not in drawn(made)


def test_many_failures_of_a_rule_are_folded_and_complete() -> None:
    """Of 2,000 failing lanes, three are open on the page, the others are folded, and none is left out."""
    text = to_html(report(plugin([result("fail", lane=f"lane {n};") for n in range(2000)])))
    article = text.partition("<article")[2].partition("</article>")[0]
    shown, _, folded = article.partition("<details>")
    assert "<summary>and in 1997 more</summary>" in folded
    lanes = [[int(n) for n in re.findall(r"lane (\d+);", part)] for part in (shown, folded)]
    assert lanes == [[0, 1, 2], [*range(3, 2000)]]


def test_long_names_are_in_the_title_in_full() -> None:
    """Wherever a page shows a plugin's name, which it may cut, the title has it in full."""
    name, partner = "n" * 5000, "p" * 5000
    held = plugin(
        [result("fail"), result(rule="GP04")],
        name=name,
        partner=partner,
        claims=[Claim(capability="trees", declared="full", shown="fail")],
        hints=["a hint"],
        not_shown=["a GPU"],
    )
    page = Page(to_html(report(held)))
    titles = [dict(attrs)["title"] or "" for _, attrs in page.of_class("name")]
    for long in (name, partner):
        assert page.text.count(long) == sum(long in title for title in titles) >= 8


def test_a_page_can_be_used_without_colours_and_without_a_mouse() -> None:
    """Each cell is a link named by rule, plugin, counts and mark; each header has its scope and a name."""
    made = full_report("x")
    for text in (to_html(made), comparison_to_html(compare(report(), made), "a", "b")):
        page = Page(text)
        headers = [dict(attrs) for tag, attrs in page.elements if tag == "th"]
        assert headers
        assert {attrs.get("scope") for attrs in headers} == {"row", "col"} & {
            attrs.get("scope") for attrs in headers
        }
        assert "<th></th>" not in re.sub(r"<th [^>]*>", "<th>", text)
    page = Page(to_html(made))
    links = [dict(attrs) for tag, attrs in page.of_class("cell") if tag == "a"]
    labels = [attrs["aria-label"] or "" for attrs in links]
    assert labels[0].startswith("general, x + x: 1 fail, 1 xpass, 1 error, ")
    assert [label for label in labels if label.endswith(", begin here")] == [
        label for label in labels if label.startswith("GP03 stale-pad-tail, x + x: ")
    ]
    assert all(dict(attrs).get("tabindex") in (None, "0") for _, attrs in page.elements)


def test_a_page_shows_claims_hints_and_what_was_not_run() -> None:
    """A page marks claims that disagree, and has hints, drawn values, missing parts, and the environment."""
    claims = [
        Claim(capability="trees", declared="full", shown="fail"),
        Claim(capability="decode", declared="full", shown="pass"),
    ]
    more = {"not_shown": ["native kernels: no GPU"], "drawn": {"page size": ["1", "64"]}}
    held = plugin([result()], claims=claims, hints=["a hint"], **more)
    text = Page(to_html(report(held, options={"size": "quick"}))).text
    assert text.count("disagrees") == 1
    shown = ("trees", "a hint", "native kernels: no GPU", "page size: 1, 64", "2.13.0", "3.11.4", "quick")
    for said in shown:
        assert said in text
    plain_page = Page(to_html(report())).text
    assert not [word for word in ("Claims", "Hints", "To fix", "drawn") if word in plain_page]


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_saved_can_be_read_back(tmp_path: Path, text: str) -> None:
    """A saved report is three files; it can be loaded from its directory and from its results.json."""
    made = full_report(text)
    save(made, tmp_path / "deep/er")
    assert sorted(p.name for p in (tmp_path / "deep/er").iterdir()) == sorted(FILES)
    assert load_report(tmp_path / "deep/er") == made
    assert load_report(tmp_path / "deep/er/results.json") == made
    assert (tmp_path / "deep/er/junit.xml").read_text(encoding="utf-8") == to_junit(made)
    assert (tmp_path / "deep/er/report.html").read_text(encoding="utf-8") == to_html(made)


def _changed(**changes: object) -> bytes:
    return json.dumps({**json.loads(report().model_dump_json()), **changes}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (report().model_dump_json().encode()[:-9], "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a report: it has no schema_version"),
        (b'{"promises": []}', "is not a report: it has no schema_version"),
        (_changed(schema_version=2), "has schema version 2; this graphpact reads 1"),
        (_changed(seed="many"), "is not a report: seed: "),
        (_changed(colour="red"), "is not a report: colour: "),
        (_changed(options=json.loads('{"a":' * 400 + "1" + "}" * 400)), "recursion limit exceeded"),
        (_changed(plugins=[{}]), "is not a report: plugins.0.kind: Field required, and 4 more"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    """A missing, broken or foreign file, or another schema version, is a usage error that says which."""
    file = tmp_path / "some.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        load_report(file)
    assert str(file) in caught.value.message
    assert caught.value.hint


def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """A path that cannot be created or written is a usage error, not an OSError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no report can be written to"):
        save(report(), tmp_path / "file/out")
    (tmp_path / "out/junit.xml").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"junit\.xml cannot be written"):
        save(report(), tmp_path / "out")


# -- comparison ----------------------------------------------------------------------------------

RANK = {"error": 0, "fail": 1, "xpass": 2, "xfail": 3, "pass": 4}
cells = st.dictionaries(
    st.tuples(st.sampled_from(["GP01", "GP03", None]), st.sampled_from(["a", "b", "c"])),
    st.sampled_from(Outcome),
    max_size=6,
)
Cells = dict[tuple[str | None, str], Outcome]


def _of(held: Cells) -> Report:
    made = [result(outcome, rule, lane=lane) for (rule, lane), outcome in held.items()]
    return report(plugin(made))


def _told(comparison: Comparison) -> Counter[tuple[str, str]]:
    return Counter((c.what, lane) for c in comparison.changes for lane in c.lanes)


@quick
@given(cells, cells)
def test_a_comparison_is_what_changed_cell_by_cell(before: Cells, after: Cells) -> None:
    """Each cell is better, worse, new, gone or unchanged; with swapped reports each is the opposite."""
    expected: Counter[tuple[str, str]] = Counter()
    regression = False
    for rule, lane in before.keys() | after.keys():
        was, now = RANK.get(before.get((rule, lane), "-")), RANK.get(after.get((rule, lane), "-"))
        if was is None and now is None:
            continue
        if was is None:
            expected["appeared", lane] += 1
            regression |= now in (0, 1, 2)
        elif now is None:
            expected["vanished", lane] += 1
        elif was != now:
            expected["better" if now > was else "worse", lane] += 1
            regression |= now < was
    found = compare(_of(before), _of(after))
    assert _told(found) == expected
    assert found.is_regression == regression
    opposite = {
        "better": "worse",
        "worse": "better",
        "appeared": "vanished",
        "vanished": "appeared",
    }
    back = _told(compare(_of(after), _of(before)))
    assert back == Counter({(opposite[what], lane): n for (what, lane), n in expected.items()})
    same = compare(_of(before), _of(before))
    assert (same.changes, same.unchanged, same.is_regression) == ((), len(before), False)


def test_cells_are_distinguished_by_plugin_partner_and_question() -> None:
    """Results with one lane name but another plugin, partner or general check are separate cells."""
    general = [result(rule=None, check="quiet"), result(rule=None, check="ends")]
    before = report(
        plugin(general),
        plugin([result()], partner="cuda_graph"),
        plugin([result()]),
        plugin([result("fail")], name="fa3"),
    )
    broken = [general[0], result("fail", None, check="ends")]
    after = report(
        plugin(broken),
        plugin([result("fail")], partner="cuda_graph"),
        plugin([result()]),
        plugin([result()], name="fa3"),
    )
    told = {(c.plugin, c.rule) for c in compare(before, after).changes}
    assert told == {
        ("flashinfer", "general: ends"),
        ("flashinfer + cuda_graph", "GP03 stale-pad-tail"),
        ("fa3", "GP03 stale-pad-tail"),
    }
    assert compare(before, after).unchanged == 2


def test_changes_of_one_kind_are_printed_together_with_the_setup() -> None:
    """Lanes with the same change share a row; differences in seed and versions follow."""
    before = report(plugin([result(lane=f"lane {n}") for n in range(4)]))
    after = report(plugin([result("fail", lane=f"lane {n}") for n in range(4)], version="0.2.0"), seed=3)
    found = compare(before, after)
    (change,) = found.changes
    assert change.lanes == ("lane 0", "lane 1", "lane 2", "lane 3")
    assert found.setup == (("seed", "0", "3"), ("graphpact-flashinfer", "0.1.0", "0.2.0"))
    file = io.StringIO()
    print_comparison(Console(file=file, width=120), found)
    shown = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    page = Page(comparison_to_html(found, "before.json", "after.json")).text
    assert "worse flashinfer GP03 stale-pad-tail ✓ pass ✗ fail lane 0 and 3 more" in shown
    assert "seed 0 3" in shown
    assert shown[-1] == "4 worse, 0 appeared, 0 vanished, 0 better, 0 unchanged"
    for said in ("before.json", "after.json", "4 worse", "lane 3", "0.2.0", "stale-pad-tail"):
        assert said in page
