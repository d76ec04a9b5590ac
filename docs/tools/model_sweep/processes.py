"""Run every case in a child process with a time limit, several at a time: a crash affects only its row."""

import os
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from graphpact_cli import children
from graphpact_cli.child import Parent
from graphpact_cli.children import Ending, Task
from model_sweep.comparison import Result

TIME_LIMIT = 120.0
"""Seconds for one case."""

_PRELOAD = [__name__, "graphpact_engine.models", "graphpact_flashinfer"]


def run_cases(
    cases: Sequence[str],
    *,
    on_result: Callable[[Result], None] = lambda _: None,
    compare: str = "model_sweep.comparison:compare",
    at_once: int | None = None,
    time_limit: float = TIME_LIMIT,
) -> list[Result]:
    """Return the results of all cases, in the order in which they end.

    A case whose process dies, raises or exceeds the time limit is ``crashed``.

    Args:
        cases: The cases.
        on_result: Called with each result.
        compare: The function that gives the result of a case, as ``module:name``.
        at_once: Number of processes; by default one for each core.
        time_limit: Seconds for one case.
    """
    results: list[Result] = []

    def take(result: Result) -> None:
        results.append(result)
        on_result(result)

    children.prepare(_PRELOAD)
    children.run([_Case(case, compare, time_limit, take) for case in cases], at_once or os.cpu_count() or 1)
    return results


class _Case(Task):
    """The task of a case."""

    work = f"{__name__}:send_result"

    def __init__(self, case: str, compare: str, limit: float, take: Callable[[Result], None]) -> None:
        self._case, self._compare, self.limit, self._take = case, compare, limit, take
        self._result: Result | None = None

    def arguments(self) -> tuple[str, str]:
        """Return the arguments of `send_result`."""
        return self._compare, self._case

    def hears(self, result: Result) -> None:
        """Keep the result."""
        self._result = result

    def ends(self, ending: Ending) -> bool:
        """Pass on the result, or a description of how the process ended without one."""
        self._take(self._result or Result(self._case, "crashed", reason=ending.fault))
        return False


def send_result(parent: Parent, compare: str, case: str) -> None:
    """Send the result of ``case``: the work of a child process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    function: Any = pkgutil.resolve_name(compare)
    try:
        result = function(case)
    except BaseException as error:  # noqa: BLE001  a row of the table
        result = Result(case, "crashed", reason=f"{type(error).__name__}: {error}"[:200])
    parent.send(result)
