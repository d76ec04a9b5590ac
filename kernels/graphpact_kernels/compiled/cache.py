"""Compiled libraries on disk: each is built once and kept under a key of all that it depends on.

The cache is ``$GRAPHPACT_CACHE_DIR``, by default ``$XDG_CACHE_HOME/graphpact`` or ``~/.cache/graphpact``. An
entry ``KIND/KEY/`` has the library, ``library.so``, and ``library.json`` with its key and SHA-256.

An entry is written to a temporary folder and moved to its place in one step. An entry that is incomplete, has
changed or belongs to another user is not used and removed, with a warning. Entries that were not used for
`DAYS` days are removed when a new one is kept. Nothing is unpickled. Whoever may write to the folder can run
code as its user, as in every cache of compiled code.

Does not: build, load, or find a change that was made together with its hash.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from graphpact.files import write_file

_log = logging.getLogger(__name__)

DAYS = 90
"""How long an entry is kept that nobody uses."""

_FORMAT = 2
_LIBRARY, _FACTS = "library.so", "library.json"


def cache_folder() -> Path:
    """Return the folder of everything that is built once and kept."""
    named = os.environ.get("GRAPHPACT_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpact"


def key_of(parts: Iterable[object]) -> str:
    """Return the key of a library that depends on ``parts``, each as its text."""
    return hashlib.sha256("\0".join(map(str, [_FORMAT, *parts])).encode()).hexdigest()[:32]


def version_of(compiler: str) -> str:
    """Return what a compiler says of its version.

    Raises:
        OSError: It cannot be run.
        subprocess.CalledProcessError: It fails.
    """
    return subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class LibraryCache:
    """The libraries of one kind.

    Args:
        kind: The name of their folder in the cache.
        what: What an entry is, in messages.
    """

    kind: str
    what: str

    @property
    def folder(self) -> Path:
        """The folder of the entries."""
        return cache_folder() / self.kind

    def find(self, key: str) -> Path | None:
        """Return the library of a key, or None. An entry that is not whole is removed, with a warning."""
        entry = self.folder / key
        if not entry.exists():
            return None
        try:
            fault = _fault(entry, key)
        except (OSError, ValueError) as error:
            fault = str(error)
        if fault is not None:
            self.discard(key, fault)
            return None
        with contextlib.suppress(OSError):  # a cache may be read-only
            os.utime(entry)
        return entry / _LIBRARY

    def keep(self, key: str, library: Path) -> Path:
        """Copy a library into the cache, remove entries that nobody uses, and return its path there.

        Raises:
            OSError: The cache cannot be written.
            GraphpactError: The same, of the file beside the library.
        """
        entry = self.folder / key
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new-") as name:
            new = Path(name, key)
            new.mkdir()
            shutil.copyfile(library, new / _LIBRARY)
            facts = {"key": key, "sha256": _hash_of(new / _LIBRARY)}
            write_file(new / _FACTS, json.dumps(facts))
            try:
                new.rename(entry)
            except OSError:
                if not entry.exists():  # else another process was first
                    raise
        self._forget_unused()
        return entry / _LIBRARY

    def discard(self, key: str, fault: str) -> None:
        """Remove the entry of a key, with a warning that says why."""
        entry = self.folder / key
        _log.warning("%s %s is not used and compiled again: %s", self.what, entry, fault)
        shutil.rmtree(entry, ignore_errors=True)

    def _forget_unused(self) -> None:
        oldest = time.time() - DAYS * 24 * 3600
        for entry in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process removes it too
                if entry.stat().st_mtime < oldest:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _fault(entry: Path, key: str) -> str | None:
    """Return why an entry cannot be used, or None."""
    library = entry / _LIBRARY
    if hasattr(os, "getuid") and library.stat().st_uid not in (os.getuid(), 0):
        return "it belongs to another user"
    facts = json.loads((entry / _FACTS).read_text("utf-8"))
    if not isinstance(facts, dict) or facts.get("key") != key:
        return "it was made for another key"
    if _hash_of(library) != facts.get("sha256"):
        return "its library was changed"
    return None


def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
