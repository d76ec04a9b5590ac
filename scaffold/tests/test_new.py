"""Tests of `graphpact new`: what it writes, and what it refuses."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphpact._version import CONTRACT_VERSION
from graphpact.errors import UsageError
from graphpact.plugins import GROUPS
from graphpact_cli import main
from graphpact_scaffold.kinds import NewKind
from graphpact_scaffold.rendering import TEMPLATE, render

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm.general_plugins", "sglang.srt.plugins")
KINDS = pytest.mark.parametrize("kind", NewKind)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[NewKind, Path]:
    """Return the folder of a distribution of each kind, with the plugin ``acme_thing``."""
    root = tmp_path_factory.mktemp("made")
    return {kind: render(kind, "acme-thing", root / kind.value) for kind in NewKind}


def project(folder: Path) -> dict[str, Any]:
    """Return the table ``project`` of a distribution."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


@KINDS
def test_every_entry_point_leads_to_what_the_package_has(made: dict[NewKind, Path], kind: NewKind) -> None:
    """The plugin's group is that of its kind, and each target is a name in a module of the new package."""
    points = project(made[kind])["entry-points"]
    assert points.pop("graphpact.contract") == {f"{CONTRACT_VERSION}": "graphpact.hookspecs:CONTRACT_VERSION"}
    assert [GROUPS[group] for group in points if group in GROUPS] == [kind.offers]
    assert sum(group in ENGINES for group in points) == (kind.offers == "adapter")
    for group in points.values():
        ((name, target),) = group.items()
        assert name == "acme_thing"
        module, _, attribute = target.partition(":")
        path = made[kind] / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        names = {
            name
            for node in ast.parse(file.read_text()).body
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom)
                else [target.id for target in node.targets if isinstance(target, ast.Name)]
                if isinstance(node, ast.Assign)
                else [getattr(node, "name", "")]
            )
        }
        assert attribute in names


@KINDS
def test_nothing_of_the_template_is_left_in_the_files(made: dict[NewKind, Path], kind: NewKind) -> None:
    """No file has marks of the template, a path of this machine, or another kind's package."""
    files = [path for path in made[kind].rglob("*") if path.is_file()]
    assert {
        path.parts[0] for file in files for path in [file.relative_to(made[kind])] if len(path.parts) > 1
    } == {*(".github", "acme_thing", "tests")}
    for file in files:
        text = file.read_text()
        assert not re.search(r"\{[{%]|[}%]\}", text.replace("${{", "")), file
        assert str(ROOT) not in text
        assert not text or text.endswith("\n"), file


