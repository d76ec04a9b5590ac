"""Attention over a page table, from FlashAttention's arguments, and the schedule of a step.

The arguments are those of ``flash_attn_with_kvcache`` (``cu_seqlens_q``, ``cache_seqlens``, ``page_table``,
``scheduler_metadata``), with its semantics: the last query of a request is at the position of its last key,
and the output is zero for a query that sees no key, and for a row past the last offset. On a CPU the kernel
reads its index tensors on the host and checks them; on other devices it uses the given bounds.

It serves latents too: all query heads share one key head, and the value is the first part of the key.

Does not: write the KV cache, or fill the page table.
"""

import torch

from graphpact.errors import KernelRefusal
from graphpact_kernels import _library
from graphpact_kernels._attend import (
    Keys,
    ScoreOptions,
    StepLayout,
    Steps,
    attend_padded,
    attend_ragged,
    own_slots,
)
from graphpact_kernels._library import define_forms
from graphpact_kernels._triton import prefer_triton

__tracebackhide__ = True  # a driver names the line that calls a kernel

BLOCK = 16
"""Queries, or keys, in one block of the schedule."""


def schedule_size(batch_size: int) -> int:
    """Return how many numbers the schedule of ``batch_size`` requests has: ``1 + 4 * round4(bs)``.

    As in FlashAttention-3's ``get_scheduler_metadata``: a semaphore, then vectors of one number per request.
    """
    return 1 + 4 * _round4(batch_size)


