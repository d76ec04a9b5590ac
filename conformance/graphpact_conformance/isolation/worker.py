"""The work of a child process that imports a plugin and examines it; see `graphpact_cli.children`.

It sends a `Result` for each experiment, what `graphpact_conformance.isolation.messages` has, and at last the
`PluginResults`.

Does not: judge an end without these, or limit its own time; the supervisor does.
"""

import gc
import os
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from graphpact.errors import UsageError
from graphpact.plugin_calls import short_path
from graphpact.plugins import PluginCatalog
from graphpact_cli.child import Parent
from graphpact_conformance import suite, vocabulary
from graphpact_conformance.isolation.messages import (
    Raised,
    Refused,
    Resolved,
    Warned,
    tail,
    without_addresses,
)
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.targets import Options, Target

_SUITE = Path(__file__).resolve().parents[1]


def resolve(parent: Parent, names: Sequence[str], options: Options) -> None:
    """Find the targets of ``names``; this imports the plugins."""

    def job(reporter: _Reporter) -> Resolved:
        catalog = PluginCatalog.scan()
        for name in names:
            reporter.begins(f"looking for {name}")  # a crash of its import is attributed to this name
            suite.targets([name], catalog)
        targets = suite.targets(names, catalog)
        suite.require_lanes(targets, options, catalog)
        device_name = _device_name(options.device)
        return Resolved([*targets], str(torch.__version__), device_name, vocabulary.experiments())

    _run(parent, job, homes=(), may_refuse=True)


def examine_for_parent(
    parent: Parent,
    target: Target,
    options: Options,
    skip: Collection[str],
    part: tuple[int, int],
    homes: Sequence[Path],
) -> None:
    """Examine a target.

    Args:
        parent: The receiver of the results.
        target: The plugin, or the pair.
        options: Options of the run.
        skip: See `suite.examine`.
        part: See `suite.examine`.
        homes: The packages of the plugins.
    """

    def job(reporter: _Reporter) -> Any:
        return suite.examine(target, options, reporter, skip=skip, part=part)

    _run(parent, job, homes)


def _run(
    parent: Parent, job: Callable[["_Reporter"], Any], homes: Sequence[Path], *, may_refuse: bool = False
) -> None:
    """Run a job and send its answer, or why there is none."""
    torch.set_num_threads(1)
    gc.freeze()  # otherwise scans of the imported modules take a third of a run
    reporter, code = _Reporter(parent), _PluginCode(homes)
    try:
        with _noticing_warnings(code, parent):
            answer = job(reporter)
    except SystemExit:  # the supervisor sees the exit status
        raise
    except BaseException as error:  # noqa: BLE001  KeyboardInterrupt; the panics of Rust extensions
        by_plugin = code.raised(error)
        if isinstance(error, UsageError) and not by_plugin and (may_refuse or not reporter.has_begun):
            parent.send(Refused(type(error).__name__, error.message, vars(error)))
        else:
            lines = "".join(traceback.format_exception(error)).splitlines()
            parent.send(Raised(by_plugin, without_addresses("\n".join(lines[-8:]))))
    else:
        parent.send(answer)


class _Reporter:
    """A listener of the suite that reports to the supervisor.

    Args:
        parent: The supervisor.

    Attributes:
        has_begun: Whether a piece of work has begun.
    """

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._err_reported, self._has_reported = 0, True
        self.has_begun = False

    def begins(self, work: str) -> None:
        """Report that ``work`` is about to run."""
        if self._has_reported:  # results follow after several pieces of work
            self._err_reported = os.fstat(self._parent.stderr).st_size
            self._has_reported = False
        self._parent.begins(work)
        self.has_begun = True

    def found(self, result: Result) -> None:
        """Report a result; the first failure includes the stderr output of its work."""
        if result.outcome is Outcome.FAIL and result.findings:
            result = self._with_stderr(result)
        self._has_reported = True
        self._parent.send(result)

    def _with_stderr(self, result: Result) -> Result:
        size = os.fstat(self._parent.stderr).st_size
        start = max(self._err_reported, size - 4096)
        said = tail(os.pread(self._parent.stderr, size - start, start).decode(errors="replace"))
        self._err_reported = size
        first, *others = result.findings
        if said:
            first = first.model_copy(update={"actual": f"{first.actual}\non stderr:\n{said}"})
        return result.model_copy(update={"findings": [first, *others]})


class _PluginCode:
    """Distinguishes the code of a plugin from code of the suite and of libraries.

    Args:
        homes: The packages of the plugin.
    """

    def __init__(self, homes: Sequence[Path]) -> None:
        self._homes = [home.resolve() for home in homes]

    def has(self, file: str) -> bool:
        """Return whether ``file`` is code of the plugin."""
        return self._nearest(file) not in (None, _SUITE)

    def raised(self, error: BaseException) -> bool:
        """Return whether the plugin raised ``error``: its last frame comes after the suite's last one."""
        last = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            last = self._nearest(frame.f_code.co_filename) or last
        return last not in (None, _SUITE)

    def _nearest(self, file: str) -> Path | None:
        path = Path(file).resolve()
        around = [home for home in (_SUITE, *self._homes) if home == path or home in path.parents]
        return max(around, key=lambda home: len(home.parts), default=None)


@contextmanager
def _noticing_warnings(code: _PluginCode, parent: Parent) -> Iterator[None]:
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
        if code.has(filename):
            at = f"{short_path(filename)}:{lineno}"
            parent.send(Warned(category.__name__, at, without_addresses(str(message))))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def _device_name(device: str) -> str | None:
    if device != "cuda":
        return None
    if not torch.cuda.is_available():
        raise UsageError("device cuda: torch has no such device on this machine", hint="leave --device out")
    return str(torch.cuda.get_device_name())
