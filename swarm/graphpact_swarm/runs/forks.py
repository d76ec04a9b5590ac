"""`Fork`: a function in a forked child, with a pipe to it.

Does not: judge how a child ended; `ForkError` says it.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from graphpact.errors import EngineError
from graphpact.plugin_calls import describe_error

_SET_PDEATHSIG = 1  # of linux/prctl.h


class ForkError(EngineError):
    """A child ended without an answer, or raised; the message says how."""


class Fork:
    """A forked child that runs a function, and then ends. Leaving the context kills it.

    Args:
        work: The function. Its first argument is the pipe to this process; what it returns is sent there.
        arguments: Its other arguments.
    """

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, childs = multiprocessing.get_context("fork").Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            _work(childs, work, arguments)
        childs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill()  # first: it would write that the pipe is closed
        self._pipe.close()

    def tell(self, message: Any) -> None:
        """Send something to the child."""
        try:
            self._pipe.send(message)
        except OSError:
            raise ForkError(f"the process {self._ending()}") from None

    def hear(self, seconds: float) -> Any:
        """Return the next message of the child.

        Raises:
            ForkError: The child raised, ended, or sent nothing for so many seconds; then it was killed.
        """
        if not self._pipe.poll(seconds):
            os.kill(self.pid, signal.SIGUSR1)  # it writes where it hangs
            time.sleep(0.2)
            self._kill()
            raise ForkError(f"the process took more than {seconds:g} s, and was killed")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise ForkError(f"the process {self._ending()}") from None
        if kind == "error":
            raise ForkError(value)
        return value

    def _ending(self) -> str:
        """Return how the child ended."""
        if not self.pid:
            return "had ended"
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if os.WIFSIGNALED(status):
            return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with status {os.waitstatus_to_exitcode(status)}"

    def _kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


class ParentPipe:
    """The pipe of a child to its parent.

    Args:
        pipe: Its end.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, message: Any) -> None:
        """Send something to the parent."""
        self._pipe.send(("message", message))

    def hear(self) -> Any:
        """Return the next message of the parent; None if it has gone, or has left the context."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return None


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone; on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _work(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the function of a child; never returns."""
    status = 1
    try:
        die_with_parent()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        result = work(ParentPipe(pipe), *arguments)
        pipe.send(("result", result))
        status = 0
    except BaseException as error:  # noqa: BLE001  the parent gets it
        import traceback  # noqa: PLC0415  rare

        traceback.print_exc()
        with suppress(OSError):
            pipe.send(("error", describe_error(error)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
