"""`OutputFile`: a text file that a run writes step by step; `move_unlocked`, which moves an older one away.

Does not: make directories; `graphpact.files` writes whole files.
"""

import os
from pathlib import Path
from typing import IO, Literal, TextIO

from graphpact.errors import GraphpactError, UsageError

Existing = Literal["refused", "replaced", "continued"]
_MODES: dict[Existing, Literal["x", "w", "a"]] = {"refused": "x", "replaced": "w", "continued": "a"}


class OutputFile:
    """A text file that is open while a run lasts. Text written before or after is dropped.

    Args:
        path: The file.
        what: Its content, for messages, such as ``"recording"``.
        existing: What becomes of an existing file.
        is_locked: Whether it is locked against `move_unlocked` of other processes, until it is closed.
    """

    def __init__(self, path: Path, what: str, *, existing: Existing, is_locked: bool = False) -> None:
        self.path = path
        self._what = what
        self._existing = existing
        self._is_locked = is_locked
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file.

        Raises:
            UsageError: It exists and is refused, cannot be written, or is locked.
        """
        try:
            self._file = self.path.open(_MODES[self._existing], encoding="utf-8")
        except FileExistsError as error:
            hint = "name another file, or remove it"
            raise UsageError(f"{self.path} exists; a {self._what} does not replace it", hint=hint) from error
        except OSError as error:
            hint = "name a path that can be written"
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror or error}", hint=hint
            ) from error
        if self._is_locked:
            try:
                _lock(self._file, self.path)
            except UsageError:
                self.close()
                raise

    def write(self, text: str, *, at_once: bool = False) -> None:
        """Write ``text``; with ``at_once`` nothing of it stays in this process's memory.

        Raises:
            GraphpactError: The disk is full or broken.
        """
        if self._file is not None:
            try:
                self._file.write(text)
                if at_once:
                    self._file.flush()
            except OSError as error:
                raise self._fault(error) from error

    def overwrite(self, at: int, text: str) -> None:
        """Write ``text`` at the byte ``at`` over as many bytes; what is written later follows the end.

        Raises:
            GraphpactError: The disk is full or broken.
        """
        if self._file is not None:
            try:
                self._file.seek(at)
                self._file.write(text)
                self._file.seek(0, os.SEEK_END)
            except OSError as error:
                raise self._fault(error) from error

    def close(self) -> None:
        """Close the file, if it is open.

        Raises:
            GraphpactError: The last text is lost: the disk is full or broken.
        """
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                raise self._fault(error) from error

    def _fault(self, error: OSError) -> GraphpactError:
        what = f"the {self._what} {self.path} cannot be written: {error.strerror or error}"
        return GraphpactError(what, hint="write to a disk with room, or run fewer prompts")


def move_unlocked(path: Path, target: Path | None) -> None:
    """Move a file to ``target``, or remove it without one, unless a process has locked it.

    Raises:
        UsageError: It is locked, or cannot be moved.
    """
    try:
        with path.open("rb") as file:
            _lock(file, path)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return  # another process has just moved it
            if target is None:
                path.unlink()
            else:
                path.replace(target)
    except OSError as error:
        hint = "name another file, or remove it"
        raise UsageError(f"{path} cannot be moved: {error.strerror or error}", hint=hint) from error


def _lock(file: IO[str] | IO[bytes], path: Path) -> None:
    import fcntl  # noqa: PLC0415  only on systems that have it

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        hint = "name another file for each process"
        raise UsageError(f"{path} is written by another process", hint=hint) from error
