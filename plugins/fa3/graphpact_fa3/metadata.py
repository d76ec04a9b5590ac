"""The metadata of FlashAttention's kernels for one step.

Does not: fill it; `graphpact_fa3.backend` does.
"""

from dataclasses import dataclass, field

import torch

from graphpact import bounded
from graphpact_kernels import PageTableRows


@dataclass(slots=True, kw_only=True)
class KeyRows(PageTableRows):
    """The index tensors of one kernel call; the page table has 0, scratch, past the last page of a row.

    Args:
        max_seqlen_k: Bound on the keys of a row.
        is_ragged: Whether there may be queries past the last offset, which belong to no row.
    """

    max_seqlen_k: int = bounded()
    is_ragged: bool = False


@dataclass(slots=True, kw_only=True)
class TreeMetadata:
    """The rows of a tree's draft tokens, one for each token.

    Args:
        drafts: The drafts that each token sees. The other part of the cascade is the request's row, which is
            the sequence before the drafts.
        windows: By window: the keys of the sequence and the drafts within the token's window.
    """

    drafts: KeyRows
    windows: dict[int, KeyRows]


@dataclass(slots=True, kw_only=True)
class FA3Metadata(KeyRows):
    """The metadata of one step; a row is a request.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        cu_seqlens_k: ``[bs + 1]`` int32: offsets of each request's keys, if they were packed.
        scheduler_metadata: ``[schedule_size(max_bs)]`` int32: the schedule, made once a step for all layers
            without a window; zeros past ``schedule_len``.
        schedule_len: How many of its numbers the kernels take; 0 if they take none.
        tree: The rows of a tree's drafts, with top-k > 1. A request's row is then its sequence without
            drafts, and every query sees all of it. Without a tree, the last query is at the last key.
    """

    out_cache_loc: torch.Tensor
    cu_seqlens_k: torch.Tensor
    scheduler_metadata: torch.Tensor
    schedule_len: int = 0
    tree: TreeMetadata | None = field(default=None)
