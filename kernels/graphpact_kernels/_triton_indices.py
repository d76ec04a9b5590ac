"""The kernels of `graphpact_kernels.indices` in Triton, for a GPU: one launch each.

They compute what the portable kernels of the same names compute, and write the same elements. The grid
depends only on shapes, as a captured launch requires; lengths are read on the device. No program waits for
another: to find where its row begins, a program adds up the rows before it, which reads a few kilobytes from
the GPU's cache.

Nothing is specialised on sizes or alignments, so all batches run the same binary. Otherwise another one might
be compiled in the middle of a step.

Does not: check contents. A request row outside ``req_to_token`` reads other memory.
"""

import contextlib

import torch
import triton
import triton.language as tl

from graphpact.errors import KernelRefusal
from graphpact_kernels.schedule import BLOCK, schedule_size, vector_size

_ROWS = tl.constexpr(1024)
"""The number of rows whose pages or keys a program adds up at once."""
_WIDTH = tl.constexpr(1024)
"""The number of elements that a program writes at once."""
_MOST_PARTS = 16
"""The most programs for one row. In longer rows, each program takes several turns."""
_MOST_CLEARING = 512
"""The most programs that clear the rest of the KV indices."""
_OPTIONS = {"enable_fp_fusion": False}
"""These kernels have nothing to fuse, and Triton 3.9 warns if the option is not set."""


# -- KV indices ------------------------------------------------------------------------------------


@triton.jit
def _span(
    at: tl.tensor,
    mask: tl.tensor,
    kv_lens: tl.tensor,
    num_q: tl.tensor,
    width: tl.tensor,
    window: tl.tensor,
    page_size: tl.constexpr,
) -> tl.tensor:
    """Return, for rows ``at``, the first page that their queries see and the number of keys from there on."""
    lens = tl.load(kv_lens + at, mask=mask, other=0).to(tl.int32)
    first = lens * 0
    if window is not None:
        queries = first + width
        if num_q is not None:
            queries = tl.load(num_q + at, mask=mask, other=0).to(tl.int32)
        first = tl.maximum(lens - queries + 1 - window, 0) // page_size
    return first, lens - first * page_size


