"""The process that a plugin is examined in: ``python -m graphpact_conformance.worker JOB``.

`graphpact_conformance.supervise` starts it and may lose it. What it finds goes, one JSON object a line,
through a pipe of its own: what a plugin writes to stdout and stderr never mixes with it.

    ready                       graphpact is imported; what follows is the plugin's time
    begins, work, printed       a piece of work; bytes on stdout so far
    found, result               a `Result`
    warned, kind, at, text      a warning whose origin is the plugin
    done, answer, printed       all is done
    refused, type, message, hint   a usage error: nothing was examined
    raised, by_plugin, text     an exception that ended it all

Does not: decide what an end without ``done`` means, or bound its own time; the supervisor does.
"""

import dataclasses
import faulthandler
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import TypeAdapter

from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_conformance import suite
from graphpact_conformance.results import Outcome, Result

_SUITE = Path(__file__).resolve().parent
_ORPHANED = (
    30.0  # seconds past the bound after which a process whose supervisor is gone ends itself
)
_TAIL_LINES, _TAIL_BYTES = 5, 4096
_RESTLESS = re.compile(
    r"0x[0-9a-fA-F]+"  # addresses
    r"|\b(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?: +\d+)?"  # times of day, thread ids
)


def tail(fd: int, start: int = 0) -> str:
    """Return the last lines of a file from ``start`` on, without what differs from run to run."""
    end = os.fstat(fd).st_size
    data = os.pread(fd, _TAIL_BYTES, max(start, end - _TAIL_BYTES))
    return steady("\n".join(data.decode(errors="replace").splitlines()[-_TAIL_LINES:]))


def steady(text: str) -> str:
    """Return ``text`` without addresses and times of day, which differ from run to run."""
    return _RESTLESS.sub("…", text)


def short(file: str) -> str:
    """Return the last two parts of a path: enough to find it, and the same on every machine."""
    return "/".join(Path(file).parts[-2:])


class Reporter:
    """What the suite tells its listener, and all else, as events in the pipe.

    Args:
        job: As `main` takes it.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._pipe: int = job["events"]
        self._stack: int = job["stack"]
        self._patience = job["bound"] + _ORPHANED
        os.set_inheritable(self._pipe, False)  # noqa: FBT003  positional only
        # A plugin may turn stdout and stderr elsewhere; these stay what the supervisor reads.
        self._out, self._err = os.dup(1), os.dup(2)
        self._err_told, self._has_told = 0, True
        self.work: str | None = None

    def begins(self, work: str) -> None:
        """Tell that ``work`` is about to run."""
        faulthandler.dump_traceback_later(self._patience, exit=True, file=self._stack)
        self.work = work
        if self._has_told:  # results come when several pieces of work are done
            self._err_told = os.fstat(self._err).st_size
            self._has_told = False
        self.say("begins", work=work, printed=self._printed())

    def found(self, result: Result) -> None:
        """Tell a result; the first failure takes along what its work has written to stderr."""
        if result.outcome is Outcome.FAIL and result.findings:
            result = self._with_stderr(result)
        self._has_told = True
        self.say("found", result=result.model_dump(mode="json"))

    def _with_stderr(self, result: Result) -> Result:
        said = tail(self._err, self._err_told)
        self._err_told = os.fstat(self._err).st_size
        first, *others = result.findings
        if said:
            first = first.model_copy(update={"actual": f"{first.actual}\non stderr:\n{said}"})
        return result.model_copy(update={"findings": [first, *others]})

    def done(self, answer: Any) -> None:
        """Tell that all is done, with what came of it."""
        self.say("done", answer=answer, printed=self._printed())

    def say(self, event: str, **fields: Any) -> None:
        """Write one event; where nobody can hear it, there is nothing left to do."""
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._pipe, data) :]
        except OSError as error:
            os.write(self._err, f"the pipe to the supervisor is gone: {error}\n".encode())
            os._exit(os.EX_IOERR)

    def _printed(self) -> int:
        return os.fstat(self._out).st_size


class _Homes:
    """Which code is the plugin's: what lies in its package, and not in one of the suite's inside it."""

    def __init__(self, homes: Sequence[str]) -> None:
        self._homes = [Path(home).resolve() for home in homes]

    def own(self, file: str) -> bool:
        """Whether ``file`` is the plugin's."""
        return self._nearest(file) not in (None, _SUITE)

    def raised(self, error: BaseException) -> bool:
        """Whether the plugin raised ``error``: its code, and not the suite's, was the last to go on."""
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
    """Report every warning that names a line of the plugin as its origin.

    What others warn of, torch above all, is no fault of the plugin, even where it called them: whoever
    means the caller says so with ``stacklevel``.
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
            at = f"{short(filename)}:{lineno}"
            reporter.say("warned", kind=category.__name__, at=at, text=steady(str(message)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def _name_targets(job: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Return the targets that the names of a job mean; the plugins are imported to find them."""
    catalog = PluginCatalog.scan()
    for name in job["names"]:
        reporter.begins(
            f"looking for {name}"
        )  # imports it: what is lost here is lost for this name
        suite.targets([name], catalog)
    targets = suite.targets(job["names"], catalog)
    return {
        "targets": [dataclasses.asdict(target) for target in targets],
        "device_name": _device_name(job["device"]),
    }


def _device_name(device: str) -> str | None:
    if device != "cuda":
        return None
    if not torch.cuda.is_available():
        raise UsageError("device cuda: torch sees none on this machine", hint="leave --device out")
    return str(torch.cuda.get_device_name())


def _examine(job: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    target = TypeAdapter(suite.Target).validate_python(job["target"])
    options = TypeAdapter(suite.Options).validate_python(job["options"])
    first, parts = job["part"]
    plugin = suite.examine(
        target, options, reporter, skip=frozenset(job["skip"]), part=(first, parts)
    )
    return plugin.model_dump(mode="json")


def main() -> None:
    """Do one job, given as JSON on the command line.

    ``names`` and ``device``: find the targets. Otherwise ``target``, ``options``, ``skip`` and ``part``:
    examine one. With both, ``homes``: where the plugin's code lies; ``events`` and ``stack``: descriptors;
    ``bound``: the supervisor's, in seconds.
    """
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    reporter, homes = Reporter(job), _Homes(job["homes"])
    faulthandler.enable(file=job["stack"], all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=job["stack"], all_threads=False)
    reporter.say("ready")
    try:
        with _noticing_warnings(homes, reporter):
            answer = (_name_targets if "names" in job else _examine)(job, reporter)
    except (
        SystemExit
    ):  # an end like any other that nobody asked for: the supervisor sees its status
        raise
    except BaseException as error:  # noqa: BLE001  KeyboardInterrupt; the panics of Rust extensions
        by_plugin = homes.raised(error)
        nothing_done = reporter.work is None or "names" in job
        if isinstance(error, UsageError) and nothing_done and not by_plugin:
            reporter.say(
                "refused", type=type(error).__name__, message=error.message, hint=error.hint
            )
        else:
            lines = "".join(traceback.format_exception(error)).splitlines()
            reporter.say("raised", by_plugin=by_plugin, text=steady("\n".join(lines[-8:])))
    else:
        reporter.done(answer)


if __name__ == "__main__":
    main()
