"""Run the command line in a separate process, and check that its output suits a user.

    refused(command("generate", "--model", path, "Hello"), "config.json")

Does not: contain tests; the folders ``hostile`` of engine and tests do.
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
    """The exit status and the output of a finished command."""

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
        given: Text for its stdin; by default stdin is empty.
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
    """Assert that a command printed only one error, which contains ``words``, and ended with ``status``.

    The error is one line and a hint, without a traceback.
    """
    assert ended.status == status, ended
    assert ended.out == "", ended
    assert "Traceback" not in ended.err, ended.err
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.err
    for word in words:
        assert word in ended.err, (word, ended.err)
