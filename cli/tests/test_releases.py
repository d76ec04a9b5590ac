"""``diff`` of an integration: what two releases of an engine changed, and which of it a package uses."""

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from graphpact_cli import main
from graphpact_cli.releases.command import add_diff
from graphpact_cli.releases.engine import EngineReleases

SURFACE = {
    "acme.attention": ("Backend", "Builder", "Metadata", "register"),
    "acme.runner": ("Runner",),
}
BASE = """
    class Base:
        def capture(self, sizes, *, pool=None): ...
"""
ATTENTION = """
    import dataclasses
    from abc import abstractmethod

    class Backend:
        name = "acme"

        @abstractmethod
        def build(self, common, fast=False): ...

        def reorder(self, batch): ...

        def _hidden(self): ...

    class Builder(Backend):
        supports: int = 0

    @dataclasses.dataclass
    class Metadata:
        seq_lens: Tensor
        max_len: int

    def register(name, *, path=None): ...
"""
RUNNER = """
    from acme.base import Base

    class Runner(Base):
        def replay(self, batch): ...
"""
AUTHOR = """
    import acme.runner
    from acme.attention import Backend, Metadata, register

    class Mine(Backend):
        def build(self, common, fast=False):
            return Metadata(common.seq_lens, common.max_len)

    register("mine")
"""


def package(root: Path, name: str, /, **modules: str) -> Path:
    """Write a package, and return the folder that has it."""
    folder = root / name
    folder.mkdir(parents=True)
    for module, text in {"__init__": "", **modules}.items():
        (folder / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return root


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The release that is in use."""
    return package(tmp_path / "before", "acme", attention=ATTENTION, runner=RUNNER, base=BASE)


@pytest.fixture
def author(tmp_path: Path) -> Path:
    """A package that builds on it."""
    return package(tmp_path / "author", "mine", backend=AUTHOR) / "mine"


@pytest.fixture(autouse=True)
def _acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An integration with the command ``acme diff``."""
    app = typer.Typer(no_args_is_help=True)
    app.callback()(lambda: None)
    add_diff(app, EngineReleases(name="Acme", package="acme", distribution="acme", surface=SURFACE))
    info = tmp_path / "site" / "graphpact_acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graphpact-acme\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[graphpact.contract]\n1 = x:y\n[graphpact.commands]\nacme = graphpact_acme:app\n"
    )
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setitem(sys.modules, "graphpact_acme", SimpleNamespace(app=app))


def changed(root: Path, tmp_path: Path, module: str, *pairs: tuple[str, str]) -> Path:
    """Return a copy of a release in which texts of a module are replaced."""
    text = (root / f"acme/{module}.py").read_text("utf-8")
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    modules = {path.stem: path.read_text("utf-8") for path in (root / "acme").glob("*.py")}
    return package(tmp_path / "after", "acme", **{**modules, module: text})


