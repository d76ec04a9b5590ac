"""Set the version of every distribution, or check that a tag is it. All of them have one version.

    python release/version.py set 0.2.0       pyproject.toml files, the core's _version.py, CHANGELOG.md
    python release/version.py check v0.2.0    what the release workflow asks before it builds

Distributions accept versions of each other that have the same first two numbers, or from 1.0 on the same
first number: `set` writes these bounds. The changes under "Unreleased" get the version and the date.

Does not: commit, tag, or know what the contract's version should be; see docs/reference/versions.md.
"""

import datetime as dt
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/graphpact/_version.py"
CHANGELOG = ROOT / "CHANGELOG.md"
ADDITIONS = ROOT / "tests/versions/contract_next.json"
_BOUNDS = re.compile(r'("graphpact[\w-]*(?:\[[\w,-]+\])?)>=[\d.]+,<[\d.]+"')
_VERSION = re.compile(r"(?m)^(__version__|version) = \"(.*)\"$")
_UNRELEASED = "## Unreleased\n"


def projects() -> list[Path]:
    """Return the pyproject.toml of every distribution, and of the examples that depend on one."""
    return sorted(ROOT / file for file in _files("pyproject.toml") if _is_project(ROOT / file))


def versions() -> dict[str, str]:
    """Return the version of every distribution by the path of the file that declares it."""
    files = [CORE, *(file for file in projects() if not file.is_relative_to(ROOT / "examples"))]
    found = {f"{file.relative_to(ROOT)}": _VERSION.search(file.read_text(encoding="utf-8")) for file in files}
    return {file: match[2] for file, match in found.items() if match}


def bounds(version: str) -> str:
    """Return the versions of other distributions that one of ``version`` accepts, as in ``>=0.1,<0.2``."""
    major, minor, _ = map(int, version.split("."))
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def set_version(version: str, today: dt.date) -> None:
    """Write ``version`` into every file that names it, and head the unreleased changes with it."""
    for file in (CORE, *projects()):
        text = file.read_text(encoding="utf-8")
        if not file.is_relative_to(ROOT / "examples"):
            text = _VERSION.sub(rf'\1 = "{version}"', text)
        file.write_text(_BOUNDS.sub(rf'\1{bounds(version)}"', text), encoding="utf-8")
    text = CHANGELOG.read_text(encoding="utf-8")
    headed = text.replace(_UNRELEASED, f"{_UNRELEASED}\n## {version}, {today.isoformat()}\n", 1)
    CHANGELOG.write_text(headed, encoding="utf-8")


def faults(tag: str) -> Iterator[str]:
    """Yield what prevents a release of ``tag``; nothing if it may be published."""
    for file, version in versions().items():
        if tag != f"v{version}":
            yield f"{file} has version {version}, and the tag is {tag}: run release/version.py set"
    if f"\n## {tag.removeprefix('v')}, " not in CHANGELOG.read_text(encoding="utf-8"):
        yield f"CHANGELOG.md has no section of {tag}: run release/version.py set"
    if added := json.loads(ADDITIONS.read_text(encoding="utf-8")):
        name = added[0]["name"]
        page = "docs/reference/versions.md"
        yield f"the contract has additions since its last version, such as {name}: see {page}"


def _files(name: str) -> list[Path]:
    patterns = (f"*/{name}", f"plugins/*/{name}", f"integrations/*/{name}", f"examples/*/{name}")
    return [file.relative_to(ROOT) for pattern in patterns for file in ROOT.glob(pattern)]


def _is_project(file: Path) -> bool:
    return "project" in tomllib.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["set", asked] if re.fullmatch(r"\d+\.\d+\.\d+", asked):
            set_version(asked, dt.datetime.now(dt.UTC).date())
        case ["check", asked]:
            if found := [*faults(asked)]:
                raise SystemExit("\n".join(found))
        case _:
            raise SystemExit("usage: version.py set MAJOR.MINOR.PATCH | version.py check TAG")
