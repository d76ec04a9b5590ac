"""The job that checks released builders, engine by engine: rows, their verdicts, and a table of both.

An engine's module has a function ``rows()``. A row is a builder class of the wheel: a target of the suite's
supervisor, or the reason why it is not run. The row lists the known findings, with the reason in the
engine's code. The job fails for an unknown finding, and for a known one that no longer appears.

Does not: know engines; modules such as `peers.vllm_checks` do.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphpact_adapters.stand_ins import NOTE
from graphpact_conformance.cli.results import progress
from graphpact_conformance.isolation import supervise
from graphpact_conformance.results import Finding, Outcome, PluginResults, Report
from graphpact_conformance.targets import Options

WORKERS = 2
TIMEOUT = 300.0
"""Seconds for one piece of work; it is long because metadata kernels are interpreted."""
_MOST = 100  # characters of a value in the table
_OF_NO_LANE = ("ends", "quiet", "suite", "calls")


@dataclass(frozen=True)
class Known:
    """A known finding that was confirmed as real.

    Attributes:
        rule: The rule of the finding, or None.
        field: How its field begins; without one, the place in the engine's code that raised; empty for a
            finding that has neither.
        why: The reason in the engine's code.
    """

    rule: str | None
    field: str
    why: str

    def explains(self, finding: Finding) -> bool:
        """Return whether a finding matches this one."""
        where = finding.field or finding.raised_at or ""
        return finding.rule == self.rule and where.startswith(self.field) and bool(where) == bool(self.field)


@dataclass(frozen=True)
class Row:
    """A builder class of a released engine.

    Attributes:
        engine: The engine, and its version.
        name: The builder.
        target: Its name for the supervisor: ``adapter:NAME:package.module:attribute``.
        not_run: Why it is not run; empty if it is run.
        known: Its known findings.
        part: The part of the page that lists it; by default that of the engine.
    """

    engine: str
    name: str
    target: str
    not_run: str = ""
    known: tuple[Known, ...] = ()
    part: str = ""

    @property
    def place(self) -> str:
        """The part of the page that lists the row."""
        return self.part or self.engine.partition(" ")[0]


@dataclass(frozen=True)
class Verdict:
    """The result of a run for one row.

    Attributes:
        row: The row.
        conformant: Whether no rule was broken; None if the row was not run, or the suite failed.
        lanes: Lanes that were checked.
        replayed: How many of these lanes have a graph.
        findings: One finding for each rule and field, the first of them.
        stand_ins: Stand-ins that the builder called.
        fault: What went wrong in the suite; empty if nothing did.
    """

    row: Row
    conformant: bool | None = None
    lanes: int = 0
    replayed: int = 0
    findings: tuple[Finding, ...] = ()
    stand_ins: str = ""
    fault: str = ""

    @property
    def new(self) -> list[Finding]:
        """The findings that are not known."""
        return [f for f in self.findings if not any(known.explains(f) for known in self.row.known)]

    @property
    def gone(self) -> list[Known]:
        """The known findings that this run did not produce."""
        if self.row.not_run:
            return []
        return [known for known in self.row.known if not any(known.explains(f) for f in self.findings)]


def run(rows: Sequence[Row], options: Options) -> list[Verdict]:
    """Check the rows that can be run, each in a separate process, and return the verdicts of all.

    Args:
        rows: The rows.
        options: Options of the run.
    """
    targets = [row.target for row in rows if not row.not_run]
    if not targets:
        return [Verdict(row) for row in rows]
    with progress() as shown, contextlib.redirect_stdout(sys.stderr):
        listeners: dict[str, Any] = {}
        if shown is not None:
            listeners["on_begin"] = lambda target, work: shown.begins(str(target), work)
            listeners["on_result"] = lambda target, result: shown.found(str(target), result)
        report = supervise.check_plugins(targets, options, workers=WORKERS, timeout=TIMEOUT, **listeners)
    return [*verdicts(rows, report)]


def verdicts(rows: Sequence[Row], report: Report) -> Iterator[Verdict]:
    """Yield the verdict of each row, from the report of those that were run."""
    found = {plugin.name: plugin for plugin in report.plugins}
    for row in rows:
        yield Verdict(row) if row.not_run else _verdict(row, found[row.target.split(":", 2)[2]])


def _verdict(row: Row, plugin: PluginResults) -> Verdict:
    results = [result for result in plugin.results if result.check not in _OF_NO_LANE]
    faults = [result.reason or "" for result in plugin.results if result.outcome is Outcome.ERROR]
    first: dict[tuple[str | None, str], Finding] = {}
    for result in plugin.results:
        if result.check == "quiet":  # log output of an engine is not a fault of its metadata
            continue
        for finding in result.findings:
            first.setdefault((finding.rule, _name(finding)), finding)
    ran = (Outcome.PASS, Outcome.FAIL)
    with_graph = {r.lane for r in results if r.outcome in ran and "replays" in r.check.split(", ")}
    return Verdict(
        row,
        conformant=None if faults else plugin.is_conformant,
        lanes=len({result.lane for result in results}),
        replayed=len(with_graph),
        findings=tuple(first.values()),
        stand_ins=", ".join(n.removeprefix(NOTE) for n in plugin.not_shown if n.startswith(NOTE)),
        fault=faults[0] if faults else "",
    )


def _name(finding: Finding) -> str:
    """Return the field of a finding without indices and token counts, which differ between lanes."""
    name = finding.field or finding.raised_at or ""
    return re.sub(r"\[[^\]]*\]|^\S* ?group \d+: ", "", name).partition(": token")[0]


# -- output ---------------------------------------------------------------------------------------------

COLUMNS = ("builder", "version", "lanes", "conformant", "rule", "finding", "looked into")


def table(found: Sequence[Verdict]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each line: a line for each builder, and for each further finding."""
    for verdict in found:
        row = verdict.row
        if row.not_run:
            yield (row.name, row.engine, "", "not run", "", row.not_run, "")
            continue
        said = {True: "yes", False: "no", None: "unknown"}[verdict.conformant]
        lines = [(f.rule or "", _short(f), "new" if f in verdict.new else "real") for f in verdict.findings]
        lines += [(known.rule or "", f"{known.field}: not found any more", "gone") for known in verdict.gone]
        if verdict.fault:
            lines.append(("", f"fault of the suite: {cut(verdict.fault)}", "new"))
        for at, line in enumerate(lines or [("", "", "")]):
            begin = (row.name, row.engine, f"{verdict.replayed} of {verdict.lanes}", said)
            yield (*(begin if at == 0 else ("", "", "", "")), *line)


