"""Results of the conformance suite in a terminal: a tree for each plugin, a table of changes.

Does not: compute results or texts; see `graphpact_conformance.report`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from graphpact_cli.console import clean, print_table, talk
from graphpact_conformance.report.comparison import Comparison, OutcomeChange
from graphpact_conformance.report.digest import (
    GLYPHS,
    MOST_SHOWN,
    VERDICTS,
    Row,
    disagreements,
    evidence,
    is_good,
    lanes,
    more_findings,
    rows,
    rows_from,
    say,
    summary,
    tier_text,
    to_fix,
    unchecked,
    verdict,
    why_first,
)
from graphpact_conformance.results import (
    ExitCode,
    Finding,
    Outcome,
    PluginResults,
    Report,
    Result,
)

_STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.XFAIL: "yellow",
    Outcome.XPASS: "bold magenta",
    Outcome.UNSUPPORTED: "dim",
    Outcome.NOT_RUN: "blue",
    Outcome.ERROR: "bold bright_red",
}
_WHATS = {"worse": "bold red", "appeared": "blue", "vanished": "dim", "better": "green"}
_GUIDE, _CORNER, _BAR, _BLANK = "├── ", "└── ", "│   ", "    "


# -- one report ----------------------------------------------------------------------------------


def print_report(console: Console, report: Report) -> None:
    """Print a tree for each plugin, its verdict, and a line of totals."""
    most = None if report.shows_all else MOST_SHOWN
    for plugin in report.plugins:
        _print_plugin(console, plugin, strict=report.strict, most=most)
        console.print()
    _print_legend(console, report)
    colour = "bold green" if report.exit_code is ExitCode.CONFORMANT else "bold red"
    text = Text.assemble((VERDICTS[report.exit_code], colour), f": {summary(report)}")
    console.print(text, soft_wrap=True)


def _print_legend(console: Console, report: Report) -> None:
    """Print what the experiments with findings do, and where batches and lanes are explained."""
    if not report.legend:
        return
    more = "batches and lanes: `graphpact explain batches`, `graphpact explain LANE`"
    console.print(Text.assemble(("how to read this", "bold"), (f"  {more}", "dim")), soft_wrap=True)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in report.legend.items():
        grid.add_row(Text(_line(name)), Text(_line(text), "dim"))
    _print_under(console, "  ", grid)
    console.print()


def _print_plugin(console: Console, plugin: PluginResults, *, strict: bool, most: int | None) -> None:
    about = (
        f"  {plugin.kind.replace('_', ' ')}, {plugin.distribution} {plugin.version},"
        f" contract {plugin.contract or 'not declared'}"
    )
    console.print(Text.assemble((_line(plugin.label), "bold"), (_line(about), "dim")), soft_wrap=True)
    in_order = rows(plugin)
    broken = to_fix(in_order)
    found = [*broken, *(row for row in in_order if row not in broken)]
    width = max((len(row.label) for row in found), default=0)
    notes = _notes(plugin)
    for at, row in enumerate(found):
        last = at == len(found) - 1 and not notes
        _print_row(console, row, width, last=last, first=row in broken[:1], most=most)
    for at, (heading, texts) in enumerate(notes):
        last = at == len(notes) - 1
        console.print(Text.assemble((_CORNER if last else _GUIDE, "dim"), (heading, "bold")))
        for text in texts:
            _print_under(console, _BLANK if last else _BAR, Text(clean(text)))
    colour = "bold green" if is_good(plugin, strict=strict) else "bold red"
    console.print(Text(_line(verdict(plugin, strict=strict)), colour), soft_wrap=True)
    if tier := tier_text(plugin):
        console.print(Text(_line(tier), "bold"), soft_wrap=True)
    if why := why_first(broken):
        console.print(Text(f"begin with {broken[0].label}: {why}"), soft_wrap=True)


def _print_row(console: Console, row: Row, width: int, *, last: bool, first: bool, most: int | None) -> None:
    line = Text.assemble((_CORNER if last else _GUIDE, "dim"), _sign(row.outcome))
    line.append(f" {row.label:<{width}}  ")
    for at, (outcome, number) in enumerate(row.counts.items()):
        line.append(", " if at else "").append(f"{number} {say(outcome)}", _STYLES[outcome])
    if first:
        line.append("  ← begin here", "bold")
    reasons = [reason for (outcome, reason) in row.others if reason and outcome is row.outcome]
    if reasons and row.outcome.ran:  # the notes have the others
        line.append(f": {_line('; '.join(reasons))}", "dim")
    console.print(line, soft_wrap=True)
    if row.failures:
        _print_failures(console, row, _BLANK if last else _BAR, most)


def _print_failures(console: Console, row: Row, guide: str, most: int | None) -> None:
    """Print the first failures of a row with the first finding of each; all of both if ``most`` is None."""
    _print_under(console, guide, Text(row.requirement, "italic"))
    for result in row.failures[:most]:
        head = Text.assemble(_sign(result.outcome), f" {_line(result.lane)}")
        head.append(f"  {_line(result.check)}", "dim")
        if not result.counts_against:
            head.append("  a SHOULD", "dim")
        _print_under(console, guide, head)
        if result.reason:
            _print_under(console, guide + "  ", Text(clean(result.reason)))
        for finding in result.findings if most is None else result.findings[:1]:
            _print_finding(console, finding, guide + "  ")
        if most is not None and (more := more_findings(result)):
            _print_under(console, guide + "  ", Text(more, "dim"))
    if rest := row.failures[most:] if most is not None else []:
        _print_under(console, guide, Text(f"and in {len(rest)} more: {_line(lanes(rest))}", "dim"))


def _print_finding(console: Console, finding: Finding, guide: str) -> None:
    parts = dict(evidence(finding))
    command = parts.pop("reproduce", None)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=len("reproduce"))
    grid.add_column(overflow="fold")
    for name, text in parts.items():
        grid.add_row(name, Text(clean(text), {"expected": "green", "actual": "red"}.get(name, "")))
    _print_under(console, guide, grid)
    if command:  # never wrapped, so that it can be copied
        line = Text.assemble((f"{guide}reproduce  ", "dim"), (_line(command), "cyan"))
        console.print(line, soft_wrap=True)


def _print_under(console: Console, guide: str, what: RenderableType) -> None:
    """Print ``what`` with ``guide`` before each line."""
    options = console.options.update(width=max(20, console.width - len(guide)))
    for segments in console.render_lines(what, options, pad=False):
        pieces = ((segment.text, segment.style or "") for segment in segments)
        line = Text.assemble((guide, "dim"), *pieces)
        line.rstrip()
        console.print(line, soft_wrap=True)


def _notes(plugin: PluginResults) -> list[tuple[str, Sequence[str]]]:
    """Return the notes after the rules, by heading."""
    found = (
        ("not checked", unchecked(plugin)),
        ("claims that disagree", disagreements(plugin)),
        ("hints", plugin.hints),
        ("not shown on this machine", plugin.not_shown),
    )
    return [(heading, texts) for heading, texts in found if texts]


def _sign(outcome: Outcome) -> tuple[str, str]:
    return GLYPHS[outcome], _STYLES[outcome]


def _line(text: str) -> str:
    """Return text from plugins on one line, with newlines and tabs escaped."""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


# -- two reports ---------------------------------------------------------------------------------


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the changes from one report to another, then the differences of their setup."""
    if comparison.changes:
        print_table(
            console,
            ("", "plugin", "rule", "before", "after", "where"),
            [_change(change) for change in comparison.changes],
        )
        console.print()
    if comparison.setup:
        print_table(console, ("made with", "before", "after"), comparison.setup)
        console.print()
    style = "bold red" if comparison.is_regression else "bold green"
    console.print(Text(comparison.summary, style), soft_wrap=True)


