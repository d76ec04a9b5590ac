"""`check`: examine plugins that may hang, exit, crash or print, in separate processes.

Each target is the job of a process (see `graphpact_conformance.isolation.processes`). If that ends, or is
stopped after a timeout, the current work has failed. The examination then restarts without that work. This
process imports no plugin; nor torch, which takes seconds, while the first workers import it.

Does not: implement rules or experiments (see `graphpact_conformance.suite`), or render a report.
"""

import dataclasses
import itertools
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import graphpact
from graphpact import errors
from graphpact.errors import ConfigError, GraphpactError, RejectedPluginError, UsageError
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance import legend
from graphpact_conformance.isolation.processes import END, START, WORKER, Ending, Starter, Task, run
from graphpact_conformance.merge import merged
from graphpact_conformance.results import (
    Environment,
    Finding,
    Outcome,
    PluginResults,
    Report,
    Result,
)
from graphpact_conformance.targets import Options, Target, reproduce_line
from graphpact_conformance.xfails import Xfails, plugin_home

TIMEOUT_VARIABLE = "GRAPHPACT_CHECK_TIMEOUT"
"""Environment variable: timeout of one piece of work, in seconds."""
TIMEOUT = 120.0
RESTARTS = 3
"""Number of restarts of one target without the work that failed."""

_MOST_WORKERS = 8
_MOST_NAMES = 5  # of replaced functions that a finding lists
_BLIND_PROGRAM = Path(__file__).with_name("blind_program.py")
_OUTLIVED = "end it at exit (`atexit`), or have it end at the end of a pipe that the plugin holds"
_REPLACED = "use what torch and graphpact offer for this: operators by `torch.library`, observers, subclasses"


class StoppedError(KeyboardInterrupt):
    """A run was stopped by a signal before its end.

    Args:
        report: What it had found.
        number: The signal.
    """

    def __init__(self, report: Report, number: signal.Signals) -> None:
        super().__init__(number)
        self.report, self.number = report, number


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
        StoppedError: A `KeyboardInterrupt` stopped the examination of targets. Its argument is the signal;
            without one it was Ctrl-C.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    bound = _bound(timeout)
    workers = workers or _default_workers(options.device)
    with Starter(command, ahead=workers if options.device == "cpu" else 0) as starter:
        catalog = PluginCatalog.scan()
        resolved = _NameResolution(names, options)
        run([resolved], 1, bound, starter)
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
            at: _BlindRun(target, options)
            for at, target in enumerate(resolved.targets)
            if blindly and is_whole and target.kind in ("attention_backend", "runner") and not target.partner
        }
        # Pairs are short: with them at the end, no worker waits long for the last one.
        order = sorted(range(len(examinations)), key=lambda at: resolved.targets[at].partner is not None)
        tasks: list[Task] = [*blind.values(), *(part for at in order for part in examinations[at])]
        stopped = _run_until_stopped(tasks, workers, bound, starter)

    if stopped is not None:
        for part in itertools.chain.from_iterable(examinations):
            part.stop(f"the run was stopped by {stopped.name}")
        blind.clear()

    found = [merged([part.results() for part in target]) for target in examinations]
    for at, task in blind.items():
        result = task.result(found[at])
        if result is not None:
            found[at] = found[at].model_copy(update={"results": [*found[at].results, result]})
            if on_result is not None:
                on_result(resolved.targets[at], result)
    plugins = xfails.judge(found, options)
    _tell_changes(resolved.targets, found, plugins, on_result)
    report = Report(
        environment=_environment(options.device, resolved),
        seed=options.seed,
        examples=options.examples,
        options={"names": list(names), **_plain(options), "timeout": bound},
        experiments=resolved.experiments,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        plugins=plugins,
    )
    if stopped is not None:
        raise StoppedError(report, stopped)
    return report


def _tell_changes(
    targets: Sequence[Target],
    found: Sequence[PluginResults],
    judged: Sequence[PluginResults],
    on_result: OnResult | None,
) -> None:
    """Pass on the results that known failures changed."""
    for target, before, after in zip(targets, found, judged, strict=True):
        for result in after.results:
            if result not in before.results and on_result is not None:
                on_result(target, result)


def _run_until_stopped(
    tasks: Sequence[Task], workers: int, bound: float, starter: Starter
) -> signal.Signals | None:
    """Run tasks to their end; return the signal that stopped them, None if none did."""
    try:
        run(tasks, workers, bound, starter)
    except KeyboardInterrupt as interrupt:
        return signal.Signals(interrupt.args[0] if interrupt.args else signal.SIGINT)
    return None


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


def _environment(device: str, resolved: "_NameResolution") -> Environment:
    return Environment(
        graphpact=graphpact.__version__,
        python=platform.python_version(),
        torch=resolved.torch,
        platform=platform.platform(),
        device=device,
        device_name=resolved.device_name,
    )


# -- tasks ---------------------------------------------------------------------------------------


