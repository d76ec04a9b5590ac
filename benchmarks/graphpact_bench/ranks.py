"""What an exchange of two ranks costs a step, against the collective that it needs.

Both ranks are processes on this machine, which share its cores with all else. They call the bare collective
and `RankExchange.tell` in turns.

Does not: measure other collectives, or ranks on several machines.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from graphpact.errors import EngineError
from graphpact_bench.exchange_process import COLLECTIVE, EXCHANGE
from graphpact_bench.options import BenchOptions
from graphpact_bench.report import Chart, Column, Table, spread_columns, spread_values
from graphpact_bench.timing import Spread, UnavailableWayError

AIM = 60.0
"""The most microseconds that an exchange should add to its collective."""
_PATIENCE = 300.0  # seconds until the processes are given up


def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the table of both parts, as rank 0 sees them.

    Raises:
        UnavailableWayError: This build of torch has no gloo.
        EngineError: A process failed.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise UnavailableWayError("this build of torch has no gloo")
    turns = 30 if options.quick else 3000
    options.say(f"ranks: {turns} turns")
    taken = _times(turns)
    table = Table(
        name="ranks",
        title=f"time of one exchange of two processes on this machine, gloo, {torch.get_num_threads()}"
        f" thread(s) each: {turns} turns",
        columns=[
            Column(key="part", heading="part"),
            *spread_columns("us", "us", ".1f"),
            Column(key="more_us", heading="more us", format=".1f"),
            Column(key="more_us_best", heading="of the best", format=".1f"),
        ],
        notes=[
            "more: the difference from the first row, the median of all turns, and best from best",
            f"aim: an exchange adds at most {AIM:.0f} us to its collective",
        ],
        chart=Chart(value="us", label=["part"]),
    )
    for part, seconds in taken.items():
        more = Spread.of_differences(seconds, taken[COLLECTIVE]).times(1e6)
        spread = spread_values("us", Spread.of(seconds).times(1e6))
        table.add(part=part, **spread, more_us=more.median, more_us_best=more.best)
    yield table


def _times(turns: int) -> dict[str, list[float]]:
    """Return the seconds of each part on rank 0, by turn."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "graphpact_bench.exchange_process"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), str(turns)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=_PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, told)) in enumerate(zip(processes, ended, strict=True)):
        if process.returncode:
            last = (told.strip().splitlines() or ["it says nothing"])[-1]
            raise EngineError(f"rank {rank} ended with status {process.returncode}: {last}")
    found: dict[str, list[float]] = json.loads(ended[0][0])
    return {name: found[name] for name in (COLLECTIVE, EXCHANGE)}
