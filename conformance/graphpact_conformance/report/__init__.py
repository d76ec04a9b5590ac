"""Reports of the conformance suite: save, load, compare, and render as HTML and JUnit XML.

    save(report, Path("out"))               results.json, junit.xml and report.html
    load_report(Path("out/results.json"))   the report again
    compare(before, after)                  results that became better or worse, appeared, vanished

The output in a terminal is in `graphpact_conformance.cli.results`.

Does not: run anything, or decide which results count (see `graphpact_conformance.results`).
"""

from graphpact_conformance.report.comparison import Comparison, OutcomeChange, compare
from graphpact_conformance.report.digest import Row, evidence, rows, summary, verdict
from graphpact_conformance.report.files import FILES, load_report, make_directory, save
from graphpact_conformance.report.junit import to_junit
from graphpact_conformance.report.page import comparison_to_html, to_badge, to_html

__all__ = [
    "FILES",
    "Comparison",
    "OutcomeChange",
    "Row",
    "compare",
    "comparison_to_html",
    "evidence",
    "load_report",
    "make_directory",
    "rows",
    "save",
    "summary",
    "to_badge",
    "to_html",
    "to_junit",
    "verdict",
]