def _change(change: OutcomeChange) -> tuple[str, ...]:
    before, after = (
        "absent" if outcome is None else f"{GLYPHS[outcome]} {say(outcome)}"
        for outcome in (change.before, change.after)
    )
    first, more = change.lanes[0], len(change.lanes) - 1
    where = first + (f" and {more} more" if more else "")
    return change.what, change.plugin, change.rule, before, after, where


# -- while it runs -------------------------------------------------------------------------------


class Progress:
    """A status line with the current work, counts and the rule to begin with; above it each failure.

    Args:
        console: Where it is shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status(Text("starting"))
        self._done = 0
        self._failed: dict[str, list[Result]] = {}  # by plugin
        self._first: dict[str, str] = {}  # by plugin: the rule to begin with

    def begins(self, plugin: str, work: str) -> None:
        """Show that ``work`` begins."""
        failed = sum(map(len, self._failed.values()))
        counts = f"{self._done} results" + (f", {failed} failed" if failed else "")
        if plugin in self._first:
            counts += f", begin with {self._first[plugin]}"
        line = f"{counts}  {_line(plugin)}: {_line(work)}"
        self._status.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def found(self, plugin: str, result: Result) -> None:
        """Count a result; if it is a failure, print it, with hook and field of its first finding."""
        self._done += 1
        if not result.outcome.is_failure:
            return
        self._failed.setdefault(plugin, []).append(result)
        if broken := to_fix(rows_from(self._failed[plugin])):
            self._first[plugin] = broken[0].label
        text = f" {_line(plugin)}  {result.rule or _line(result.check)}  {_line(result.lane)}"
        first = result.findings[0] if result.findings else None
        place = [] if first is None else [part for part in (first.hook, first.field) if part]
        more = (f"  {_line(', '.join(place))}", "dim")
        self._console.print(Text.assemble(_sign(result.outcome), text, more))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line inside the context."""
        with self._status:
            yield


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress | None]:
    """Show progress on a terminal. Yields None without a terminal, or if ``quiet``."""
    console = talk()
    if quiet or not console.is_interactive:
        yield None
        return
    shown = Progress(console)
    with shown.shown():
        yield shown