@KINDS
@pytest.mark.parametrize("command", ["check", "format --check --diff"])
def test_the_code_is_formatted_and_clean(made: dict[NewKind, Path], kind: NewKind, command: str) -> None:
    """The linter and the formatter have nothing to change, by the settings of the new distribution."""
    ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."]
    done = subprocess.run(ruff, cwd=made[kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@KINDS
def test_the_continuous_integration_needs_no_gpu(made: dict[NewKind, Path], kind: NewKind) -> None:
    """The workflows of both forges are valid, run the tests and the suite, and ask for torch for a CPU."""
    github = yaml.safe_load((made[kind] / ".github/workflows/check.yml").read_text())
    gitlab = yaml.safe_load((made[kind] / ".gitlab-ci.yml").read_text())
    assert github["jobs"]["check"]["runs-on"] == "ubuntu-latest"
    readme = (made[kind] / "README.md").read_text()
    (check,) = re.findall(r"^graphpact check .* --report build$", readme, re.MULTILINE)
    for lines in (
        [step["run"] for step in github["jobs"]["check"]["steps"] if "run" in step],
        gitlab["check"]["script"],
    ):
        assert any("--torch-backend cpu -e '.[test]'" in line for line in lines)
        assert "uv run --no-sync pytest" in lines
        assert f"uv run --no-sync {check}" in lines


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("Acme", "'Acme' cannot be the name of a plugin and of its package", "acme_attention"),
        ("acme__thing", "cannot be the name", "single underscores"),
        ("../acme", "cannot be the name", "begin"),
        ("class", "'class' is a word of Python", "acme_class"),
        ("json", "'json' is a word of Python", "acme_json"),
        ("torch", "'torch' is an installed package", "acme_torch"),
        (
            "cuda_graph",
            "graphpact-cuda-graph .* has a plugin of this kind called 'cuda_graph'",
            "another name",
        ),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, says: str, hint: str, tmp_path: Path) -> None:
    """A name that no package can have, or that Python or something installed has, makes nothing."""
    with pytest.raises(UsageError, match=says) as error:
        render(NewKind.runner, name, tmp_path / "new")
    assert hint in (error.value.hint or "")
    assert not (tmp_path / "new").exists()


def test_only_a_new_or_an_empty_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are there are kept; without a folder, one is made that is called like the distribution."""
    (tmp_path / "note").write_text("mine")
    for folder in (tmp_path, tmp_path / "note"):
        with pytest.raises(UsageError, match="exists and is no empty folder"):
            render(NewKind.observer, "acme_thing", folder)
    with pytest.raises(UsageError, match="cannot be written"):
        render(NewKind.observer, "acme_thing", tmp_path / "note/new")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
    (tmp_path / "empty").mkdir()
    assert render(NewKind.observer, "acme_thing", tmp_path / "empty") == tmp_path / "empty"
    monkeypatch.chdir(tmp_path)
    assert render(NewKind.observer, "acme_thing") == Path("acme-thing")
    assert (tmp_path / "acme-thing/acme_thing/observer.py").is_file()


def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    """A folder that does not exist, or that is no template, is named, and nothing is written."""
    (tmp_path / "empty").mkdir()
    for name, says in (("absent", "cannot be rendered"), ("empty", "is no template of a plugin")):
        with pytest.raises(UsageError, match=f"{tmp_path / name} {says}") as error:
            render(NewKind.observer, "acme_thing", tmp_path / "new", template=str(tmp_path / name))
        assert "leave --template out" in (error.value.hint or "")
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_plugin_follows_its_template_in_git(tmp_path: Path) -> None:
    """`copier update` brings a later version of the template into a plugin, and keeps its own changes."""

    def git(*words: str, folder: Path) -> None:
        named = ["-c", "user.name=Acme", "-c", "user.email=acme@example.org"]
        program = shutil.which("git") or "git"
        subprocess.run([program, *named, *words], cwd=folder, check=True, capture_output=True)

    def commit(folder: Path, *tag: str) -> None:
        git("add", "--all", folder=folder)
        git("commit", "--message", "a step", folder=folder)
        if tag:
            git("tag", *tag, folder=folder)

    template, plugin = tmp_path / "template", tmp_path / "plugin"
    shutil.copytree(TEMPLATE, template)
    git("init", folder=template)
    commit(template, "v1")
    render(NewKind.observer, "acme_thing", plugin, template=str(template))
    git("init", folder=plugin)
    code = plugin / "acme_thing/observer.py"
    code.write_text(code.read_text().replace("SECONDS = 0.1", "SECONDS = 0.2"))
    commit(plugin)
    ignored = template / "project/.gitignore.jinja"
    ignored.write_text(ignored.read_text() + "*.log\n")
    commit(template, "v2")
    updated = subprocess.run(
        [sys.executable, "-m", "copier", "update", "--defaults", "--quiet"],
        cwd=plugin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert updated.returncode == 0, updated.stderr
    assert "*.log\n" in (plugin / ".gitignore").read_text()
    assert "SECONDS = 0.2" in code.read_text()
    assert "_commit: v2" in (plugin / ".copier-answers.yml").read_text()


def test_the_command_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`graphpact new` writes the folder, and names it and the first commands on stderr."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "speculation", "acme_thing"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "cd acme-thing" in said.err
    assert "pip install -e '.[test]'" in said.err
    assert (tmp_path / "acme-thing/acme_thing/algorithm.py").is_file()
    assert main(["new", "speculation", "acme_thing"]) == 2
    assert "acme-thing exists and is no empty folder" in capsys.readouterr().err


FIRST_PARTY = sorted([*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "examples/third_party/pyproject.toml"])


@pytest.mark.parametrize("file", FIRST_PARTY, ids=lambda file: file.parent.name)
def test_first_party_plugins_have_the_form_of_the_template(file: Path, made: dict[NewKind, Path]) -> None:
    """Each has the tables and keys of a new plugin, with bounds on graphpact, and the files beside it."""
    new = tomllib.loads((made[NewKind.attention_backend] / "pyproject.toml").read_text())
    ours = tomllib.loads(file.read_text())
    template, table = new["project"], ours["project"]
    assert template.keys() - {"optional-dependencies"} <= table.keys()
    for key in ("license", "license-files", "readme", "requires-python"):
        assert table[key] == template[key], key
    for key in ("dependencies", "classifiers"):
        assert set(template[key]) <= set(table[key]), key
    contract = "graphpact.contract"
    assert table["entry-points"][contract] == template["entry-points"][contract]
    assert ours["build-system"] == new["build-system"]
    (package,) = ours["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for name in ("README.md", "LICENSE", f"{package}/__init__.py", f"{package}/py.typed"):
        assert (file.parent / name).is_file(), name
