"""Conformance reports built by hand, for tests of the code that reads reports."""

import io
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from rich.console import Console

from graphpact_conformance.cli.results import print_report
from graphpact_conformance.results import (
    Claim,
    Environment,
    Finding,
    Outcome,
    PluginResults,
    Report,
    Result,
)

HOSTILE = (
    "</p></details><script>alert(1)</script>",
    '" onmouseover="x" <b>',
    "]]> --> <!-- {{ 7 * 7 }} {% raw %} &amp; &#60;",
    "[bold red]markup[/bold red] :skull:",
    "\x1b[2J\x1b]0;title\x07\x00\x9b31m\r",
    "\ud800\udfff\ufffe\uffff\u202eright to left",
    "two lines\n├── ✓ GP01 and a tab\t",
)
"""Texts that would break an HTML page, an XML file or a terminal if they were not escaped."""

words = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))
"""Any text, including lone surrogates."""


def finding(rule: str | None = "GP03", **changes: Any) -> Finding:
    """Return a finding with a value in every field."""
    fields = {
        "hook": "prepare_replay",
        "field": "view.req_pool_indices[3:4]",
        "expected": "0, scratch",
        "actual": "5, of the batch before",
        "batch": "decode, 3 requests",
        "shape": "decode bs=4 tokens=4",
        "help": "declare PaddingPolicy.ZERO",
        "reproduce": "graphpact check flashinfer --only GP03 --lane 'decode, page 16' --seed 0",
    }
    return Finding(rule=rule, **{**fields, **changes})


def result(outcome: Outcome | str = Outcome.PASS, rule: str | None = "GP03", **more: Any) -> Result:
    """Return a result; by default a failure has one finding."""
    outcome = Outcome(outcome)
    fields: dict[str, Any] = {"check": "shrink_after_grow", "lane": "decode, page 16"}
    if outcome is Outcome.FAIL:
        fields["findings"] = [finding(rule)]
    return Result(rule=rule, outcome=outcome, **{**fields, **more})


def plugin(results: Sequence[Result] = (), **changes: Any) -> PluginResults:
    """Return the results of one backend."""
    fields: dict[str, Any] = {
        "kind": "attention_backend",
        "name": "flashinfer",
        "distribution": "graphpact-flashinfer",
        "version": "0.1.0",
        "contract": "1",
        "drivers": ["tape"],
        "provider": "portable",
    }
    return PluginResults(results=list(results), **{**fields, **changes})


def report(*plugins: PluginResults, **changes: Any) -> Report:
    """Return a report of ``plugins``, or of one plugin with one passed result if none are given."""
    fields: dict[str, Any] = {
        "environment": Environment(
            graphpact="0.1.0", python="3.11.4", torch="2.13.0", platform="Linux", device="cpu"
        ),
        "seed": 0,
        "examples": 2,
        "started": "2026-11-21T10:04:05+00:00",
        "seconds": 1.5,
    }
    return Report(plugins=list(plugins or [plugin([result()])]), **{**fields, **changes})


def drawn(made: Report, width: int = 100, *, colours: bool = False) -> str:
    """Return a report as printed on a terminal of the given width."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=colours, markup=False, emoji=False, highlight=False
    )
    print_report(console, made)
    return file.getvalue()


def full_report(text: str = "x") -> Report:
    """Return a report of two plugins with every kind of content and ``text`` in every text field."""
    fields = dict.fromkeys(("field", "expected", "actual", "batch", "shape", "help"), text)
    place = {"check": text, "lane": text}
    broken = finding(None, hook=text, reproduce=text, **fields)
    results = [
        result(outcome, rule, reason=text, findings=[broken, broken], examples=2, **place)
        for rule in (None, "GP03", "GP20")
        for outcome in Outcome
    ]
    results += [result("pass", "GP01", **place), result("not_run", "GP02", reason=text, **place)]
    claims = [
        Claim(capability=text, declared="full", shown="fail", hint=text),
        Claim(capability=text, declared="since", since=text, shown="pass"),
    ]
    about = {"name": text, "distribution": text, "version": text, "contract": text}
    more = {"drivers": [text], "provider": text, "device": text, "hints": [text]}
    return report(
        plugin(results, claims=claims, not_shown=[text], partner=text, **about, **more),
        plugin([result()]),
        options={"strict": False, "lanes": [text], "size": text},
    )
