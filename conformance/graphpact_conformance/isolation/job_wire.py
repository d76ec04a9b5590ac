"""What workers and the processes that start them agree on: the descriptors of a job, and how ends are told.

Does not: start a process, or import torch.
"""

import os
import re
import struct

OF_JOB = ("events", "stack", "key")
"""The descriptors that a worker finds in its job."""
GIVEN = ("job", "left", "out", "err", *OF_JOB)
"""The descriptors of a message to a nursery: the job as JSON, the report of the keeper, and the worker's."""
ANSWER = struct.Struct("=i")
"""How the worker of a nursery ended, in bytes."""

_TAIL_LINES, _TAIL_BYTES = 5, 4096
_RESTLESS = re.compile(
    r"0x[0-9a-fA-F]+"  # addresses
    r"|\b(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?: +\d+)?"  # times of day, thread ids
)


def tail(fd: int, start: int = 0) -> str:
    """Return the last lines of a file from ``start`` on, without addresses and times."""
    end = os.fstat(fd).st_size
    data = os.pread(fd, _TAIL_BYTES, max(start, end - _TAIL_BYTES))
    return steady("\n".join(data.decode(errors="replace").splitlines()[-_TAIL_LINES:]))


def steady(text: str) -> str:
    """Return ``text`` without addresses and times of day, which differ between runs."""
    return _RESTLESS.sub("…", text)
