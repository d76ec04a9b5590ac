"""Attention over a paged KV cache, from FlashInfer's index tensors.

Arguments and checks are those of FlashInfer's paged wrappers (``qo_indptr``, ``kv_indptr``, ``kv_indices``,
``kv_last_page_len``): the last query offset must be the number of query rows, and a causal request must have
at least as many keys as queries. The mask is FlashInfer's packed one. Like FlashInfer's kernels it reads the
planned chunks of keys from a plan. On a CPU the kernel reads its index tensors on the host and uses the true
lengths; on other devices it uses the given bounds, so that it never waits for the device.

Does not: write the KV cache; see `graphpact_kernels.paged_cache`.
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
)
from graphpact_kernels._library import define_forms
from graphpact_kernels.call import AttendCall, ScoreOptions

__tracebackhide__ = True  # a driver names the line that calls a kernel


@dataclass(slots=True, kw_only=True)
class PagedRows:
    """The index tensors of a call: the queries of each row, and the pages of its keys.

    Args:
        qo_indptr: ``[rows + 1]`` int32: where each row's queries begin.
        kv_indptr: ``[rows + 1]`` int32: where each row's pages begin in ``kv_indices``.
        kv_indices: ``[>= kv_indptr[-1]]`` int32: page numbers, read up to ``kv_indptr[-1]``.
        kv_last_page_len: ``[rows]`` int32: keys in each row's last page, 1 to ``page_size``.
        page_size: KV slots in a page.
        max_q_len: Bound on the queries of a row.
        max_kv_len: Bound on the keys of a row.
        mask: ``[capacity]`` uint8: ``num_q * num_kv`` bits of each row, query by query, lowest bit first:
            which keys the query sees, instead of causality and window. FlashInfer's ``packed_custom_mask``.
            None without a mask.
        mask_indptr: ``[rows + 1]`` int32: where each row's bytes begin in ``mask``; None without a mask.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    page_size: int
    max_q_len: int = bounded()
    max_kv_len: int = bounded()
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of keys of a plan, if there is one; see `paged_attention`."""

    o_indptr: torch.Tensor | None
    kv_chunk_size: torch.Tensor | None

    def planned_keys(self) -> torch.Tensor | None:
        """Return ``[rows]``: the keys that the chunks cover; None without a plan."""
        if self.o_indptr is None or self.kv_chunk_size is None:
            return None
        return (self.o_indptr[1:] - self.o_indptr[:-1]) * self.kv_chunk_size


def _kv_lens(rows: PagedRows) -> torch.Tensor:
    """Return ``[rows]``: keys of each row, on the device."""
    pages = rows.kv_indptr[1:] - rows.kv_indptr[:-1]
    lens = (pages - 1) * rows.page_size + rows.kv_last_page_len
    return torch.where(pages > 0, lens, 0)


def _keys(rows: PagedRows, kv_lens: torch.Tensor, num_keys: int, planned: torch.Tensor | None) -> Keys:
    """Return the keys of every row, in ``num_keys`` columns, rounded up to whole pages."""
    size, device = rows.page_size, kv_lens.device
    if not len(rows.kv_indices):  # no row has a key
        return Keys(kv_lens.new_zeros(len(kv_lens), size), kv_lens, planned)
    page = torch.arange(-(-num_keys // size), device=device)
    entry = (rows.kv_indptr[:-1, None] + page).clamp_(max=rows.kv_indices.shape[0] - 1)
    first = rows.kv_indices[entry] * size
    slots = (first[:, :, None] + torch.arange(size, device=device)).flatten(1)
    return Keys(slots, kv_lens, planned)


_layouts = LayoutCache()


def _layout_of(call: AttendCall[PagedRows], chunks: _Chunks) -> StepLayout:
    """Return the layout of the checked index tensors."""
    rows = call.rows
    qo_indptr: list[int] = rows.qo_indptr.tolist()
    kv_indptr: list[int] = rows.kv_indptr.tolist()
    last_page_len: list[int] = rows.kv_last_page_len.tolist()
    numbers = (
        *(tuple(each) for each in (qo_indptr, kv_indptr, last_page_len)),
        *(None if each is None else tuple(each.tolist()) for each in (chunks.o_indptr, chunks.kv_chunk_size)),
        *(call.q.shape[0], rows.kv_indices.shape[0]),
        *(rows.page_size, rows.max_q_len, rows.max_kv_len),
    )

    def make() -> StepLayout:
        lengths = _check(call, qo_indptr, kv_indptr, last_page_len)
        planned = chunks.planned_keys()
        if planned is not None and all(
            most >= length for most, length in zip(planned.tolist(), lengths, strict=True)
        ):
            planned = None  # the plan covers all keys
        keys = _keys(rows, torch.tensor(lengths), max([1, *lengths]), planned)
        return StepLayout(qo_indptr, lengths, keys)

    return _layouts.find(numbers, rows.kv_indices[: max(kv_indptr[-1], 0)], make)


def _check(
    call: AttendCall[PagedRows], qo_indptr: list[int], kv_indptr: list[int], last_page_len: list[int]
) -> list[int]:
    """Make FlashInfer's checks, check the bounds, and return the keys of each row."""
    rows, num_queries = call.rows, call.q.shape[0]
    capacity, page_size = rows.kv_indices.shape[0], rows.page_size
    if qo_indptr[0] != 0 or qo_indptr[-1] != num_queries:
        raise KernelRefusal(
            f"qo_indptr goes from {qo_indptr[0]} to {qo_indptr[-1]}, q has {num_queries} rows",
            rule="GP05",
        )
    if kv_indptr[0] != 0 or kv_indptr[-1] > capacity:
        raise KernelRefusal(
            f"kv_indptr goes from {kv_indptr[0]} to {kv_indptr[-1]}, kv_indices has {capacity} rows",
            rule="GP13",
        )
    for name, indptr in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if indptr != sorted(indptr):
            raise KernelRefusal(
                f"{name} decreases: {indptr}",
                rule="GP07",
            )
    kv_lens = []
    for i, last in enumerate(last_page_len):
        num_q = qo_indptr[i + 1] - qo_indptr[i]
        pages = kv_indptr[i + 1] - kv_indptr[i]
        keys = (pages - 1) * page_size + last if pages else 0
        if pages and not 1 <= last <= page_size:
            raise KernelRefusal(f"kv_last_page_len[{i}] is {last}, a page has {page_size} keys", rule="GP04")
        if num_q > keys:
            raise KernelRefusal(
                f"request {i}: causal attention of {num_q} queries over {keys} keys", rule="GP04"
            )
        if num_q > rows.max_q_len:
            raise KernelRefusal(
                f"request {i}: {num_q} queries, planned for at most {rows.max_q_len}", rule="GP08"
            )
        if keys > rows.max_kv_len:
            raise KernelRefusal(
                f"request {i}: {keys} keys, planned for at most {rows.max_kv_len}", rule="GP08"
            )
        kv_lens.append(keys)
    return kv_lens


