"""`read_recording`: the recorded steps of a file, by lane. The file may be damaged or hostile.

Does not: make batches of them; the suite does.
"""

from dataclasses import dataclass, field
from pathlib import Path

from graphpact.errors import UsageError
from graphpact.files import read_file
from graphpact.recording.checks import require_lane, require_step
from graphpact.recording.lines import (
    MOST_BYTES,
    MOST_LANES,
    MOST_STEPS,
    LaneLine,
    LineError,
    StepLine,
    parse,
)


@dataclass(frozen=True)
class LaneSteps:
    """The recorded steps of one lane.

    Args:
        line: The line that describes the lane.
        steps: Its steps in order, by the number of their line, from 1.
    """

    line: LaneLine
    steps: dict[int, StepLine] = field(default_factory=dict)


def read_recording(path: Path) -> list[LaneSteps]:
    """Return the lanes of a file that have steps, in the order of the file.

    Raises:
        UsageError: The file cannot be read, is not a recording, or contains an invalid line.
    """
    lanes: dict[str, LaneSteps] = {}
    for number, text in enumerate(_lines(path), 1):
        try:
            line = parse(text, is_first=number == 1)
            if isinstance(line, LaneLine):
                _add_lane(lanes, line)
            elif isinstance(line, StepLine):
                _add_step(lanes, line, number)
        except LineError as error:
            hint = "record again: graphpact generate --record FILE"
            if not text.endswith(b"\n"):  # the file ends inside this line, as when its writer is killed
                hint += f"; to drop a line that was cut: head -n -1 {path} > FILE"
            raise UsageError(f"{path}, line {number}: {error}", hint=hint) from error
    found = [lane for lane in lanes.values() if lane.steps]
    if not found:
        raise UsageError(f"{path} has no step", hint="record with graphpact generate --record FILE")
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        data = read_file(path, MOST_BYTES + 1)
    except OSError as error:
        hint = "pass a file that graphpact generate --record has written"
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES} bytes", hint="record fewer prompts or tokens")
    return data.splitlines(keepends=True)


def _add_lane(lanes: dict[str, LaneSteps], line: LaneLine) -> None:
    if line.lane in lanes:
        raise LineError(f"a second lane {line.lane!r}")
    if len(lanes) == MOST_LANES:
        raise LineError(f"more than {MOST_LANES} lanes")
    require_lane(line)
    lanes[line.lane] = LaneSteps(line)


def _add_step(lanes: dict[str, LaneSteps], step: StepLine, number: int) -> None:
    lane = lanes.get(step.step)
    if lane is None:
        raise LineError(f"a step of lane {step.step!r}, which no earlier line describes")
    if len(lane.steps) == MOST_STEPS:
        raise LineError(f"more than {MOST_STEPS} steps of lane {step.step!r}")
    require_step(lane.line, step)
    lane.steps[number] = step
