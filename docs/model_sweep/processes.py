"""Runs every case in a process of its own, several at a time, with a time limit: one crash costs one row.

Does not: run anything in this process.
"""

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers

from model_sweep.comparison import Result, compare

TIME_LIMIT = 120.0
"""Seconds for one case."""

_PRELOAD = ["model_sweep.comparison", "graphpact_engine.models", "graphpact_flashinfer"]


@dataclass(slots=True)
class _Running:
    case: str
    process: BaseProcess
    pipe: Connection
    until: float


def run_cases(
    cases: Sequence[str],
    *,
    work: Callable[[str], Result] = compare,
    at_once: int | None = None,
    time_limit: float = TIME_LIMIT,
) -> Iterator[Result]:
    """Yield the result of each case, in the order in which they end.

    A case whose process dies, raises or exceeds the time limit is ``crashed``.

    Args:
        cases: The cases.
        work: Gives the result of a case.
        at_once: Number of processes; by default one for each core.
        time_limit: Seconds for one case.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # imported once, then forked
    first = context.Process(target=int)
    first.start()
    first.join()  # imports do not count as time of a case
    waiting, running = list(reversed(cases)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or os.cpu_count() or 1):
                pipe, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(work, waiting[-1], theirs))
                process.start()
                theirs.close()
                until = time.monotonic() + time_limit
                running.append(_Running(waiting.pop(), process, pipe, until))
            left = min(one.until for one in running) - time.monotonic()
            ready = wait([one.pipe for one in running], timeout=max(left, 0))
            for one in [one for one in running if one.pipe in ready or time.monotonic() > one.until]:
                running.remove(one)
                yield _end(one)
    finally:
        for one in running:
            one.process.kill()


def _end(one: _Running) -> Result:
    """Return the result of a process that has one, has died, or has no time left."""
    with one.pipe:
        if not one.pipe.poll():
            one.process.kill()
            result = Result(one.case, "crashed", reason="no result in time")
        else:
            try:
                result = one.pipe.recv()
            except EOFError:
                result = Result(one.case, "crashed", reason="its process died")
    one.process.join()
    return result


def _run(work: Callable[[str], Result], case: str, pipe: Connection) -> None:
    """Send the result of ``case``: the body of a process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        result = work(case)
    except BaseException as error:  # noqa: BLE001  a row of the table
        result = Result(case, "crashed", reason=f"{type(error).__name__}: {error}"[:200])
    pipe.send(result)
