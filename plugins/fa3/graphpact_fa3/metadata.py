"""What the kernels of one step read.

Does not: fill it.
"""

from dataclasses import dataclass, field

import torch

from graphpact import bounded


@dataclass(slots=True, kw_only=True)
class KeyRows:
    """Queries, and the keys that each row of them sees: what one call of a kernel takes.

    Args:
        cu_seqlens_q: ``[rows + 1]`` int32: where each row's queries begin.
        cache_seqlens: ``[rows]`` int32: keys of each row.
        page_table: ``[rows, pages]`` int32: its pages; 0, scratch, past its last.
        page_size: KV slots in a page.
        max_seqlen_q: Bound on the queries of a row.
        max_seqlen_k: Bound on its keys.
        is_ragged: Whether queries can be there that belong to no row, past the last offset.
    """

    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    max_seqlen_q: int = bounded()
    max_seqlen_k: int = bounded()
    is_ragged: bool = False


@dataclass(slots=True, kw_only=True)
class TreeMetadata:
    """What each draft token of a tree sees beyond, or instead of, what its request shares.

    Args:
        drafts: One row a token: the drafts that it sees. The other part of the cascade is the request's
            row, which is the sequence before the drafts.
        windows: By window: one row a token, the keys of the sequence and the drafts within its window.
    """

    drafts: KeyRows
    windows: dict[int, KeyRows]


@dataclass(slots=True, kw_only=True)
class FA3Metadata(KeyRows):
    """The metadata of one step; a row is a request.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        cu_seqlens_k: ``[bs + 1]`` int32: where each request's keys would begin, one after another.
        scheduler_metadata: ``[schedule_size(max_bs)]`` int32: the schedule, made once a step for all layers
            without a window; zeros past ``schedule_len``.
        schedule_len: How many of its numbers the kernels take; 0 where they take none.
        tree: Where drafts are a tree. The request's row is then its sequence without drafts, of which every
            query sees all; otherwise the last query stands at the last key.
    """

    out_cache_loc: torch.Tensor
    cu_seqlens_k: torch.Tensor
    scheduler_metadata: torch.Tensor
    schedule_len: int = 0
    tree: TreeMetadata | None = field(default=None)
