"""The process that examines a plugin: ``python -m graphpact_conformance.isolation.worker < JOB``, or forked.

`graphpact_conformance.isolation.supervise` starts it and handles its end. Events go through a separate pipe,
one JSON object per line, so that output of a plugin on stdout and stderr does not mix with them. Each line
begins with a key, which the worker reads before it imports a plugin: a line without it comes from a plugin.

    ready                       graphpact is imported; the plugin's timeout starts
    begins, work, printed       a piece of work; bytes on stdout so far
    found, result               a `Result`
    warned, kind, at, text      a warning from the plugin
    done, answer, printed, threads   the job is done; names of threads that keep the process alive
    replaced, names, work       functions of the suite or of torch that the plugin replaced
    forked, work                a child that the plugin forked returned into the suite
    refused, type, message, hint   a usage error; nothing was examined
    raised, by_plugin, text     an exception that ended the job

The work of ``replaced`` and ``forked`` is None before the first.

Does not: judge an end without ``done``, or limit its own time; the supervisor does.
"""

import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import TypeAdapter

from graphpact.errors import UsageError
from graphpact.plugin_calls import short_path
from graphpact.plugins import PluginCatalog
from graphpact_conformance import legend, suite
from graphpact_conformance.isolation.blind import judge
from graphpact_conformance.isolation.integrity import Originals
from graphpact_conformance.isolation.job_wire import steady, tail
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.targets import Options, Target

_SUITE = Path(__file__).resolve().parents[1]
_ORPHANED = 30.0  # seconds after the timeout until a process without a supervisor ends itself


class Reporter:
    """A listener of the suite that writes events into the pipe.

    Args:
        job: The job, as for `main`.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._pipe: int = job["events"]
        self._stack: int = job["stack"]
        self._patience = job["bound"] + _ORPHANED
        os.set_inheritable(self._pipe, False)  # noqa: FBT003  positional only
        self._key = os.read(job["key"], 64)
        os.close(job["key"])
        self._pid = os.getpid()
        self._originals = Originals()
        # A plugin may redirect stdout and stderr; these stay the files that the supervisor reads.
        self._out, self._err = os.dup(1), os.dup(2)
        self._err_reported, self._has_reported = 0, True
        self.work: str | None = None

    def begins(self, work: str) -> None:
        """Report that ``work`` is about to run."""
        faulthandler.dump_traceback_later(self._patience, exit=True, file=self._stack)
        self._compare_functions()
        if self._has_reported:  # results follow after several pieces of work
            self._err_reported = os.fstat(self._err).st_size
            self._has_reported = False
        self.say("begins", work=work, printed=self._printed())  # of a forked child: still the work before
        self.work = work

    def found(self, result: Result) -> None:
        """Report a result; the first failure includes the stderr output of its work."""
        if result.outcome is Outcome.FAIL and result.findings:
            result = self._with_stderr(result)
        self._has_reported = True
        self.say("found", result=result.model_dump(mode="json"))

    def _with_stderr(self, result: Result) -> Result:
        said = tail(self._err, self._err_reported)
        self._err_reported = os.fstat(self._err).st_size
        first, *others = result.findings
        if said:
            first = first.model_copy(update={"actual": f"{first.actual}\non stderr:\n{said}"})
        return result.model_copy(update={"findings": [first, *others]})

    def done(self, answer: Any) -> None:
        """Report the end of the job, with the answer."""
        self._compare_functions()
        threads = [t.name for t in threading.enumerate() if not (t.daemon or t is threading.main_thread())]
        self.say("done", answer=answer, printed=self._printed(), threads=threads)

    def say(self, event: str, **fields: Any) -> None:
        """Write one event; exit if the pipe is closed."""
        is_fork = os.getpid() != self._pid
        if is_fork:
            event, fields = "forked", {"work": self.work}
        data = self._key + b" " + json.dumps({"event": event, **fields}).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._pipe, data) :]
        except OSError as error:
            os.write(self._err, f"the pipe to the supervisor is gone: {error}\n".encode())
            os._exit(os.EX_IOERR)
        if is_fork:
            os._exit(os.EX_SOFTWARE)

    def _compare_functions(self) -> None:
        """Report functions that the last piece of work replaced."""
        if names := self._originals.replaced():
            self.say("replaced", names=names, work=self.work)

    def _printed(self) -> int:
        return os.fstat(self._out).st_size


class _Homes:
    """The packages of the plugin, which decide whether a file is the plugin's code."""

    def __init__(self, homes: Sequence[str]) -> None:
        self._homes = [Path(home).resolve() for home in homes]

    def own(self, file: str) -> bool:
        """Whether ``file`` is code of the plugin."""
        return self._nearest(file) not in (None, _SUITE)

    def raised(self, error: BaseException) -> bool:
        """Whether the plugin raised ``error``: its last frame comes after the suite's last one."""
        last = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            last = self._nearest(frame.f_code.co_filename) or last
        return last not in (None, _SUITE)

    def _nearest(self, file: str) -> Path | None:
        path = Path(file).resolve()
        around = [home for home in (_SUITE, *self._homes) if home == path or home in path.parents]
        return max(around, key=lambda home: len(home.parts), default=None)


