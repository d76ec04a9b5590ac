"""Examining plugins that may hang, exit, crash or print, and living to tell of it: `check`.

Each target is examined in a process of its own (`graphpact_conformance.worker`). One that is lost, or
that is stopped because nothing in it ended for too long, is a failure of the work that it was at; the
examination then goes again without that work. This process imports no plugin.

Does not: know any rule or experiment (`graphpact_conformance.suite` does), or draw a report.
"""

import dataclasses
import json
import math
import os
import platform
import re
import signal
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
from typing import Any, Protocol, Self

import torch
from pydantic import TypeAdapter

import graphpact
from graphpact import errors
from graphpact.errors import ConfigError, GraphpactError, RejectedPluginError, UsageError
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance.results import (
    Environment,
    Finding,
    Outcome,
    PluginResults,
    Report,
    Result,
)
from graphpact_conformance.suite import Options, Target, merged, reproduce_line
from graphpact_conformance.worker import short, tail
from graphpact_conformance.xfails import Xfails, plugin_home

TIMEOUT_VARIABLE = "GRAPHPACT_CHECK_TIMEOUT"
"""Environment variable: seconds that one piece of work may take before it counts as hung."""
TIMEOUT = 120.0
RESTARTS = 3
"""How often the examination of one target goes again without the work that ended it."""
WORKER = (sys.executable, "-B", "-P", "-u", "-m", "graphpact_conformance.worker")
"""Command line of the worker. ``-B``: warnings of the compiler come in every run, or in none."""

