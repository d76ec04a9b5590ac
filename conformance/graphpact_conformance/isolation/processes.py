"""Processes of plugins: they run jobs in parallel, with timeouts, and may hang, exit, crash or print.

A `Task` has the job of a process (`graphpact_conformance.isolation.worker`) and hears its events. If the
process ends, or is stopped after a timeout, the task decides whether another one starts. On Linux each worker
has a parent (`graphpact_conformance.isolation.keeper`) that finds and ends what it leaves.

Does not: know what a job is, judge an end (see `graphpact_conformance.isolation.supervise`), or import torch.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, Protocol, Self

from graphpact.plugin_calls import short_path
from graphpact_cli.survey import child_environment, ending, kill
from graphpact_conformance.isolation.job_wire import ANSWER, GIVEN, OF_JOB, tail
from graphpact_conformance.isolation.keeper import GRACE

WORKER = (sys.executable, "-B", "-P", "-u", "-m", "graphpact_conformance.isolation.worker")
"""Command line of the worker. ``-B``: warnings of the compiler then do not depend on caches."""
START, END = "start", "end of the process"
"""The pieces of work before the first and after the last of a job."""

_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}  # of the environment of a worker
_START_BOUND = 300.0  # seconds for the import of graphpact, before the plugin's timeout starts
_MOST_WRITTEN = 64 << 20  # bytes of stdout, stderr or one event; a plugin with more is stopped
_MOST_READS = 256  # of events in a row, before other processes and timeouts get their turn
_TICK = 0.05  # seconds between two polls of processes without events
_SAMPLES = 10  # stack samples of a hanging process
_SAMPLE_PAUSE = 0.02  # seconds between two samples
_STOP_BOUND = 15.0  # seconds in which the keeper ends its processes
_FROM_STDIN = (sys.executable, "-B", "-P", "-u", "-")
_NURSERY = (*WORKER[:-1], "graphpact_conformance.isolation.nursery")
_KEEPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")))
_SPOILED = "it wrote into the suite's pipe"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a process.

    Args:
        fault: The fault, as a sentence; empty for a normal end.
        work: The last piece of work.
        evidence: Lines: the Python stack, and the last lines of stderr.
        ready: Whether the process finished the import of graphpact.
        hung: Whether it was stopped after the timeout.
        printed: The work that first wrote to stdout, and its first line.
        left: Command lines of processes that it started and that outlived it.
        seconds: Time spent in ``work``.
    """

    fault: str
    work: str
    evidence: list[str]
    ready: bool
    hung: bool
    printed: tuple[str, str] | None
    left: list[str]
    seconds: float


class Task(Protocol):
    """The task of a process, and of its restarts.

    Attributes:
        program: A script that the process reads from stdin; None to run the worker.
    """

    program: Path | None

    def job(self) -> dict[str, Any]:
        """Return the job of the next process, as JSON values."""
        ...

    def hear(self, event: dict[str, Any]) -> None:
        """Handle one event of the process."""
        ...

    def ends(self, ending: Ending) -> bool:
        """Note the end of the process; return whether to start another one."""
        ...


def run(tasks: Iterable[Task], workers: int, bound: float, starter: "Starter") -> None:
    """Run ``tasks`` in separate processes, ``workers`` of them in parallel; kill all on exit."""
    waiting = deque(tasks)
    running: list[_Process] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Process(waiting.popleft(), bound, starter))
            connection.wait([p.events for p in running if not p.is_silent], _TICK)
            for process in tuple(running):
                if process.has_ended():
                    running.remove(process)
                    with process:
                        again = process.task.ends(process.ending())
                    if again:
                        waiting.appendleft(process.task)
    finally:
        for process in running:
            with process:
                process.kill()


