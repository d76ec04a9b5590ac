"""Reports as single HTML pages, without scripts and external resources, in light and dark.

Texts from plugins are not trusted: templates escape HTML and unprintable characters.

Does not: import jinja2 before a page is rendered; it is an extra.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from graphpact_conformance import vocabulary
from graphpact_conformance.report import digest
from graphpact_conformance.report.comparison import WHATS, Comparison
from graphpact_conformance.results import WORST_FIRST, Report

if TYPE_CHECKING:
    from jinja2 import Environment


def to_html(report: Report) -> str:
    """Return ``report`` as a page.

    The page has the verdict on each plugin with the rule to begin with, a matrix of rules by plugins, where
    each cell links to its evidence, then failures, claims, hints, the parts that this machine could not show,
    the drawn values of each dimension, and the options of the run.
    """
    columns = [{row.key: row for row in digest.rows(plugin)} for plugin in report.plugins]
    labels = {key: row for column in columns for key, row in column.items()}
    return _draw(
        "report.html.jinja",
        report=report,
        columns=columns,
        to_fix=[digest.to_fix(column.values()) for column in columns],
        # in the order of the rules
        rules=sorted(labels.values(), key=lambda row: "" if row.rule is None else row.key),
        headline=digest.VERDICTS[report.exit_code],
        summary=digest.summary(report),
        counts=digest.in_order(report.counts),
        batches=vocabulary.BATCHES,
        lanes=vocabulary.LANES,
    )


def comparison_to_html(comparison: Comparison, before: str, after: str) -> str:
    """Return a comparison as a page.

    Args:
        comparison: What changed.
        before: Name of the first report.
        after: Name of the second report.
    """
    return _draw("comparison.html.jinja", comparison=comparison, before=before, after=after, whats=WHATS)


def to_badge(report: Report) -> str:
    """Return a picture of the verdict for a README, in SVG: conformant or not, and the lowest tier.

    It has no time and no version of graphpact, so it changes only with the verdict.
    """
    said, colour = digest.badge(report)
    return _draw("badge.svg.jinja", said=said, colour=colour)


def _draw(template: str, **names: Any) -> str:
    return _environment().get_template(template).render(**names)


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  an extra
    from markupsafe import Markup  # noqa: PLC0415  comes with it

    def printable(value: Any) -> Any:
        return value if isinstance(value, Markup) else digest.plain(str(value))

    environment = Environment(
        loader=PackageLoader("graphpact_conformance.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(
        glyphs=digest.GLYPHS,
        outcomes=WORST_FIRST,
        verdict=digest.verdict,
        tier_text=digest.tier_text,
        standing=digest.standing,
        why_first=digest.why_first,
        unchecked=digest.unchecked,
        most_shown=digest.MOST_SHOWN,
        evidence=digest.evidence,
        say=digest.say,
        say_counts=digest.say_counts,
    )
    return environment