def _short(finding: Finding) -> str:
    parts = [
        finding.field or finding.raised_at or "",
        f"expected {cut(finding.expected)}",
        f"actual {cut(finding.actual)}",
    ]
    return "; ".join([": ".join(parts[:2]), *parts[2:], cut(finding.batch or "")])


_FOLDERS = re.compile(r"(?:/[^\s/:]+)+/(?=[^\s/:]+/[^\s/:]+:\d)")


def cut(text: str) -> str:
    """Return a text as one short line; paths keep only their last folder."""
    text = _FOLDERS.sub("", " ".join(text.split()))
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def as_json(found: Sequence[Verdict]) -> str:
    """Return verdicts as JSON: a list of objects, one for each row."""
    return json.dumps([_plain(verdict) for verdict in found], indent=2) + "\n"


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        **asdict(verdict.row),
        "conformant": verdict.conformant,
        "lanes": verdict.lanes,
        "replayed": verdict.replayed,
        "findings": [finding.model_dump(mode="json") for finding in verdict.findings],
        "new": [finding.field for finding in verdict.new],
        "stand_ins": verdict.stand_ins,
        "fault": verdict.fault,
    }


def is_as_known(found: Sequence[Verdict]) -> bool:
    """Return whether every finding is known, every known one was found, and the suite had no fault."""
    return not any(verdict.new or verdict.gone or verdict.fault for verdict in found)
