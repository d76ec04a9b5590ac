"""What a process writes while it compiles: one plain line, or a progress line on a terminal."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphpact_kernels.compiled import waiting
from graphpact_kernels.compiled.waiting import announced

WAIT = "import time; from graphpact_kernels.compiled.waiting import announced\n"


@pytest.fixture(autouse=True)
def nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a process that has written nothing."""
    monkeypatch.setattr(waiting, "_written", {})


def test_elsewhere_one_plain_line_comes_first_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    """One line is on stderr before the work, no second one for the same work, and none on stdout."""
    for _ in range(2):
        with announced("compiling it, a minute"):
            assert capsys.readouterr().out == ""
    with announced("compiling another"):
        assert capsys.readouterr() == ("", "compiling another\n")
    with announced("compiling it, a minute"), announced("a third"):
        assert capsys.readouterr() == ("", "a third\n")


def _on_terminal(program: str) -> str:
    """Run a program with a terminal as stderr, and return what it writes there."""
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stderr=slave) as process:
        os.close(slave)
        written = b""
        while True:
            try:
                part = os.read(master, 1024)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            written += part
    os.close(master)
    assert process.returncode == 0
    return written.decode()


@pytest.mark.sweep
def test_on_a_terminal_a_line_counts_the_seconds() -> None:
    """The line appears at once, is updated in place, and ends with the elapsed time."""
    written = _on_terminal(f"{WAIT}with announced('compiling it'): time.sleep(2.5)")
    first, *updates = written.split("\r")
    assert first == "compiling it"
    assert [*map(str.strip, updates)][:2] == ["compiling it: 1 s", "compiling it: 2 s"]
    assert re.fullmatch(r"compiling it: [23] s", updates[-2].strip() or updates[-1].strip())
    assert written.endswith("\n")


@pytest.mark.sweep
def test_on_a_terminal_the_parts_are_counted_in_a_second_line() -> None:
    """Each part replaces the one before in place, below the first text, and the seconds go on."""
    written = _on_terminal(
        f"{WAIT}with announced('compiling graphs') as update:\n"
        " for n in (1, 2): update(f'piece {n} of 2'); time.sleep(1.2)"
    )
    first, second = written.replace("\r\n", "\n").split("\n", 1)
    assert first == "compiling graphs"
    shown = [part.strip() for part in second.split("\r") if part.strip()]
    assert shown[:3] == ["piece 1 of 2: 0 s", "piece 1 of 2: 1 s", "piece 2 of 2: 1 s"]
    assert shown[-1] == "piece 2 of 2: 2 s"
    assert second.count("\n") == 1


def test_elsewhere_parts_are_told_at_most_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that begins soon after another line is not written; one that begins 10 seconds later is."""
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    with announced("compiling graphs") as update:
        for number, seconds in enumerate((0, 9, 2, 5, 6)):
            now[0] += seconds
            update(f"piece {number} of 4")
    assert capsys.readouterr() == ("", "compiling graphs\npiece 2 of 4\npiece 4 of 4\n")


@pytest.mark.sweep
def test_an_error_ends_the_line_and_the_thread() -> None:
    """An error of the work is raised, and nothing is written after it."""
    program = (
        f"{WAIT}import threading\ntry:\n with announced('x'): raise ValueError\nexcept ValueError: pass\n"
        "assert threading.active_count() == 1; time.sleep(1.5)"
    )
    assert re.fullmatch(r"x\rx: 0 s\s*", _on_terminal(program))


def test_a_broken_stderr_ends_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a closed or missing stderr, the work still succeeds."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            done = []
            with announced("compiling it") as update:
                update("a part")
                done.append(True)
        assert done


def test_the_place_that_compiles_says_so(tmp_path: Path) -> None:
    """With an empty cache, the build and its duration are announced before the compiler runs."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 1;; *) echo 'x.cpp: error: out of paper'; exit 1;; esac\n"
    )
    compiler.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", "from graphpact_kernels.compiled import load; print(load())"],
        env=os.environ | {"CXX": str(compiler), "GRAPHPACT_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "out of paper" in done.stdout
    assert done.stderr.startswith("compiling the kernels, once for this machine and torch; 10 to ")
    assert "seconds" in done.stderr