class _NameResolution:
    """The task that resolves names to targets. Its worker imports the plugins.

    Attributes:
        targets: The targets.
        torch: The version of torch in workers.
        device_name: The name of the GPU; None on a CPU.
        experiments: What each experiment does, by its name.
    """

    program: Path | None = None

    def __init__(self, names: Sequence[str], options: Options) -> None:
        self._names, self._options = list(names), options
        self._raised = ""
        self.targets: list[Target] = []
        self.torch = ""
        self.device_name: str | None = None
        self.experiments: dict[str, str] = {}

    def job(self) -> dict[str, Any]:
        """Return the job of the worker."""
        options = _plain(self._options)
        return {"names": self._names, "device": self._options.device, "options": options, "homes": []}

    def hear(self, event: dict[str, Any]) -> None:
        """Take the answer, or raise the error of the worker."""
        if event["event"] == "done":
            answer = event["answer"]
            self.targets = TypeAdapter(list[Target]).validate_python(answer["targets"])
            self.torch, self.device_name = answer["torch"], answer["device_name"]
            self.experiments = answer["experiments"]
        elif event["event"] == "raised":
            self._raised = event["text"]
        else:
            _raise_if_refused(event)

    def ends(self, ending: Ending) -> bool:
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
        self._info = _info(catalog, *target.plugin)
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
        self._work = START
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
                self._note_end(self._failure(work or START, _said_replaced(names), _REPLACED))
            case {"event": "forked", "work": work}:
                self._note_end(
                    self._failure(work or START, "a child that it forked went on with the suite's work")
                )
            case _:
                if self._work == START:
                    _raise_if_refused(event)

    def ends(self, ending: Ending) -> bool:
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
            self._note_end(self._failure(END, f"still running, and ended by the suite: {left}", _OUTLIVED))
        if not fault:
            return False
        work = ending.work if self._raised is None else self._work
        actual = "\n".join([fault, *ending.evidence])
        help_ = f"if it is only slow, set {TIMEOUT_VARIABLE}=SECONDS" if ending.hung else None
        self._note_end(self._failure(work, actual, help_, ending.seconds))
        if self._plugin is not None or work == START:
            return False  # no work can be left out
        if len(self._skip) == RESTARTS:
            self._note_end(self._given_up(ending))
            return False
        self._skip.append(work)
        return True

    def stop(self, why: str) -> None:
        """Note that the run was stopped, if the target is not examined to its end."""
        if self._plugin is None and not self._ends:
            self._note_end(
                Result(
                    rule=None,
                    check="suite",
                    lane="the rest",
                    outcome=Outcome.ERROR,
                    reason=why,
                )
            )

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

    def _given_up(self, ending: Ending) -> Result:
        """Return a result for the remaining work, which did not run."""
        return Result(
            rule=None,
            check="ends",
            lane="the rest",
            outcome=Outcome.NOT_RUN,
            reason=f"given up after {RESTARTS + 1} lost processes",
            seconds=ending.seconds,
        )

    def _error(self, ending: Ending, fault: str) -> Result:
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
    """The task that runs a target where the suite is not imported, and then judges what came out.

    The judge is a worker that imports no plugin; see `graphpact_conformance.isolation.blind`. Neither is
    repeated.
    """

    def __init__(self, target: Target, options: Options) -> None:
        self.program: Path | None = _BLIND_PROGRAM
        self._target, self._options = target, options
        self._events: list[dict[str, Any]] = []
        self._judged: Result | None = None

    def job(self) -> dict[str, Any]:
        """Return the job of the process that runs the target, then of the judge."""
        if self.program is None:
            target, options = dataclasses.asdict(self._target), _plain(self._options)
            return {"judge": target, "options": options, "heard": self._events, "homes": []}
        is_runner = self._target.kind == "runner"
        return {
            "backend": None if is_runner else self._target.name,
            "runner": self._target.name if is_runner else self._target.partner,
            "seed": self._options.seed,
            "device": self._options.device,
        }

    def hear(self, event: dict[str, Any]) -> None:
        """Keep what comes out, and the result of the judge."""
        if self.program is not None:
            if event["event"] in ("declares", "stepped", "failed"):
                self._events.append(event)
        elif event["event"] == "done" and event["answer"] is not None:
            self._judged = Result.model_validate(event["answer"])
        elif event["event"] in ("raised", "refused"):
            self._lost(event.get("text") or event["message"])

    def ends(self, ending: Ending) -> bool:
        """Note a lost process; return whether to start the judge."""
        said = "\n".join([ending.fault, *ending.evidence]) if ending.fault else ""
        if self.program is None:
            if said and self._judged is None:
                self._lost(said)
            return False
        if said:
            self._events.append({"event": "lost", "work": ending.work, "text": said})
        self.program = None
        return bool(self._events)

    def _lost(self, reason: str) -> None:
        """Note that there is no verdict: no plugin is in the judge's process."""
        self._judged = Result(
            rule=None, check="blind", lane=legend.BLIND_LANE, outcome=Outcome.ERROR, reason=reason
        )

    def result(self, worker: PluginResults) -> Result | None:
        """Return the result of the judge; None if there was nothing to judge.

        Args:
            worker: The results of the worker. If it found a failure of its lanes too, the two agree.
        """
        of_lanes = [result for result in worker.results if result.check != "ends"]
        agrees = any(result.counts_against or result.breaks_rule for result in of_lanes)
        if self._judged is None or self._judged.outcome is not Outcome.FAIL or not agrees:
            return self._judged
        return self._judged.model_copy(update={"outcome": Outcome.PASS, "findings": []})


def _said_replaced(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f"it replaced {shown}, on which the verdict of the suite depends"


def _info(catalog: PluginCatalog, kind: str, name: str) -> PluginInfo:
    return next(info for info in catalog.infos() if (info.kind, info.name) == (kind, name))


def _raise_if_refused(event: dict[str, Any]) -> None:
    """Raise the usage error of a worker in this process."""
    if event["event"] == "refused":
        error = getattr(errors, event["type"], UsageError)(event["message"])
        vars(error).update(event["fields"])  # its hint, and the plugin that an `UnknownPluginError` is about
        raise error