class _Process:
    """A worker process: its events, timeout and end."""

    def __init__(self, task: Task, bound: float, starter: "Starter") -> None:
        self.task = task
        self._starter = starter
        self.is_silent = False
        self._bound = bound
        self._buffer = bytearray()  # the beginning of an event
        self._fault = ""
        self._is_ready = self._is_done = self._is_hung = False
        self._works: list[tuple[str, int]] = [(START, 0)]  # with the bytes on stdout before each
        self._threads: list[str] = []
        self._key = secrets.token_hex(8).encode()
        with ExitStack() as stack, ExitStack() as theirs:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)]
            self._out, self._err, self._stack, self._left = (file.fileno() for file in files)
            self.events, writer = os.pipe()
            stack.callback(os.close, self.events)
            theirs.callback(os.close, writer)
            os.set_blocking(self.events, False)
            key = self._sent_key(theirs)
            descriptors = {
                "left": self._left,
                "out": self._out,
                "err": self._err,
                "events": writer,
                "stack": self._stack,
                "key": key,
            }
            self._process = starter.start({**task.job(), "bound": bound}, task.program, descriptors)
            self._files = stack.pop_all()
        self._began = time.monotonic()
        self._deadline = self._began + _START_BOUND

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._starter.take_back(self._process)
        self._files.close()

    def _sent_key(self, stack: ExitStack) -> int:
        """Return a descriptor with the key of the events: the worker reads it before it imports a plugin."""
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        os.write(writer, self._key)
        os.close(writer)
        return reader

    def has_ended(self) -> bool:
        """Read its events, and return whether it has ended or was stopped."""
        self._listen()
        if self._process.poll() is None:
            self._look_for_faults()
        if self._process.poll() is None:
            return False
        self.kill()  # its remaining child processes
        self._listen()
        return True

    def kill(self) -> None:
        """Kill it and its child processes."""
        self._process.end()

    def ending(self) -> Ending:
        """Return the description of its end."""
        status = self._process.returncode or 0
        fault = self._fault or ("" if self._is_done and not status else ending(status))
        return Ending(
            fault=fault,
            work=END if self._is_done else self._works[-1][0],
            evidence=self._evidence() if fault else [],
            ready=self._is_ready,
            hung=self._is_hung,
            printed=self._printed(),
            left=json.loads(os.pread(self._left, 1 << 20, 0) or "[]"),
            seconds=time.monotonic() - self._began,
        )

    def _listen(self) -> None:
        for _ in range(_MOST_READS):
            if self.is_silent:
                return
            try:
                data = os.read(self.events, 1 << 16)
            except BlockingIOError:
                return
            self.is_silent = not data
            self._buffer += data
            if b"\n" in data:
                *lines, self._buffer = self._buffer.split(b"\n")
                for line in lines:
                    self._hear(bytes(line))
            is_event = self._key.startswith(self._buffer[: len(self._key)])
            if not is_event or len(self._buffer) > _MOST_WRITTEN:
                self._fault = self._fault or _SPOILED
                self._buffer.clear()

    def _hear(self, line: bytes) -> None:
        if self._fault:
            return  # events after a fault do not count
        key, _, text = line.partition(b" ")
        if not secrets.compare_digest(key, self._key):
            self._fault = _SPOILED
            return
        event = json.loads(text)
        name = event["event"]
        self._is_ready = True
        self._is_done |= name in ("done", "raised")
        if name == "begins":
            self._works.append((event["work"], event["printed"]))
        elif name == "done":
            self._works.append((END, event["printed"]))
            self._threads = event["threads"]
        if name in ("ready", "begins", "done", "raised"):
            self._began = time.monotonic()
            self._deadline = self._began + self._bound + (GRACE if name == "done" else 0)
        self.task.hear(event)

    def _look_for_faults(self) -> None:
        if time.monotonic() > self._deadline:
            bound = self._bound if self._is_ready else _START_BOUND
            self._fault = f"it did not finish within {bound:g} s"
            if self._threads:
                self._fault += f"; its threads still run: {', '.join(self._threads)}"
            self._is_hung = True
            self._sample_stack()
        elif max(os.fstat(fd).st_size for fd in (self._out, self._err)) > _MOST_WRITTEN:
            self._fault = f"it wrote more than {_MOST_WRITTEN >> 20} MiB to stdout or stderr"
        if self._fault:
            self.kill()

    def _sample_stack(self) -> None:
        """Have the process write its stack several times."""
        if not self._is_ready:
            return  # the signal handler is not installed yet
        for _ in range(_SAMPLES):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_SAMPLE_PAUSE)

    def _evidence(self) -> list[str]:
        frames = _steady_frames(os.pread(self._stack, 1 << 20, 0).decode(errors="replace"))
        said = tail(self._err).splitlines()
        return [*frames, *(["on stderr:", *said] if said else [])]

    def _printed(self) -> tuple[str, str] | None:
        if not os.fstat(self._out).st_size:
            return None
        work = next(work for work, before in reversed(self._works) if not before)
        text = os.pread(self._out, 4096, 0).decode(errors="replace")
        return work, next((line for line in text.splitlines() if line.strip()), "")[:200]


