"""One rank of ``test_comparison.py``: compares its choice in each step, and prints what it gets.

    python comparison_rank.py RANK SIZE STORE CHOICE...

STORE is a file where all ranks meet.

Does not: judge.
"""

import json
import os
import sys

import torch.distributed as dist

from graphpact_guard import RankComparison, describe_ranks

rank, size, store, *choices = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
comparison = RankComparison(dist.group.WORLD, f"dp{rank}")
found = [comparison.differing(choice, f"replays {choice}") for choice in choices]
print(json.dumps([None if said is None else describe_ranks(said) for said in found]))  # noqa: T201  for the test
dist.barrier()  # a rank that leaves while others connect would end them
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a thread of gloo that is still there would end the process by SIGABRT
