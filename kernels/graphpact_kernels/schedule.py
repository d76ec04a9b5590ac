"""The layout of a schedule: how many blocks of queries and keys each request has.

It is that of FlashAttention-3's ``get_scheduler_metadata``: a semaphore, which is 0, then vectors with one
number for each request, padded to a multiple of four numbers. The first vector has the query blocks, the
second the key blocks; the others are zero.

Does not: write a schedule; `graphpact_kernels.schedule_attention` does.
"""

import torch

BLOCK = 16
"""Queries, or keys, in one block of a schedule."""


def vector_size(batch_size: int) -> int:
    """Return the length of one vector of the schedule of ``batch_size`` requests."""
    return -(-batch_size // 4) * 4


def schedule_size(batch_size: int) -> int:
    """Return the length of the schedule of ``batch_size`` requests: a semaphore and four vectors."""
    return 1 + 4 * vector_size(batch_size)


def query_blocks(schedule: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return a view of ``schedule``, ``[batch_size]`` int32: the query blocks of each request."""
    return schedule[1 : 1 + batch_size]


def key_blocks(schedule: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return a view of ``schedule``, ``[batch_size]`` int32: the key blocks of each request."""
    return schedule[1 + vector_size(batch_size) :][:batch_size]