class Starter:
    """Starts workers: forked from processes that have imported torch, which it keeps for the next jobs.

    Args:
        command: The worker's command line.
        ahead: Number of processes that begin to import torch at once, to fork `WORKER` from; 0 to start each
            worker as a new process. So is every other command, and all where the system has no keepers.
    """

    def __init__(self, command: Sequence[str], *, ahead: int) -> None:
        self._command = command
        self._ahead = ahead if command is WORKER and _has_keeper() else 0
        self._idle: list[_Nursery] = []

    def __enter__(self) -> Self:
        self._idle += [_Nursery() for _ in range(self._ahead)]
        return self

    def __exit__(self, *_: object) -> None:
        for nursery in self._idle:
            nursery.close()

    def start(
        self, job: dict[str, Any], program: Path | None, descriptors: dict[str, int]
    ) -> "_Spawned | _Nursery":
        """Start a worker, or a process that runs ``program``.

        Args:
            job: The job.
            program: See `Task`.
            descriptors: Those of `graphpact_conformance.isolation.nursery.GIVEN`, by name, without the job's.
        """
        if program is not None or not self._ahead:
            return _Spawned(self._command, job, descriptors, program)
        nursery = self._idle.pop() if self._idle else _Nursery()
        nursery.begin(job, descriptors)
        return nursery

    def take_back(self, process: "_Spawned | _Nursery") -> None:
        """Keep a process for another job, if it can run one."""
        if isinstance(process, _Nursery) and process.is_idle:
            self._idle.append(process)


class _Spawned:
    """A process that was started for one job, below its keeper if the system has one.

    Args:
        command: The worker's command line. It reads the job on stdin.
        job: The job.
        descriptors: See `Starter.start`.
        program: See `Task`.
    """

    def __init__(
        self, command: Sequence[str], job: dict[str, Any], descriptors: dict[str, int], program: Path | None
    ) -> None:
        mine = {name: descriptors[name] for name in OF_JOB}
        left = descriptors["left"]
        kept = (*_KEEPER, str(left)) if _has_keeper() else ()
        told = json.dumps(job | mine)
        last = command if program is None else (*_FROM_STDIN, told)
        with _job_file(told) if program is None else program.open("rb") as given:
            self._process = subprocess.Popen(
                [*kept, *last],
                stdin=given,
                stdout=descriptors["out"],
                stderr=descriptors["err"],
                pass_fds=(*mine.values(), left),
                env=child_environment() | _SETTINGS,
                start_new_session=True,
            )

    @property
    def returncode(self) -> int | None:
        """As of `subprocess.Popen`."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return the `returncode`, if it has ended."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send it a signal; its keeper passes it on."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it and its child processes."""
        _end(self._process)


class _Nursery:
    """A process that forks a worker for each job; see `graphpact_conformance.isolation.nursery`.

    Attributes:
        returncode: How the worker of the job ended, as of `subprocess.Popen`; None while it runs.
    """

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._err = -1
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  until `close`
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _NURSERY,
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
                env=child_environment() | _SETTINGS,
                start_new_session=True,
            )

    @property
    def is_idle(self) -> bool:
        """Whether it can run another job."""
        return self.returncode is not None and self._process.returncode is None

    def begin(self, job: dict[str, Any], descriptors: dict[str, int]) -> None:
        """Fork a worker for a job; see `Starter.start`."""
        self.returncode, self._err = None, descriptors["err"]
        with _job_file(json.dumps(job)) as file, suppress(OSError):  # `poll` sees its end
            all_given = {"job": file.fileno(), **descriptors}
            socket.send_fds(self._control, [b"j"], [all_given[name] for name in GIVEN])

    def poll(self) -> int | None:
        """Return the `returncode`, if the worker or this process has ended."""
        if self.returncode is None:
            try:
                answer = self._control.recv(ANSWER.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:
                answer = b""
            if answer:
                (self.returncode,) = ANSWER.unpack(answer)
            else:
                self.returncode = self._process.wait()
                os.write(self._err, os.pread(self._said.fileno(), 1 << 16, 0))
                self.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the worker a signal."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill the worker, its child processes and this one; nothing if the worker has ended."""
        if self.poll() is None:
            _end(self._process)
            self.poll()
            self.close()  # it may have answered before its end

    def close(self) -> None:
        """End the process, which has no worker."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_BOUND)
        kill(self._process)
        self._said.close()


def _job_file(told: str) -> IO[bytes]:
    """Return a file with a job, at its beginning: it may be larger than a pipe or a command line."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(told.encode())
    file.seek(0)
    return file


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its child processes; its keeper finds all of them."""
    if _has_keeper():
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_BOUND)
    kill(process)


def _has_keeper() -> bool:
    """Return whether the system lets a process adopt orphans."""
    return sys.platform == "linux"


def _steady_frames(dumps: str) -> list[str]:
    """Return the frames of a `faulthandler` dump of one thread, innermost frame last.

    With several dumps, return only the frames that all have, so that a loop is named and not a line in it.
    """
    stacks = []
    for dump in re.split(r"most recent call first\):\n", dumps)[1:]:
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', dump, re.MULTILINE)
        stacks.append([(short_path(file), name, line) for file, line, name in reversed(frames)])
    steady = []
    for level in zip(*stacks):  # noqa: B905  as deep as the flattest
        if len({(file, name) for file, name, _ in level}) > 1:
            break
        file, name, line = level[0]
        where = f"{file}:{line}" if len(set(level)) == 1 else file
        steady.append(f"in {name} ({where})")
    return steady[-6:]
