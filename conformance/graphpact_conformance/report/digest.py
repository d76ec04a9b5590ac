"""The contents of reports in every format: a row per rule, the evidence, the verdict.

Does not: render.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphpact_conformance.results import (
    WORST_FIRST,
    Claim,
    ExitCode,
    Finding,
    Outcome,
    PluginResults,
    Report,
    Result,
    worst,
)
from graphpact_conformance.rule import Rule
from graphpact_conformance.rules import EVERY_RULE, Evidence, causes_first, concern_of
from graphpact_conformance.tier_rules import TIERS

MOST_SHOWN = 3
"""Number of failures of one rule that are shown in full; others are folded or counted."""

_MOST_REASONS = 6
"""Number of reasons that are shown for what was not checked."""

GENERAL = "general"
"""The key of general checks, which belong to no rule."""

_GENERAL_REQUIREMENT = (
    "The plugin can be found and loaded, its eager outputs are right, a driver keeps the promises without a"
    " rule, it does not crash or hang, it prints nothing, its list of known failures is correct, and what it"
    " states of the tiers holds."
)

GLYPHS = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✗",
    Outcome.XFAIL: "≈",
    Outcome.XPASS: "!",
    Outcome.UNSUPPORTED: "–",  # noqa: RUF001  as wide as the others
    Outcome.NOT_RUN: "○",
    Outcome.ERROR: "‼",
}
"""A sign for each outcome, always printed with its name or colour."""

VERDICTS = {
    ExitCode.CONFORMANT: "conformant",
    ExitCode.NOT_CONFORMANT: "not conformant",
    ExitCode.SUITE_ERROR: "no verdict: the suite could not continue",
    ExitCode.NOTHING_RAN: "no verdict: nothing ran",
}
"""The verdict on a run, by exit code."""


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one rule for one plugin.

    Args:
        rule: The rule; None for general checks.
        results: One result per lane, at least one.
    """

    rule: Rule | None
    results: tuple[Result, ...]

    @property
    def key(self) -> str:
        """Id of the rule, or `GENERAL`; valid as an anchor."""
        return self.rule.id if self.rule else GENERAL

    @property
    def label(self) -> str:
        """Id and name of the rule."""
        return str(self.rule or GENERAL)

    @property
    def requirement(self) -> str:
        """The requirement, in one sentence."""
        return self.rule.requirement if self.rule else _GENERAL_REQUIREMENT

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of all lanes."""
        return worst(result.outcome for result in self.results)

    @property
    def counts(self) -> dict[Outcome, int]:
        """Number of lanes per outcome, the worst first."""
        return in_order(Counter(result.outcome for result in self.results))

    @property
    def share(self) -> str:
        """Number of lanes with the outcome: ``12``, or ``2/12`` of the supported ones."""
        counts = self.counts
        hits = counts[self.outcome]
        others = sum(counts.values()) - hits - counts.get(Outcome.UNSUPPORTED, 0)
        return f"{hits}/{hits + others}" if others > 0 else str(hits)

    @property
    def failures(self) -> list[Result]:
        """The failures: errors of the plugin, then findings that name a hook; errors of the suite last."""
        broken = [result for result in self.results if result.outcome.is_failure]
        return sorted(broken, key=lambda r: (r.outcome is Outcome.ERROR, not r.raised, r.evidence))

    @property
    def evidence(self) -> Evidence:
        """The best evidence of its findings."""
        return min((result.evidence for result in self.failures), default=Evidence())

    @property
    def raised_at(self) -> str | None:
        """The line of the plugin that raised an error without a rule; None if no line did."""
        places = (f.raised_at for result in self.failures for f in result.findings if f.rule is None)
        return next(filter(None, places), None)

    @property
    def others(self) -> dict[tuple[Outcome, str | None], list[Result]]:
        """All results except failures, grouped by outcome and reason."""
        groups: dict[tuple[Outcome, str | None], list[Result]] = {}
        for result in self.results:
            if not result.outcome.is_failure:
                groups.setdefault((result.outcome, result.reason), []).append(result)
        return groups


def rows(plugin: PluginResults) -> list[Row]:
    """Return a row for each rule with results, by id; general checks come first."""
    return rows_of(plugin.results)


def rows_of(results: Iterable[Result]) -> list[Row]:
    """Return a row for each rule of some results; see `rows`."""
    by_rule: dict[str | None, list[Result]] = {}
    for result in results:
        by_rule.setdefault(result.rule, []).append(result)
    rules = (None, *EVERY_RULE.values())
    return [Row(rule, tuple(found)) for rule in rules if (found := by_rule.get(rule.id if rule else None))]


def to_fix(found: Iterable[Row]) -> list[Row]:
    """Return the rows with failures, the one to begin with first.

    An error of the plugin comes first if no finding of a rule has its line or names a hook, because it ended
    a step about which nothing is known. Then come broken rules in the order of `causes_first`, and then other
    general checks, which in the museum fail as a consequence of a broken rule. Rows that contain only errors
    of the suite come last, because their results are incomplete.
    """
    broken = [row for row in found if row.failures]
    order = causes_first(
        (row.key for row in broken if row.rule),
        {row.key: _weight(row, broken) for row in broken if row.rule},
    )

    ruled = {f.raised_at for row in broken if row.rule for r in row.failures for f in r.findings}
    is_known = any(row.rule is not None and row.evidence.level < 2 for row in broken)

    def rank(row: Row) -> tuple[bool, bool, int]:
        is_error = row.outcome is Outcome.ERROR
        return (
            is_error,
            is_known or row.raised_at is None or row.raised_at in ruled,
            order.index(row.key) if row.rule else len(order),
        )

    return sorted(broken, key=rank)


def _weight(row: Row, broken: Sequence[Row]) -> Evidence:
    """Return the evidence of a row for the order of causes.

    An idle rank that takes no graph, or another one, is first of all a rank that differs from the others. So
    a wrong graph of idle lanes alone counts less where GP17 names its field.
    """
    is_idle = row.key == "GP12" and all(_kind_of(each.lane) == "idle" for each in row.failures)
    ranks = any(other.key == "GP17" and other.evidence.level == 0 for other in broken)
    return Evidence(1) if is_idle and ranks else row.evidence


def why_first(broken: Sequence[Row]) -> str:
    """Return why to begin with the first of the rows of `to_fix`; empty if no other rule is broken."""
    if len(broken) < 2:
        return ""
    if broken[0].outcome is Outcome.ERROR:
        return "the suite could not continue there, so the results are incomplete"
    if broken[0].raised_at is not None:
        return f"the plugin raised an error at {broken[0].raised_at}"
    rest = [row for row in broken[1:] if row.outcome is not Outcome.ERROR]
    if not rest:
        return ""
    others = "the other" if len(rest) == 1 else f"the other {len(rest)}"
    return f"it concerns {concern_of(broken[0].key)}, and {others} may follow from it"


def disagreements(plugin: PluginResults) -> list[str]:
    """Return the claims that the results contradict, in words.

    If a rule is broken, the declared capabilities that fail are on one line: they may fail because of it.
    """
    wrong = [claim for claim in plugin.claims if claim.disagrees]
    affected = [c for c in wrong if c.is_made and any(r.breaks_rule for r in plugin.results)]
    lines = [f"affected by the broken rules: {', '.join(c.capability for c in affected)}"] if affected else []
    return lines + [_say_claim(claim) for claim in wrong if claim not in affected]


def _say_claim(claim: Claim) -> str:
    declared = claim.declared.replace("_", " ") + (f" {claim.since}" if claim.since else "")
    return f"{claim.capability}: declared {declared}, shown {claim.shown.replace('_', ' ')}"


def unchecked(plugin: PluginResults) -> list[str]:
    """Return the lanes whose requirements were not checked, a line for each reason, with their number."""
    groups: dict[tuple[str, Outcome], list[Result]] = {}
    for result in plugin.results:
        if not result.outcome.ran:
            groups.setdefault((result.reason or "no reason given", result.outcome), []).append(result)
    lines = [
        f"{_where_of(results, plugin)}: {reason} ({len(results)} {say(outcome)})"
        for (reason, outcome), results in groups.items()
    ]
    more = len(lines) - _MOST_REASONS
    return lines[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else [])


def _where_of(results: Sequence[Result], plugin: PluginResults) -> str:
    """Return the kinds of step or the lanes of results that did not run, and their rules if these are few."""
    names = {result.lane for result in results}
    there = {result.lane for result in plugin.results}
    kinds = [_kind_of(lane) for lane in dict.fromkeys(result.lane for result in results)]
    is_whole = {lane for lane in there if _kind_of(lane) in kinds} <= names
    where = ", ".join(dict.fromkeys(kinds)) if is_whole else lanes(results)
    rules = list(dict.fromkeys(result.rule for result in results if result.rule))
    return f"{', '.join(rules)} in {where}" if 0 < len(rules) <= MOST_SHOWN else where


def _kind_of(lane: str) -> str:
    """Return the kind of step of a lane, with which its name begins."""
    return lane.partition("-")[0]


def evidence(finding: Finding) -> list[tuple[str, str]]:
    """Return the parts of a finding with their names, in the order of the output."""
    parts = (
        ("raised at", finding.raised_at),
        ("hook", finding.hook),
        ("field", finding.field),
        ("expected", finding.expected),
        ("actual", finding.actual),
        ("batch", finding.batch),
        ("shape", finding.shape),
        ("found by", finding.experiment),
        ("help", finding.help),
        ("reproduce", finding.reproduce),
    )
    return [(name, text) for name, text in parts if text]


def more_findings(result: Result) -> str | None:
    """Return a line about the findings of a result after the first; None if there are none."""
    more = len(result.findings) - 1
    return f"and {more} more findings in this lane (check --all-findings prints them)" if more > 0 else None


def verdict(plugin: PluginResults, *, strict: bool = False) -> str:
    """Return the verdict on a plugin in one sentence, with what a full claim would also need."""
    found = rows(plugin)
    broken = [_say_broken(row) for row in found if any(r.counts_against for r in row.results)]
    errors = [_say_broken(row) for row in found if any(r.outcome is Outcome.ERROR for r in row.results)]
    stopped = f"the suite could not continue with {', '.join(errors)}"
    if broken:
        return f"not conformant: {', '.join(broken)}" + (f"; {stopped}" if errors else "")
    if errors:
        return f"no verdict: {stopped}"
    if not plugin.is_conformant:
        return "no verdict: nothing passed, nothing failed"
    known = [row.label for row in found if row.outcome is Outcome.XFAIL]
    shown = _where(plugin) + (f", but for known failures of {', '.join(known)}" if known else "")
    needs = plugin.shortfalls
    if strict and needs:
        return f"not conformant: --strict also asks for {'; '.join(needs)}; all else holds {shown}"
    if plugin.not_shown:
        needs.append("what this machine could not show")
    claim = f"; a full claim would also need {'; '.join(needs)}" if needs else ""
    return f"conformant {shown}{claim}"


def tier_text(plugin: PluginResults) -> str | None:
    """Return the tier of a plugin, and what the next one needs; None if it states none."""
    if plugin.tier is None:
        return None
    reached = plugin.tier.tier
    missing = [rule for rule in plugin.tier.rules if not rule.holds]
    following = next((tier for tier in TIERS if any(rule.tier == tier for rule in missing)), None)
    needs = [rule.rule for rule in missing if rule.tier == following]
    text = f"tier {reached}" if reached else "no tier"
    if reached and (unjudged := [rule.rule for rule in plugin.tier.unjudged]):
        text += f", if a run of the whole suite confirms {', '.join(unjudged)}"
    return text + (f"; {following} needs {', '.join(needs)}" if following is not None else "")


_COLOURS = {None: "#4c1", "bronze": "#a1662f", "silver": "#6e7b85", "gold": "#b58900"}
"""Colours of the badge of a conformant plugin, by tier."""


def badge(report: Report) -> tuple[str, str]:
    """Return the text and the colour of a badge: the verdict of a run, and the lowest tier of its plugins."""
    if report.exit_code is not ExitCode.CONFORMANT:
        return VERDICTS[report.exit_code].partition(":")[0], "#c33"
    stated = [plugin.tier for plugin in report.plugins if plugin.tier is not None]
    tiers = [None if verdict.unjudged else verdict.tier for verdict in stated]
    tier = None if None in tiers else min(tiers, key=lambda each: TIERS.index(each or "bronze"), default=None)
    return f"conformant, {tier}" if tier else "conformant", _COLOURS[tier]


def is_good(plugin: PluginResults, *, strict: bool = False) -> bool:
    """Return whether a plugin is conformant."""
    return plugin.is_conformant and not (strict and plugin.shortfalls)


def standing(plugin: PluginResults, *, strict: bool = False) -> Outcome:
    """Return the verdict on a plugin as one outcome: pass, the kind of failure, or not run for no verdict."""
    if is_good(plugin, strict=strict):
        return Outcome.PASS
    found = worst(result.outcome for result in plugin.results)
    if found.is_failure:
        return found
    return Outcome.FAIL if plugin.is_conformant else Outcome.NOT_RUN


def summary(report: Report) -> str:
    """Return the last line of a run: numbers of conformant plugins and of results per outcome."""
    total = len(report.plugins)
    good = sum(is_good(plugin, strict=report.strict) for plugin in report.plugins)
    return (
        f"{good} of {total} {'plugin' if total == 1 else 'plugins'} conformant;"
        f" {say_counts(in_order(report.counts))}; seed {report.seed}; {report.seconds:.1f} s"
    )


def in_order(counts: Counter[Outcome]) -> dict[Outcome, int]:
    """Return the counts that are not zero, the worst first."""
    return {outcome: counts[outcome] for outcome in WORST_FIRST if counts[outcome]}


def say_counts(counts: dict[Outcome, int]) -> str:
    """Return counts in words: ``2 fail, 12 pass``."""
    return ", ".join(f"{number} {say(outcome)}" for outcome, number in counts.items()) or "none"


def say(outcome: Outcome) -> str:
    """Return an outcome in words."""
    return outcome.value.replace("_", " ")


def lanes(results: Iterable[Result], most: int = 3) -> str:
    """Return the names of the first lanes, and the number of the others."""
    names = list(dict.fromkeys(result.lane for result in results))
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def plain(text: str) -> str:
    """Return ``text`` with unprintable characters escaped, except newlines and tabs.

    Characters that XML cannot hold and characters that change the direction of writing are escaped too.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _say_broken(row: Row) -> str:
    if row.rule:
        return row.label
    found = dict.fromkeys(f.experiment or r.check for r in row.failures for f in r.findings)
    return f"{row.label} ({', '.join(found or dict.fromkeys(result.check for result in row.failures))})"


def _where(plugin: PluginResults) -> str:
    drivers = ", ".join(f"the {driver}" for driver in plugin.drivers)
    parts = [f"on {drivers}" if drivers else "without graphs"]
    if plugin.provider:
        parts.append(f"{plugin.provider} kernels")
    return ", ".join(parts)
