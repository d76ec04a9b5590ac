"""The body of a child process of `graphpact_cli.children`: runs a task's work and reports to its parent.

What the work prints goes to files, its stdin is empty, and what it starts is in the session that it leads.

Does not: limit its own time, or judge its end; the parent does.
"""

import atexit
import ctypes
import faulthandler
import io
import multiprocessing
import os
import pkgutil
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START = "start"
"""The piece of work before the first that a child begins."""

_ORPHAN_LIMIT = 30.0  # seconds after its limit until a child ends that could not detect its parent's end


class Parent:
    """What a child sees of the process that started it.

    Args:
        pipe: The pipe to it.
        folder: The folder with the files ``stdout``, ``stderr`` and ``stacks`` of this child.
        limit: Seconds for one piece of work.

    Attributes:
        stdout: A descriptor of the file that the parent reads; it stays valid if the work redirects
            descriptor 1.
        stderr: The same for 2.
    """

    def __init__(self, pipe: Connection, folder: Path, limit: float) -> None:
        self._pipe, self._folder, self._limit = pipe, folder, limit
        self._pid, self._work = os.getpid(), START
        self.stdout, self.stderr, self._stacks = (
            os.open(folder / name, os.O_RDWR | os.O_APPEND) for name in ("stdout", "stderr", "stacks")
        )
        self._redirect()
        faulthandler.enable(self._stacks, all_threads=False)
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=False)
        threading.Thread(target=self._end_with_it, daemon=True).start()
        self._end_after_limit()

    def _redirect(self) -> None:
        """Make stdin empty, and have stdout and stderr go to the files, without buffers."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((nothing, self.stdout, self.stderr)):
            os.dup2(descriptor, number)
        os.close(nothing)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(number, "w", closefd=False),  # as of `python -u`
                errors="backslashreplace",
                write_through=True,
            )
            for number in (1, 2)
        )

    def _end_with_it(self) -> None:
        """Kill this session when the parent has closed its end of the pipe, or is gone."""
        with suppress(EOFError, OSError):
            self._pipe.recv_bytes()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    def _end_after_limit(self) -> None:
        """End this process long after its limit: a call that keeps the GIL also stops `_end_with_it`."""
        faulthandler.dump_traceback_later(self._limit + _ORPHAN_LIMIT, exit=True, file=self._stacks)

    def begins(self, work: str) -> None:
        """Report that a piece of work begins; its limit starts."""
        self._tell("begins", work, os.fstat(self.stdout).st_size)
        self._work = work
        self._end_after_limit()

    def send(self, message: Any) -> None:
        """Send a message, which is pickled."""
        self._tell("sends", message)

    def run(self, work: str, arguments: Sequence[Any]) -> None:
        """Import and call the function ``work``, then do what an interpreter does at its end."""
        function = pkgutil.resolve_name(work)
        self._tell("starts")
        function(self, *arguments)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)  # what libraries of C have printed
        threads = [each for each in threading.enumerate() if not each.daemon]
        threads.remove(threading.main_thread())
        self._tell("ends", os.fstat(self.stdout).st_size, [thread.name for thread in threads])
        # This also asks the threads of `concurrent.futures` to end, before it waits for all threads.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  no public way
        atexit._run_exitfuncs()  # noqa: SLF001  processes of multiprocessing do not run them

    def _tell(self, kind: str, *rest: Any) -> None:
        """Send a message that the parent acts on; end this process if the work forked it."""
        is_fork = os.getpid() != self._pid
        try:
            self._pipe.send(("forks", self._work) if is_fork else (kind, *rest))
        except OSError as error:
            os.write(2, f"the pipe to the parent is gone: {error}\n".encode())
            os._exit(os.EX_IOERR)
        if is_fork:
            os._exit(os.EX_SOFTWARE)


def main(
    pipe: Connection,
    folder: Path,
    environment: Mapping[str, str],
    limit: float,
    work: str,
    arguments: Sequence[Any],
) -> None:
    """Run the work of a task.

    Args:
        pipe: See `Parent`.
        folder: See `Parent`.
        environment: The environment variables; those of this process are from the start of its server.
        limit: See `Parent`.
        work: The function, as ``module:name``. Its first argument is a `Parent`.
        arguments: Its other arguments.
    """
    if pipe.poll():
        return  # the parent was interrupted while it waited for the start
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which its server blocks
    parent = Parent(pipe, folder, limit)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True  # otherwise warnings of the compiler depend on earlier runs
    multiprocessing.set_start_method(None, force=True)  # or the server starts processes of the work
    parent.run(work, arguments)
