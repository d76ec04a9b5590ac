"""Recorded steps of an engine: the file that `graphpact check --scenario` reads, and its reader and writer.

The file has one JSON object per line:

    {"graphpact": "recording", "version": 1}
    {"lane": ..., "mode": ..., "page_size": ..., "context": ..., "slots": ..., "rows": ..., "shapes": ...,
     "draft": ..., "frozen": ...}                                        before the first step of each lane
    {"step": LANE, "mode": ..., "requests": [{"row": ..., "cached": ..., "pages": ..., "slots": ..., ...}]}

A request has its request row, the number of its cached tokens, the pages of its positions, and for each new
token the KV slots that it writes. The requests of a tree verify also have ``parents``, those of a draft
extend ``accepted``. Token ids, texts and contents of caches are not recorded.

    lines      the lines, and what each field may hold
    checks     how the fields must agree
    batches    a batch of an engine as a step
    numbers    small numbers for the pages of a large cache
    writer     writes a file, or files that are rotated
    reader     reads a file, which may be hostile

Does not: run steps, or draw what is not recorded; the suite does.
"""

from graphpact.recording.batches import step_of
from graphpact.recording.checks import require_lane, require_step
from graphpact.recording.lines import (
    MOST_BYTES,
    MOST_CONTEXT,
    MOST_LANES,
    MOST_ROWS,
    MOST_SLOTS,
    MOST_STEPS,
    MOST_TOKENS,
    LaneLine,
    LineError,
    RequestLine,
    StepLine,
)
from graphpact.recording.numbers import Renumbering, fitted_lane, small_lane
from graphpact.recording.reader import LaneSteps, read_recording
from graphpact.recording.writer import RecordingWriter

__all__ = [
    "MOST_BYTES",
    "MOST_CONTEXT",
    "MOST_LANES",
    "MOST_ROWS",
    "MOST_SLOTS",
    "MOST_STEPS",
    "MOST_TOKENS",
    "LaneLine",
    "LaneSteps",
    "LineError",
    "RecordingWriter",
    "Renumbering",
    "RequestLine",
    "StepLine",
    "fitted_lane",
    "read_recording",
    "require_lane",
    "require_step",
    "small_lane",
    "step_of",
]
