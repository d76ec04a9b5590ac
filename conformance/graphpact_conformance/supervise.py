"""`check`: examine plugins that may hang, exit, crash or print, in separate processes.

Each target runs in its own process (`graphpact_conformance.worker`). If the process ends, or is stopped after
a timeout, the current work has failed. The examination then restarts without that work. On Linux each worker
has a parent (`graphpact_conformance.keeper`) that finds and ends what it leaves. This process imports no
plugin.

Does not: implement rules or experiments (see `graphpact_conformance.suite`), or render a report.
"""

import dataclasses
import json
import math
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from pydantic import TypeAdapter

import graphpact
from graphpact import errors
from graphpact.cli.survey import child_environment, ending, kill
from graphpact.errors import ConfigError, GraphpactError, RejectedPluginError, UsageError, short_path
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance import legend
from graphpact_conformance.blind import PROGRAM, Judge
from graphpact_conformance.keeper import GRACE
from graphpact_conformance.nursery import ANSWER, GIVEN, OF_JOB
from graphpact_conformance.results import (
    Environment,
    Finding,
    Outcome,
    PluginResults,
    Report,
    Result,
)
from graphpact_conformance.suite import merged
from graphpact_conformance.targets import Options, Target, reproduce_line
from graphpact_conformance.worker import tail
from graphpact_conformance.xfails import Xfails, plugin_home

TIMEOUT_VARIABLE = "GRAPHPACT_CHECK_TIMEOUT"
"""Environment variable: timeout of one piece of work, in seconds."""
TIMEOUT = 120.0
RESTARTS = 3
"""Number of restarts of one target without the work that failed."""
WORKER = (sys.executable, "-B", "-P", "-u", "-m", "graphpact_conformance.worker")
"""Command line of the worker. ``-B``: warnings of the compiler then do not depend on caches."""

_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}  # of the environment of a worker
_START_BOUND = 300.0  # seconds for the import of graphpact, before the plugin's timeout starts
_MOST_WORKERS = 8
_MOST_WRITTEN = 64 << 20  # bytes of stdout, stderr or one event; a plugin with more is stopped
_MOST_READS = 256  # of events in a row, before other processes and timeouts get their turn
_TICK = 0.05  # seconds between two polls of processes without events
_SAMPLES = 10  # stack samples of a hanging process
_SAMPLE_PAUSE = 0.02  # seconds between two samples
_MOST_NAMES = 5  # of replaced functions that a finding lists
_STOP_BOUND = 15.0  # seconds in which the keeper ends its processes
_START, _END = "start", "end of the process"
_FROM_STDIN = (sys.executable, "-B", "-P", "-u", "-")
_NURSERY = (*WORKER[:-1], "graphpact_conformance.nursery")
_KEEPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")))
_OUTLIVED = "end it at exit (`atexit`), or have it end at the end of a pipe that the plugin holds"
_REPLACED = "use what torch and graphpact offer for this: operators by `torch.library`, observers, subclasses"
_SPOILED = "it wrote into the suite's pipe"

OnResult = Callable[[Target, Result], None]
OnBegin = Callable[[Target, str], None]


