"""The rank of this process in its attention tensor-parallel group, and its share of the tokens.

With attention TP under DP, activations are gathered and scattered between layers. Each rank has ``padded
tokens / attn_tp_size`` rows of the padded batch. Layers that must not process padding (MoE routing) need the
number of real tokens among these rows.

Does not: communicate.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from graphpact.errors import ConfigError


@dataclass(slots=True)
class ParallelContext:
    """This process as rank ``attn_tp_rank`` of ``attn_tp_size`` in its attention tensor-parallel group."""

    attn_tp_rank: int = 0
    attn_tp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.attn_tp_rank < self.attn_tp_size:
            rank = f"attn_tp_rank {self.attn_tp_rank} of attn_tp_size {self.attn_tp_size}"
            raise ConfigError(rank, hint="ranks count from 0 and are below the size")

    @contextmanager
    def override(
        self, *, attn_tp_rank: int | None = None, attn_tp_size: int | None = None
    ) -> Iterator["ParallelContext"]:
        """Return a context in which this process has another rank; raise `ConfigError` if it is invalid."""
        before = self.attn_tp_rank, self.attn_tp_size
        asked = zip((attn_tp_rank, attn_tp_size), before, strict=True)
        now = ParallelContext(*(old if new is None else new for new, old in asked))
        self.attn_tp_rank, self.attn_tp_size = now.attn_tp_rank, now.attn_tp_size
        try:
            yield self
        finally:
            self.attn_tp_rank, self.attn_tp_size = before


_CONTEXT = ParallelContext()


def get_parallel() -> ParallelContext:
    """Return the context of this process; by default rank 0 of 1."""
    return _CONTEXT


def get_attention_tp_size() -> int:
    """Return the number of ranks in the attention tensor-parallel group of this process."""
    return _CONTEXT.attn_tp_size


def get_attention_tp_rank() -> int:
    """Return the rank of this process in its attention tensor-parallel group."""
    return _CONTEXT.attn_tp_rank


def local_num_token_non_padded(global_count: int, num_tokens_per_dp: int) -> int:
    """Return how many of ``global_count`` real tokens are in the rows of this attention-TP rank.

    Ranks split the padded count: with 1024 padded tokens, two ranks and 1018 real tokens, rank 0 has 512 and
    rank 1 has 506 (SGLang PR 22404).

    Args:
        global_count: Real tokens of all attention-TP ranks of this DP rank.
        num_tokens_per_dp: Padded tokens of the captured shape, not of the batch. If it is not a multiple of
            the group size, the last rows belong to no rank.
    """
    first, rows = _rows_of_this_rank(num_tokens_per_dp)
    return min(max(global_count - first, 0), rows)


def compute_local_num_token_non_padded(
    global_num_token_non_padded: torch.Tensor | int, num_tokens_per_dp: int
) -> torch.Tensor:
    """Return `local_num_token_non_padded` as a tensor, computed without a host read.

    The result is ``[1]`` int32, on the device of the global count; on the CPU if that is a Python number.
    """
    if isinstance(global_num_token_non_padded, int):
        local = local_num_token_non_padded(global_num_token_non_padded, num_tokens_per_dp)
        return torch.tensor([local], dtype=torch.int32)
    first, rows = _rows_of_this_rank(num_tokens_per_dp)
    return torch.clamp(global_num_token_non_padded - first, 0, rows)


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ``rank 0`` or ``ranks 0, 1``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _rows_of_this_rank(num_tokens_per_dp: int) -> tuple[int, int]:
    """Return the first row of this rank, and how many rows it has."""
    rows = num_tokens_per_dp // get_attention_tp_size()
    return get_attention_tp_rank() * rows, rows
