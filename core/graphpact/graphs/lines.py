"""`Line`: a line of the caller's code, for messages.

Does not: read the source file before a message is formatted.
"""

import functools
import linecache
import sys
from types import FrameType

__tracebackhide__ = True

_WRAPPERS = ("contextlib.py", "typing_extensions.py")


class Line:
    """The innermost line of the caller's code. It is formatted only when it is printed.

    Modules that set ``__tracebackhide__ = True`` are not the caller's code, and pytest hides their frames
    too. Every module of a driver sets it.
    """

    __slots__ = ("_file", "_number")

    def __init__(self) -> None:
        frame = sys._getframe(1)  # noqa: SLF001  a traceback for every operation costs too much
        while frame.f_back is not None and _is_internal(frame):
            frame = frame.f_back
        self._file, self._number = frame.f_code.co_filename, frame.f_lineno

    def __str__(self) -> str:
        text = linecache.getline(self._file, self._number).strip()
        return f"{self._file}:{self._number}: {text}"


def _is_internal(frame: FrameType) -> bool:
    """Return whether ``frame`` belongs to torch or a driver."""
    return _is_library(frame.f_code.co_filename) or frame.f_globals.get("__tracebackhide__") is True


@functools.lru_cache
def _is_library(filename: str) -> bool:
    # Decorators in these modules are between a caller and functions of torch.
    return "/torch/" in filename or filename.startswith("<") or filename.endswith(_WRAPPERS)