def _attend_ragged(call: AttendCall[PagedRows], chunks: _Chunks, out: torch.Tensor) -> None:
    """Attend with the index tensors read on the host: every row has its own length."""
    rows, layout = call.rows, _layout_of(call, chunks)
    if not call.q.shape[0]:
        return
    if rows.mask is None or rows.mask_indptr is None:
        attend_ragged(call, layout, out)
        return
    packed, begins, seen = rows.mask, rows.mask_indptr.tolist(), layout.keys.seen
    offsets, lengths = layout.offsets, layout.lengths

    def mask(row: int) -> torch.Tensor:
        shape = offsets[row + 1] - offsets[row], lengths[row]
        bit = torch.arange(shape[0] * shape[1])
        bits = (packed[begins[row] + bit // 8] >> (bit % 8) & 1).bool().view(shape)
        return bits & (torch.arange(shape[1]) < seen[row])

    attend_ragged(call, layout, out, mask=mask)


def _attend_padded(call: AttendCall[PagedRows], chunks: _Chunks, out: torch.Tensor) -> None:
    """Attend without host reads: every row is padded to the bounds."""
    rows = call.rows
    keys = _keys(rows, _kv_lens(rows), rows.max_kv_len, chunks.planned_keys())
    mask = None
    if rows.mask is not None and rows.mask_indptr is not None:
        row = torch.arange(rows.max_q_len, device=out.device)[None, :, None]
        key = torch.arange(keys.slots.shape[1], device=out.device)
        bit = row * keys.lens[:, None, None] + key
        byte = (rows.mask_indptr[:-1, None, None] + bit // 8).clamp_(max=rows.mask.shape[0] - 1)
        mask = (rows.mask[byte] >> (bit % 8) & 1).bool() & (key < keys.seen[:, None, None])
    attend_padded(call, rows.qo_indptr, keys, rows.max_q_len, out, mask=mask)


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    max_q_len: int,
    max_kv_len: int,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    o_indptr: torch.Tensor | None,
    kv_chunk_size: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows = PagedRows(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        page_size=page_size,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        mask=mask,
        mask_indptr=mask_indptr,
    )
    options = ScoreOptions(scaling, sliding_window, softcap, sinks)
    attend = _attend_ragged if _library.may_read(q) else _attend_padded
    attend(AttendCall(q, k_cache, v_cache, rows, options), _Chunks(o_indptr, kv_chunk_size), out)


_attention = define_forms(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr,"
    " Tensor kv_indices, Tensor kv_last_page_len, int page_size, int max_q_len, int max_kv_len,"
    " float scaling, int sliding_window, float softcap, Tensor? sinks, Tensor? mask,"
    " Tensor? mask_indptr, Tensor? o_indptr, Tensor? kv_chunk_size, Tensor(a!) out) -> ()",
    _paged_attention,
)


def paged_attention(
    call: AttendCall[PagedRows],
    *,
    o_indptr: torch.Tensor | None = None,
    kv_chunk_size: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Attend causally, or by a mask, from the queries of each row to its pages.

    Args:
        call: Its arguments, with causal options.
        o_indptr: ``[rows + 1]`` int32, of a plan: where each row's chunks begin in the list of chunks.
            Keys that no chunk covers are not attended, as in a kernel with a stale plan. None without a plan.
        kv_chunk_size: ``[1]`` int32, of a plan: keys in a chunk.
        compiled: Whether the C++ kernel attends, which `graphpact_kernels.compiled.load` has loaded.

    Returns:
        ``[T, num_q_heads, v_head_dim]``.

    Raises:
        KernelRefusal: The index tensors contradict each other or the bounds (checked on a CPU).
        ValueError: The options are not causal.
    """
    rows, options = call.rows, call.options
    if not options.is_causal:
        raise ValueError("paged_attention is causal: pass a mask to let a query see other keys")
    out = call.new_output()
    _attention[compiled](
        call.q,
        call.k_cache,
        call.v_cache,
        rows.qo_indptr,
        rows.kv_indptr,
        rows.kv_indices,
        rows.kv_last_page_len,
        rows.page_size,
        rows.max_q_len,
        rows.max_kv_len,
        options.scaling,
        options.sliding_window,
        options.softcap,
        options.sinks,
        rows.mask,
        rows.mask_indptr,
        o_indptr,
        kv_chunk_size,
        out,
    )
    return out
