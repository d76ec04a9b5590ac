"""`announced`: write to stderr what a process waits for while it compiles.

Does not: log, because a person who waits a minute must see the line with any log handlers.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

_TICK = 1.0  # seconds between two updates of a progress line
_PAUSE = 10.0  # seconds between two plain lines about progress

_written: dict[str, float] = {}
"""The plain lines that this process has written, and when."""


@contextlib.contextmanager
def announced(what: str) -> Iterator[Callable[[str], None]]:
    """Return a context that writes ``what`` to stderr when it is entered.

    On a terminal it is a progress line that shows the elapsed seconds. Elsewhere, and under a progress bar of
    the caller, it is a plain line, written once in a process.

    The context yields a function that writes another text, about the part of the work that begins: on a
    terminal in place, elsewhere as a plain line if the last one was written 10 seconds ago.

    Args:
        what: A text that says what is done, how long it takes, and whether it will be done again.
    """
    stream = sys.stderr
    if stream is None or stream.closed:
        yield _ignore
        return
    is_own = stream is sys.__stderr__  # otherwise a progress bar or a test has replaced it
    if is_own and stream.isatty():
        with _ProgressLine(what) as line:
            yield line.update
        return
    if what not in _written:
        _write_plain(what)
    yield _write_seldom


class _ProgressLine:
    """A line on a terminal with the elapsed seconds, updated by a thread while the context is active."""

    def __init__(self, what: str) -> None:
        self._text = what
        self._is_updated = False
        self._start = time.monotonic()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._tick, name="graphpact-progress", daemon=True)

    def __enter__(self) -> Self:
        _write(self._text)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._show("\n")

    def update(self, text: str) -> None:
        """Show ``text`` from now on, in a second line, below the first text."""
        with self._lock:
            if not self._is_updated:
                _write("\n")
            self._text, self._is_updated = text, True
        self._show()

    def _tick(self) -> None:
        while not self._done.wait(_TICK):
            self._show()

    def _show(self, end: str = "") -> None:
        with self._lock:
            _write(f"\r{self._text}: {time.monotonic() - self._start:.0f} s{end}")


def _write_seldom(text: str) -> None:
    """Write a plain line, unless one was written a moment ago."""
    if time.monotonic() - max(_written.values(), default=0.0) >= _PAUSE:
        _write_plain(text)


def _write_plain(text: str) -> None:
    _written[text] = time.monotonic()
    _write(f"{text}\n")


def _ignore(text: str) -> None:
    pass


def _write(text: str) -> None:
    """Write to stderr, and ignore errors, so that the build goes on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
