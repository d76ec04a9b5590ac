"""One rank of ``test_agreement.py``: refuses graphs in steps, and prints what all ranks refuse after each.

    python agreement_rank.py RANK STORE REFUSED...

RANK is 0 or 1, STORE a file where both ranks meet, and REFUSED the sizes of the graphs that this rank refuses
in each step, such as ``4,8``; ``-`` for none.

Does not: compare.
"""

import json
import os
import sys

import torch.distributed as dist

from graphpact_guard import GraphKey, RankAgreement

rank, store, *steps = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
agreement = RankAgreement(dist.group.WORLD)
exchanges = 0
gather = dist.all_gather_object


def counted(*args: object, **kwargs: object) -> None:
    """Exchange graphs, and count it."""
    global exchanges  # noqa: PLW0603  a script
    exchanges += 1
    gather(*args, **kwargs)


dist.all_gather_object = counted
refused: set[GraphKey] = set()
seen = []
for step in steps:
    refused |= {GraphKey(runner="Decode", shape=size) for size in step.split(",") if size != "-"}
    refused = agreement.update(refused)
    seen.append(sorted(key.shape for key in refused))
print(json.dumps({"seen": seen, "exchanges": exchanges}))  # noqa: T201  read by the test
dist.barrier()  # a rank that leaves while others connect would end them
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a thread of gloo that is still there would end the process by SIGABRT
