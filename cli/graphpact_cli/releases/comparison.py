"""`compare_releases`: compares two releases of an engine, and writes what changed.

Does not: read the command line; see `graphpact_cli.releases.command`.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from graphpact.errors import UsageError
from graphpact_cli.console import data, note, print_table
from graphpact_cli.releases.changes import MemberChange, compare_surfaces
from graphpact_cli.releases.engine import EngineReleases
from graphpact_cli.releases.sources import Source, open_source
from graphpact_cli.releases.surface import Member, read_surface
from graphpact_cli.releases.uses import Use, concerns, uses_of

_MOST_USES = 3
"""Uses of a member that the table shows."""


def compare_releases(
    engine: EngineReleases, before: str, after: str, *, package: Path | None, show_all: bool, as_json: bool
) -> bool:
    """Write the changes between two releases, and return whether none may break ``package``."""
    author = None if package is None else _author(package)
    with tempfile.TemporaryDirectory() as scratch:
        old, new = (_read(engine, asked, Path(scratch)) for asked in (before, after))
    changes = compare_surfaces(old, new)
    uses = {} if author is None else uses_of(author, {**new, **old})
    broken = [each for each in changes if concerns(each, uses)]
    shown = changes if author is None or show_all else [each for each in changes if _is_used(each, uses)]
    if as_json:
        data().print(json.dumps(_report(before, after, old, changes, uses)), soft_wrap=True)
    else:
        _print(shown, uses, has_author=author is not None)
        unchanged = len(old.keys() & new.keys()) - sum(each.kind == "changed" for each in changes)
        note(
            f"{engine.name} {before} and {after}: {unchanged} of {len(old)} members are the same;"
            f" {len(changes)} changes"
            + (f", of which {len(broken)} may break {author.package}" if author is not None else "")
        )
    return not broken


def _is_used(change: MemberChange, uses: Mapping[str, Sequence[Use]]) -> bool:
    return change.name in uses or concerns(change, uses)


def _author(folder: Path) -> Source:
    folder = folder.resolve()
    if not folder.is_dir() or not any(folder.rglob("*.py")):
        raise UsageError(
            f"--package {folder}: it is no folder with Python files", hint="name the folder of a package"
        )
    return Source(str(folder), folder.parent, folder.name)


def _read(engine: EngineReleases, asked: str, scratch: Path) -> dict[str, Member]:
    members = read_surface(open_source(asked, engine.package, engine.distribution, scratch), engine.surface)
    if not members:
        raise UsageError(
            f"{asked}: nothing of {engine.name} that is compared is in it", hint="is it an old release?"
        )
    return members


def _print(changes: Sequence[MemberChange], uses: Mapping[str, Sequence[Use]], *, has_author: bool) -> None:
    rows = [[each.kind, each.name, each.details] for each in changes]
    if has_author:
        rows = [
            [*row, "may break" if concerns(each, uses) else "", _where(uses, each)]
            for row, each in zip(rows, changes, strict=True)
        ]
    if rows:
        print_table(data(), ["change", "what", "how", *(["", "used by"] if has_author else [])], rows)


def _where(uses: Mapping[str, Sequence[Use]], change: MemberChange) -> str:
    found = uses.get(change.name, uses.get(change.owner, ()))
    more = len(found) - _MOST_USES
    return "; ".join(map(str, found[:_MOST_USES])) + (f"; {more} more" if more > 0 else "")


def _report(
    before: str,
    after: str,
    old: Mapping[str, Member],
    changes: Sequence[MemberChange],
    uses: Mapping[str, Sequence[Use]],
) -> dict[str, object]:
    return {
        "before": before,
        "after": after,
        "members": len(old),
        "changes": [
            asdict(each)
            | {"concerns": concerns(each, uses), "uses": [asdict(use) for use in uses.get(each.name, ())]}
            for each in changes
        ],
    }
