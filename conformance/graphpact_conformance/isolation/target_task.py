"""`TargetTask`: the child processes that examine a target, its results, and what their ends mean.

Does not: start or watch processes (see `graphpact_cli.children`), or check a rule.
"""

from collections.abc import Callable
from typing import Any

from graphpact.plugins import PluginCatalog
from graphpact_cli.child import START
from graphpact_cli.children import END, Ending, Task
from graphpact_conformance.isolation.messages import Raised, Refused, Warned, ending_lines
from graphpact_conformance.results import Finding, Outcome, PluginResults, Result
from graphpact_conformance.targets import TIMEOUT_VARIABLE, Options, Target, reproduce_line
from graphpact_conformance.xfails import Xfails, plugin_home

RESTARTS = 3
"""Number of restarts of one target without the work that failed."""
WORKER = "graphpact_conformance.isolation.worker"
"""The module with the functions that child processes run."""

_OUTLIVED = "end it at exit (`atexit`), or have it end at the end of a pipe that the plugin holds"

OnResult = Callable[[Target, Result], None]
OnBegin = Callable[[Target, str], None]


class TargetTask(Task):
    """The task that examines a target, or a part of its lanes, with restarts."""

    work = f"{WORKER}:examine_for_parent"

    def __init__(
        self,
        target: Target,
        options: Options,
        catalog: PluginCatalog,
        xfails: Xfails,
        limit: float,
        on_result: OnResult | None,
        on_begin: OnBegin | None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._target, self._options, self._xfails = target, options, xfails
        self._part, self.limit = part, limit
        self._on_result, self._on_begin = on_result, on_begin
        infos = target.infos(catalog)
        self._info = infos[0]
        homes = (plugin_home(info.target) for info in infos)
        self._homes = [home for home in homes if home is not None]
        self._skip: list[str] = []
        self._reported: set[tuple[str | None, str, str]] = set()
        self._ends: list[Result] = []
        self._noise: dict[str, Result] = {}  # by source
        self._forget()

    def _forget(self) -> None:
        """Drop results: a restarted process repeats those of the process before it."""
        self._current = START
        self._found: list[Result] = []
        self._plugin: PluginResults | None = None
        self._raised: Raised | None = None

    def results(self) -> PluginResults:
        """Return all results, in an order that does not depend on timing."""
        plugin = self._plugin or self._target.results(self._info, self._options.device)
        results = [*self._found, *self._noise.values(), *self._ends]
        return plugin.model_copy(update={"results": results})

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the worker's function, for a process that repeats what was not left out."""
        self._forget()
        return self._target, self._options, self._skip, self._part, self._homes

    def begins(self, work: str) -> None:
        """Note the current piece of work."""
        self._current = work
        if self._on_begin is not None:
            self._on_begin(self._target, work)

    def hears(self, message: Result | PluginResults | Warned | Raised | Refused) -> None:
        """Handle one message of the worker."""
        match message:
            case Result():
                result = self._xfails.expect(self._target, message)
                self._found.append(result)
                self._report(result)
            case Warned():
                actual = f"{message.kind}: {message.text}"
                self._note_noise(message.at, self._current, "no warning from the plugin", actual)
            case PluginResults():
                self._plugin = message
            case Raised():
                self._raised = message
            case Refused():
                raise message.error()

    def ends(self, ending: Ending) -> bool:
        """Note the end of a process; return whether to restart without its last work."""
        if ending.printed is not None:
            work, line = ending.printed
            expected = "nothing on stdout, which belongs to the program that uses the plugin"
            self._note_noise("stdout", work, expected, f"first: {line!r}")
        for work in ending.forked:
            self._note_end(self._failure(work, "a child that it forked went on with the suite's work"))
        if self._raised is not None and not self._raised.by_plugin:
            self._note_end(self._error(ending, self._raised.text))
            return False
        fault = self._raised.text if self._raised is not None else ending.fault
        if not fault and self._plugin is None:
            fault = "it ended before the end of its job"
        if not ending.started:
            self._note_end(self._error(ending, fault))
            return False
        if not fault and ending.left:
            left = "; ".join(ending.left)
            self._note_end(self._failure(END, f"still running, and ended by the suite: {left}", _OUTLIVED))
        if not fault:
            return False
        work = ending.work if self._raised is None else self._current
        actual = "\n".join([fault, *ending_lines(ending)])
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
            lane=self._current,
            outcome=Outcome.ERROR,
            reason="\n".join([fault, *ending_lines(ending)]),
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
