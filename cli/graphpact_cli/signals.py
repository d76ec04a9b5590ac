"""`stopped_by_sigterm`: SIGTERM ends a command as Ctrl-C does, with its files cleaned up.

Does not: report the end; `graphpact_cli.main` returns the exit status.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM too, which schedulers send; does nothing in other threads.

    Its argument is the number of the signal.
    """

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
