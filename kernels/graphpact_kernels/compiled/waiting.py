"""`announced`: says on stderr what a process waits for while it compiles.

Does not: log; whoever waits a minute reads the line, whatever handlers there are.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_TICK = 1.0  # seconds between two updates of a progress line

_told: set[str] = set()


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Return a context that says ``what`` is waited for, on stderr, from its start.

    On a terminal it is a progress line, with the seconds that have passed. Elsewhere, and under a progress
    bar of the caller's, it is one plain line, which is written once in a process.

    Args:
        what: What is done, how long it takes, and whether it is done again.
    """
    stream = sys.stderr
    if stream is None or stream.closed:
        yield
        return
    is_own = stream is sys.__stderr__  # else of a progress bar, or of a test
    if not (is_own and stream.isatty()):
        if what not in _told:
            _told.add(what)
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
    """Write to stderr; a broken one ends no build."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
