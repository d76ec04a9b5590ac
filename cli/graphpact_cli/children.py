"""`run`: work in child processes, which may hang, exit, crash, fork or print without harm to this one.

A `Task` names the function that a child process runs, handles its messages, and decides at its end whether
another one starts. Children are forked from a server of `multiprocessing` that has imported what they need.
Each leads a session, which is killed with it, or when this process is gone. `faulthandler` reports where one
hung or crashed.

Does not: find processes that leave the session of a child, as daemons do, or prevent writes to files.
"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from graphpact.errors import EngineError
from graphpact.plugin_calls import short_path
from graphpact_cli import child
from graphpact_cli.child import START

END = "end of the process"
"""The piece of work after the last that a child begins."""

_START_LIMIT = 300.0  # seconds for the imports of the work, before the limit of the task applies
_GRACE = 1.0  # seconds in which helpers of libraries may end after their process
_KILL_LIMIT = 10.0  # seconds for the end of processes that start others faster than they are killed
_MOST_WRITTEN = 64 << 20  # bytes of stdout or stderr; a child that writes more is killed
_MOST_MESSAGES = 256  # heard in a row, before other children and limits get their turn
_TICK = 0.05  # seconds between two looks at children without messages
_SAMPLES, _SAMPLE_PAUSE = 10, 0.02  # stack samples of a hanging child, and seconds between two
_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}  # the same results in each child, on one core
_SERVER_KILLED = 255  # the exit code of children, some of which still run, after the end of their server


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a child process.

    Args:
        fault: How it ended, as a sentence; empty for a normal end.
        work: Its last piece of work.
        frames: The frames in which it hung or crashed, innermost last.
        printed: The work that first wrote to stdout, and the first line; None if nothing was written.
        stdout: What it wrote to stdout.
        stderr: What it wrote to stderr.
        forked: Pieces of work that forked, whose fork then went on with the child's work and was ended.
        left: Command lines of processes of its session that outlived it and were killed; on Linux.
        started: Whether it finished its imports.
        hung: Whether it was killed after its limit.
        seconds: Time spent in ``work``.
    """

    fault: str
    work: str
    frames: list[str]
    printed: tuple[str, str] | None
    stdout: str
    stderr: str
    forked: list[str]
    left: list[str]
    started: bool
    hung: bool
    seconds: float


class Task(ABC):
    """The work of a child process, and of those that take its place.

    Attributes:
        work: The function, as ``module:name``, which the child imports. Its first argument is a
            `graphpact_cli.child.Parent`.
        limit: Seconds for one piece of work.
    """

    work: str
    limit: float

    @abstractmethod
    def arguments(self) -> Sequence[Any]:
        """Return the other arguments of ``work``, for the next child."""

    def begins(self, work: str) -> None:  # noqa: B027  most tasks do not need it
        """Note that a piece of work begins."""

    @abstractmethod
    def hears(self, message: Any) -> None:
        """Handle a message of the child."""

    @abstractmethod
    def ends(self, ending: Ending) -> bool:
        """Note the end of the child; return whether to start another one."""


