"""``graphpact museum``: the suite against plugins with real bugs, and against correct plugins.

Does not: contain exhibits; see `graphpact_museum`.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphpact.errors import UsageError, did_you_mean
from graphpact_cli.console import data, note, print_table, talk
from graphpact_conformance.cli.check import complete_rule
from graphpact_conformance.rules import RULES, find_rule
from graphpact_museum import ROOMS, room_of

if TYPE_CHECKING:
    from graphpact_museum.exhibit import Exhibit, Variant
    from graphpact_museum.gallery import Visit


def museum(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="Names of exhibits and variants; default: all.",
            show_default=False,
        ),
    ] = None,
    *,
    room: Annotated[
        list[str] | None,
        typer.Option(
            "--room",
            metavar="ROOM",
            help=f"Run only this room: {', '.join(ROOMS)}; repeatable.",
            autocompletion=lambda incomplete: [r for r in ROOMS if r.startswith(incomplete)],
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="RULE",
            help="Run only exhibits of this rule, such as GP03; repeatable.",
            autocompletion=complete_rule,
        ),
    ] = None,
    list_pieces: Annotated[
        bool, typer.Option("--list", help="List exhibits and variants without a run.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check each exhibit only against its own rule."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Number of processes; default: one per core."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the suite against plugins with real bugs (exhibits) and correct plugins (variants).

    The suite must catch each exhibit under its own rule, and pass each variant. A full run takes
    minutes. Select parts by name, room or rule:

    - `graphpact museum --list` lists all exhibits and variants
    - `graphpact museum fa3-lengths-cast plan-object` runs one exhibit and one variant
    - `graphpact museum --room padding --quick` runs a room, each exhibit only against its own rule
    - `graphpact museum --only GP03` runs the exhibits of a rule

    Exit status: 0 all exhibits are caught and all variants pass, 1 otherwise, 2 unknown name,
    5 nothing to run.
    """
    rules = {find_rule(text).id for text in only or []}
    pieces = _choose(names or [], rules, room or [])
    if list_pieces:
        _print_list(pieces, as_json=as_json)
        return
    visits = _run(pieces, workers, quick=quick, quiet=as_json)
    if as_json:
        sys.stdout.write(json.dumps([describe(visit) for visit in visits], indent=2) + "\n")
    else:
        print_matrix(visits)
    if not [v for v in visits if v.missing is None]:
        raise typer.Exit(5)
    raise typer.Exit(0 if all(visit.is_right for visit in visits) else 1)


def describe(visit: "Visit") -> dict[str, Any]:
    """Return a visit as a dict, ready for JSON."""
    piece = visit.piece
    rule = getattr(piece, "rule", None)
    return {
        "name": piece.name,
        "rule": rule,
        "thread": getattr(piece, "thread", None),
        "what": getattr(piece, "planted", None) or getattr(piece, "style", None),
        "base": piece.base,
        "lanes": list(visit.lanes),
        "is_right": visit.is_right,
        "missing": visit.missing,
        "errors": list(visit.errors),
        "findings": {
            rule or "general": finding.model_dump(mode="json") for rule, finding in visit.findings.items()
        },
    }


def print_matrix(visits: Sequence["Visit"]) -> None:
    """Print the matrix of exhibits by rules, then the variants."""
    console = data()
    exhibits = [v for v in visits if hasattr(v.piece, "rule")]
    variants = [v for v in visits if not hasattr(v.piece, "rule")]
    if exhibits:
        short = [rule.removeprefix("GP") for rule in RULES]
        rows = [
            (
                v.piece.name,
                v.piece.base,
                _state(v),
                *(_cell(v, rule) for rule in RULES),
                _caught_by(v),
            )
            for v in exhibits
        ]
        print_table(console, ("exhibit", "in", "", *short, "what caught it"), rows)
        console.print()
    if variants:
        rows = [(v.piece.name, v.piece.base, _state(v), _alarms(v)) for v in variants]
        print_table(console, ("right, in another style", "in", "", ""), rows)
        console.print()
    caught = sum(v.is_right for v in exhibits)
    passed = sum(v.is_right for v in variants)
    console.print(
        f"{caught} of {len(exhibits)} exhibits caught under their own rule,"
        f" {passed} of {len(variants)} right plugins pass"
    )


