"""Attention over a page table, from FlashAttention's arguments.

The arguments are those of ``flash_attn_with_kvcache`` (``cu_seqlens_q``, ``cache_seqlens``, ``page_table``,
``scheduler_metadata``), with its semantics: the last query of a row is at the position of its last key, and
the output is zero for a query that sees no key, and for a query past the last offset. On a CPU the kernel
reads its index tensors on the host and checks them; on other devices it uses the given bounds.

It serves latents too: all query heads share one key head, and the value is the first part of the key.

Does not: fill the page table; see `graphpact_kernels.indices`.
"""

from dataclasses import dataclass

import torch

from graphpact import bounded
from graphpact.errors import KernelRefusal
from graphpact_kernels import _library
from graphpact_kernels._attend import (
    Keys,
    LayoutCache,
    StepLayout,
    attend_padded,
    attend_ragged,
    lse_dtype,
)
from graphpact_kernels._library import define_forms
from graphpact_kernels.call import AttendCall, Rows_co, ScoreOptions
from graphpact_kernels.schedule import BLOCK, key_blocks, schedule_size, vector_size

__tracebackhide__ = True  # a driver names the line that calls a kernel


@dataclass(slots=True, kw_only=True)
class PageTableRows:
    """The index tensors of a call: the queries of each row, and the pages of its keys.

    Args:
        cu_seqlens_q: ``[rows + 1]`` int32: where each row's queries begin; queries past the last offset
            belong to no row.
        cache_seqlens: ``[rows]`` int32: keys of each row, 0 for none.
        page_table: ``[rows, pages]`` int32: page numbers; read for ``cache_seqlens`` keys.
        page_size: KV slots in a page.
        max_seqlen_q: Bound on the queries of a row.
    """

    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    max_seqlen_q: int = bounded()


@dataclass(slots=True)
class PageTableCall(AttendCall[Rows_co]):
    """One call of attention over a page table; ``rows`` are `PageTableRows`.

    Args:
        schedule: ``[>= schedule_size(rows)]`` int32, as the kernel's library makes it, or None. The portable
            kernel takes that of `graphpact_kernels.schedule_attention`: keys in blocks that it does not count
            are not attended, as in a kernel with a stale schedule. None attends all keys.
        with_lse: Whether to return the log-sum-exp of the scores.
    """

    schedule: torch.Tensor | None = None
    with_lse: bool = False

    def new_lse(self) -> torch.Tensor:
        """Return uninitialised memory for the log-sum-exp: ``[T, num_q_heads]``, float32 or wider."""
        return self.q.new_empty(self.q.shape[:2], dtype=lse_dtype(self.q))


_layouts = LayoutCache()


def _keys(rows: PageTableRows, pages: torch.Tensor, schedule: torch.Tensor | None) -> Keys:
    """Return the KV slots of the keys in ``pages``, the first columns of the page table or all."""
    lens = rows.cache_seqlens.long()
    column = torch.arange(rows.page_size, device=lens.device)
    slots = (pages[:, :, None] * rows.page_size + column).flatten(1)
    planned = None if schedule is None else key_blocks(schedule, len(pages)) * BLOCK
    return Keys(slots, lens, planned)


