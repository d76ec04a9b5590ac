"""Tests of `write_file`: a file is written completely or not at all."""

import ast
import errno
import os
import resource
import shutil
import stat
from pathlib import Path

import pytest

from graphpact.errors import GraphpactError, UsageError
from graphpact.files import write_file

ROOT = Path(__file__).parents[2]
PACKAGES = [*ROOT.glob("*/graphpact*/"), *ROOT.glob("plugins/*/graphpact*/")]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", [(Path, "open"), (os, "fsync"), (shutil, "copymode"), (Path, "replace")])
def test_a_write_that_fails_changes_nothing(
    stage: tuple[object, str],
    error: BaseException,
    there: bool,  # noqa: FBT001  a parameter of the test
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stage fails, the old file is unchanged, no other file is left, and a full disk has code 3."""
    file = tmp_path / "a.json"
    if there:
        file.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*stage, fail)
        if stage[1] == "copymode" and not there:
            write_file(file, "new")  # a new file has no mode to keep
            return
        with pytest.raises(GraphpactError if isinstance(error, OSError) else type(error)) as told:
            write_file(file, "new")
    if isinstance(told.value, GraphpactError):
        assert (told.value.code, told.value.message) == (
            3,
            f"{file} cannot be written: No space left",
        )
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == (
        {"a.json": "old"} if there else {}
    )


def test_a_disk_that_fills_up_keeps_the_old_file(tmp_path: Path) -> None:
    """A write that the system cuts off in the middle leaves the old file and no other."""
    file = tmp_path / "a.json"
    file.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(GraphpactError, match="File too large") as told:
            write_file(file, "n" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.value.code == 3
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_what_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """A directory, a file below a file, and a missing directory are refused with status 2 and the reason."""
    (tmp_path / "file").write_text("old")
    for path in (tmp_path, tmp_path / "file/below", tmp_path / "no/such"):
        with pytest.raises(UsageError) as told:
            write_file(path, "new")
        assert str(path) in told.value.message
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_a_file_is_replaced_as_an_editor_would(tmp_path: Path) -> None:
    """A link stays a link to the new text, the file keeps its mode, and a new one has that of the umask."""
    file, link, new = tmp_path / "a", tmp_path / "link", tmp_path / "new"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to("a")
    write_file(link, "né \udcff")
    write_file(new, "x")
    assert (link.is_symlink(), file.read_bytes()) == (True, "né \\udcff".encode())
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    other = tmp_path / "other"
    other.touch()
    assert new.stat().st_mode == other.stat().st_mode
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "link", "new", "other"]


def test_a_device_is_written_directly() -> None:
    """A device is not replaced by a file; a full one is an error of code 3."""
    write_file(Path(os.devnull), "x")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(GraphpactError, match="No space left") as told:
        write_file(Path("/dev/full"), "x")
    assert told.value.code == 3


def test_every_file_is_written_by_it() -> None:
    """No module of ours writes a file in another way: by ``write_text`` or by opening it for writing.

    A recording is the exception: it is written line by line, as an engine steps.
    """
    found = []
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        if (file.parent.name, file.name) in (("graphpact", "files.py"), ("graphpact_engine", "recording.py")):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            mode = [ast.literal_eval(a) for a in node.args[:2] if isinstance(a, ast.Constant)]
            writes = any(isinstance(m, str) and set(m) & set("wxa+") and len(m) <= 3 for m in mode)
            if name in ("write_text", "write_bytes") or (name == "open" and writes):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []
