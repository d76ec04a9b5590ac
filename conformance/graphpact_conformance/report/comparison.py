"""Two reports compared: results that became better or worse, appeared or vanished.

A cell is one rule in one lane of one plugin. It exists if the requirement was checked. A cell that is now
unsupported or not run has vanished.

Does not: compare evidence; two failures of one cell count as equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from graphpact_conformance.report.digest import GENERAL
from graphpact_conformance.results import WORST_FIRST, Outcome, Report, worst
from graphpact_conformance.rules import EVERY_RULE

What: TypeAlias = Literal["worse", "appeared", "vanished", "better"]
WHATS: tuple[What, ...] = ("worse", "appeared", "vanished", "better")
"""The kinds of change, in the order of the output."""

_Key: TypeAlias = tuple[str, str, str | None, str, str]  # kind, plugin, rule, question, lane


@dataclass(frozen=True, slots=True)
class OutcomeChange:
    """The cells of one rule of one plugin with the same change.

    Args:
        what: The kind of change.
        plugin: Label of the plugin, with its partner.
        rule: Id and name.
        before: The earlier outcome; None if the cell was not in the report.
        after: The later outcome; None if the cell is not in the report.
        lanes: Their lanes, in the order of the reports.
    """

    what: What
    plugin: str
    rule: str
    before: Outcome | None
    after: Outcome | None
    lanes: tuple[str, ...]

    @property
    def is_regression(self) -> bool:
        """Whether a passing cell now fails, or a new cell fails."""
        new = self.what == "appeared" and self.after is not None and self.after.is_failure
        return self.what == "worse" or new


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes from one report to another.

    Args:
        changes: In the order of `WHATS`, then of the reports.
        unchanged: Number of cells with the same outcome in both.
        setup: Differences in how the reports were made: name, before, after.
    """

    changes: tuple[OutcomeChange, ...]
    unchanged: int
    setup: tuple[tuple[str, str, str], ...]

    @property
    def is_regression(self) -> bool:
        """Whether any change is a regression."""
        return any(change.is_regression for change in self.changes)

    @property
    def counts(self) -> dict[What, int]:
        """Number of cells per kind of change."""
        return {
            what: sum(len(change.lanes) for change in self.changes if change.what == what) for what in WHATS
        }

    @property
    def summary(self) -> str:
        """The comparison in one line."""
        counts = ", ".join(f"{number} {what}" for what, number in self.counts.items())
        return f"{counts}, {self.unchanged} unchanged"


def compare(before: Report, after: Report) -> Comparison:
    """Return the changes from ``before`` to ``after``, grouped by kind of change."""
    old, new = _cells(before), _cells(after)
    groups: dict[tuple[What, Outcome | None, Outcome | None, str, str], list[str]] = {}
    unchanged = 0
    for key in old | new:
        was, now = old.get(key), new.get(key)
        what = _what(was, now)
        if what is None:
            unchanged += was == now
            continue
        _, plugin, rule, question, lane = key
        label = str(EVERY_RULE[rule]) if rule else f"{GENERAL}: {question}"
        groups.setdefault((what, was, now, plugin, label), []).append(lane)
    changes = [
        OutcomeChange(what, plugin, label, was, now, tuple(lanes))
        for what in WHATS
        for (kind, was, now, plugin, label), lanes in groups.items()
        if kind == what
    ]
    return Comparison(tuple(changes), unchanged, tuple(_setup(before, after)))


def _cells(report: Report) -> dict[_Key, Outcome]:
    cells: dict[_Key, list[Outcome]] = {}
    for plugin in report.plugins:
        for result in plugin.results:
            question = result.check if result.rule is None else ""
            key = (plugin.kind, plugin.label, result.rule, question, result.lane)
            cells.setdefault(key, []).append(result.outcome)
    return {key: worst(outcomes) for key, outcomes in cells.items()}


def _what(was: Outcome | None, now: Outcome | None) -> What | None:
    was_there, is_there = (outcome is not None and outcome.ran for outcome in (was, now))
    if was_there != is_there:
        return "appeared" if is_there else "vanished"
    if was is None or now is None or was == now or not is_there:
        return None
    return "better" if _rank(now) > _rank(was) else "worse"


def _rank(outcome: Outcome) -> int:
    """Return a number that is higher for better outcomes. An error shows nothing, so it is the lowest."""
    return -1 if outcome is Outcome.ERROR else WORST_FIRST.index(outcome)


def _setup(before: Report, after: Report) -> Iterator[tuple[str, str, str]]:
    old, new = _setup_of(before), _setup_of(after)
    for name in old | new:
        was, now = old.get(name, ""), new.get(name, "")
        if was != now:
            yield name, was, now


def _setup_of(report: Report) -> dict[str, str]:
    """Return how a report was made: machine, options, versions of plugins."""
    setup = {**report.environment.model_dump(), **report.options}
    setup |= {"seed": report.seed, "examples": report.examples}
    setup |= {plugin.distribution: plugin.version for plugin in report.plugins}
    return {name: "" if value is None else str(value) for name, value in setup.items()}
