"""One of the two processes that `graphpact_bench.ranks` times; prints the seconds of each part as JSON.

    python -m graphpact_bench.exchange_process RANK PORT TURNS

PORT is that of the store where both processes meet.

Does not: compare.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from graphpact.ranks import RankExchange, RankStep
from graphpact.ranks.collectives import all_gather
from graphpact_bench.timing import take_turns

COLLECTIVE, EXCHANGE = "the collective alone", "RankExchange.tell"
WARM_UP = 20
TIMEOUT = timedelta(seconds=60)


def times(rank: int, port: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each part, by name, once for each turn."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    group = dist.new_group([0, 1], backend="gloo", timeout=TIMEOUT)
    exchange = RankExchange(group)
    mine = torch.zeros(len(RankStep._fields), dtype=torch.int64)
    every = torch.zeros(2 * len(mine), dtype=torch.int64)
    parts = {
        COLLECTIVE: lambda: all_gather(every, mine, group=group),
        EXCHANGE: lambda: exchange.tell("a step", tokens=7, requests=7, mode=1, digest=rank),
    }
    take_turns(parts, turns=WARM_UP)
    # One call each: both processes wait in every call, so a disturbed one would spoil its block.
    taken = take_turns(parts, turns=turns)
    dist.barrier()  # a process that leaves while the other one waits would end it
    return taken


if __name__ == "__main__":
    sys.stdout.write(json.dumps(times(*map(int, sys.argv[1:]))))
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that is still there would end the process by SIGABRT
