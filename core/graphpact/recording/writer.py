"""`RecordingWriter`: writes recorded steps to a file, or to a file that is rotated.

Does not: check what it writes, or read it from an engine.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from graphpact.errors import GraphpactError, UsageError
from graphpact.files import read_file
from graphpact.output_file import OutputFile, move_unlocked
from graphpact.recording.lines import (
    HEADER,
    MOST_BYTES,
    MOST_CONTEXT,
    MOST_ROWS,
    MOST_SLOTS,
    MOST_STEPS,
    LaneLine,
    LineError,
    StepLine,
    text_of,
)

_HEADER = text_of(HEADER)


class RecordingWriter:
    """A writer of one file; a context manager that opens and closes it.

    With rotation, a file never grows beyond what a reader takes. A full file is moved to ``FILE.1``, where it
    replaces an older one, and a new file begins; each can be read alone. A file that exists at the start is
    moved too, unless it or the older one is no recording, or a process writes it. Each step is written
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
        self._file = OutputFile(self.path, "recording", existing="refused", is_locked=self._rotates)
        self._lanes: dict[str, _WrittenLane] = {}
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

        Args:
            lane: Its lane. If it has grown since its line was written, the line is written anew in its place.
            step: The step.

        Raises:
            LineError: With rotation: it is larger than a file may be.
            GraphpactError: The disk is full or broken.
        """
        about, text = _text_with_room(lane), text_of(step)
        if self._rotates and not self._fits(lane, about, text):
            if len(_HEADER + about + text) > self._most_bytes:
                raise LineError(f"a step of more than {self._most_bytes} bytes")
            self._rotate()
        known = self._lanes.get(lane.lane)
        if known is None:
            text = self._before(about) + text
            known = self._lanes[lane.lane] = _WrittenLane(lane, self._bytes + text.index(about))
        elif known.line != lane:
            self._file.overwrite(known.at, about)
            known.line = lane
        self._file.write(text, at_once=self._rotates)
        self._bytes += len(text)
        known.num_steps += 1
        self.num_steps += 1

    def _before(self, about: str) -> str:
        """Return what precedes the first step of a lane."""
        return about if self._lanes else _HEADER + about

    def _fits(self, lane: LaneLine, about: str, text: str) -> bool:
        """Return whether this file has room for a step."""
        known = self._lanes.get(lane.lane)
        if known is None:
            text = self._before(about) + text
        elif known.num_steps >= self._most_steps:
            return False
        return self._bytes + len(text) <= self._most_bytes

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
        move_unlocked(self.path, self._older if self.path.stat().st_size else None)


@dataclass
class _WrittenLane:
    """A lane in the present file.

    Args:
        line: The lane.
        at: Where its line begins, in bytes.
        num_steps: Its steps in this file.
    """

    line: LaneLine
    at: int
    num_steps: int = 0


def _text_with_room(lane: LaneLine) -> str:
    """Return the text of a lane with spaces at its end: room for the largest sizes of a recording."""
    most = text_of(replace(lane, context=MOST_CONTEXT, slots=MOST_SLOTS, rows=MOST_ROWS))
    return text_of(lane).rstrip("\n").ljust(len(most) - 1) + "\n"


def _is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does, or is empty."""
    try:
        lines = read_file(path, 200).splitlines()
        return not lines or json.loads(lines[0])["graphpact"] == HEADER["graphpact"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
