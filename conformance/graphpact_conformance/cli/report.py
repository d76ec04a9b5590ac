"""``graphpact report``: show a saved report of the conformance suite, or compare two.

Does not: run anything, or show a report of ``generate`` (see `graphpact_engine.cli.report`).
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from graphpact.errors import UsageError
from graphpact.files import write_file
from graphpact_cli.console import data, note
from graphpact_conformance.cli.extras import need_extra

_WORSE = 1


def report(
    file: Annotated[
        Path,
        typer.Argument(metavar="A.json", help="A results.json of `graphpact check --report DIR`."),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="B.json", help="A later report to compare with.", show_default=False),
    ] = None,
    *,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write it as one HTML page."),
    ] = None,
    badge: Annotated[
        Path | None,
        typer.Option("--badge", metavar="FILE", help="Write a picture of its verdict, as SVG for a README."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a saved report, or the differences of a later one: better, worse, appeared, vanished.

    Exit status: 0 for one report. For two, 1 if a result became worse or a new failure appeared, otherwise 0.
    """
    from graphpact_conformance import report as made  # noqa: PLC0415  pydantic
    from graphpact_conformance.cli import results  # noqa: PLC0415  pydantic

    if html is not None or badge is not None:
        need_extra("conformance", "jinja2")
    if badge is not None and other is not None:
        raise UsageError("--badge shows one report, and there are two", hint="leave B.json out")
    first = made.load_report(file)
    if other is None:
        if badge is not None:
            _write(badge, made.to_badge(first))
        if html is not None:
            _write(html, made.to_html(first))
        if as_json:
            sys.stdout.write(first.model_dump_json(indent=2) + "\n")
        else:
            results.print_report(data(), first)
        return
    comparison = made.compare(first, made.load_report(other))
    if html is not None:
        _write(html, made.comparison_to_html(comparison, str(file), str(other)))
    if as_json:
        sys.stdout.write(json.dumps(asdict(comparison), indent=2) + "\n")
    else:
        results.print_comparison(data(), comparison)
    if comparison.is_regression:
        raise typer.Exit(_WORSE)


def _write(path: Path, text: str) -> None:
    write_file(path, text)
    note(f"written to {path}")