def diff(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> list[dict[str, Any]]:
    """Return the changes that ``diff --json`` gives."""
    assert main(["acme", "diff", *map(str, words), "--json"]) == status
    changes: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["changes"]
    return changes


BUILD, REORDER, REGISTER = "attention.Backend.build", "attention.Backend.reorder", "attention.register"
MUST = "    @abstractmethod\n    def must(self): ...\n"
MAY = "    def may(self): ...\n"
CHANGES = [
    ("attention", "self, common, fast", "self, common, rows, fast", "changed", BUILD, "+rows", True),
    ("attention", "fast=False", "fast=False, rows=None", "changed", BUILD, "+rows=None", True),
    ("attention", "fast=False", "fast=True", "changed", BUILD, "-fast=False, +fast=True", True),
    ("attention", "*, path=None", "*, path=None, x=0", "changed", REGISTER, "+x=0", False),
    ("attention", "path=None", "path", "changed", REGISTER, "-path=None, +path", True),
    ("attention", "def register", "def enlist", "removed", REGISTER, "(name, *, path=None)", True),
    (
        "attention",
        "lens: Tensor",
        "lens: list",
        "changed",
        "attention.Metadata.seq_lens",
        "-Tensor, +list",
        True,
    ),
    ("attention", "    max_len: int", "    pass", "removed", "attention.Metadata.max_len", "int", True),
    ("attention", MUST, MUST, "added", "attention.Backend.must", "abstractmethod (self)", True),
    ("attention", MAY, MAY, "added", "attention.Backend.may", "(self)", False),
    ("attention", "(self, batch)", "(self, rows)", "changed", REORDER, "-batch, +rows", False),
    ("attention", '"acme"', '"new"', "changed", "attention.Backend.name", "-= 'acme', += 'new'", False),
    ("base", "sizes, *", "sizes, keys, *", "changed", "runner.Runner.capture", "+keys", False),
]


@pytest.mark.parametrize(("module", "old", "new", "kind", "name", "details", "may_break"), CHANGES)
def test_a_change_is_named_with_what_it_breaks(
    before: Path,
    author: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    module: str,
    old: str,
    new: str,
    kind: str,
    name: str,
    details: str,
    may_break: bool,  # noqa: FBT001  a column of the table
) -> None:
    """Each change of a member is listed, and the status is 1 only if it may break what the package uses."""
    if old in (MAY, MUST):
        old, new = "    def reorder", f"{new}\n    def reorder"
    after = changed(before, tmp_path, module, (old, new))
    changes = diff(capsys, before, after, "--package", author, status=int(may_break))
    named = {each["name"]: each for each in changes}
    assert (named[f"acme.{name}"]["kind"], named[f"acme.{name}"]["details"]) == (kind, details)
    assert [each["name"] for each in changes if each["concerns"]] == [f"acme.{name}"] * may_break
    diff(capsys, before, after)  # without a package, nothing can break


def test_code_that_moved_is_no_change(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Methods that moved to a base, and classes that are imported from another module, are the same."""
    after = package(
        tmp_path / "after",
        "acme",
        attention="from .rooms.attention import Backend, Builder, Metadata, register",
        runner="""
            class Runner:
                def replay(self, batch): ...
                def capture(self, sizes, *, pool=None): ...
        """,
    )
    package(after / "acme", "rooms", attention=ATTENTION)
    assert diff(capsys, before, after) == []


def test_a_class_that_is_gone_is_one_change(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its members are not listed one by one."""
    after = changed(before, tmp_path, "runner", ("class Runner", "class Other"))
    assert [(each["kind"], each["name"]) for each in diff(capsys, before, after)] == [
        ("removed", "acme.runner.Runner")
    ]


def test_uses_are_found_where_they_are(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heirs of heirs, calls, reads and dotted paths in texts are named by file and line."""
    author = package(
        tmp_path / "author",
        "mine",
        heir="""
            from mine.root import Root

            class Heir(Root):
                def reorder(self, batch): ...
        """,
        root="""
            from acme import attention as at

            class Root(at.Backend): ...
        """,
        hooks="""
            PLACE = "acme.runner"
            CAPTURE = f"{PLACE}.Runner.capture"
        """,
    )
    after = changed(before, tmp_path, "attention", ("reorder(self, batch)", "reorder(self, rows)"))
    text = (after / "acme/base.py").read_text("utf-8")
    (after / "acme/base.py").write_text(text.replace("sizes", "counts"), encoding="utf-8")
    changes = {
        each["name"]: each["uses"]
        for each in diff(capsys, before, after, "--package", author / "mine", status=1)
    }
    assert changes["acme.attention.Backend.reorder"] == [
        {"file": "mine/heir.py", "line": 5, "how": "overrides"}
    ]
    assert changes["acme.runner.Runner.capture"] == [{"file": "mine/hooks.py", "line": 3, "how": "names"}]


def test_the_table_has_what_the_package_uses(
    before: Path, author: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the package does not use is in the table only with --all; a wheel is read as a folder is."""
    folder = changed(
        before, tmp_path, "attention", ("common, fast", "rows, fast"), ("(self, batch)", "(self)")
    )
    wheel = tmp_path / "acme-2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted((folder / "acme").glob("*.py")):
            archive.write(file, f"acme/{file.name}")
    given = ["acme", "diff", str(before / "acme"), str(wheel), "--package", str(author)]
    assert main(given) == 1
    out, err = capsys.readouterr()
    assert "acme.attention.Backend.build  -common, +rows  may break  overrides mine/backend.py:6" in out
    assert "reorder" not in out
    assert "12 of 16 members are the same; 4 changes, of which 1 may break mine" in err
    assert main([*given, "--all"]) == 1
    assert "acme.attention.Backend.reorder" in capsys.readouterr().out


def test_a_version_is_downloaded_by_pip(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is the engine's distribution, or another one that is named; pip's error is passed on."""
    asked = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[-1])
        if "9.9" in command[-1]:
            return SimpleNamespace(returncode=1, stderr="note\nERROR: No matching distribution found")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "acme-1.0-py3-none-any.whl", "w") as archive:
            for file in sorted((before / "acme").glob("*.py")):
                archive.write(file, f"acme/{file.name}")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert diff(capsys, "1.0.0", "acme-cpu==1.0") == []
    assert asked == ["acme==1.0.0", "acme-cpu==1.0"]
    assert main(["acme", "diff", "1.0.0", "9.9.0"]) == 2
    assert "pip cannot download acme==9.9.0: ERROR: No matching distribution found" in capsys.readouterr().err


def test_what_is_no_release_is_refused(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file, a broken wheel, another package, broken Python: each is named, and none is compared."""
    broken, text = package(tmp_path / "broken", "acme", attention="def ("), tmp_path / "text.whl"
    text.write_text("no wheel")
    damaged = tmp_path / "damaged.whl"
    with zipfile.ZipFile(damaged, "w") as archive:
        archive.writestr("acme/attention.py", "class Backend: ...")
    damaged.write_bytes(damaged.read_bytes().replace(b"class Backend", b"class Broken!", 1))
    other, old = package(tmp_path / "other", "another"), package(tmp_path / "old", "acme")
    for asked, message in (
        (tmp_path / "none.whl", "there is no such file or folder"),
        (text, "it is no wheel"),
        (other, "there is no package 'acme' in it"),
        (old, "nothing of Acme that is compared is in it"),
        (broken, "is no Python"),
        (damaged, "cannot be read"),
        ("installed", "'acme' is not installed"),
    ):
        assert main(["acme", "diff", str(before), str(asked)]) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert not out
    assert main(["acme", "diff", str(before), str(before), "--package", str(tmp_path / "none")]) == 2
    assert "it is no folder with Python files" in capsys.readouterr().err