def check(
    names: Sequence[str],
    options: Options,
    *,
    on_result: OnResult | None = None,
    on_begin: OnBegin | None = None,
    workers: int | None = None,
    timeout: float | None = None,
    command: Sequence[str] = WORKER,
    blindly: bool = True,
) -> Report:
    """Examine plugins, alone and as pairs, and return the report.

    The order of targets and results does not depend on the timing of processes.

    Args:
        names: Names as on the command line, such as ``flashinfer`` or ``runner:cuda_graph``.
        options: Options of the run.
        on_result: Called with each result; called again for a result that the whole run turns into an xpass.
        on_begin: Called with each piece of work before it runs.
        workers: Number of parallel processes; default: one per core, and one on a GPU.
        timeout: Seconds for one piece of work; default: ``GRAPHPACT_CHECK_TIMEOUT``, or 120.
        command: The worker's command line, to which the job is appended. `WORKER` is forked instead, on a
            CPU where the system has keepers.
        blindly: Whether each backend and runner also runs where the suite is not imported; never in a run of
            selected rules or lanes. Pairs do not: both plugins have.

    Raises:
        UsageError: A name is unknown; a plugin is rejected, or ends or hangs the process that imports it; a
            list of known failures cannot be read; the timeout is invalid.
        GraphpactError: The targets cannot be found because of a fault of the suite or the machine.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    bound = _bound(timeout)
    workers = workers or _default_workers(options.device)
    with _Starter(command, ahead=workers if options.device == "cpu" else 0) as starter:
        catalog = PluginCatalog.scan()
        resolved = _NameResolution(names, options)
        _run([resolved], 1, bound, starter)
        xfails = Xfails.read(resolved.targets, catalog)
        parts = max(1, workers // max(len(resolved.targets), 1))  # per target, if there are few targets
        examinations = [
            [
                _Examination(target, options, catalog, xfails, on_result, on_begin, (first, parts))
                for first in range(parts)
            ]
            for target in resolved.targets
        ]
        is_whole = not (options.only or options.lanes)
        blind = {
            at: _BlindRun(Judge(target, options))
            for at, target in enumerate(resolved.targets)
            if blindly and is_whole and target.kind != "graph_driver" and target.partner is None
        }
        tasks: list[_Task] = [*blind.values(), *(part for target in examinations for part in target)]
        _run(tasks, workers, bound, starter)

    found = [merged([part.results() for part in target]) for target in examinations]
    for at, run in blind.items():
        result = run.judge.result(found[at])
        if result is not None:
            found[at] = found[at].model_copy(update={"results": [*found[at].results, result]})
            if on_result is not None:
                on_result(resolved.targets[at], result)
    plugins = xfails.judge(found, options)
    if on_result is not None:
        for target, before, after in zip(resolved.targets, found, plugins, strict=True):
            for result in after.results:
                if result not in before.results:
                    on_result(target, result)
    return Report(
        environment=_environment(options.device, resolved.device_name),
        seed=options.seed,
        examples=options.examples,
        options={"names": list(names), **_plain(options), "timeout": bound},
        experiments=legend.experiments(),
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        plugins=plugins,
    )


def _bound(timeout: float | None) -> float:
    said = os.environ.get(TIMEOUT_VARIABLE) if timeout is None else timeout
    try:
        bound = TIMEOUT if said is None else float(said)
    except ValueError:
        bound = math.nan
    if not 0 < bound < math.inf:
        source = TIMEOUT_VARIABLE if timeout is None else "timeout"
        raise ConfigError(
            f"{source} is {said!r}, not a number of seconds", hint=f"the default is {TIMEOUT:g}"
        )
    return bound


def _default_workers(device: str) -> int:
    if device != "cpu":
        return 1
    ours = hasattr(os, "sched_getaffinity")  # respects the share of a container
    cores = len(os.sched_getaffinity(0)) if ours else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


def _plain(options: Options) -> dict[str, Any]:
    """Return ``options`` as JSON values, with sorted sets."""
    dumped = TypeAdapter(Options).dump_python(options, mode="json")
    sets = [name for name in dumped if isinstance(getattr(options, name), frozenset)]
    return {**dumped, **{name: sorted(dumped[name]) for name in sets}}


def _environment(device: str, device_name: str | None) -> Environment:
    return Environment(
        graphpact=graphpact.__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        device=device,
        device_name=device_name,
    )


# -- processes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ending:
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


class _Task(Protocol):
    """The task of a process, and of its restarts.

    Attributes:
        program: A script that the process reads from stdin; None to run the worker.
    """

    program: Path | None

    def job(self) -> dict[str, Any]: ...
    def hear(self, event: dict[str, Any]) -> None: ...
    def ends(self, ending: _Ending) -> bool:
        """Note the end of the process; return whether to start another one."""
        ...


def _run(tasks: Iterable[_Task], workers: int, bound: float, starter: "_Starter") -> None:
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

    def __init__(self, task: _Task, bound: float, starter: "_Starter") -> None:
        self.task = task
        self._starter = starter
        self.is_silent = False
        self._bound = bound
        self._buffer = bytearray()  # the beginning of an event
        self._fault = ""
        self._is_ready = self._is_done = self._is_hung = False
        self._works: list[tuple[str, int]] = [(_START, 0)]  # with the bytes on stdout before each
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

    def ending(self) -> _Ending:
        """Return the description of its end."""
        status = self._process.returncode or 0
        fault = self._fault or ("" if self._is_done and not status else ending(status))
        return _Ending(
            fault=fault,
            work=_END if self._is_done else self._works[-1][0],
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
            self._works.append((_END, event["printed"]))
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


class _Starter:
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
            program: See `_Task`.
            descriptors: Those of `graphpact_conformance.nursery.GIVEN`, by name, without the job's.
        """
        if program is not None:
            with program.open("rb") as file:
                return _Spawned(_FROM_STDIN, job, descriptors, file.fileno())
        if not self._ahead:
            return _Spawned(self._command, job, descriptors)
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
        command: Its command line, without the job.
        job: The job.
        descriptors: See `_Starter.start`.
        given: Descriptor of its stdin.
    """

    def __init__(
        self,
        command: Sequence[str],
        job: dict[str, Any],
        descriptors: dict[str, int],
        given: int = subprocess.DEVNULL,
    ) -> None:
        mine = {name: descriptors[name] for name in OF_JOB}
        left = descriptors["left"]
        kept = (*_KEEPER, str(left)) if _has_keeper() else ()
        self._process = subprocess.Popen(
            [*kept, *command, json.dumps(job | mine)],
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
    """A process that forks a worker for each job; see `graphpact_conformance.nursery`.

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
        """Fork a worker for a job; see `_Starter.start`."""
        self.returncode, self._err = None, descriptors["err"]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file, suppress(OSError):  # `poll` sees its end
            json.dump(job, file)
            file.seek(0)
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