_START_BOUND = 300.0  # seconds for the import of graphpact itself, which is not the plugin's time
_MOST_WORKERS = 8
_MOST_WRITTEN = 64 << 20  # bytes of stdout or stderr: more is a loop that prints
_TICK = 0.05  # seconds between two looks at processes that say nothing
_SAMPLES = 10  # looks at the stack of a process that hangs
_SAMPLE_PAUSE = 0.02  # seconds between two of them
_START, _END = "start", "end of the process"

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
) -> Report:
    """Examine the plugins that are called ``names``, alone and as pairs, and return what was found.

    The report has the targets in the suite's order, and of each the results in the order in which it
    came to them, however the processes took turns.

    Args:
        names: As the command line takes them, such as ``flashinfer`` or ``runner:cuda_graph``.
        options: How, and how much.
        on_result: Called with each result as it comes; again for one that the whole run turns into an
            xpass.
        on_begin: Called with each piece of work before it runs.
        workers: Processes at once; as many as there are cores where none is given, and one on a GPU.
        timeout: Seconds for one piece of work; what ``GRAPHPACT_CHECK_TIMEOUT`` says, or 120, where
            none is given.
        command: The worker's command line, to which the job is added.

    Raises:
        UsageError: A name that is unknown, or a plugin that was rejected, that ends or hangs the process
            that imports it; a list of known failures that cannot be read; a bad timeout.
        GraphpactError: The targets cannot be found, for a fault of the suite or of the machine.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    bound = _bound(timeout)
    catalog = PluginCatalog.scan()
    door = _Door(names, options.device)
    _run([door], 1, bound, command)
    xfails = Xfails.read(door.targets, catalog)
    workers = workers or _default_workers(options.device)
    parts = max(1, workers // max(len(door.targets), 1))  # of a target, where there are few
    examinations = [
        [
            _Examination(target, options, catalog, xfails, on_result, on_begin, (first, parts))
            for first in range(parts)
        ]
        for target in door.targets
    ]
    _run([part for target in examinations for part in target], workers, bound, command)

    found = [merged([part.results() for part in target]) for target in examinations]
    plugins = xfails.judge(found, options)
    if on_result is not None:
        for target, before, after in zip(door.targets, found, plugins, strict=True):
            for result in after.results:
                if result not in before.results:
                    on_result(target, result)
    return Report(
        environment=_environment(options.device, door.device_name),
        seed=options.seed,
        examples=options.examples,
        options={"names": list(names), **_plain(options), "timeout": bound},
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
            f"{source} is {said!r}, no number of seconds", hint=f"the default is {TIMEOUT:g}"
        )
    return bound


def _default_workers(device: str) -> int:
    if device != "cpu":
        return 1
    ours = hasattr(os, "sched_getaffinity")  # where it is, a container's share is seen
    cores = len(os.sched_getaffinity(0)) if ours else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


def _plain(options: Options) -> dict[str, Any]:
    """Return ``options`` as JSON has them, sets in order."""
    told = TypeAdapter(Options).dump_python(options, mode="json")
    sets = [name for name in told if isinstance(getattr(options, name), frozenset)]
    return {**told, **{name: sorted(told[name]) for name in sets}}


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
    """How a process came to its end.

    Args:
        fault: What was wrong with it, as a sentence; empty for a good end.
        work: What it was at.
        evidence: Lines: where in Python it was, and the last that it wrote to stderr.
        ready: Whether it came to be the plugin's at all.
        hung: Whether it was stopped for going on too long.
        printed: The work in which it first wrote to stdout, and that line.
        seconds: How long it was at ``work``.
    """

    fault: str
    work: str
    evidence: list[str]
    ready: bool
    hung: bool
    printed: tuple[str, str] | None
    seconds: float


class _Task(Protocol):
    """What a process is started for, as often as it takes."""

    def job(self) -> dict[str, Any]: ...
    def hear(self, event: dict[str, Any]) -> None: ...
    def ends(self, ending: _Ending) -> bool:
        """Take note of the end of the process; return whether another is to be started."""
        ...


def _run(tasks: Iterable[_Task], workers: int, bound: float, command: Sequence[str]) -> None:
    """Run ``tasks``, each in processes of its own, ``workers`` of them at once; leave none behind."""
    waiting = deque(tasks)
    running: list[_Process] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Process(waiting.popleft(), bound, command))
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
    """One process of a worker: its events, its time, its end."""

    def __init__(self, task: _Task, bound: float, command: Sequence[str]) -> None:
        self.task = task
        self.is_silent = False
        self._bound = bound
        self._buffer = b""
        self._fault = ""
        self._is_ready = self._is_done = self._is_hung = False
        self._works: list[tuple[str, int]] = [(_START, 0)]  # and what was on stdout before each
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            self._out, self._err, self._stack = (file.fileno() for file in files)
            self.events, writer = os.pipe()
            stack.callback(os.close, self.events)
            os.set_blocking(self.events, False)
            job = {**task.job(), "events": writer, "stack": self._stack, "bound": bound}
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps(job)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._out,
                    stderr=self._err,
                    pass_fds=(writer, self._stack),
                    env=_child_environment(),
                    start_new_session=True,
                )
            finally:
                os.close(writer)
            self._files = stack.pop_all()
        self._began = time.monotonic()
        self._deadline = self._began + _START_BOUND

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def has_ended(self) -> bool:
        """Take what it has said, and return whether it is over, by itself or for taking too long."""
        self._listen()
        if self._process.poll() is None:
            self._look_for_faults()
        if self._process.poll() is None:
            return False
        self.kill()  # what it has started and left
        self._listen()
        return True

    def kill(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ending(self) -> _Ending:
        """Return how it ended."""
        fault = self._fault or (
            "" if self._is_done and not self._process.returncode else self._status()
        )
        return _Ending(
            fault=fault,
            work=_END if self._is_done else self._works[-1][0],
            evidence=self._evidence() if fault else [],
            ready=self._is_ready,
            hung=self._is_hung,
            printed=self._printed(),
            seconds=time.monotonic() - self._began,
        )

    def _listen(self) -> None:
        while not self.is_silent:
            try:
                data = os.read(self.events, 1 << 16)
            except BlockingIOError:
                return
            self.is_silent = not data
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        if self._fault:
            return  # on its way out: nothing after the fault counts
        try:
            event = json.loads(line)
            name = event["event"]
        except (ValueError, TypeError, KeyError):
            self._fault = "it wrote into the suite's own pipe"
            return
        self._is_ready = True
        self._is_done |= name in ("done", "refused", "raised")
        if name == "begins":
            self._works.append((event["work"], event["printed"]))
        elif name == "done":
            self._works.append((_END, event["printed"]))
        if name in ("ready", "begins", "done", "raised"):
            self._began = time.monotonic()
            self._deadline = self._began + self._bound
        self.task.hear(event)

    def _look_for_faults(self) -> None:
        if time.monotonic() > self._deadline:
            bound = self._bound if self._is_ready else _START_BOUND
            self._fault = f"it went on for {bound:g} s without an end"
            self._is_hung = True
            self._sample_stack()
        elif max(os.fstat(fd).st_size for fd in (self._out, self._err)) > _MOST_WRITTEN:
            self._fault = f"it wrote more than {_MOST_WRITTEN >> 20} MiB to stdout or stderr"
        if self._fault:
            self.kill()

    def _sample_stack(self) -> None:
        """Have the process write down where it is, some times over."""
        if not self._is_ready:
            return  # it would die of the signal
        for _ in range(_SAMPLES):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_SAMPLE_PAUSE)

    def _status(self) -> str:
        status = self._process.returncode
        if status >= 0:
            return f"it ended the process: exit status {status}"
        return f"signal {-status} ({signal.Signals(-status).name}) ended the process"

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


def _child_environment() -> dict[str, str]:
    """Return the environment of a worker: it finds what this process finds, with one thread."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109  text to text
    ours = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours}


