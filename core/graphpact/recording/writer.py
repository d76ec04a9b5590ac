"""`RecordingWriter`: writes recorded steps to a file, or to a file that is rotated.

Does not: check what it writes, or read it from an engine.
"""

import json
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from graphpact.errors import GraphpactError, UsageError
from graphpact.files import read_file
from graphpact.output_file import OutputFile, move_unlocked
from graphpact.recording.lines import HEADER, MOST_BYTES, MOST_STEPS, LaneLine, LineError, StepLine, text_of


class RecordingWriter:
    """A writer of one file; a context manager that opens and closes it.

    With rotation, a file never grows beyond what a reader takes. A full file is moved to ``FILE.1``, where it
    replaces an older one, and a new file begins; each can be read alone. A file that exists at the start is
    moved too, but only in the place of a recording, and only if no process writes it. Each step is written
    at once, so that a killed process loses none. Without rotation, an existing file is refused, and a file
    without any step is removed at the end.

    Args:
        path: The file.
        rotates: Whether it is rotated.
        most_bytes: The most bytes of a file with rotation.
        most_steps: The most steps of a lane in a file with rotation.

    Attributes:
        num_steps: Steps that were written, to all files.
    """

    def __init__(
        self, path: Path, *, rotates: bool = False, most_bytes: int = MOST_BYTES, most_steps: int = MOST_STEPS
    ) -> None:
        self.num_steps = 0
        self.path = path
        self._older = path.with_name(f"{path.name}.1")
        self._rotates = rotates
        self._most_bytes, self._most_steps = most_bytes, most_steps
        self._begin()

    def _begin(self) -> None:
        self._file = OutputFile(self.path, "recording", replaces=False, is_locked=self._rotates)
        self._steps: dict[str, int] = {}  # in this file, by lane
        self._bytes = 0

    def __enter__(self) -> Self:
        """Open the file; see `open`."""
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; see `close`."""
        try:
            self.close()
        except GraphpactError:
            if kind is None:
                raise

    def open(self) -> None:
        """Open the file.

        Raises:
            UsageError: It exists and is not moved, or cannot be written.
        """
        if self._rotates and self.path.exists():
            self._move_existing()
        self._file.open()

    def close(self) -> None:
        """Close the file.

        Raises:
            GraphpactError: The last lines cannot be written.
        """
        try:
            self._file.close()
        finally:
            if not (self.num_steps or self._rotates):
                with suppress(OSError):
                    self.path.unlink()

    def write(self, lane: LaneLine, step: StepLine) -> None:
        """Write a step, after the line of its lane if it is the first of this lane.

        Raises:
            LineError: With rotation: it is larger than a file may be.
            GraphpactError: The disk is full or broken.
        """
        text = text_of(step)
        before = self._before(lane)
        if self._rotates and self._is_full(lane, before + text):
            alone = text_of(HEADER) + text_of(lane)
            if len(alone + text) > self._most_bytes:
                raise LineError(f"a step of more than {self._most_bytes} bytes")
            self._rotate()
            before = alone
        self._file.write(before + text, at_once=self._rotates)
        self._bytes += len(before + text)
        self._steps[lane.lane] = self._steps.get(lane.lane, 0) + 1
        self.num_steps += 1

    def _before(self, lane: LaneLine) -> str:
        """Return the lines that must precede a step of a lane in this file."""
        header = "" if self._steps else text_of(HEADER)
        return header if lane.lane in self._steps else header + text_of(lane)

    def _is_full(self, lane: LaneLine, text: str) -> bool:
        is_long = self._steps.get(lane.lane, 0) >= self._most_steps
        return is_long or self._bytes + len(text) > self._most_bytes

    # -- rotation --------------------------------------------------------------------------------

    def _rotate(self) -> None:
        self._file.close()
        move_unlocked(self.path, self._older)
        self._begin()
        self._file.open()

    def _move_existing(self) -> None:
        """Move a recording that exists at the start."""
        for path in (self.path, self._older):
            if path.exists() and not _is_recording(path):
                hint = "name another file, or remove it"
                raise UsageError(f"{path} exists and is no recording; it is not replaced", hint=hint)
        move_unlocked(self.path, self._older)


def _is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does, or is empty."""
    try:
        lines = read_file(path, 200).splitlines()
        return not lines or json.loads(lines[0])["graphpact"] == HEADER["graphpact"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
