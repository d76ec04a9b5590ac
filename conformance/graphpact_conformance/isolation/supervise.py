"""`check`: examine plugins that may hang, exit, crash or print, in separate processes.

Each target is the work of a child process (see `graphpact_cli.children`). If that ends, or is stopped after
a timeout, the current piece of work has failed. The examination then restarts without it. This process
imports no plugin, nor torch, which the server of the child processes imports meanwhile.

Does not: implement rules or experiments (see `graphpact_conformance.suite`), or render a report.
"""

import itertools
import math
import os
import platform
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

import graphpact
from graphpact.errors import ConfigError, GraphpactError, RejectedPluginError
from graphpact.plugins import PluginCatalog
from graphpact_cli import children
from graphpact_cli.children import Ending, Task
from graphpact_conformance.isolation.messages import Raised, Refused, Resolved, Warned, ending_lines
from graphpact_conformance.isolation.target_task import (
    WORKER,
    OnBegin,
    OnResult,
    TargetTask,
)
from graphpact_conformance.merge import merged
from graphpact_conformance.results import Environment, PluginResults, Report
from graphpact_conformance.targets import TIMEOUT, TIMEOUT_VARIABLE, Options, Target
from graphpact_conformance.tiers import judge_tiers
from graphpact_conformance.xfails import Xfails

_MOST_WORKERS = 8


class StoppedError(KeyboardInterrupt):
    """A run was stopped by a signal before its end.

    Args:
        report: What it had found.
        number: The signal.
    """

    def __init__(self, report: Report, number: signal.Signals) -> None:
        super().__init__(number)
        self.report, self.number = report, number


def check_plugins(
    names: Sequence[str],
    options: Options,
    *,
    on_result: OnResult | None = None,
    on_begin: OnBegin | None = None,
    workers: int | None = None,
    timeout: float | None = None,
) -> Report:
    """Examine single plugins and pairs, and return the report.

    The order of targets and results does not depend on the timing of processes.

    Args:
        names: Names as on the command line, such as ``flashinfer`` or ``runner:cuda_graph``.
        options: Options of the run.
        on_result: Called with each result; called again for a result that the whole run turns into an xpass.
        on_begin: Called with each piece of work before it runs.
        workers: Number of parallel processes; default: one per core, and one on a GPU.
        timeout: Seconds for one piece of work; default: ``GRAPHPACT_CHECK_TIMEOUT``, or 120.

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
    children.prepare([WORKER])
    catalog = PluginCatalog.scan()
    resolution = _NameResolution(names, options, bound)
    children.run([resolution], 1)
    resolved = resolution.found
    xfails = Xfails.read(resolved.targets, catalog)
    parts = max(1, workers // max(len(resolved.targets), 1))  # per target, if there are few targets
    if options.fail_fast:
        parts = 1  # else the first finding depends on the timing of processes
    examinations = [
        [
            TargetTask(target, options, catalog, xfails, bound, on_result, on_begin, (first, parts))
            for first in range(parts)
        ]
        for target in resolved.targets
    ]
    # Pairs are short: with them at the end, no worker waits long for the last one.
    order = sorted(range(len(examinations)), key=lambda at: resolved.targets[at].partner is not None)
    stopped = _run_until_stopped([part for at in order for part in examinations[at]], workers)
    if stopped is not None:
        for part in itertools.chain.from_iterable(examinations):
            part.stop(f"the run was stopped by {stopped.name}")

    found = [merged([part.results() for part in target]) for target in examinations]
    plugins = judge_tiers(xfails.judge(found, options), catalog, xfails, options)
    _tell_changes(resolved.targets, found, plugins, on_result)
    report = Report(
        environment=_environment(options, resolved),
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


def _run_until_stopped(tasks: Sequence[Task], workers: int) -> signal.Signals | None:
    """Run tasks to their end; return the signal that stopped them, None if none did."""
    try:
        children.run(tasks, workers)
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


def _environment(options: Options, resolved: Resolved) -> Environment:
    return Environment(
        graphpact=graphpact.__version__,
        python=platform.python_version(),
        torch=resolved.torch,
        platform=platform.platform(),
        device=options.device,
        device_name=resolved.device_name,
        ranks=options.ranks,
    )


class _NameResolution(Task):
    """The task that resolves names to targets. Its child process imports the plugins.

    Attributes:
        found: The targets, and what the process knows of its machine.
    """

    work = f"{WORKER}:resolve"

    def __init__(self, names: Sequence[str], options: Options, limit: float) -> None:
        self._names, self._options, self.limit = list(names), options, limit
        self._raised = ""
        self.found = Resolved([], "", None, {})

    def arguments(self) -> tuple[list[str], Options]:
        """Return the arguments of the worker's function."""
        return self._names, self._options

    def hears(self, message: Resolved | Raised | Refused | Warned) -> None:
        """Take the answer, or raise the usage error of the worker."""
        match message:
            case Resolved():
                self.found = message
            case Raised():
                self._raised = message.text
            case Refused():
                raise message.error()

    def ends(self, ending: Ending) -> bool:
        """Raise an error unless the process ended normally."""
        details = "\n  ".join(["", *ending_lines(ending)])
        if self._raised or not ending.started:
            raise GraphpactError(
                f"the suite cannot find its targets: {self._raised or ending.fault + details}"
            )
        if ending.fault:
            raise RejectedPluginError(
                f"{ending.work}: {ending.fault}{details}",
                hint="do the work when the plugin is built or called, not at import",
            )
        return False
