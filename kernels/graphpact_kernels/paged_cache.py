"""Kernels that move indices and values in and out of a paged KV cache.

Does not: attend.
"""

import torch
from torch.nn import functional

from graphpact.errors import KernelRefusal
from graphpact_kernels import _library
from graphpact_kernels._library import declare_compiled, define_kernel

__tracebackhide__ = True  # a driver names the line that calls a kernel


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
        first_page: ``[bs]`` int: the page of its sequence that each request begins with; None for the
            first.

    Raises:
        KernelRefusal: ``out`` is too small (checked on a CPU).
    """
    _pack(req_to_token, req_pool_indices, kv_indptr, first_page, page_size, out)


def write_indptr(counts: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write ``[0, counts[0], counts[0] + counts[1], ...]`` into ``out``.

    Args:
        counts: ``[n]`` int.
        out: ``[n + 1]`` int32, written.
    """
    out[:1].zero_()
    torch.cumsum(counts, dim=0, dtype=out.dtype, out=out[1:])


_write = declare_compiled(
    "write_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor out_cache_loc) -> ()"
)


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    compiled: bool = False,
) -> None:
    """Write each token's key and value to its KV slot.

    Args:
        k: ``[T, num_kv_heads, head_dim]``.
        v: ``[T, num_kv_heads, v_head_dim]``.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``.
        out_cache_loc: ``[T]`` int64; padding tokens share scratch slot 0, and the last write wins.
        compiled: Whether one C++ kernel writes both, which `graphpact_kernels.compiled.load` has loaded.
    """
    if compiled:
        _write(k, v, k_cache, v_cache, out_cache_loc)
        return
    k_cache.index_copy_(0, out_cache_loc, k)
    v_cache.index_copy_(0, out_cache_loc, v)
