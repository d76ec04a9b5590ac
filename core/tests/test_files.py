"""Tests of `write_file`, which writes completely or not at all, and of `read_file`, which refuses pipes."""

import ast
import errno
import os
import resource
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpact.errors import GraphpactError, UsageError
from graphpact.files import read_file, write_file

ROOT = Path(__file__).parents[2]
PACKAGES = [
    *ROOT.glob("*/graphpact*/"),
    *ROOT.glob("plugins/*/graphpact*/"),
    *ROOT.glob("integrations/*/graphpact*/"),
]


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
    """A device is written, not replaced by a file; a full device is an error with code 3."""
    write_file(Path(os.devnull), "x")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(GraphpactError, match="No space left") as told:
        write_file(Path("/dev/full"), "x")
    assert told.value.code == 3


def test_every_file_is_written_by_it() -> None:
    """No module of ours writes a file in another way: by ``write_text`` or by opening it for writing.

    Exceptions: a recording is written line by line, as an engine steps; an entry of the cache of libraries is
    a folder, which is moved to its place when it is complete; the log of a swarm's worker is written by it,
    and so are the output and the stacks of ranks.
    """
    exceptions = {
        "graphpact/files.py",
        "graphpact/output_file.py",
        "compiled/cache.py",
        "graphpact_swarm/swarm.py",
        "real_ranks/launch.py",
        "real_ranks/worker.py",
    }
    assert [place for file, place, writes in _accesses() if writes and file not in exceptions] == []


NOT_BY_OTHERS = {
    "compiled/build.py": "sources of the package",
    **dict.fromkeys(["drivers/strictness.py", "graphpact_bench/speculation.py"], "data of the package"),
    **dict.fromkeys(["graphpact_cpu_graph/keys.py", "graphpact_bench/machine.py"], "the system's"),
    "graphpact_cli/children.py": "the system's, and what a child process wrote",
    "real_ranks/launch.py": "what the launcher and the ranks wrote",
    "compiled/cache.py": "a library that was just built; what is kept is opened by `open_own_file`",
    "graphpact/output_file.py": "a file to write, and to move",
    "graphpact_swarm/swarm.py": "the log of a worker",
    "workers/llama_cpp.py": "the model that bench saved; it runs where graphpact is not installed",
    "releases/sources.py": "a member of a wheel, which `zipfile` reads",
    "graphpact_cli/prompt_lines.py": "prompts may come through a pipe, whose writer takes its time",
}
"""Modules that read files in another way, and why these files are safe."""


def test_every_file_of_somebody_else_is_read_by_it() -> None:
    """No module opens a file for reading in another way, so that none waits for a pipe or reads a device."""
    readers = {file: place for file, place, writes in _accesses() if not writes}
    readers.pop("graphpact/files.py")
    assert readers.keys() == NOT_BY_OTHERS.keys(), readers


def _accesses() -> Iterator[tuple[str, str, bool]]:
    """Yield each place where our modules open files: end of the path, line, whether it writes."""
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            mode = [
                a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            modes = [m for m in mode if set(m) <= set("rwxabt+")]
            writes = any(set(m) & set("wxa+") for m in modes) or name.startswith("write_")
            reads = name in ("read_text", "read_bytes") or (
                name == "open" and (modes or "encoding" in _names(node))
            )
            if reads or name in ("write_text", "write_bytes") or (name == "open" and writes):
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                yield "/".join(file.parts[-2:]), place, writes


def _names(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a pipe", "a link to a pipe", "an endless device", "a terminal"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    """A pipe without a writer, and a device, which may be endless, are refused at once."""
    file = tmp_path / "file"
    if kind in ("a pipe", "a link to a pipe"):
        os.mkfifo(tmp_path / "pipe")
        file = tmp_path / "pipe"
    if kind == "a link to a pipe":
        file = tmp_path / "link"
        file.symlink_to("pipe")
    elif kind == "an endless device":
        file.symlink_to("/dev/zero")
    elif kind == "a terminal":
        file.symlink_to(os.ttyname(os.openpty()[1]))
    signal.alarm(20)  # ends a test that waits
    with pytest.raises(OSError, match="it is a pipe or a device, not a file") as told:
        read_file(file)
    signal.alarm(0)
    assert told.value.filename == str(file)


def test_a_file_is_read_and_so_is_what_a_shell_passes(tmp_path: Path) -> None:
    """A file is read to its end or to a number of bytes; a pipe that the shell has opened is waited for."""
    (tmp_path / "file").write_bytes(b"0123456789" * 10_000)
    assert read_file(tmp_path / "file") == b"0123456789" * 10_000
    assert read_file(tmp_path / "file", 3) == b"012"
    reader, writer = os.pipe()
    late = threading.Timer(0.2, lambda: (os.write(writer, b"late"), os.close(writer)))
    late.start()
    assert read_file(Path(f"/dev/fd/{reader}")) == b"late"
    late.join()
    os.close(reader)
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError, match=str(missing)):
            read_file(missing)
