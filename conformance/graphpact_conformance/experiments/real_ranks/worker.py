"""The process of one rank, started by `graphpact_conformance.experiments.real_ranks.launch` and ``torchrun``.

It does the tasks that the suite sends, and answers each with a `RankReport`. After an error it ends, so that
ranks that wait for it go on at once. It ends with the suite too.

What a plugin prints goes to the files ``stdout-RANK`` and ``stderr-RANK`` in a folder of the suite, and
`faulthandler` writes stacks to ``stacks-RANK``.

Does not: end after a time limit of its own, except long after that of a task; the suite ends it.
"""

import faulthandler
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from graphpact.plugin_calls import place_of
from graphpact.ranks import RankExchange, RankWatch
from graphpact_conformance.experiments.real_ranks.messages import RankReport, RankTask
from graphpact_conformance.experiments.real_ranks.rig import Ranks
from graphpact_conformance.experiments.real_ranks.steps import LaneOnRank
from graphpact_conformance.records.global_state import seeded
from graphpact_conformance.records.raised import message_of

_LINGER = 1.0  # seconds after an error, in which the other ranks may raise the same error
_ORPHAN_LIMIT = 30.0  # seconds after the limit of a task, for a process that cannot see the suite's end


def main(address: str, folder: str, timeout: float, limit: float) -> None:
    """Do the tasks of this rank.

    Args:
        address: The socket of the suite.
        folder: The folder for output.
        timeout: Seconds that ranks wait for each other.
        limit: Seconds for one task.
    """
    rank = int(os.environ["RANK"])
    _redirect(Path(folder), rank)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, when another rank ends; the suite kills
    torch.set_num_threads(1)
    suite = socket.socket(socket.AF_UNIX)
    try:
        suite.connect(address)
    except OSError:
        _end_without_suite(folder)
    pipe = Connection(suite.detach())
    tasks: queue.SimpleQueue[RankTask] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, tasks, folder), daemon=True).start()
    pipe.send((rank, os.getpid()))
    joined: Callable[[], Ranks] | None = None
    stacks = (Path(folder) / f"stacks-{rank}").open("a")
    while True:
        task = tasks.get()
        faulthandler.dump_traceback_later(limit + _ORPHAN_LIMIT, exit=True, file=stacks)
        try:
            joined = joined or _join(rank, timeout)
            report = _run(task, joined())
        except (Exception, SystemExit) as error:  # noqa: BLE001  the suite reports it
            report = RankReport(rank, fault=f"{message_of(error)}, at {place_of(error)}")
        faulthandler.cancel_dump_traceback_later()
        pipe.send(report)
        if not report.is_whole:
            time.sleep(_LINGER)
            os._exit(0)


def _run(task: RankTask, ranks: Ranks) -> RankReport:
    with task.source.lane(task) as lane, torch.inference_mode(), seeded(0, lane.device):
        return LaneOnRank(lane, ranks).run()


def _join(rank: int, timeout: float) -> Callable[[], Ranks]:
    """Join the other ranks, all of which are here; return a maker of `Ranks`, whose numbers begin anew."""
    bound = timedelta(seconds=timeout)
    dist.init_process_group("gloo", timeout=bound)
    group = dist.new_group(timeout=bound, group_desc="all ranks")
    steps = dist.new_group(timeout=bound, group_desc="step")
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public name for it

    def ranks() -> Ranks:
        exchange = RankExchange(steps)
        return Ranks(rank, group, exchange, RankWatch(store, rank, exchange.ranks, grace=min(2.0, timeout)))

    return ranks


def _listen(pipe: Connection, tasks: "queue.SimpleQueue[RankTask]", folder: str) -> None:
    """Pass on the tasks; end this process when the suite has closed its end."""
    with suppress(EOFError, OSError):
        while True:
            tasks.put(pipe.recv())
    _end_without_suite(folder)


def _end_without_suite(folder: str) -> NoReturn:
    """End this process and what it started; the suite was killed, and cannot remove the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.killpg(0, signal.SIGKILL)  # the launcher made a session for this rank
    os._exit(0)


def _redirect(folder: Path, rank: int) -> None:
    """Have stdout and stderr go to files, and stacks on SIGUSR1 and crashes."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        with (folder / f"{name}-{rank}").open("ab") as file:
            os.dup2(file.fileno(), number)
    stacks = (folder / f"stacks-{rank}").open("a")
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
