"""What FlashInfer's kernels read for one step: index tensors, masks and plans.

Does not: fill anything; the backend and its kernels do.
"""

from dataclasses import dataclass, field

import torch

from graphpact import bounded


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """The host numbers that a plan is made for. A graph holds them, so they never change for its shape.

    Args:
        num_requests: Rows of the plan, the fake request included.
        num_rows: Queries of all of them.
        num_qo_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Width of a query and a key head.
        page_size: KV slots in a page.
        window_left: Keys before its own that a query sees; -1 for all.
        scaling: Factor on the scores.
        softcap: Cap of the scores; 0 for none.
        is_masked: Whether a mask says what each query sees, instead of the causal rule.
        max_chunks: Pieces of work that the plan may have at most, which the grid is made for.
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
    """How the work of one set of indices is divided; made anew, in place, before every replay.

    Args:
        arguments: What it was made for.
    """

    arguments: PlanArguments


@dataclass(slots=True, kw_only=True)
class PagedIndices:
    """One set of indices: the pages of every request, as far back as its layers look.

    Args:
        kv_indptr: ``[rows + 1]`` int32: where each request's pages begin in ``kv_indices``.
        kv_indices: ``[capacity]`` int32: page numbers, read up to ``kv_indptr[-1]``.
        kv_last_page_len: ``[rows]`` int32: keys in each request's last page, 1 to the page size.
        plan: How the kernel divides the work.
        mask: ``[capacity]`` uint8: packed bits, which keys each query sees; None where a causal rule says.
        mask_indptr: ``[rows + 1]`` int32: where each request's bytes begin in ``mask``.
        max_kv_len: Bound on the keys of a request.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    plan: Plan
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    max_kv_len: int = bounded()


@dataclass(slots=True, kw_only=True)
class FlashInferMetadata(PagedIndices):
    """What FlashInfer's kernels read for one step: one set of indices for all that a query may see.

    Rows are the batch's requests; in an extend one more, the fake request that owns the padded tokens; in
    a draft decode with branches the branches.

    Args:
        out_cache_loc: ``[T]`` int64: KV slot of each new token; 0 is scratch.
        qo_indptr: ``[rows + 1]`` int32: where each request's queries begin.
        windows: Another set of indices for layers that see no more than a window, by its length.
        max_q_len: Bound on the queries of a request.
        page_size: KV slots in a page of the indices.
    """

    out_cache_loc: torch.Tensor
    qo_indptr: torch.Tensor
    page_size: int
    windows: dict[int, PagedIndices] = field(default_factory=dict)
    max_q_len: int = bounded()