def _choose(names: Sequence[str], rules: set[str], rooms: Sequence[str]) -> list["Exhibit | Variant"]:
    from graphpact_museum.collection import EXHIBITS, VARIANTS  # noqa: PLC0415  imports the whole suite

    for room in rooms:
        if room not in ROOMS:
            near = did_you_mean(room, ROOMS)
            raise UsageError(
                f"the museum has no room {room!r}; its rooms are {', '.join(ROOMS)}",
                hint=f"did you mean {near!r}?" if near else "`graphpact museum --help` lists them",
            )
    pieces: list[Exhibit | Variant] = [*EXHIBITS, *VARIANTS]
    by_name = {piece.name: piece for piece in pieces}
    for name in names:
        if name not in by_name:
            near = did_you_mean(name, by_name)
            raise UsageError(
                f"no exhibit and no variant is called {name!r}",
                hint=f"did you mean {near!r}?" if near else "`graphpact museum --list` lists them",
            )
    chosen = [by_name[name] for name in names] or [*by_name.values()]
    if rooms:
        chosen = [piece for piece in chosen if room_of(piece.module) in rooms]
    if rules:
        chosen = [piece for piece in chosen if getattr(piece, "rule", None) in rules]
    return chosen


def _run(
    pieces: Sequence["Exhibit | Variant"], workers: int | None, *, quick: bool, quiet: bool
) -> list["Visit"]:
    from graphpact_museum.gallery import visit_all  # noqa: PLC0415  imports the whole suite

    shown = talk() if not quiet and sys.stderr.isatty() else None
    done = 0

    def on_visit(visit: "Visit") -> None:
        nonlocal done
        done += 1
        if shown is not None:
            shown.print(f"{done} of {len(pieces)}: {visit.piece.name}: {_state(visit)}")

    count = min(workers or os.cpu_count() or 1, max(len(pieces), 1))
    with contextlib.redirect_stdout(sys.stderr):
        return visit_all(pieces, on_visit, workers=count, quick=quick)


def _print_list(pieces: Sequence["Exhibit | Variant"], *, as_json: bool) -> None:
    columns = ("name", "rule", "in", "thread", "bug or style")
    rows = [
        (
            p.name,
            getattr(p, "rule", ""),
            p.base,
            getattr(p, "thread", ""),
            getattr(p, "planted", None) or getattr(p, "style", ""),
        )
        for p in pieces
    ]
    if as_json:
        keys = ("name", "rule", "base", "thread", "what")
        listed = [dict(zip(keys, row, strict=True)) for row in rows]
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
        return
    print_table(data(), columns, rows)
    note(f"{len(rows)} pieces")


def _state(visit: "Visit") -> str:
    if visit.missing is not None:
        return "not installed"
    if visit.errors:
        return "error"
    if not visit.lanes:
        return "no lane"
    if hasattr(visit.piece, "rule"):
        return "caught" if visit.is_right else "MISSED"
    return "passes" if visit.is_right else "ALARM"


def _cell(visit: "Visit", rule: str) -> str:
    if rule not in visit.findings:
        return "-" if rule == getattr(visit.piece, "rule", None) else ""
    return "X" if rule == getattr(visit.piece, "rule", None) else "x"


def _caught_by(visit: "Visit") -> str:
    finding = visit.findings.get(getattr(visit.piece, "rule", None))
    if finding is None:
        return visit.missing or "; ".join(visit.errors)
    return f"{finding.hook or 'the lane'}: {finding.field or finding.actual}"


def _alarms(visit: "Visit") -> str:
    alarms = [f"{rule or 'general'}: {f.field or f.actual}" for rule, f in visit.findings.items()]
    return "; ".join(alarms) or visit.missing or "; ".join(visit.errors)
