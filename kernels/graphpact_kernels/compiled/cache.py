"""Compiled libraries on disk: each is built once and kept under a key of everything that it depends on.

The cache is ``$GRAPHPACT_CACHE_DIR``, by default ``$XDG_CACHE_HOME/graphpact`` or ``~/.cache/graphpact``. An
entry ``KIND/KEY/`` contains the library, ``library.so``, and ``library.json`` with its key and SHA-256.

An entry is written to a temporary folder and moved to its place in one step. Entries that were not used for
`DAYS` days are removed when a new one is kept. Nothing is unpickled.

A library is code, so only a checked file may be loaded. No other user can have changed the folder, the entry
and its files, or can change them later (see `graphpact_kernels.compiled.ownership`). An entry that is
incomplete, was changed, is not a folder or belongs to another user is removed, with a warning. If it cannot
be removed, that is an error, because it would block the place of a new one.

A library is loaded from its path in the cache, not through an open descriptor: torch and debuggers open the
path again when they describe an error in it.

Does not: build libraries (see `graphpact_kernels.compiled.build`); detect a change that this user made
together with its hash, or after the check.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from graphpact.errors import GraphpactError
from graphpact.plugin_calls import describe_error
from graphpact_kernels.compiled.ownership import fault_of, open_own_file, own_folder

_log = logging.getLogger(__name__)

DAYS = 90
"""Days after which an unused entry is removed."""

_FORMAT = 2
_LIBRARY, _FACTS = "library.so", "library.json"
_MOST_FACTS = 1 << 12  # bytes; the usual size is about 120
_VARIABLE = "GRAPHPACT_CACHE_DIR"


def cache_folder() -> Path:
    """Return the folder of all caches."""
    named = os.environ.get(_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpact"


def key_of(parts: Iterable[object]) -> str:
    """Return the key of a library that depends on ``parts``, from the text of each."""
    return hashlib.sha256("\0".join(map(str, [_FORMAT, *parts])).encode()).hexdigest()[:32]


def version_of(compiler: str) -> str:
    """Return the version text that a compiler prints.

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
        """Return the checked library of a key, or None; remove an entry that cannot be used, with a warning.

        Raises:
            OSError: The folder cannot be entered.
            GraphpactError: Other users can change the folder, or the entry cannot be removed.
        """
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._opened())
                os.stat(key, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return None
            try:
                return self._checked(key, folder)
            except (OSError, ValueError, RecursionError) as error:
                self._remove(key, folder, str(error))
                return None

    def keep(self, key: str, library: Path) -> Path:
        """Copy a library into the cache, remove old unused entries, and return the copy.

        If another process has stored one under the key in the meantime and it is usable, return that one.

        Raises:
            OSError: The cache cannot be written.
            GraphpactError: Other users can change the folder, or an unusable entry cannot be removed.
        """
        content = library.read_bytes()
        facts = json.dumps({"key": key, "sha256": hashlib.sha256(content).hexdigest()})
        with self._opened(create=True) as folder:
            try:
                with _new_folder(folder) as name:
                    _write(f"{name}/{_LIBRARY}", folder, content)
                    _write(f"{name}/{_FACTS}", folder, facts.encode())
                    try:
                        os.rename(name, key, src_dir_fd=folder, dst_dir_fd=folder)
                    except OSError:  # another process was first, or the place is taken by an unusable entry
                        found = self.find(key)
                        if found is not None:
                            return found
                        os.rename(name, key, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:  # the system's message has only the path inside the open folder
                raise OSError(error.errno, error.strerror, str(self.folder)) from error
            self._forget_unused(folder)
        found = self.find(key)
        if found is None:
            raise GraphpactError(
                f"{self.what} was written to {self.folder / key}, but cannot be used from there",
                hint=f"the warning has the reason; name another folder in {_VARIABLE}",
            )
        return found

    def discard(self, key: str, fault: str) -> None:
        """Remove the entry of a key, and log a warning with the reason.

        Raises:
            OSError: The folder cannot be entered.
            GraphpactError: Other users can change the folder, or the entry cannot be removed.
        """
        with self._opened() as folder:
            self._remove(key, folder, fault)

    @contextlib.contextmanager
    def building(self, key: str, seconds: float) -> Iterator[None]:
        """Hold the lock of a key, so that one process at a time builds its library. A wait is logged.

        Args:
            key: The key.
            seconds: How long to wait for another process.

        Raises:
            OSError: The lock cannot be created.
            GraphpactError: Other users can change the folder, or another process still holds the lock.
        """
        with self._opened(create=True):
            pass
        lock = FileLock(self.folder / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.warning(
                "waiting for another process that builds %s, at most %.0f s: it holds %s",
                *(self.what, seconds, lock.lock_file),
            )
            try:
                lock.acquire(timeout=seconds)
            except Timeout:
                raise GraphpactError(
                    f"{self.what} is not built: another process has held {lock.lock_file} for"
                    f" {seconds:.0f} s",
                    hint=f"end that process (`fuser {lock.lock_file}` shows it), or name another folder in"
                    f" {_VARIABLE}",
                ) from None
        try:
            yield
        finally:
            lock.release()

    def _opened(self, *, create: bool = False) -> contextlib.AbstractContextManager[int]:
        return own_folder(self.folder, _VARIABLE, create=create)

    def _checked(self, key: str, folder: int) -> Path:
        """Check an entry, and return its library.

        Raises:
            OSError: A file is missing or cannot be read.
            ValueError: The entry cannot be used.
            RecursionError: The JSON of ``library.json`` is nested too deeply.
        """
        if not stat.S_ISDIR(os.stat(key, dir_fd=folder, follow_symlinks=False).st_mode):
            raise ValueError("it is no folder")
        entry = os.open(key, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            fault = fault_of(os.fstat(entry))
            if fault is not None:
                raise ValueError(f"it {fault}")
            with os.fdopen(open_own_file(_FACTS, entry), "rb") as file:
                facts = json.loads(file.read(_MOST_FACTS).decode())
            if not isinstance(facts, dict) or facts.get("key") != key:
                raise ValueError("it was made for another key")
            with os.fdopen(open_own_file(_LIBRARY, entry), "rb") as library:
                if hashlib.file_digest(library, "sha256").hexdigest() != facts.get("sha256"):
                    raise ValueError("its library was changed")
            with contextlib.suppress(OSError):  # a cache may be read-only
                os.utime(entry)
            return self.folder / key / _LIBRARY
        finally:
            os.close(entry)

    def _remove(self, key: str, folder: int, fault: str) -> None:
        entry = self.folder / key
        try:
            _delete(key, folder)
        except OSError as error:
            raise GraphpactError(
                f"{self.what} {entry} is not used: {fault}; it cannot be removed: {describe_error(error)}",
                hint=f"remove {entry} as its owner or as root, or name another folder in {_VARIABLE}",
            ) from error
        _log.warning("%s %s is not used and compiled again: %s", self.what, entry, fault)

    def _forget_unused(self, folder: int) -> None:
        oldest = time.time() - DAYS * 24 * 3600
        for entry in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process removes it too
                if entry.lstat().st_mtime < oldest:
                    _delete(entry.name, folder)


@contextlib.contextmanager
def _new_folder(folder: int) -> Iterator[str]:
    """Make a folder for a new entry, yield its name, and remove it at the end unless it was moved."""
    name = f".new-{secrets.token_hex(8)}"
    os.mkdir(name, 0o755, dir_fd=folder)
    try:
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            _delete(name, folder)


def _write(name: str, folder: int, content: bytes) -> None:
    """Write a new file that other users cannot write, under any umask."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
    with os.fdopen(file, "wb") as stream:
        stream.write(content)


def _delete(name: str, folder: int) -> None:
    """Remove a folder with its contents, or a file, a pipe or a link (not its target)."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
