"""The metadata of FlashInfer's kernels for one step: index tensors, masks and plans.

Does not: fill anything; `graphpact_flashinfer.backend` and the kernels do.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from graphpact_kernels import PagedRows


class PlanArguments(NamedTuple):
    """The host numbers of a plan. A graph freezes them, so they are fixed for its shape.

    Every step makes them again, so that the pact can compare them: a tuple takes the least time to make.

    Args:
        num_requests: Rows of the plan, the fake request included.
        num_rows: Queries of all these rows together.
        num_qo_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Width of a query and a key head.
        page_size: KV slots in a page.
        window_left: Keys before its own that a query sees; -1 for all.
        scaling: Factor on the scores.
        softcap: Cap of the scores; 0 for none.
        is_masked: Whether a mask replaces the causal rule.
        max_chunks: The most chunks that the plan may have: the fixed size of the grid.
    """

    num_requests: int
    num_rows: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    scaling: float
    softcap: float
    is_masked: bool
    max_chunks: int


@dataclass(slots=True)
class Plan:
    """The split of the work of one set of indices; made again, in place, before every replay.

    Args:
        arguments: The host numbers of the plan.
    """

    arguments: PlanArguments


@dataclass(slots=True, kw_only=True)
class PagedIndices(PagedRows):
    """One set of indices: the pages of every row that its layers read, with the queries of all sets.

    Args:
        plan: How the kernel splits the work.
    """

    plan: Plan


@dataclass(slots=True, kw_only=True)
class FlashInferMetadata(PagedIndices):
    """The metadata of one step, with the set of indices of layers without a window.

    Rows are the batch's requests. An extend has one more, the fake request that owns the padding tokens. In a
    draft decode with top-k > 1, rows are the branches.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        windows: The sets of indices of layers with a sliding window, by its length.
    """

    out_cache_loc: torch.Tensor
    windows: dict[int, PagedIndices] = field(default_factory=dict)