def _round4(n: int) -> int:
    return -(-n // 4) * 4


def _schedule_attention(cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor, out: torch.Tensor) -> None:
    bs = cache_seqlens.shape[0]
    width = _round4(bs)
    out.zero_()
    torch.div(
        cu_seqlens_q[1:] - cu_seqlens_q[:-1] + (BLOCK - 1),
        BLOCK,
        rounding_mode="floor",
        out=out[1 : 1 + bs],
    )
    torch.div(cache_seqlens + (BLOCK - 1), BLOCK, rounding_mode="floor", out=out[1 + width :][:bs])


_SCHEDULE = "schedule_attention(Tensor cu_seqlens_q, Tensor cache_seqlens, Tensor(a!) out) -> ()"
_schedule = define_forms(
    _SCHEDULE, _schedule_attention, on_cuda=prefer_triton(_schedule_attention, "schedule_attention")
)


def schedule_attention(
    cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor, *, out: torch.Tensor, compiled: bool = False
) -> None:
    """Write the schedule of a step into ``out``, on the device.

    Args:
        cu_seqlens_q: ``[bs + 1]`` int32: where each request's queries begin.
        cache_seqlens: ``[bs]`` int32: keys of each request.
        out: ``[>= schedule_size(bs)]`` int32: the semaphore, 0; the number of query blocks of each request;
            the number of key blocks of each request, both padded to a multiple of 4; zeros to the end, so
            that no block of an earlier, larger step remains.
        compiled: Whether the C++ kernel writes it, which `graphpact_kernels.compiled.load` has loaded.
    """
    _schedule[compiled](cu_seqlens_q, cache_seqlens, out)


_steps = Steps()


def _keys(
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_size: int,
    schedule: torch.Tensor | None,
) -> Keys:
    """Return the KV slots of the keys, for all columns of ``page_table``."""
    lens = cache_seqlens.long()
    column = torch.arange(page_size, device=lens.device)
    slots = (page_table[:, :, None] * page_size + column).flatten(1)
    planned = None
    if schedule is not None:
        bs = page_table.shape[0]
        planned = schedule[1 + _round4(bs) :][:bs] * BLOCK
    return Keys(own_slots(slots, lens), lens, planned)


def _step_of(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_seqlen_q: int,
    schedule: torch.Tensor | None,
) -> StepLayout:
    """Return the layout of the checked index tensors."""
    offsets: list[int] = cu_seqlens_q.tolist()
    lengths: list[int] = cache_seqlens.tolist()
    # At least one page, so that queries without keys need no code of their own.
    pages = page_table[:, : max(1, -(-max(lengths, default=0) // page_size))]

    def make() -> StepLayout:
        _check(q, offsets, lengths, page_table, page_size, max_seqlen_q, schedule)
        return StepLayout(offsets, lengths, _keys(pages, cache_seqlens, page_size, schedule))

    numbers = (
        *(tuple(offsets), tuple(lengths)),
        None if schedule is None else tuple(schedule.tolist()),
        *(q.shape[0], tuple(page_table.shape), page_size, max_seqlen_q),
    )
    return _steps.find(numbers, pages, make)


def _check(
    q: torch.Tensor,
    offsets: list[int],
    lengths: list[int],
    page_table: torch.Tensor,
    page_size: int,
    max_seqlen_q: int,
    schedule: torch.Tensor | None,
) -> None:
    """Check the index tensors against each other and the bounds."""
    bs, num_pages = page_table.shape
    if len(offsets) != bs + 1 or len(lengths) != bs:
        raise KernelRefusal(
            f"page_table has {bs} rows, cu_seqlens_q {len(offsets)} and cache_seqlens {len(lengths)}:"
            " each has one for each request, and the offsets have one more",
            rule="GP05",
        )
    if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > q.shape[0]:
        raise KernelRefusal(
            f"cu_seqlens_q is {offsets}, q has {q.shape[0]} rows: offsets begin at 0, do not decrease, and"
            " end within q",
            rule="GP05",
        )
    for i, length in enumerate(lengths):
        num_q = offsets[i + 1] - offsets[i]
        if num_q > max_seqlen_q:
            raise KernelRefusal(f"request {i}: {num_q} queries, max_seqlen_q is {max_seqlen_q}", rule="GP08")
        if not 0 <= length <= num_pages * page_size:
            raise KernelRefusal(
                f"request {i}: {length} keys, its row of page_table has room for {num_pages * page_size}",
                rule="GP13" if length > 0 else "GP04",
            )
    if schedule is not None:
        rest = schedule[1 + 2 * _round4(bs) :]
        if schedule.shape[0] < schedule_size(bs) or bool(schedule[0] != 0) or bool(rest.any()):
            raise KernelRefusal(
                f"scheduler_metadata has {schedule.shape[0]} numbers for {bs} requests: it must begin with 0,"
                f" have at least {schedule_size(bs)} numbers, and zeros after those of the requests",
                rule="GP09",
            )


def _page_table_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_seqlen_q: int,
    scaling: float,
    causal: bool,  # noqa: FBT001  operators are called by position
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scheduler_metadata: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    options = ScoreOptions(scaling, sliding_window, softcap, sinks, causal)
    if not _library.may_read(q):
        keys = _keys(page_table, cache_seqlens, page_size, scheduler_metadata)
        attend_padded(q, k_cache, v_cache, cu_seqlens_q, keys, max_seqlen_q, options, out, lse=lse)
        return
    step = _step_of(
        *(q, cu_seqlens_q, cache_seqlens, page_table, page_size, max_seqlen_q, scheduler_metadata)
    )
    end = step.offsets[-1]
    out[end:].zero_()
    if lse is not None:
        lse[end:].fill_(float("-inf"))
    attend_ragged(q, k_cache, v_cache, step, options, out, lse=lse)


_SCHEMA = (
    "page_table_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens_q,"
    " Tensor cache_seqlens, Tensor page_table, int page_size, int max_seqlen_q, float scaling,"
    " bool causal, int sliding_window, float softcap, Tensor? sinks, Tensor? scheduler_metadata,"
    " Tensor(a!) out, Tensor(b!)? lse) -> ()"
)
_page_table = define_forms(_SCHEMA, _page_table_attention)


def page_table_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_seqlen_q: int,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Attend from the tokens of each request to the pages of its row of a page table.

    Args:
        q: ``[T, num_q_heads, head_dim]``, the requests' queries one after another.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``; may be a view of ``k_cache``.
        cu_seqlens_q: ``[bs + 1]`` int32: where each request's queries begin; rows of ``q`` past the last
            one belong to no request, and their output is zero.
        cache_seqlens: ``[bs]`` int32: keys of each request, 0 for none.
        page_table: ``[bs, pages]`` int32: page numbers; read for ``cache_seqlens`` keys.
        page_size: KV slots in a page.
        max_seqlen_q: Bound on a request's queries.
        scaling: Factor on the scores.
        causal: Whether the last query of a request is at the position of its last key; else every query sees
            every key.
        sliding_window: Keys that a query sees, its own included; None for all.
        softcap: As in `graphpact.LayerSpec`.
        sinks: As in `graphpact.LayerSpec`.
        scheduler_metadata: ``[>= schedule_size(bs)]`` int32, from `schedule_attention`: keys in blocks
            that it does not count are not attended, as in a kernel with a stale schedule. None attends all.
        lse: ``[T, num_q_heads]`` float32 (float64 for float64 queries), written: the log-sum-exp of the
            scores, including the sink: the sink alone for a query that sees no key, or minus infinity
            without sinks, and for a row of no request. None to skip it.
        out: ``[T, num_q_heads, v_head_dim]``, written; None for new memory.
        compiled: Whether the C++ kernel attends, which `graphpact_kernels.compiled.load` has loaded.

    Returns:
        ``[T, num_q_heads, v_head_dim]``; ``out`` if it is given.

    Raises:
        KernelRefusal: The index tensors contradict each other or the bounds (checked on a CPU).
    """
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
    _page_table[compiled](
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        page_size,
        max_seqlen_q,
        scaling,
        causal,
        sliding_window or 0,
        softcap or 0.0,
        sinks,
        scheduler_metadata,
        out,
        lse,
    )
    return out


def merge_states(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> torch.Tensor:
    """Return the attention over two disjoint sets of keys, from the attention over each.

    As FlashInfer's ``merge_state`` and SGLang's ``merge_state_v2``; cascade attention uses it.

    Args:
        out: ``[T, heads, dim]`` over the first set.
        lse: ``[T, heads]`` float32, its log-sum-exp; minus infinity for an empty set.
        other: ``[T, heads, dim]`` over the second set.
        other_lse: ``[T, heads]`` float32.

    Returns:
        ``[T, heads, dim]``; zeros where both sets are empty.
    """
    most = torch.maximum(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    mine, theirs = torch.exp(lse - most), torch.exp(other_lse - most)
    total = (mine + theirs).clamp_min(torch.finfo(lse.dtype).tiny)
    share = (mine / total)[..., None], (theirs / total)[..., None]
    return (out * share[0] + other * share[1]).to(out.dtype)
