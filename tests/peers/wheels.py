"""Released wheels, downloaded once and unpacked into a cache; nothing is installed.

The cache is the folder ``graphpact/peers`` of the user's cache directory, or the one that the environment
variable ``GRAPHPACT_PEERS_CACHE`` names. A wheel is unpacked beside its place and moved there when it is
complete, so an interrupted download leaves nothing that looks like a wheel. Its code is imported, so no other
user may be able to change the cache or a wheel in it.

Does not: resolve dependencies, or build a source distribution.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from graphpact_kernels.compiled import own_folder

_VARIABLE = "GRAPHPACT_PEERS_CACHE"
_ALWAYS = ("*.py", "*.dist-info/METADATA", "*.dist-info/entry_points.txt")


@dataclass(frozen=True)
class Wheel:
    """A released wheel, and which of its files are unpacked.

    Attributes:
        name: Name of the distribution.
        version: Its exact version.
        files: Patterns of files to unpack besides Python files and the metadata that imports read.
    """

    name: str
    version: str
    files: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder for ``sys.path`` into which the wheel is or will be unpacked."""
        return cache() / f"{self.name}-{self.version}"


TRITON = Wheel("triton", "3.9.0", ("triton/_C/*.so",))
"""Its interpreter runs the small metadata kernels of engines."""


def cache() -> Path:
    """Return the folder that holds unpacked wheels."""
    if chosen := os.environ.get(_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpact" / "peers"


def unpack(wheel: Wheel) -> Path:
    """Return the folder of an unpacked wheel; download it if it is missing.

    Raises:
        GraphpactError: Other users can change the cache or the wheel.
        RuntimeError: pip found no such wheel; its answer is in the message.
    """
    with own_folder(cache(), _VARIABLE, create=True):
        pass
    if not wheel.folder.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            unpacked = Path(scratch, "unpacked")
            _extract(_download(wheel, Path(scratch)), unpacked, _ALWAYS + wheel.files)
            unpacked.rename(wheel.folder)
    with own_folder(wheel.folder, _VARIABLE):
        return wheel.folder


def _download(wheel: Wheel, folder: Path) -> Path:
    asked = f"{wheel.name}=={wheel.version}"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        asked,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{asked} cannot be downloaded:\n{done.stderr}")
    (file,) = folder.glob("*.whl")
    return file


def _extract(wheel: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if any(fnmatch(name, pattern) for pattern in patterns)]
        archive.extractall(folder, wanted)