# -- tasks ---------------------------------------------------------------------------------------


class _NameResolution:
    """The task that resolves names to targets. Its worker imports the plugins."""

    program: Path | None = None

    def __init__(self, names: Sequence[str], options: Options) -> None:
        self._names, self._options = list(names), options
        self._raised = ""
        self.targets: list[Target] = []
        self.device_name: str | None = None

    def job(self) -> dict[str, Any]:
        """Return the job of the worker."""
        options = _plain(self._options)
        return {"names": self._names, "device": self._options.device, "options": options, "homes": []}

    def hear(self, event: dict[str, Any]) -> None:
        """Take the answer, or raise the error of the worker."""
        if event["event"] == "done":
            answer = event["answer"]
            self.targets = TypeAdapter(list[Target]).validate_python(answer["targets"])
            self.device_name = answer["device_name"]
        elif event["event"] == "raised":
            self._raised = event["text"]
        else:
            _raise_if_refused(event)

    def ends(self, ending: _Ending) -> bool:
        """Raise an error unless the process ended normally."""
        details = "\n  ".join(["", *ending.evidence])
        if self._raised or not ending.ready:
            raise GraphpactError(
                f"the suite cannot find its targets: {self._raised or ending.fault + details}"
            )
        if ending.fault:
            raise RejectedPluginError(
                f"{ending.work}: {ending.fault}{details}",
                hint="do the work when the plugin is built or called, not at import",
            )
        return False


