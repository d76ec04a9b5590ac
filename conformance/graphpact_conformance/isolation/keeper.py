"""The parent of a worker on Linux: no process that a plugin starts outlives it.

    python -I -S keeper.py REPORT COMMAND...

It runs ``COMMAND``, and ends as that ends: with the same exit status or signal. Processes that lose their
parent become its children, also those of another session, so at the end it finds every one that still runs.
It kills them and writes their command lines to the descriptor ``REPORT``, as one JSON array. It imports only
the standard library and no plugin.

    SIGTERM    kills everything at once, without a report; also sent if the supervisor ends
    SIGUSR1    is passed on to the command

Does not: see a process that the system's manager of services starts for a plugin, or that a plugin puts into
another PID namespace.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
GRACE = 1.0
"""Seconds in which helpers of libraries may end after their process, such as multiprocessing's tracker."""
_KILL_BOUND = 10.0  # seconds for the end of processes that start others faster than they are killed
_TICK = 0.01
_LONGEST = 200  # characters of a command line


class Keeper:
    """Keeps what its child processes start: it becomes the parent of orphans, and ends them.

    Attributes:
        is_stopped: Whether it was told to kill everything.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self._child = 0
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, self._pass_on)
        signal.signal(signal.SIGUSR1, self._pass_on)

    def _pass_on(self, number: int, _: object) -> None:
        self.is_stopped |= number == signal.SIGTERM
        if self._child:  # otherwise it has not begun, or has ended
            os.kill(self._child, signal.SIGKILL if self.is_stopped else number)

    def keep(self, child: int) -> int:
        """Wait for the end of the child process ``child``, and return its status, as `os.wait` does."""
        self._child = child
        if self.is_stopped:
            os.kill(child, signal.SIGKILL)
        status = _status_of(child)
        self._child = 0
        return status

    def end_all(self, report: int) -> None:
        """Kill what still runs after a while, and report it, unless it was told to kill everything.

        Args:
            report: Descriptor to which the command lines are written, as one JSON array.
        """
        deadline = time.monotonic() + GRACE
        while (left := _children()) and not self.is_stopped and time.monotonic() < deadline:
            time.sleep(_TICK)
        names = sorted(map(_command_line, left))
        _kill_all()
        if names and not self.is_stopped:
            os.write(report, json.dumps(names).encode())


def main(report: int, command: list[str]) -> None:
    """Run ``command``, end what it leaves, and end as it does."""
    os.set_inheritable(report, False)  # noqa: FBT003  positional only
    keeper = Keeper()
    status = keeper.keep(os.posix_spawn(command[0], command, os.environ))
    keeper.end_all(report)
    _end_like(status)


def _status_of(child: int) -> int:
    """Wait for the end of the command, and return its status; reap other processes until then."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _children() -> list[int]:
    """Reap what has ended, and return the other children of this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    own, found = str(os.getpid()), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it ended
                state = (folder / "stat").read_text().rpartition(")")[2].split()
                if state[1] == own and state[0] != "Z":
                    found.append(int(folder.name))
    return found


def _command_line(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(words).strip()[:_LONGEST]
    return "a process that ended"


def _kill_all() -> None:
    """Kill all children, and those that become children by the end of their parents."""
    deadline = time.monotonic() + _KILL_BOUND
    while (left := _children()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _end_like(status: int) -> None:
    """End this process as another one has ended."""
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