def _layout_of(call: PageTableCall[PageTableRows]) -> StepLayout:
    """Return the layout of the checked index tensors."""
    rows, schedule = call.rows, call.schedule
    offsets: list[int] = rows.cu_seqlens_q.tolist()
    lengths: list[int] = rows.cache_seqlens.tolist()
    # At least one page, so that queries without keys need no special case.
    pages = rows.page_table[:, : max(1, -(-max(lengths, default=0) // rows.page_size))]

    def make() -> StepLayout:
        _check(call, offsets, lengths)
        return StepLayout(offsets, lengths, _keys(rows, pages, schedule))

    numbers = (
        *(tuple(offsets), tuple(lengths)),
        None if schedule is None else tuple(schedule.tolist()),
        *(call.q.shape[0], tuple(rows.page_table.shape), rows.page_size, rows.max_seqlen_q),
    )
    return _layouts.find(numbers, pages, make)


def _check(call: PageTableCall[PageTableRows], offsets: list[int], lengths: list[int]) -> None:
    """Check the index tensors against each other and the bounds."""
    rows, schedule, num_queries = call.rows, call.schedule, call.q.shape[0]
    bs, num_pages = rows.page_table.shape
    if len(offsets) != bs + 1 or len(lengths) != bs:
        raise KernelRefusal(
            f"page_table has {bs} rows: cu_seqlens_q needs {bs + 1} entries (it has {len(offsets)}) and"
            f" cache_seqlens {bs} (it has {len(lengths)})",
            rule="GP05",
        )
    if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > num_queries:
        raise KernelRefusal(
            f"cu_seqlens_q is {offsets}, q has {num_queries} rows: offsets begin at 0, do not decrease, and"
            " end within q",
            rule="GP05",
        )
    for i, length in enumerate(lengths):
        num_q = offsets[i + 1] - offsets[i]
        if num_q > rows.max_seqlen_q:
            raise KernelRefusal(
                f"request {i}: {num_q} queries, max_seqlen_q is {rows.max_seqlen_q}", rule="GP08"
            )
        capacity = num_pages * rows.page_size
        if not 0 <= length <= capacity:
            raise KernelRefusal(
                f"request {i}: {length} keys, its row of page_table has room for {capacity}",
                rule="GP13" if length > 0 else "GP04",
            )
    if schedule is not None:
        rest = schedule[1 + 2 * vector_size(bs) :]
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
    rows = PageTableRows(
        cu_seqlens_q=cu_seqlens_q,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        page_size=page_size,
        max_seqlen_q=max_seqlen_q,
    )
    options = ScoreOptions(scaling, sliding_window, softcap, sinks, causal)
    call = PageTableCall(q, k_cache, v_cache, rows, options, scheduler_metadata)
    if not _library.may_read(q):
        keys = _keys(rows, page_table, scheduler_metadata)
        attend_padded(call, cu_seqlens_q, keys, max_seqlen_q, out, lse=lse)
        return
    layout = _layout_of(call)
    end = layout.offsets[-1]
    out[end:].zero_()
    if lse is not None:
        lse[end:].fill_(float("-inf"))
    attend_ragged(call, layout, out, lse=lse)


_attention = define_forms(
    "page_table_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens_q,"
    " Tensor cache_seqlens, Tensor page_table, int page_size, int max_seqlen_q, float scaling,"
    " bool causal, int sliding_window, float softcap, Tensor? sinks, Tensor? scheduler_metadata,"
    " Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _page_table_attention,
)


def page_table_attention(
    call: PageTableCall[PageTableRows],
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from the queries of each row to the pages of its row of a page table.

    Args:
        call: Its arguments.
        out: ``[T, num_q_heads, v_head_dim]``, written; None for new memory.
        lse: ``[T, num_q_heads]`` float32 (float64 for float64 queries), written; None for new memory. Only
            with ``call.with_lse``.
        compiled: Whether the C++ kernel attends, which `graphpact_kernels.compiled.load` has loaded.

    Returns:
        The output, and the log-sum-exp of the scores, or None without ``call.with_lse``. The log-sum-exp
        includes the sink: for a query that sees no key it is the logit of the sink, or minus infinity without
        sinks. For a query of no row it is minus infinity.

    Raises:
        KernelRefusal: The index tensors contradict each other or the bounds (checked on a CPU).
    """
    rows, options = call.rows, call.options
    if out is None:
        out = call.new_output()
    if call.with_lse and lse is None:
        lse = call.new_lse()
    _attention[compiled](
        call.q,
        call.k_cache,
        call.v_cache,
        rows.cu_seqlens_q,
        rows.cache_seqlens,
        rows.page_table,
        rows.page_size,
        rows.max_seqlen_q,
        options.scaling,
        options.is_causal,
        options.sliding_window,
        options.softcap,
        options.sinks,
        call.schedule,
        out,
        lse,
    )
    return out, lse


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
