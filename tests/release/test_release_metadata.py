"""Tests of what an index shows of each distribution, and of the versions of all of them."""

import datetime as dt
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = {
    f"{file.parent.relative_to(ROOT)}": tomllib.loads(file.read_text(encoding="utf-8"))
    for pattern in ("*", "plugins/*", "integrations/*")
    for file in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
}
SAME = ("license", "license-files", "authors", "requires-python", "classifiers", "urls", "readme")
"""The parts of a project's metadata that are the same in all of them."""
SOURCE = PROJECTS["core"]["project"]["urls"]["Source"]


def script(root: Path = ROOT) -> ModuleType:
    """Return the module release/version.py of a copy of the repository."""
    spec = importlib.util.spec_from_file_location("version_script", root / "release/version.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the files that release/version.py reads."""
    files = [*script().versions(), *(f"{file.relative_to(ROOT)}" for file in script().projects())]
    for name in {*files, "release/version.py", "CHANGELOG.md", "tests/versions/contract_next.json"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run release/version.py of a copy."""
    command = [sys.executable, "release/version.py", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", PROJECTS)
def test_an_index_shows_every_distribution_in_one_form(folder: str) -> None:
    """Licence, authors, classifiers, links and Python are those of the core; the rest is its own."""
    project = PROJECTS[folder]["project"]
    assert {key: project[key] for key in SAME} == {key: PROJECTS["core"]["project"][key] for key in SAME}
    assert project["keywords"][:3] == ["cuda graphs", "llm", "inference"]
    assert len(set(project["keywords"])) == len(project["keywords"]) > 3
    assert 20 < len(project["description"]) < 160
    others = [each["project"]["description"] for at, each in PROJECTS.items() if at != folder]
    assert project["description"] not in others
    licence = ROOT / folder / "LICENSE"
    assert not licence.is_symlink()  # an sdist would have the link, and not the file
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", PROJECTS)
def test_links_of_a_readme_work_on_an_index(folder: str) -> None:
    """The README of a distribution begins with its name; its links are absolute, and ours lead to a file."""
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {PROJECTS[folder]['project']['name']}\n")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    for link in links:
        at = re.fullmatch(rf"{re.escape(SOURCE)}/(?:blob|tree)/main/(.*)", link)
        assert at is None or (ROOT / at[1]).exists(), link


def test_all_distributions_have_one_version() -> None:
    """Every distribution declares the version of the core, once."""
    found = script().versions()
    assert len(found) == len(PROJECTS)
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("folder", PROJECTS)
def test_dependencies_between_distributions_are_bounded(folder: str) -> None:
    """A requirement of another distribution of ours has the bounds of the version: ``>=0.1,<0.2`` in 0.1."""
    project = PROJECTS[folder]["project"]
    needs = [*project["dependencies"]]
    needs += [need for extra in project.get("optional-dependencies", {}).values() for need in extra]
    extras = ("graphpact[", "graphpact-engine[")  # of the core's extra `all`; the extras have the bounds
    ours = [n for n in needs if n.startswith("graphpact") and not (folder == "core" and n.startswith(extras))]
    expected = script().bounds(next(iter(script().versions().values())))
    assert {re.sub(r"^[\w-]+", "", need) for need in ours} <= {expected}
    names = {each["project"]["name"] for each in PROJECTS.values()}
    assert {re.match(r"[\w-]+", need)[0] for need in ours} <= names  # type: ignore[index]


def test_a_new_version_is_one_command(copy: Path) -> None:
    """``set`` writes every version and bound and a section of the changelog; ``check`` accepts the tag."""
    assert run(copy, "set", "0.2.0").returncode == 0
    assert set(script(copy).versions().values()) == {"0.2.0"}
    texts = [file.read_text(encoding="utf-8") for file in copy.rglob("pyproject.toml")]
    assert len(texts) == len(PROJECTS) + 1  # the example of a third party
    assert sum(text.count(">=0.2,<0.3") for text in texts) > 40
    assert not [text for text in texts if "<0.2" in text]
    changes = (copy / "CHANGELOG.md").read_text(encoding="utf-8")
    today = dt.datetime.now(dt.UTC).date()
    assert f"\n## Unreleased\n\n## 0.2.0, {today}\n" in changes
    assert run(copy, "check", "v0.2.0").stderr == ""
    assert run(copy, "check", "v0.2.0").returncode == 0


def test_bounds_follow_the_number_that_may_break() -> None:
    """Before 1.0 another second number may break a distribution, from 1.0 on another first number."""
    bounds = script().bounds
    assert (bounds("0.1.3"), bounds("0.12.0")) == (">=0.1,<0.2", ">=0.12,<0.13")
    assert (bounds("1.0.0"), bounds("2.3.1")) == (">=1.0,<2", ">=2.3,<3")


def test_a_tag_that_is_not_the_version_is_refused(copy: Path) -> None:
    """``check`` names each file of another version, a changelog without the section, and open additions."""
    run(copy, "set", "0.2.0")
    file = copy / "swarm/pyproject.toml"
    file.write_text(file.read_text(encoding="utf-8").replace('"0.2.0"', '"0.1.9"'), encoding="utf-8")
    added: list[dict[str, Any]] = [{"name": "graphpact.batch.ForwardBatch.new", "kind": "field", "parts": []}]
    (copy / "tests/versions/contract_next.json").write_text(json.dumps(added), encoding="utf-8")
    done = run(copy, "check", "v0.2.0")
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert said[0].startswith("swarm/pyproject.toml has version 0.1.9, and the tag is v0.2.0")
    assert "additions since its last version, such as graphpact.batch.ForwardBatch.new" in said[1]
    assert "CHANGELOG.md has no section of v0.3.0" in run(copy, "check", "v0.3.0").stderr
    assert run(copy, "set", "0.2").stderr.startswith("usage: ")
