"""`OutputFile`: a text file that a run writes step by step.

Does not: buffer more than Python does, or make directories; `graphpact.files` writes whole files.
"""

from pathlib import Path
from typing import TextIO

from graphpact.errors import GraphpactError, UsageError


class OutputFile:
    """A text file that is open while a run lasts. Text written before or after is dropped.

    Args:
        path: The file.
        what: Its content, for messages, such as ``"recording"``.
        replaces: Whether to replace an existing file.
    """

    def __init__(self, path: Path, what: str, *, replaces: bool) -> None:
        self.path = path
        self._what = what
        self._replaces = replaces
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file.

        Raises:
            UsageError: It exists and is not replaced, or cannot be written.
        """
        try:
            self._file = self.path.open("w" if self._replaces else "x", encoding="utf-8")
        except FileExistsError as error:
            hint = "name another file, or remove it"
            raise UsageError(f"{self.path} exists; a {self._what} does not replace it", hint=hint) from error
        except OSError as error:
            hint = "name a path that can be written"
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror or error}", hint=hint
            ) from error

    def write(self, text: str) -> None:
        """Write ``text``.

        Raises:
            GraphpactError: The disk is full or broken.
        """
        if self._file is not None:
            try:
                self._file.write(text)
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