@triton.jit
def _pages_before(
    end: tl.tensor,
    kv_lens: tl.tensor,
    num_q: tl.tensor,
    width: tl.tensor,
    window: tl.tensor,
    page_size: tl.constexpr,
) -> tl.tensor:
    """Return the number of pages of the rows before ``end``."""
    total = tl.zeros([_ROWS], tl.int32)
    for start in range(0, end, _ROWS):
        at = start + tl.arange(0, _ROWS)
        mask = at < end
        _, held = _span(at, mask, kv_lens, num_q, width, window, page_size)
        total += tl.where(mask, (held + (page_size - 1)) // page_size, 0)
    return tl.sum(total)


@triton.jit(
    do_not_specialize=[
        *("req_to_token", "req_pool_indices", "kv_lens", "num_q", "kv_indptr", "kv_indices"),
        *("kv_last_page_len", "row_stride", "column_stride", "columns", "num_requests", "num_rows"),
        *("capacity", "width", "window", "parts", "clearing"),
    ]
)
def _write_paged_indices(
    req_to_token: tl.tensor,
    req_pool_indices: tl.tensor,
    kv_lens: tl.tensor,
    num_q: tl.tensor,
    kv_indptr: tl.tensor,
    kv_indices: tl.tensor,
    kv_last_page_len: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    columns: tl.tensor,
    num_requests: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    window: tl.tensor,
    parts: tl.tensor,
    clearing: tl.tensor,
    page_size: tl.constexpr,
) -> None:
    """Write all index tensors: ``parts`` programs for each row, then ``clearing`` for the rest."""
    program = tl.program_id(0)
    row, part = program // parts, program % parts
    lane = tl.arange(0, _WIDTH)
    if row < num_rows:
        first, held = _span(row, row >= 0, kv_lens, num_q, width, window, page_size)
        pages = (held + (page_size - 1)) // page_size
        if (part == 0) | ((part * _WIDTH < pages) & (row < num_requests)):
            begin = _pages_before(row, kv_lens, num_q, width, window, page_size)
            if part == 0:
                tl.store(kv_indptr + row + 1, begin + pages)
                tl.store(kv_last_page_len + row, (held + (page_size - 1)) % page_size + 1)
            if row < num_requests:
                of = req_to_token + tl.load(req_pool_indices + row).to(tl.int64) * row_stride
                for start in range(part * _WIDTH, pages, parts * _WIDTH):
                    page = start + lane
                    column = (first + page) * page_size
                    inside = (page < pages) & (column < columns)  # scratch past the end of the table
                    slots = tl.load(of + column.to(tl.int64) * column_stride, mask=inside, other=0)
                    fits = (page < pages) & (begin + page < capacity)
                    tl.store(kv_indices + begin + page, slots // page_size, mask=fits)
    else:
        turn = program - num_rows * parts
        if turn == 0:
            tl.store(kv_indptr, 0)
        total = _pages_before(num_requests, kv_lens, num_q, width, window, page_size)
        for start in range(total + turn * _WIDTH, capacity, clearing * _WIDTH):
            at = start + lane
            tl.store(kv_indices + at, lane * 0, mask=at < capacity)


def fill_paged_indices(
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
    """Fill FlashInfer's index tensors; the arguments are those of the operator of this name."""
    rows, real, capacity = len(kv_lens), len(req_pool_indices), len(kv_indices)
    _require_sizes(
        f"{rows} rows of {real} requests",
        kv_lens=(rows, max(rows, real)),
        kv_indptr=(len(kv_indptr), rows + 1),
        kv_last_page_len=(len(kv_last_page_len), rows),
        num_q=(rows if num_q is None else len(num_q), rows),
    )
    _require_dense(kv_indptr=kv_indptr, kv_indices=kv_indices, kv_last_page_len=kv_last_page_len)
    parts = _parts(-(-req_to_token.shape[1] // page_size), _MOST_PARTS)
    clearing = _parts(capacity, _MOST_CLEARING)
    with _on(kv_indptr):
        _write_paged_indices[(rows * parts + clearing,)](
            req_to_token,
            req_pool_indices.contiguous(),
            kv_lens.contiguous(),
            None if num_q is None else num_q.contiguous(),
            kv_indptr,
            kv_indices,
            kv_last_page_len,
            *req_to_token.stride(),
            req_to_token.shape[1],
            real,
            rows,
            capacity,
            width,
            sliding_window or None,
            parts,
            clearing,
            page_size=page_size,
            **_OPTIONS,
        )


# -- page tables -----------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        *("req_to_token", "req_pool_indices", "seq_lens", "cache_seqlens", "cu_seqlens_k", "page_table"),
        *("row_stride", "column_stride", "table_stride", "used", "bs", "pages", "uncounted", "parts"),
    ]
)
def _write_page_table(
    req_to_token: tl.tensor,
    req_pool_indices: tl.tensor,
    seq_lens: tl.tensor,
    cache_seqlens: tl.tensor,
    cu_seqlens_k: tl.tensor,
    page_table: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    table_stride: tl.tensor,
    used: tl.tensor,
    bs: tl.tensor,
    pages: tl.tensor,
    uncounted: tl.tensor,
    parts: tl.tensor,
    page_size: tl.constexpr,
) -> None:
    """Write lengths, offsets and table: ``parts`` programs for each request, one for the first offset."""
    program = tl.program_id(0)
    row, part = program // parts, program % parts
    lane = tl.arange(0, _WIDTH)
    if row < bs:
        keys = tl.load(seq_lens + row).to(tl.int32) + uncounted
        if part == 0:
            tl.store(cache_seqlens + row, keys)
            if cu_seqlens_k is not None:
                total = tl.zeros([_ROWS], tl.int32)
                for start in range(0, row, _ROWS):
                    at = start + tl.arange(0, _ROWS)
                    lens = tl.load(seq_lens + at, mask=at < row, other=0).to(tl.int32)
                    total += tl.where(at < row, lens + uncounted, 0)
                tl.store(cu_seqlens_k + row + 1, tl.sum(total) + keys)
        of = req_to_token + tl.load(req_pool_indices + row).to(tl.int64) * row_stride
        out = page_table + row.to(tl.int64) * table_stride
        for start in range(part * _WIDTH, pages, parts * _WIDTH):
            page = start + lane
            held = (page < used) & (page * page_size < keys)
            column = page.to(tl.int64) * page_size
            slots = tl.load(of + column * column_stride, mask=held, other=0)
            tl.store(out + page, slots // page_size, mask=page < pages)
    elif cu_seqlens_k is not None:
        tl.store(cu_seqlens_k, 0)


def fill_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    uncounted: int,
    page_size: int,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor,
) -> None:
    """Fill lengths and page table; the arguments are those of the operator of this name."""
    bs, pages = page_table.shape
    _require_sizes(
        f"{bs} rows of page_table",
        req_pool_indices=(len(req_pool_indices), bs),
        seq_lens=(len(seq_lens), bs),
        cache_seqlens=(len(cache_seqlens), bs),
        cu_seqlens_k=(bs + 1 if cu_seqlens_k is None else len(cu_seqlens_k), bs + 1),
    )
    dense = {"cache_seqlens": cache_seqlens, "page_table": page_table}
    _require_dense(**dense if cu_seqlens_k is None else dense | {"cu_seqlens_k": cu_seqlens_k})
    parts = _parts(pages, _MOST_PARTS)
    with _on(page_table):
        _write_page_table[(bs * parts + 1,)](
            req_to_token,
            req_pool_indices.contiguous(),
            seq_lens.contiguous(),
            cache_seqlens,
            cu_seqlens_k,
            page_table,
            *req_to_token.stride(),
            page_table.stride(0),
            -(-req_to_token.shape[1] // page_size),
            bs,
            pages,
            uncounted,
            parts,
            page_size=page_size,
            **_OPTIONS,
        )


@triton.jit(do_not_specialize=["cu_seqlens_q", "cache_seqlens", "out", "bs", "padded", "size"])
def _write_schedule(
    cu_seqlens_q: tl.tensor,
    cache_seqlens: tl.tensor,
    out: tl.tensor,
    bs: tl.tensor,
    padded: tl.tensor,
    size: tl.tensor,
    block_size: tl.constexpr,
) -> None:
    """Write one block of the schedule: the semaphore, query blocks, key blocks, zeros."""
    at = tl.program_id(0) * _WIDTH + tl.arange(0, _WIDTH)
    request = at - 1
    has_queries = (request >= 0) & (request < bs)
    begin = tl.load(cu_seqlens_q + request, mask=has_queries, other=0)
    end = tl.load(cu_seqlens_q + request + 1, mask=has_queries, other=0)
    request -= padded
    has_keys = (request >= 0) & (request < bs)
    keys = tl.load(cache_seqlens + request, mask=has_keys, other=0)
    count = tl.where(has_queries, end - begin, keys)
    tl.store(out + at, (count + (block_size - 1)) // block_size, mask=at < size)


def schedule_attention(cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor, out: torch.Tensor) -> None:
    """Write the schedule of a step; the arguments are those of the operator of this name."""
    bs = len(cache_seqlens)
    _require_sizes(
        f"{bs} requests",
        cu_seqlens_q=(len(cu_seqlens_q), bs + 1),
        schedule=(len(out), max(len(out), schedule_size(bs))),
    )
    _require_dense(out=out)
    with _on(out):
        _write_schedule[(_parts(len(out)),)](
            cu_seqlens_q.contiguous(),
            cache_seqlens.contiguous(),
            out,
            bs,
            vector_size(bs),
            len(out),
            block_size=BLOCK,
            **_OPTIONS,
        )


# -- launches --------------------------------------------------------------------------------------


def _parts(elements: int, most: int | None = None) -> int:
    """Return the number of programs for ``elements``: one per `_WIDTH`, at least one, at most ``most``."""
    parts = max(1, -(-elements // int(_WIDTH.value)))
    return parts if most is None else min(parts, most)


def _require_sizes(what: str, **sizes: tuple[int, int]) -> None:
    """Raise `KernelRefusal` unless each tensor has as many entries as it needs for ``what``.

    Args:
        what: The rows or requests of the launch.
        sizes: By name: the entries that the tensor has, and that it needs.
    """
    wrong = [
        f"{name} has {has} entries, it needs {needs}" for name, (has, needs) in sizes.items() if has != needs
    ]
    if wrong:
        raise KernelRefusal(f"{what}: {'; '.join(wrong)}", rule="GP05")


def _require_dense(**outputs: torch.Tensor) -> None:
    """Raise `KernelRefusal` unless the last dimension of each output is dense in memory."""
    for name, tensor in outputs.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise KernelRefusal(
                f"{name} has strides {tensor.stride()}: the kernel writes rows of dense memory", rule="GP07"
            )


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context that makes the GPU of ``tensor`` current, because Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