@contextmanager
def _noticing_warnings(homes: _Homes, reporter: Reporter) -> Iterator[None]:
    """Report every warning with a line of the plugin as its origin.

    A warning with its origin in torch or another library is no fault of the plugin that called it. Libraries
    use ``stacklevel`` for warnings about the caller.
    """

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG001  as the module calls it
        line: str | None = None,  # noqa: ARG001
    ) -> None:
        if homes.own(filename):
            at = f"{short_path(filename)}:{lineno}"
            reporter.say("warned", kind=category.__name__, at=at, text=steady(str(message)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def _name_targets(job: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Return the targets of the names of a job; this imports the plugins."""
    catalog = PluginCatalog.scan()
    for name in job["names"]:
        reporter.begins(f"looking for {name}")  # imports the plugin; a crash here is attributed to this name
        suite.targets([name], catalog)
    targets = suite.targets(job["names"], catalog)
    suite.require_lanes(targets, TypeAdapter(Options).validate_python(job["options"]), catalog)
    return {
        "targets": [dataclasses.asdict(target) for target in targets],
        "torch": str(torch.__version__),
        "device_name": _device_name(job["device"]),
        "experiments": legend.experiments(),
    }


def _device_name(device: str) -> str | None:
    if device != "cuda":
        return None
    if not torch.cuda.is_available():
        raise UsageError("device cuda: torch has no such device on this machine", hint="leave --device out")
    return str(torch.cuda.get_device_name())


def _examine(job: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    target = TypeAdapter(Target).validate_python(job["target"])
    options = TypeAdapter(Options).validate_python(job["options"])
    first, parts = job["part"]
    plugin = suite.examine(target, options, reporter, skip=frozenset(job["skip"]), part=(first, parts))
    return plugin.model_dump(mode="json")


def _judge(job: dict[str, Any], _: Reporter) -> dict[str, Any] | None:
    target = TypeAdapter(Target).validate_python(job["judge"])
    options = TypeAdapter(Options).validate_python(job["options"])
    result = judge(target, options, job["heard"])
    return None if result is None else result.model_dump(mode="json")


_JOBS = {"names": _name_targets, "target": _examine, "judge": _judge}


def main(job: dict[str, Any]) -> None:
    """Run one job.

    With ``names``, ``device`` and ``options``, find the targets. With ``target``, ``options``, ``skip`` and
    ``part``, examine one. With ``judge``, which is a target, ``options`` and ``heard``, its events, judge a
    blind run. All have ``homes``, the locations of the plugin's code; ``events``, ``stack`` and ``key``,
    descriptors; and ``bound``, the timeout of the supervisor in seconds.
    """
    torch.set_num_threads(1)
    gc.freeze()  # the imported modules: without it, looking through them takes a third of a run
    reporter, homes = Reporter(job), _Homes(job["homes"])
    faulthandler.enable(file=job["stack"], all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=job["stack"], all_threads=False)
    reporter.say("ready")
    try:
        with _noticing_warnings(homes, reporter):
            (run,) = (run for name, run in _JOBS.items() if name in job)
            answer = run(job, reporter)
    except SystemExit:  # not requested: the supervisor sees the exit status
        raise
    except BaseException as error:  # noqa: BLE001  KeyboardInterrupt; the panics of Rust extensions
        by_plugin = homes.raised(error)
        nothing_done = reporter.work is None or "names" in job
        if isinstance(error, UsageError) and nothing_done and not by_plugin:
            reporter.say("refused", type=type(error).__name__, message=error.message, fields=vars(error))
        else:
            lines = "".join(traceback.format_exception(error)).splitlines()
            reporter.say("raised", by_plugin=by_plugin, text=steady("\n".join(lines[-8:])))
    else:
        reporter.done(answer)


def close_stdin() -> None:
    """Make stdin empty: what it was is the supervisor's."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    close_stdin()
    main(given)
