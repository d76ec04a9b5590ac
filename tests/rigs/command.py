"""Runs the command line in a process of its own, and holds its end to what a user may be shown.

    refused(command("generate", "--model", path, "Hello"), "config.json")

Does not: hold tests; the folders ``hostile`` of engine and tests have them.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT = 120
"""Seconds after which a command counts as hanging."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ended: its exit status and what it wrote."""

    status: int
    out: str
    err: str


def command(
    *arguments: str | Path,
    given: str | None = None,
    environment: Mapping[str, str] | None = None,
    folders: tuple[Path, ...] = (),
    cwd: Path | None = None,
) -> Ended:
    """Run ``graphpact`` with ``arguments`` and wait for its end.

    Args:
        arguments: The command line after ``graphpact``.
        given: Text for its stdin, which is empty without.
        environment: Variables to add to those of this process.
        folders: Folders to put in front of Python's path, such as one of fake installed plugins.
        cwd: The folder to run it in.
    """
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "graphpact_cli", *map(str, arguments)],
        input=given or "",
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **(environment or {}),
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def refused(ended: Ended, *words: str, status: int = 2) -> None:
    """Assert that a command gave no output, one error that names ``words``, and that status.

    A refusal is an error of one line and its help; a traceback is none.
    """
    assert ended.status == status, ended
    assert ended.out == "", ended
    assert "Traceback" not in ended.err, ended.err
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.err
    for word in words:
        assert word in ended.err, (word, ended.err)
