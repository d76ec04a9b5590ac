"""`StepRecording`: the steps of a running engine in a file, which `graphpact check --scenario` reads.

The file holds the last part of a run: a full one is moved to ``FILE.1``; see `graphpact.recording`.

Does not: read an engine's batches; its integration gives each as a `graphpact.batch.ForwardBatch`.
"""

import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.errors import GraphpactError
from graphpact.recording import (
    LaneLine,
    LineError,
    RecordingWriter,
    Renumbering,
    fitted_lane,
    require_step,
    small_lane,
    step_of,
)

logger = logging.getLogger("graphpact.guard")


class StepRecording:
    """The recording of one process.

    A step that no recording can have is left out, counted by its reason, and named once in the log. If the
    file cannot be written any more, recording ends with a message, and the engine goes on.

    Args:
        path: The file; see `RecordingWriter` for one that exists.
        rank: The name of this process if there are several; it becomes a part of the file's name.

    Raises:
        UsageError: The file cannot be written, exists and is no recording, or another process writes it.
    """

    def __init__(self, path: Path, rank: str = "") -> None:
        self.path = path.with_name(f"{path.stem}.{rank}{path.suffix}") if rank else path
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.failure: str | None = None
        self._writer = RecordingWriter(self.path, rotates=True)
        self._lanes: dict[str, LaneLine] = {}  # with the largest sizes of a recording
        self._written: dict[str, LaneLine] = {}  # with the sizes that the steps needed
        self._numbers: dict[tuple[int, int, int], Renumbering] = {}
        self._writer.open()
        logger.warning(
            "graphpact guard: steps are recorded in %s; lengths and pages are, token ids and texts are not",
            self.path,
        )

    def record(self, lane: LaneLine, batch: ForwardBatch, table: torch.Tensor) -> None:
        """Write a step; it waits for the device.

        Args:
            lane: The lane, with the sizes of the engine. Equal names are equal lanes.
            batch: The live batch, without padding. Its token ids are not read.
            table: ``[rows, max_context_len]`` int: KV slot of each position by request row.
        """
        if self.failure is not None:
            return
        try:
            small = self._lanes.get(lane.lane) or self._lanes.setdefault(lane.lane, small_lane(lane))
            bounded = replace(lane, context=small.context)
            step = step_of(bounded, batch, table)
            require_step(bounded, step)
            cache = lane.page_size, lane.slots, lane.rows
            numbers = self._numbers.get(cache) or self._numbers.setdefault(cache, Renumbering(lane))
            step = numbers.step(step)
            line = self._written[lane.lane] = fitted_lane(small, step, self._written.get(lane.lane))
            self._writer.write(line, step)
        except LineError as error:
            self.leave_out(lane.lane, str(error))
        except GraphpactError as error:
            self.failure = str(error)
            logger.exception("graphpact guard: recording ends; the engine goes on")

    def leave_out(self, kind: str, reason: str) -> None:
        """Count a step that is not recorded.

        Args:
            kind: What kind of step it is, such as the name of its lane.
            reason: Why it is not recorded. Reasons that differ in numbers alone count as one.
        """
        without_numbers = kind, re.sub(r"\d+", "N", reason)
        self.left_out[without_numbers] += 1
        if self.left_out[without_numbers] == 1:
            logger.warning("graphpact guard: a step of %s is not recorded: %s", kind, reason)

    def close(self) -> None:
        """Close the file; the end of the process closes it too."""
        self._writer.close()

    def summary(self) -> dict[str, Any]:
        """Return the state of the recording, ready for JSON."""
        return {
            "file": str(self.path),
            "steps": self._writer.num_steps,
            "left_out": [
                {"kind": kind, "reason": reason, "steps": n} for (kind, reason), n in self.left_out.items()
            ],
            "failure": self.failure,
        }
