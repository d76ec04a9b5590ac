"""`announced`: write to stderr what a process waits for while it compiles.

Does not: log, because a person who waits a minute must see the line with any log handlers.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_TICK = 1.0  # seconds between two updates of a progress line

_written: set[str] = set()
"""The plain lines that this process has written."""


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Return a context that writes ``what`` to stderr when it is entered.

    On a terminal it is a progress line that shows the elapsed seconds. Elsewhere, and under a progress bar of
    the caller, it is a plain line, written once in a process.

    Args:
        what: A text that says what is done, how long it takes, and whether it will be done again.
    """
    stream = sys.stderr
    if stream is None or stream.closed:
        yield
        return
    is_own = stream is sys.__stderr__  # otherwise a progress bar or a test has replaced it
    if not (is_own and stream.isatty()):
        if what not in _written:
            _written.add(what)
            _write(f"{what}\n")
        yield
        return
    start, done = time.monotonic(), threading.Event()

    def show() -> None:
        while not done.wait(_TICK):
            _write(f"\r{what}: {time.monotonic() - start:.0f} s")

    _write(what)
    thread = threading.Thread(target=show, name="graphpact-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _write(f"\r{what}: {time.monotonic() - start:.0f} s\n")


def _write(text: str) -> None:
    """Write to stderr, and ignore errors, so that the build goes on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
