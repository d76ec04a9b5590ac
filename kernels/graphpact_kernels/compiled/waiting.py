"""`announced`: writes to stderr what a process waits for while it compiles.

Does not: log. A person who waits a minute must see the line, whatever the handlers of logs are.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_TICK = 1.0  # seconds between two updates of a progress line

_written: set[str] = set()
"""What this process has written as plain lines."""


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Return a context that writes ``what`` to stderr when it is entered.

    On a terminal it is a progress line, with the seconds that have passed. Elsewhere, and under a progress
    bar of the caller, it is one plain line, which is written once in a process.

    Args:
        what: What is done, how long it takes, and whether it will be done again.
    """
    stream = sys.stderr
    if stream is None or stream.closed:
        yield
        return
    is_own = stream is sys.__stderr__  # else of a progress bar, or of a test
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
    """Write to stderr; if that fails, the build goes on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
