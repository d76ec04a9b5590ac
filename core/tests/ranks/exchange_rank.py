"""One rank of ``test_exchange.py``: makes exchanges, and prints what it got from each.

    python exchange_rank.py RANK PORT

PORT is that of the store where both ranks meet.

Does not: compare.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphpact.errors import RankError
from graphpact.ranks import RankExchange

RANK, PORT = map(int, sys.argv[1:])
TIMEOUT = timedelta(seconds=60)


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the `RankError` that a call raises."""
    try:
        call()
    except RankError as error:
        return str(error)
    return "no error"


def main() -> dict[str, Any]:
    """Return what this rank got, by case; every case leaves the ranks at the same exchange."""
    group = dist.new_group([0, 1], backend="gloo", timeout=TIMEOUT)
    exchange = RankExchange(group)
    found: dict[str, Any] = {
        "numbers": [
            exchange.tell(
                "a step",
                tokens=10 + RANK,
                requests=RANK,
                mode=5 * RANK,
                wants_graph=RANK == 0,
                digest=2**32 - 1 - RANK,
            )
            for _ in range(2)
        ],
        "defaults": exchange.tell("a step"),
        "objects": exchange.objects({"rank": RANK}),
        "actions": error_of(lambda: exchange.tell("a decode" if RANK else "a capture", place=f"line {RANK}")),
        "after an error": exchange.tell("a step", tokens=RANK),
    }
    # Rank 1 makes one step more, and is at its next one when rank 0 does something else.
    exchange.tell("a step")
    found["one more"] = error_of(lambda: exchange.tell("a step" if RANK else "the end"))
    if RANK == 0:
        exchange = RankExchange(group)  # it has made no exchange yet
    found["another count"] = error_of(lambda: exchange.tell("a step"))
    found["inference"] = []
    for made_in in (False, True):
        with torch.inference_mode(mode=made_in):
            exchange = RankExchange(group)
        for used_in in (False, True):
            with torch.inference_mode(mode=used_in):
                found["inference"].append([step.tokens for step in exchange.tell("a step", tokens=RANK)])
    return found


store = dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=TIMEOUT)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=TIMEOUT)
print(json.dumps(main()))  # noqa: T201  read by the test
sys.stdout.flush()
dist.barrier()  # a rank that leaves while the other one waits would end it
os._exit(0)  # a thread of gloo that is still there would end the process by SIGABRT
