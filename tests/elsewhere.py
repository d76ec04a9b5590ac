"""`Elsewhere`: a virtual environment with wheels of this repository, and a folder to work in, outside of it.

The wheels are built offline. Other packages are linked from the environment of the tests, except graphpact
and its plugins.

Does not: install what the wheels of graphpact require; the caller names them all.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass
class Elsewhere:
    """A virtual environment, and a folder to work in."""

    venv: Path
    work: Path

    @classmethod
    def make(cls, root: Path, sources: Iterable[Path]) -> Self:
        """Return an environment under ``root`` with the wheels of the distributions in ``sources``."""
        wheels, borrowed, venv, work = (root / name for name in ("wheels", "borrowed", "venv", "work"))
        for source in sources:
            _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels), cwd=source)
        _run("-m", "venv", "--without-pip", str(venv))
        made = cls(venv, work)
        made.install("--no-index", *map(str, wheels.glob("*.whl")))
        borrowed.mkdir()
        work.mkdir()
        for folder in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
            for installed in folder.iterdir():
                if "graphpact" not in installed.name and not installed.name.startswith("_editable"):
                    (borrowed / installed.name).symlink_to(installed)
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(f"{borrowed}\n")
        return made

    def install(self, *arguments: str) -> None:
        """Install with the pip of the tests, without requirements and without a network."""
        pip = ("-m", "pip", "--python", str(self.venv / "bin/python"), "install", "--no-deps")
        _run(*pip, "--no-build-isolation", *arguments, cwd=self.work if self.work.exists() else None)

    def run(self, *command: str, status: int = 0, folder: str = ".") -> str:
        """Run a command of the environment in a folder, verify its exit status, and return its stdout."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRAPHPACT"))}
        done = subprocess.run(
            [str(self.venv / "bin" / command[0]), *command[1:]],
            cwd=self.work / folder,
            env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


def _run(*arguments: str, cwd: Path | None = None) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