def _steady_frames(dumps: str) -> list[str]:
    """Return what `faulthandler` wrote of one thread, innermost frame last.

    Of several dumps, only the frames that did not move: a loop is found where it is, and not where it
    happened to be.
    """
    stacks = []
    for dump in re.split(r"most recent call first\):\n", dumps)[1:]:
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', dump, re.MULTILINE)
        stacks.append([(f"{short(file)}", name, line) for file, line, name in reversed(frames)])
    steady = []
    for level in zip(*stacks):  # noqa: B905  as deep as the flattest
        if len({(file, name) for file, name, _ in level}) > 1:
            break
        file, name, line = level[0]
        where = f"{file}:{line}" if len(set(level)) == 1 else file
        steady.append(f"in {name} ({where})")
    return steady[-6:]


# -- tasks ---------------------------------------------------------------------------------------


class _Door:
    """Finds what names mean. The plugins are imported there, and not in this process."""

    def __init__(self, names: Sequence[str], device: str) -> None:
        self._names, self._device = list(names), device
        self._raised = ""
        self.targets: list[Target] = []
        self.device_name: str | None = None

    def job(self) -> dict[str, Any]:
        """Return what the worker is told."""
        return {"names": self._names, "device": self._device, "homes": []}

    def hear(self, event: dict[str, Any]) -> None:
        """Take the answer, or raise what kept the worker from one."""
        if event["event"] == "done":
            answer = event["answer"]
            self.targets = TypeAdapter(list[Target]).validate_python(answer["targets"])
            self.device_name = answer["device_name"]
        elif event["event"] == "raised":
            self._raised = event["text"]
        else:
            _raise_if_refused(event)

    def ends(self, ending: _Ending) -> bool:
        """Raise what no end of this process excuses."""
        told = "\n  ".join(["", *ending.evidence])
        if self._raised or not ending.ready:
            raise GraphpactError(
                f"the suite cannot find its targets: {self._raised or ending.fault + told}"
            )
        if ending.fault:
            raise RejectedPluginError(
                f"{ending.work}: {ending.fault}{told}",
                hint="a plugin does its work when it is built and called, not when it is imported",
            )
        return False


