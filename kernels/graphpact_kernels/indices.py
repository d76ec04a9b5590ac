"""Kernels that fill the index tensors of a step: offsets, KV indices, page tables, schedules.

    fill_paged_indices    FlashInfer's ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``
    fill_page_table       FlashAttention's and TensorRT-LLM's lengths and page table
    schedule_attention    the schedule of a step, for attention over a page table
    pack_kv_indices, write_indptr   the parts of the first, for backends that compute their own lengths

On a GPU each of the first three takes one launch if Triton is installed
(`graphpact_kernels._triton_indices`), and about ten otherwise.

Does not: attend; see `graphpact_kernels.paged_attention` and `graphpact_kernels.page_table_attention`.
"""

import torch
from torch.nn import functional

from graphpact.errors import KernelRefusal
from graphpact_kernels import _library
from graphpact_kernels._library import define_forms, define_kernel
from graphpact_kernels._triton import prefer_triton
from graphpact_kernels.schedule import BLOCK, key_blocks, query_blocks

__tracebackhide__ = True  # a driver names the line that calls a kernel


def write_indptr(counts: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write ``[0, counts[0], counts[0] + counts[1], ...]`` into ``out``.

    Args:
        counts: ``[n]`` int.
        out: ``[n + 1]`` int32, written.
    """
    out[:1].zero_()
    torch.cumsum(counts, dim=0, dtype=out.dtype, out=out[1:])


# -- KV indices ------------------------------------------------------------------------------------


def _pack_ragged(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    first_page: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
) -> None:
    """Pack with the offsets read on the host: only pages in use are read and written."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    total = int(kv_indptr[-1])
    if total > out.shape[0]:
        raise KernelRefusal(
            f"kv_indices has {out.shape[0]} entries, this batch needs {total} pages", rule="GP13"
        )
    first = 0 if first_page is None else first_page[:, None]
    widest = int((pages + (0 if first_page is None else first_page)).max()) if len(pages) else 0
    table = req_to_token[:, : widest * page_size : page_size][req_pool_indices]
    table = functional.pad(table, (0, widest - table.shape[1]))  # scratch past the end of a row
    at = torch.arange(widest)
    taken = (at >= first) & (at < first + pages[:, None])
    torch.div(table[taken], page_size, rounding_mode="floor", out=out[:total])


def _pack_padded(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    first_page: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
) -> None:
    """Pack without host reads: every entry of ``out`` computes its own page."""
    if not len(req_pool_indices):
        out.zero_()
        return
    at = torch.arange(out.shape[0], dtype=kv_indptr.dtype, device=out.device)
    request = torch.searchsorted(kv_indptr[1:], at, right=True)
    request = request.clamp_(max=req_pool_indices.shape[0] - 1)
    page = at - kv_indptr[request]
    if first_page is not None:
        page = page + first_page[request]
    column = page * page_size
    there = (at < kv_indptr[-1]) & (column < req_to_token.shape[1])
    slots = req_to_token[req_pool_indices[request], torch.where(there, column, 0)]
    out.copy_(torch.where(there, slots // page_size, 0))


def _pack_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    first_page: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
) -> None:
    pack = _pack_ragged if _library.may_read(out) else _pack_padded
    pack(req_to_token, req_pool_indices, kv_indptr, first_page, page_size, out)


_pack = define_kernel(
    "pack_kv_indices(Tensor req_to_token, Tensor req_pool_indices, Tensor kv_indptr,"
    " Tensor? first_page, int page_size, Tensor(a!) out) -> ()",
    _pack_kv_indices,
)


def pack_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor,
    first_page: torch.Tensor | None = None,
) -> None:
    """Write the pages of every request, one after another, into ``out``.

    Args:
        req_to_token: ``[rows, max_context_len]`` int32: KV slot of each position of each request row.
        req_pool_indices: ``[bs]`` int64: the row of each request.
        kv_indptr: ``[bs + 1]`` int32: where each request's pages begin in ``out``.
        page_size: KV slots in a page.
        out: ``[capacity]`` int32, written up to ``kv_indptr[-1]``. On a GPU the host does not know that
            number, so the rest is written too, with zeros: page 0, scratch.
        first_page: ``[bs]`` int: for each request, the index of the first page of its sequence that is
            written; None for 0.

    Raises:
        KernelRefusal: ``out`` is too small (checked on a CPU).
    """
    _pack(req_to_token, req_pool_indices, kv_indptr, first_page, page_size, out)


def _fill_paged_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    num_q: torch.Tensor | None,
    width: int,
    sliding_window: int,
    page_size: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    queries = width if num_q is None else num_q
    first, held, real = None, kv_lens, len(req_pool_indices)
    if sliding_window:
        first = first_page(kv_lens, queries, sliding_window, page_size)
        held = kv_lens - first * page_size
        first = first[:real]
    write_indptr((held + (page_size - 1)) // page_size, out=kv_indptr)
    kv_last_page_len.copy_((held - 1) % page_size + 1)
    if real < len(kv_lens):
        kv_indices.zero_()
    _pack_kv_indices(req_to_token, req_pool_indices, kv_indptr[: real + 1], first, page_size, kv_indices)


_FILL_INDICES = (
    "fill_paged_indices(Tensor req_to_token, Tensor req_pool_indices, Tensor kv_lens, Tensor? num_q,"
    " int width, int sliding_window, int page_size, Tensor(a!) kv_indptr, Tensor(b!) kv_indices,"
    " Tensor(c!) kv_last_page_len) -> ()"
)
_fill_indices = define_forms(
    _FILL_INDICES, _fill_paged_indices, on_cuda=prefer_triton(_fill_paged_indices, "fill_paged_indices")
)


def first_page(
    kv_lens: torch.Tensor, num_q: torch.Tensor | int, sliding_window: int, page_size: int
) -> torch.Tensor:
    """Return ``[rows]``: the page of its sequence that holds the first key that a row's queries see.

    Args:
        kv_lens: ``[rows]`` int: keys of each row, those of its queries included.
        num_q: ``[rows]`` int, or one number for all rows: queries.
        sliding_window: Keys that a query sees, its own included.
        page_size: KV slots in a page.
    """
    return (kv_lens - num_q + 1 - sliding_window).clamp_(min=0) // page_size


def fill_paged_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    num_q: torch.Tensor | int,
    page_size: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sliding_window: int | None = None,
    compiled: bool = False,
) -> None:
    """Fill FlashInfer's index tensors of the keys, in one kernel.

    Args:
        req_to_token: ``[request rows, max_context_len]`` int32: KV slot of each position of each row.
        req_pool_indices: ``[bs]`` int64: the row of each request.
        kv_lens: ``[rows]`` int64, at least ``bs``: keys of each row, those of its queries included. Rows
            after the requests have their keys in page 0, scratch.
        num_q: ``[rows]`` int, or one number for all rows: queries. Read only with a window.
        page_size: KV slots in a page.
        kv_indptr: ``[rows + 1]`` int32, written: where each row's pages begin in ``kv_indices``.
        kv_indices: ``[capacity]`` int32: page numbers, written up to ``kv_indptr[-1]``. It is written to its
            end if there are rows after the requests, or on a GPU, where the host does not know that number.
        kv_last_page_len: ``[rows]`` int32, written: keys in each row's last page.
        sliding_window: Keys that a query sees, its own included: pages before the first key that a row's
            queries see are left out. None for all.
        compiled: Whether the C++ kernel fills, which `graphpact_kernels.compiled.load` has loaded.

    Raises:
        KernelRefusal: ``kv_indices`` is too small (checked on a CPU).
    """
    by_row, width = (num_q, 0) if isinstance(num_q, torch.Tensor) else (None, num_q)
    _fill_indices[compiled](
        req_to_token,
        req_pool_indices,
        kv_lens,
        by_row,
        width,
        sliding_window or 0,
        page_size,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
    )


# -- page tables -----------------------------------------------------------------------------------


def _fill_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    uncounted: int,
    page_size: int,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor,
) -> None:
    torch.add(seq_lens, uncounted, out=cache_seqlens)
    if cu_seqlens_k is not None:
        write_indptr(cache_seqlens, out=cu_seqlens_k)
    used = min(page_table.shape[1], -(-req_to_token.shape[1] // page_size))
    if _library.may_read(page_table):  # compute only the columns in use
        longest = int(cache_seqlens.max()) if len(cache_seqlens) else 0
        used = min(used, -(-longest // page_size))
    page_table[:, used:].zero_()
    first = torch.arange(used, device=page_table.device) * page_size
    slots = req_to_token[:, : used * page_size : page_size][req_pool_indices]
    page_table[:, :used].copy_(torch.where(first < cache_seqlens[:, None], slots // page_size, 0))


_FILL_TABLE = (
    "fill_page_table(Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, int uncounted,"
    " int page_size, Tensor(a!) cache_seqlens, Tensor(b!)? cu_seqlens_k, Tensor(c!) page_table) -> ()"
)
_fill_table = define_forms(
    _FILL_TABLE, _fill_page_table, on_cuda=prefer_triton(_fill_page_table, "fill_page_table")
)


def fill_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    uncounted: int,
    page_size: int,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    compiled: bool = False,
) -> None:
    """Fill the lengths and the page table of every request, in one kernel.

    Args:
        req_to_token: ``[rows, max_context_len]`` int32: KV slot of each position of each request row; read at
            the first slot of each page that a request has keys in.
        req_pool_indices: ``[bs]`` int64: the row of each request.
        seq_lens: ``[bs]`` int64: keys of each request, without ``uncounted``.
        uncounted: Keys of each request, drafts for example, that ``seq_lens`` does not count.
        page_size: KV slots in a page.
        cache_seqlens: ``[bs]`` int32, written: all keys of each request.
        page_table: ``[bs, pages]`` int32, written whole: page numbers, 0 past the last page of a request.
        cu_seqlens_k: ``[bs + 1]`` int32, written: where each request's keys begin; None to skip it.
        compiled: Whether the C++ kernel fills, which `graphpact_kernels.compiled.load` has loaded.
    """
    _fill_table[compiled](
        req_to_token,
        req_pool_indices,
        seq_lens,
        uncounted,
        page_size,
        cache_seqlens,
        cu_seqlens_k,
        page_table,
    )


# -- schedules -------------------------------------------------------------------------------------


def _schedule_attention(cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor, out: torch.Tensor) -> None:
    bs = cache_seqlens.shape[0]
    out.zero_()
    num_q = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    for counts, blocks in ((num_q, query_blocks(out, bs)), (cache_seqlens, key_blocks(out, bs))):
        torch.div(counts + (BLOCK - 1), BLOCK, rounding_mode="floor", out=blocks)


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
        out: ``[>= schedule_size(bs)]`` int32, written whole, with zeros after the blocks of the requests, so
            that no block of an earlier, larger step remains. `graphpact_kernels.schedule` has its layout.
        compiled: Whether the C++ kernel writes it, which `graphpact_kernels.compiled.load` has loaded.
    """
    _schedule[compiled](cu_seqlens_q, cache_seqlens, out)