class _Examination:
    """The task that examines a target, or a part of its lanes, with restarts."""

    program: Path | None = None

    def __init__(
        self,
        target: Target,
        options: Options,
        catalog: PluginCatalog,
        xfails: Xfails,
        on_result: OnResult | None,
        on_begin: OnBegin | None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._target, self._options, self._xfails = target, options, xfails
        self._part = part
        self._on_result, self._on_begin = on_result, on_begin
        self._info = _info(catalog, target.kind, target.name)
        infos = [self._info]
        if target.partner is not None:
            infos.append(_info(catalog, "runner", target.partner))
        homes = (plugin_home(info.target) for info in infos)
        self._homes = [str(home) for home in homes if home is not None]
        self._skip: list[str] = []
        self._reported: set[tuple[str | None, str, str]] = set()
        self._ends: list[Result] = []
        self._noise: dict[str, Result] = {}  # by source
        self._forget()

    def _forget(self) -> None:
        """Drop results: a restarted process repeats those of the process before it."""
        self._work = _START
        self._found: list[Result] = []
        self._plugin: PluginResults | None = None
        self._raised: dict[str, Any] | None = None

    def results(self) -> PluginResults:
        """Return all results, in an order that does not depend on timing."""
        plugin = self._plugin or PluginResults(
            kind=self._target.kind,
            name=self._target.name,
            distribution=self._info.distribution,
            version=self._info.version,
            contract=self._info.contract,
            partner=self._target.partner,
            device=self._options.device,
        )
        results = [*self._found, *self._noise.values(), *self._ends]
        return plugin.model_copy(update={"results": results})

    def job(self) -> dict[str, Any]:
        """Return the job of the worker."""
        self._forget()
        return {
            "target": dataclasses.asdict(self._target),
            "options": _plain(self._options),
            "skip": self._skip,
            "part": self._part,
            "homes": self._homes,
        }

    def hear(self, event: dict[str, Any]) -> None:
        """Handle one event of the worker."""
        match event:
            case {"event": "begins", "work": work}:
                self._work = work
                if self._on_begin is not None:
                    self._on_begin(self._target, work)
            case {"event": "found", "result": fields}:
                result = self._xfails.expect(self._target, Result.model_validate(fields))
                self._found.append(result)
                self._report(result)
            case {"event": "warned", "at": at, "kind": kind, "text": text}:
                self._note_noise(at, self._work, "no warning from the plugin", f"{kind}: {text}")
            case {"event": "done", "answer": answer}:
                self._plugin = PluginResults.model_validate(answer)
            case {"event": "raised"}:
                self._raised = event
            case {"event": "replaced", "names": names, "work": work}:
                self._note_end(self._failure(work or _START, _said_replaced(names), _REPLACED))
            case {"event": "forked", "work": work}:
                self._note_end(self._failure(work, "a child that it forked went on with the suite's work"))
            case _:
                if self._work == _START:
                    _raise_if_refused(event)

    def ends(self, ending: _Ending) -> bool:
        """Note the end of a process; return whether to restart without its last work."""
        if ending.printed is not None:
            work, line = ending.printed
            expected = "nothing on stdout, which belongs to the program that uses the plugin"
            self._note_noise("stdout", work, expected, f"first: {line!r}")
        if self._raised is not None and not self._raised["by_plugin"]:
            self._note_end(self._error(ending, self._raised["text"]))
            return False
        fault = self._raised["text"] if self._raised is not None else ending.fault
        if not fault and self._plugin is None:
            fault = "it ended before the end of its job"
        if not ending.ready:
            self._note_end(self._error(ending, fault))
            return False
        if not fault and ending.left:
            left = "; ".join(ending.left)
            self._note_end(self._failure(_END, f"still running, and ended by the suite: {left}", _OUTLIVED))
        if not fault:
            return False
        work = ending.work if self._raised is None else self._work
        actual = "\n".join([fault, *ending.evidence])
        help_ = f"if it is only slow, set {TIMEOUT_VARIABLE}=SECONDS" if ending.hung else None
        self._note_end(self._failure(work, actual, help_, ending.seconds))
        if self._plugin is not None or work == _START:
            return False  # no work can be left out
        if len(self._skip) == RESTARTS:
            self._note_end(self._given_up(ending))
            return False
        self._skip.append(work)
        return True

    def _failure(self, work: str, actual: str, help_: str | None = None, seconds: float = 0.0) -> Result:
        only = self._options.only
        rule = next(iter(only)) if len(only) == 1 else None
        finding = Finding(
            rule=rule,
            hook=None,
            field=None,
            expected="every call returns, the process continues as it was, and what it starts ends with it",
            actual=actual,
            help=help_,
            reproduce=self._reproduce(work),
        )
        return Result(
            rule=rule, check="ends", lane=work, outcome=Outcome.FAIL, findings=[finding], seconds=seconds
        )

    def _given_up(self, ending: _Ending) -> Result:
        """Return a result for the remaining work, which did not run."""
        return Result(
            rule=None,
            check="ends",
            lane="the rest",
            outcome=Outcome.NOT_RUN,
            reason=f"given up after {RESTARTS + 1} lost processes",
            seconds=ending.seconds,
        )

    def _error(self, ending: _Ending, fault: str) -> Result:
        return Result(
            rule=None,
            check="suite",
            lane=self._work,
            outcome=Outcome.ERROR,
            reason="\n".join([fault, *ending.evidence]),
            seconds=ending.seconds,
        )

    def _reproduce(self, work: str) -> str:
        """Return the command that reproduces ``work``, with the selected rules."""
        lane, separator, _ = work.partition(" :: ")
        only = sorted(self._options.only)
        return reproduce_line(self._target.names, only, lane if separator else "*", self._options)

    def _note_noise(self, source: str, work: str, expected: str, actual: str) -> None:
        finding = Finding(rule=None, hook=None, field=source, expected=expected, actual=actual)
        result = Result(
            rule=None,
            check="quiet",
            lane=work,
            outcome=Outcome.FAIL,
            level="SHOULD",
            findings=[finding],
        )
        if self._noise.setdefault(source, result) is result:
            self._report(result)

    def _note_end(self, result: Result) -> None:
        self._ends.append(result)
        self._report(result)

    def _report(self, result: Result) -> None:
        key = (result.rule, result.check, result.lane)
        if self._on_result is not None and (result.check == "quiet" or key not in self._reported):
            self._reported.add(key)
            self._on_result(self._target, result)


class _BlindRun:
    """The task that runs a target where the suite is not imported. It is not repeated."""

    program: Path | None = PROGRAM

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def job(self) -> dict[str, Any]:
        """Return the job of the process."""
        return self.judge.job

    def hear(self, event: dict[str, Any]) -> None:
        """Hand what comes out to the judge."""
        if event["event"] in ("declares", "stepped", "failed"):
            self.judge.hear(event)

    def ends(self, ending: _Ending) -> bool:
        """Note a lost process."""
        if ending.fault:
            self.judge.lost(ending.work, "\n".join([ending.fault, *ending.evidence]))
        return False


def _said_replaced(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f"it replaced {shown}, on which the verdict of the suite depends"


def _info(catalog: PluginCatalog, kind: str, name: str) -> PluginInfo:
    return next(info for info in catalog.infos() if (info.kind, info.name) == (kind, name))


def _raise_if_refused(event: dict[str, Any]) -> None:
    """Raise the usage error of a worker in this process."""
    if event["event"] == "refused":
        kind = getattr(errors, event["type"], UsageError)
        raise kind(event["message"], hint=event["hint"])
