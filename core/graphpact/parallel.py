"""Which rank of an attention tensor-parallel group this process is, and what share of tokens is its.

With attention TP under DP, activations are gathered and scattered between layers, so that each rank
holds ``bucket / attn_tp_size`` rows of the padded batch. Layers that must not touch padding (MoE
routing) need the number of real tokens among them.

Does not: communicate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from graphpact.errors import ConfigError


@dataclass(slots=True)
class ParallelContext:
    """The place of this process.

    Args:
        attn_tp_rank: Rank in the attention tensor-parallel group.
        attn_tp_size: Ranks in that group.
    """

    attn_tp_rank: int = 0
    attn_tp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.attn_tp_rank < self.attn_tp_size:
            raise ConfigError(
                f"attn_tp_rank {self.attn_tp_rank} of attn_tp_size {self.attn_tp_size}",
                hint="ranks count from 0 and are below the size",
            )

    @contextmanager
    def override(
        self, *, attn_tp_rank: int | None = None, attn_tp_size: int | None = None
    ) -> Iterator["ParallelContext"]:
        """Be another rank within a ``with`` block: for tests, and for ranks that are simulated.

        Raises:
            ConfigError: No such rank.
        """
        before = replace(self)
        now = ParallelContext(
            self.attn_tp_rank if attn_tp_rank is None else attn_tp_rank,
            self.attn_tp_size if attn_tp_size is None else attn_tp_size,
        )
        self.attn_tp_rank, self.attn_tp_size = now.attn_tp_rank, now.attn_tp_size
        try:
            yield self
        finally:
            self.attn_tp_rank, self.attn_tp_size = before.attn_tp_rank, before.attn_tp_size


_CONTEXT = ParallelContext()


def get_parallel() -> ParallelContext:
    """Return the context of this process: rank 0 of 1 unless something set it."""
    return _CONTEXT


def local_num_token_non_padded(global_count: int, num_tokens_per_dp: int) -> int:
    """Return how many of ``global_count`` real tokens are among the rows of this attention-TP rank.

    Padding moves the boundary between ranks, so it is drawn in the padded count: with a bucket of 1024,
    two ranks and 1018 real tokens, rank 0 has 512 and rank 1 has 506 (SGLang PR 22404).

    Args:
        global_count: Real tokens of all ranks of this DP rank.
        num_tokens_per_dp: Padded tokens: the bucket's, never the batch's. Of a bucket that the size
            does not divide, the last rows are no rank's.
    """
    first, rows = _rows_of_this_rank(num_tokens_per_dp)
    return min(max(global_count - first, 0), rows)


def compute_local_num_token_non_padded(
    global_num_token_non_padded: torch.Tensor | int, num_tokens_per_dp: int
) -> torch.Tensor:
    """Return the same on the device: no host read.

    Args:
        global_num_token_non_padded: ``[1]`` int32, or a host number.
        num_tokens_per_dp: See `local_num_token_non_padded`.

    Returns:
        A tensor like the one that was given; ``[1]`` int32 on the CPU for a host number.
    """
    if isinstance(global_num_token_non_padded, int):
        local = local_num_token_non_padded(global_num_token_non_padded, num_tokens_per_dp)
        return torch.tensor([local], dtype=torch.int32)
    first, rows = _rows_of_this_rank(num_tokens_per_dp)
    return torch.clamp(global_num_token_non_padded - first, 0, rows)


def _rows_of_this_rank(num_tokens_per_dp: int) -> tuple[int, int]:
    """Return the first of this rank's rows, and how many there are."""
    rows = num_tokens_per_dp // _CONTEXT.attn_tp_size
    return _CONTEXT.attn_tp_rank * rows, rows
