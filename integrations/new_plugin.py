"""`serve_new_plugin`: what `graphpact new` writes for an engine, and its own test with that engine.

Does not: judge; the tests that it runs do.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from page_commands import unchosen_environment

from graphpact_scaffold.kinds import NewKind
from graphpact_scaffold.rendering import render


def serve_new_plugin(kind: NewKind, folder: Path) -> str:
    """Return the output of the tests of a new plugin with its engine; they have passed.

    The plugin is installed only for these tests: its wheel is unpacked into a folder of their path.

    Args:
        kind: The kind of the plugin.
        folder: An empty folder to work in.
    """
    name = f"acme_{kind.value.replace('-', '_')}"
    project = render(kind, name, folder / "project")
    _run(project, "-m", "hatchling", "build", "-t", "wheel", "-d", f"{folder}")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")  # safe, since it is built from our own template
    return _run(project, "-m", "pytest", "-q", "-rs", "tests/test_in_the_engine.py", path=folder / "site")


def _run(project: Path, *arguments: str, path: Path | None = None) -> str:
    environment = unchosen_environment()
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = f"{path}"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout
