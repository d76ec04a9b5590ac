"""The parts of ``docs/reference/peers.md`` that a run writes, and ``build/peers.md`` with each finding.

A part is the table of an engine's builders, or of other wheels. A run of one part leaves the others. The
findings, each with its reason, are too many for the page.

Does not: write the text around these parts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from graphpact_conformance.results import Finding
from peers.job import Verdict, cut

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/peers.md"
FINDINGS = ROOT / "build/peers.md"
BEGIN, END = "<!-- a run writes this: {} -->\n", "<!-- /a run writes this: {} -->\n"
_TITLE = "# Findings in released builders\n\nWritten by `make peers`; the page of peers has all builders.\n"
_SAID = {True: "yes", False: "**no**", None: "unknown"}


def with_verdicts(page: str, found: Sequence[Verdict]) -> str:
    """Return the page with the verdicts of a run in place of earlier ones, in each part of the run.

    Raises:
        ValueError: The page has no such part.
    """
    for part in dict.fromkeys(verdict.row.place for verdict in found):
        begin, end = BEGIN.format(part), END.format(part)
        if begin not in page or end not in page:
            raise ValueError(f"the page has no part for {part}: add the lines {begin!r} and {end!r} to it")
        before, _, rest = page.partition(begin)
        of_part = [verdict for verdict in found if verdict.row.place == part]
        page = f"{before}{begin}\n{''.join(_lines(of_part))}\n{end}{rest.partition(end)[2]}"
    return page


def findings(found: Sequence[Verdict]) -> str:
    """Return the text of `FINDINGS`: each finding of a run with its reason, and the stand-ins called."""
    lines = [_TITLE]
    for verdict in found:
        if verdict.findings or verdict.stand_ins:
            title = verdict.row.engine if verdict.row.part else verdict.row.place
            lines.append(f"\n## {title}: `{verdict.row.name}`\n\n")
            lines += (_bullet(verdict, finding) for finding in verdict.findings)
            if verdict.stand_ins:
                lines.append(f"- Stand-ins called: `{verdict.stand_ins}`.\n")
    return "".join(lines)


def _lines(found: Sequence[Verdict]) -> Iterator[str]:
    yield "| builder | version | lanes with graphs | conformant | rules, or why it is not run |\n"
    yield "|---|---|---|---|---|\n"
    for verdict in found:
        row = verdict.row
        if row.not_run:
            yield f"| `{row.name}` | {row.engine} | | not run | {row.not_run} |\n"
            continue
        rules = sorted({finding.rule or "no rule" for finding in verdict.findings})
        lanes, said = f"{verdict.replayed} of {verdict.lanes}", _SAID[verdict.conformant]
        yield f"| `{row.name}` | {row.engine} | {lanes} | {said} | {', '.join(rules) or verdict.fault} |\n"


def _bullet(verdict: Verdict, finding: Finding) -> str:
    why = [known.why for known in verdict.row.known if known.explains(finding)]
    batch, where = cut(finding.batch or "none"), finding.field or finding.raised_at
    return (
        f"- **{finding.rule or 'no rule'}**, {f'`{where}`' if where else 'in the kernel'}: expected"
        f" {cut(finding.expected)}; actual {cut(finding.actual)}; batch"
        f" {batch if batch.endswith('...') else f'{batch}.'}"
        f" {why[0] if why else 'Not looked into yet.'}\n"
    )