class _Examination:
    """One target, or a part of its lanes, from the first process to the last."""

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
        self._told: set[tuple[str | None, str, str]] = set()
        self._ends: list[Result] = []
        self._noise: dict[str, Result] = {}  # by where it came from
        self._forget()

    def _forget(self) -> None:
        """Begin anew: a process that goes again comes to the results of the one before it."""
        self._work = _START
        self._found: list[Result] = []
        self._plugin: PluginResults | None = None
        self._raised: dict[str, Any] | None = None

    def results(self) -> PluginResults:
        """Return all that was found, in an order that no timing changes."""
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
        """Return what the worker is told."""
        self._forget()
        return {
            "target": dataclasses.asdict(self._target),
            "options": _plain(self._options),
            "skip": self._skip,
            "part": self._part,
            "homes": self._homes,
        }

    def hear(self, event: dict[str, Any]) -> None:
        """Take one event of the worker."""
        match event:
            case {"event": "begins", "work": work}:
                self._work = work
                if self._on_begin is not None:
                    self._on_begin(self._target, work)
            case {"event": "found", "result": fields}:
                result = self._xfails.expect(self._target, Result.model_validate(fields))
                self._found.append(result)
                self._tell(result)
            case {"event": "warned", "at": at, "kind": kind, "text": text}:
                self._note_noise(at, self._work, "no warning of its own", f"{kind}: {text}")
            case {"event": "done", "answer": answer}:
                self._plugin = PluginResults.model_validate(answer)
            case {"event": "raised"}:
                self._raised = event
            case _:
                _raise_if_refused(event)

    def ends(self, ending: _Ending) -> bool:
        """Take note of how a process ended; return whether another goes on without its last work."""
        if ending.printed is not None:
            work, line = ending.printed
            expected = "nothing on stdout, which belongs to whoever uses the plugin"
            self._note_noise("stdout", work, expected, f"first: {line!r}")
        if self._raised is not None and not self._raised["by_plugin"]:
            self._note_end(self._error(ending, self._raised["text"]))
            return False
        fault = self._raised["text"] if self._raised is not None else ending.fault
        if not ending.ready:
            self._note_end(self._error(ending, fault))
            return False
        if not fault:
            return False
        work = ending.work if self._raised is None else self._work
        self._note_end(self._failure(ending, work, fault))
        if self._plugin is not None or work == _START:
            return False  # there is nothing to leave out
        if len(self._skip) == RESTARTS:
            self._note_end(self._given_up(ending))
            return False
        self._skip.append(work)
        return True

    def _failure(self, ending: _Ending, work: str, fault: str) -> Result:
        only = self._options.only
        rule = next(iter(only)) if len(only) == 1 else None
        finding = Finding(
            rule=rule,
            hook=None,
            field=None,
            expected="whatever is called comes back, and the process goes on",
            actual="\n".join([fault, *ending.evidence]),
            help=f"if it is only slow, {TIMEOUT_VARIABLE}=SECONDS gives it longer"
            if ending.hung
            else None,
            reproduce=self._reproduce(work),
        )
        return Result(
            rule=rule,
            check="ends",
            lane=work,
            outcome=Outcome.FAIL,
            findings=[finding],
            seconds=ending.seconds,
        )

    def _given_up(self, ending: _Ending) -> Result:
        """Return that the rest was not looked at; what was lost has failed already."""
        return Result(
            rule=None,
            check="ends",
            lane="the rest",
            outcome=Outcome.NOT_RUN,
            reason=f"given up: {RESTARTS + 1} processes were lost",
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
        """Return the command line that comes to ``work`` again: with the rules that were asked for."""
        target = self._target
        names = target.name if target.partner is None else f"{target.name} {target.partner}"
        lane, separator, _ = work.partition(" :: ")
        only = sorted(self._options.only)
        return reproduce_line(names, only, lane if separator else "*", self._options)

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
            self._tell(result)

    def _note_end(self, result: Result) -> None:
        self._ends.append(result)
        self._tell(result)

    def _tell(self, result: Result) -> None:
        key = (result.rule, result.check, result.lane)
        if self._on_result is not None and (result.check == "quiet" or key not in self._told):
            self._told.add(key)
            self._on_result(self._target, result)


def _info(catalog: PluginCatalog, kind: str, name: str) -> PluginInfo:
    return next(info for info in catalog.infos() if (info.kind, info.name) == (kind, name))


def _raise_if_refused(event: dict[str, Any]) -> None:
    """Raise the usage error that a worker met, as if it had been met here."""
    if event["event"] == "refused":
        kind = getattr(errors, event["type"], UsageError)
        raise kind(event["message"], hint=event["hint"])