def prepare(preload: Iterable[str]) -> None:
    """Start the server that children are forked from, if it does not run; its imports go on meanwhile.

    Args:
        preload: Modules that the server imports. A server that runs already imports no more.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([child.__name__, *preload])
    resource_tracker.ensure_running()  # the server starts it otherwise, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # no Ctrl-C in the server's imports
    try:
        with _as_children_need():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(tasks: Iterable[Task], workers: int) -> None:
    """Run ``tasks`` in child processes, at most ``workers`` in parallel; leave none behind.

    Raises `EngineError` if a child process cannot be started.
    """
    waiting, running = deque(tasks), list[_Child]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(waiting.popleft()))
            connection.wait([each for one in running for each in one.awaited()], _TICK)
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                with one:
                    again = one.task.ends(one.ending())
                if again:
                    waiting.appendleft(one.task)
    finally:
        for one in running:
            with one:
                one.kill()


def _start(task: Task) -> "_Child":
    """Start a child; try again while the server ends, which another child may have killed.

    The server is started again with the next child, but only once it is gone: it closes its socket before.
    """
    deadline = time.monotonic() + _KILL_LIMIT
    while True:
        try:
            return _Child(task)
        except (OSError, EOFError) as error:
            is_of_server = isinstance(error, (EOFError, ConnectionError))
            if not is_of_server or time.monotonic() > deadline:
                raise EngineError(f"no child process can be started: {error}") from error
            time.sleep(_TICK / 5)


class _Child:
    """A child process: its messages, its limit and its end."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._fault = ""
        self._is_started = self._is_done = self._is_hung = self._is_silent = False
        self._works = [(START, 0)]  # with the bytes on stdout before each
        self._forked: list[str] = []
        self._threads: list[str] = []
        self._left: list[str] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="graphpact-")
        self._folder = Path(self._temporary.name)
        for name in ("stdout", "stderr", "stacks"):
            (self._folder / name).touch()
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        environment = {**os.environ, **_variables()}
        arguments = (theirs, self._folder, environment, task.limit, task.work, task.arguments())
        self._process = context.Process(target=child.main, args=arguments, daemon=False)
        try:
            with theirs, _as_children_need():
                self._process.start()
        except BaseException:
            self.__exit__()  # ends the child, if there is one
            raise
        self._pid = self._process.pid or 0
        self._began = time.monotonic()
        self._deadline = self._began + _START_LIMIT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._temporary.cleanup()

    def awaited(self) -> Iterator[Any]:
        """Yield what becomes ready when it sends a message or ends."""
        if not self._is_silent:
            yield self._pipe
        if self._process.exitcode is None:
            yield self._process.sentinel

    def has_ended(self) -> bool:
        """Handle its messages, and return whether it has ended or was killed for a fault."""
        self._listen()
        if not self._is_gone():
            self._look_for_faults()
            if not self._fault:
                return False
        if self._fault:
            self.kill()
        else:
            self._left = self.kill(grace=_GRACE)
        self._listen()
        return True

    def _is_gone(self) -> bool:
        code = self._process.exitcode
        return code is not None and not (code == _SERVER_KILLED and self._pid in _session(self._pid))

    def kill(self, grace: float = 0.0) -> list[str]:
        """Kill it and its session; return the command lines of what still ran after ``grace`` seconds."""
        deadline = time.monotonic() + grace
        while (left := _session(self._pid)) and time.monotonic() < deadline:
            time.sleep(_TICK / 5)
        names = sorted(left.values())
        deadline = time.monotonic() + _KILL_LIMIT
        while time.monotonic() < deadline:
            if self._process.exitcode is None:
                _kill(os.kill, self._pid)  # it may lead no group yet
            _kill(os.killpg, self._pid)
            for pid in left:
                _kill(os.kill, pid)
            if not (left := _session(self._pid)):
                break
        self._process.join(_KILL_LIMIT)
        return names

    def ending(self) -> Ending:
        """Return the description of its end."""
        code = self._process.exitcode or 0
        fault = self._fault or ("" if self._is_done and code in (0, _SERVER_KILLED) else _in_words(code))
        stdout, stderr, stacks = map(self._written, ("stdout", "stderr", "stacks"))
        printed = None
        if stdout:
            work = next(work for work, before in reversed(self._works) if not before)
            printed = work, next((line for line in stdout.splitlines() if line.strip()), "")[:200]
        return Ending(
            fault=fault,
            work=END if self._is_done else self._works[-1][0],
            frames=steady_frames(stacks) if fault else [],
            printed=printed,
            stdout=stdout,
            stderr=stderr,
            forked=self._forked,
            left=self._left,
            started=self._is_started,
            hung=self._is_hung,
            seconds=time.monotonic() - self._began,
        )

    def _written(self, name: str) -> str:
        with (self._folder / name).open("rb") as file:
            return file.read(2 * _MOST_WRITTEN).decode(errors="replace")

    def _listen(self) -> None:
        for _ in range(_MOST_MESSAGES):
            if self._is_silent or not self._pipe.poll():
                return
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                self._is_silent = True
                return
            if not self._fault:  # later ones do not count
                self._hear(message)

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("starts",):
                self._is_started = True
                self._restart_clock()
            case ("begins", work, printed):
                self._works.append((work, printed))
                self._restart_clock()
                self.task.begins(work)
            case ("sends", sent):
                self.task.hears(sent)
            case ("forks", work):
                self._forked.append(work)
            case ("ends", printed, threads):
                self._is_done, self._threads = True, threads
                self._works.append((END, printed))
                self._restart_clock(more=_GRACE)

    def _restart_clock(self, more: float = 0.0) -> None:
        self._began = time.monotonic()
        self._deadline = self._began + self.task.limit + more

    def _look_for_faults(self) -> None:
        if time.monotonic() > self._deadline:
            limit = self.task.limit if self._is_started else _START_LIMIT
            self._fault = f"it did not finish within {limit:g} s"
            if self._threads:
                self._fault += f"; its threads still run: {', '.join(self._threads)}"
            self._is_hung = True
            for _ in range(_SAMPLES if self._is_started else 0):
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGUSR1)  # `faulthandler` writes the stack
                time.sleep(_SAMPLE_PAUSE)
        elif any((self._folder / name).stat().st_size > _MOST_WRITTEN for name in ("stdout", "stderr")):
            self._fault = f"it wrote more than {_MOST_WRITTEN >> 20} MiB to stdout or stderr"


def _kill(kill: Any, pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)


@contextmanager
def _as_children_need() -> Iterator[None]:
    """Give this process the environment of its children, and an empty main module, for a start.

    `multiprocessing` imports the main module in each child. Children need nothing of it, and a script
    without a guard would run again.
    """
    variables, main = _variables(), sys.modules["__main__"]
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _variables() -> dict[str, str]:
    """Return the environment variables that children do not share with this process."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109  text to text
    return {**_SETTINGS, "PYTHONPATH": path}


def _session(leader: int) -> dict[int, str]:
    """Return the command lines of the running processes of a session, by process id; on Linux."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if session == str(leader) and state not in "ZX":
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found[int(folder.name)] = " ".join(words).strip()[:200]
    return found


def _in_words(code: int) -> str:
    """Return how a process ended, from its exit code as `multiprocessing` has it."""
    if code >= 0:
        return f"it ended the process: exit status {code}"
    return f"signal {-code} ({signal.Signals(-code).name}) ended the process"


def steady_frames(dumps: str) -> list[str]:
    """Return the frames of a `faulthandler` dump of the work of a child, innermost frame last.

    With several dumps, return only the frames that all have, so that a loop is named and not a line in it.
    """
    stacks = []
    for dump in re.split(r"most recent call first\):\n", dumps)[1:]:
        of_work = dump.partition(child.__file__)[0]
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', of_work, re.MULTILINE)
        stacks.append([(short_path(file), name, line) for file, line, name in reversed(frames)])
    steady = []
    for level in zip(*stacks):  # noqa: B905  up to the depth of the shallowest
        if len({(file, name) for file, name, _ in level}) > 1:
            break
        file, name, line = level[0]
        where = f"{file}:{line}" if len(set(level)) == 1 else file
        steady.append(f"in {name} ({where})")
    return steady[-6:]
