"""Runs every case in a process of its own, several at a time, with a time limit: one crash costs one row.

Does not: run anything in this process.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from model_sweep.comparison import Result

TIME_LIMIT = 120.0
"""Seconds for one case."""

_PRELOAD = ["model_sweep.comparison", "graphpact_engine.models", "graphpact_flashinfer"]


@dataclass(slots=True)
class _Running:
    case: str
    process: BaseProcess
    pipe: Connection
    until: float


def run_cases(cases: Sequence[str], *, at_once: int | None = None) -> Iterator[Result]:
    """Yield the result of each case, in the order in which they end.

    A case whose process dies, raises or exceeds `TIME_LIMIT` is ``crashed``.

    Args:
        cases: The cases.
        at_once: Number of processes; by default one for each core.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # imported once, then forked
    waiting, running = list(reversed(cases)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or os.cpu_count() or 1):
                pipe, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(waiting[-1], theirs))
                process.start()
                theirs.close()
                until = time.monotonic() + TIME_LIMIT
                running.append(_Running(waiting.pop(), process, pipe, until))
            left = min(one.until for one in running) - time.monotonic()
            ready = wait([one.pipe for one in running], timeout=max(left, 0))
            for one in [
                one for one in running if one.pipe in ready or time.monotonic() > one.until
            ]:
                running.remove(one)
                yield _end(one)
    finally:
        for one in running:
            one.process.kill()


def _end(one: _Running) -> Result:
    """Return the result of a process that has one or is to end."""
    with one.pipe:
        try:
            result = one.pipe.recv() if one.pipe.poll() else None
        except EOFError:
            one.process.join(TIME_LIMIT)
            return Result(one.case, "crashed", reason=f"exit status {one.process.exitcode}")
    if result is None:
        one.process.kill()
        result = Result(one.case, "crashed", reason=f"no result after {TIME_LIMIT:.0f} seconds")
    one.process.join(TIME_LIMIT)
    if not isinstance(result, Result):
        raise TypeError(f"{one.case} sent {result!r}")
    return result


def _run(case: str, pipe: Connection) -> None:
    """Send the result of ``case``: the body of a process."""
    import warnings  # noqa: PLC0415  of the new process

    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from model_sweep.comparison import compare  # noqa: PLC0415

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        result = compare(case)
    except BaseException as error:  # noqa: BLE001  a row of the table
        result = Result(case, "crashed", reason=f"{type(error).__name__}: {error}"[:300])
    pipe.send(result)
