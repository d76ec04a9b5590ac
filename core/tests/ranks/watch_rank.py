"""One rank of ``test_watch.py``: rank 1 fails in several ways, and rank 0 prints how it learned of each.

    python watch_rank.py RANK PORT HOW=TIMEOUT...

PORT is that of the store where both ranks meet. HOW is what rank 1 does instead of a collective: ``raise``,
``kill`` or ``stop``. TIMEOUT is that of the group of this collective, in seconds. Each has a process of its
own, a fork of this one, which saves its imports.

Does not: compare.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from graphpact.errors import RankError
from graphpact.ranks import RankWatch

RANK, PORT = map(int, sys.argv[1:3])
TIMEOUTS = {how: float(timeout) for how, _, timeout in (each.partition("=") for each in sys.argv[3:])}
GRACE = 1.0
PATIENCE = timedelta(seconds=60)


def joined() -> dist.TCPStore:
    """Return a connection to the store."""
    return dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=PATIENCE)


def fail(how: str) -> None:
    """End or stop this rank, without a word unless it raises."""
    if how == "raise":
        raise ValueError("no such expert: 12\nof 8")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def communicate(how: str, group: dist.ProcessGroup) -> None:
    """Call the collective that rank 1 does not call; after a kill it is the wait that fails."""
    if how == "kill":
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()
    else:
        dist.all_reduce(torch.ones(2), group=group)


def run(how: str) -> None:
    """Take a few steps with the other rank, and one in which rank 1 fails; print what rank 0 learns."""
    store = dist.PrefixStore(how, joined())
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=PATIENCE)
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=TIMEOUTS[how]))
    dist.barrier()  # only now the short timeout counts: on a busy machine one rank starts much later
    watch = RankWatch(store, RANK, [0, 1], grace=GRACE)
    for watch.step in range(1, 4):
        with watch.explaining():
            dist.all_reduce(torch.ones(2), group=group)
    begun = time.monotonic()
    watch.step, watch.doing = 4, "lane 'decode', an eager step"
    error = "no error"
    try:
        with watch.explaining():
            fail(how) if RANK else communicate(how, group)
    except RankError as raised:
        error = str(raised)
    print(json.dumps({"how": how, "seconds": time.monotonic() - begun, "error": error}))  # noqa: T201  read by the test
    sys.stdout.flush()
    store.set("done", "")


children = {}
for how in TIMEOUTS:
    children[how] = os.fork()
    if not children[how]:
        try:
            run(how)
        finally:
            os._exit(0)  # a thread of gloo that is still there would end the process by SIGABRT
for how, child in children.items():
    if RANK == 1 and how == "stop":
        dist.PrefixStore(how, joined()).wait(["done"])
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
