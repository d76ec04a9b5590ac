"""Attention over a paged KV cache, from FlashInfer's index tensors.

The arguments are those of FlashInfer's paged wrappers (``qo_indptr``, ``kv_indptr``, ``kv_indices``,
``kv_last_page_len``), and so are the checks: the last query offset must be the number of query rows,
and a causal request must have at least as many keys as queries. On a CPU the kernel reads its own
index tensors, as a kernel may, and works on the lengths that are really there; elsewhere it works on
the bounds that it was given, so that it never waits for the device.

Does not: write the KV cache.
"""

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional

from graphpact.kernels._library import define_kernel

__tracebackhide__ = True  # a driver names the line that calls a kernel


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where queries and keys lie, and the bounds; see `paged_attention`."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    page_size: int
    max_q_len: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """How scores are made and which keys a query sees."""

    scaling: float
    sliding_window: int  # 0 for none
    softcap: float  # 0 for none
    sinks: torch.Tensor | None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, rule: _Rule
) -> torch.Tensor:
    """Attend densely: q ``[b, nq, hq, d]``, k and v ``[b, nk, hkv, d]``, allowed ``[b, nq, nk]``."""
    batch, num_q, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Query heads that share a key head become more queries of it: no key is repeated.
    grouped = q.view(batch, num_q, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * num_q, -1)
    mask = allowed[:, None]
    if num_q > 1 and group > 1:
        mask = mask.repeat(1, 1, group, 1)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    if rule.softcap == 0.0 and rule.sinks is None:
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=rule.scaling
        )
    else:
        scores = grouped @ keys.transpose(-1, -2) * rule.scaling
        if rule.softcap != 0.0:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if rule.sinks is not None:
            column = rule.sinks.to(scores.dtype).view(1, kv_heads, group, 1, 1)
            column = column.expand(batch, -1, -1, num_q, 1).reshape(batch, kv_heads, -1, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        if rule.sinks is not None:
            weights = weights[..., :-1]
        out = weights @ values
    out = out.view(batch, kv_heads, group, num_q, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_q, heads, -1)


def _allowed(
    q_positions: torch.Tensor, num_keys: int, kv_lens: torch.Tensor, rule: _Rule
) -> torch.Tensor:
    """Return ``[b, nq, nk]``: causal, within the request's keys, within the window where there is one."""
    key = torch.arange(num_keys, device=q_positions.device)
    at = q_positions[:, :, None]
    allowed = (key <= at) & (key < kv_lens[:, None, None])
    if rule.sliding_window > 0:
        allowed &= key > at - rule.sliding_window
    return allowed


def _key_slots(
    layout: _Layout, kv_lens: torch.Tensor, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[bs, nk]`` twice: the KV slot of every key, and whether the key is there.

    ``nk`` is ``num_keys`` rounded up to whole pages. Keys that are not there repeat the request's own
    first key: no weight falls on them, and what nobody owns, which may be NaN, is not even multiplied
    by zero.
    """
    size, device = layout.page_size, kv_lens.device
    page = torch.arange(-(-num_keys // size), device=device)
    entry = (layout.kv_indptr[:-1, None] + page).clamp_(max=layout.kv_indices.shape[0] - 1)
    first = layout.kv_indices[entry] * size
    slots = (first[:, :, None] + torch.arange(size, device=device)).flatten(1)
    there = torch.arange(slots.shape[1], device=device) < kv_lens[:, None]
    return torch.where(there, slots, slots[:, :1]), there


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return ``cache[slots]``, by the faster of torch's two ways."""
    return cache.index_select(0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:])


def _attend_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: _Layout,
    kv_lens: torch.Tensor,
    num_keys: int,
    rule: _Rule,
) -> torch.Tensor:
    """Attend from one query a request, at its last position."""
    slots, allowed = _key_slots(layout, kv_lens, num_keys)
    if rule.sliding_window > 0:
        key = torch.arange(slots.shape[1], device=q.device)
        allowed = allowed & (key >= kv_lens[:, None] - rule.sliding_window)
    k, v = _gather(k_cache, slots), _gather(v_cache, slots)
    return _attend(q[:, None], k, v, allowed[:, None], rule)[:, 0]


def _check(q: torch.Tensor, layout: _Layout) -> tuple[list[int], list[int]]:
    """Make FlashInfer's checks, and those of the bounds; return query offsets and key counts."""
    qo_indptr: list[int] = layout.qo_indptr.tolist()
    kv_indptr: list[int] = layout.kv_indptr.tolist()
    capacity, page_size = layout.kv_indices.shape[0], layout.page_size
    if qo_indptr[0] != 0 or qo_indptr[-1] != q.shape[0]:
        raise RuntimeError(
            f"qo_indptr goes from {qo_indptr[0]} to {qo_indptr[-1]}, q has {q.shape[0]} rows"
        )
    if kv_indptr[0] != 0 or kv_indptr[-1] > capacity:
        raise RuntimeError(
            f"kv_indptr goes from {kv_indptr[0]} to {kv_indptr[-1]}, kv_indices has {capacity} rows"
        )
    for name, indptr in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if indptr != sorted(indptr):
            raise RuntimeError(f"{name} decreases: {indptr}")
    kv_lens = []
    for i, last in enumerate(layout.kv_last_page_len.tolist()):
        num_q = qo_indptr[i + 1] - qo_indptr[i]
        pages = kv_indptr[i + 1] - kv_indptr[i]
        keys = (pages - 1) * page_size + last if pages else 0
        if pages and not 1 <= last <= page_size:
            raise RuntimeError(f"kv_last_page_len[{i}] is {last}, a page has {page_size} keys")
        if num_q > keys:
            raise RuntimeError(f"request {i}: causal attention of {num_q} queries over {keys} keys")
        if num_q > layout.max_q_len or (layout.max_q_len == 1 and num_q != 1):
            raise RuntimeError(
                f"request {i}: {num_q} queries, planned for at most {layout.max_q_len}"
            )
        if keys > layout.max_kv_len:
            raise RuntimeError(f"request {i}: {keys} keys, planned for at most {layout.max_kv_len}")
        kv_lens.append(keys)
    return qo_indptr, kv_lens


def _attend_ragged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: _Layout,
    rule: _Rule,
    out: torch.Tensor,
) -> None:
    """Attend with the index tensors read on the host: every request at its own length."""
    offsets, lengths = _check(q, layout)
    kv_lens = torch.tensor(lengths)
    if layout.max_q_len == 1:
        out.copy_(_attend_decode(q, k_cache, v_cache, layout, kv_lens, max(lengths), rule))
        return
    slots, _ = _key_slots(layout, kv_lens, max(lengths))
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        length = lengths[i]
        mine = slots[i : i + 1, :length]
        k, v = _gather(k_cache, mine), _gather(v_cache, mine)
        at = torch.arange(length - (end - start), length)[None]
        allowed = _allowed(at, length, kv_lens[i : i + 1], rule)
        dense = _attend(q[None, start:end], k, v, allowed, rule)
        out[start:end] = dense[0]


def _attend_padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: _Layout,
    rule: _Rule,
    out: torch.Tensor,
) -> None:
    """Attend without reading anything on the host: every request padded to the bounds."""
    pages = layout.kv_indptr[1:] - layout.kv_indptr[:-1]
    kv_lens = (pages - 1) * layout.page_size + layout.kv_last_page_len
    num_keys = layout.max_kv_len
    if layout.max_q_len == 1:
        out.copy_(_attend_decode(q, k_cache, v_cache, layout, kv_lens, num_keys, rule))
        return
    slots, _ = _key_slots(layout, kv_lens, num_keys)
    k, v = _gather(k_cache, slots), _gather(v_cache, slots)
    # Rows that are not there repeat the first query of all, and are dropped.
    begin = layout.qo_indptr
    num_q = begin[1:] - begin[:-1]
    column = torch.arange(layout.max_q_len, device=q.device)
    live = column < num_q[:, None]
    rows = torch.where(live, begin[:-1, None] + column, 0)
    at = torch.where(live, (kv_lens - num_q)[:, None] + column, 0)
    allowed = _allowed(at, slots.shape[1], kv_lens, rule)
    dense = _attend(q[rows], k, v, allowed, rule)
    row = torch.arange(q.shape[0], dtype=begin.dtype, device=q.device)
    request = torch.searchsorted(begin[1:], row, right=True).clamp_(max=num_q.shape[0] - 1)
    out.copy_(dense[request, row - begin[request]])


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
    out: torch.Tensor,
) -> None:
    layout = _Layout(
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size, max_q_len, max_kv_len
    )
    rule = _Rule(scaling, sliding_window, softcap, sinks)
    attend = _attend_ragged if q.device.type == "cpu" else _attend_padded
    attend(q, k_cache, v_cache, layout, rule, out)


_paged = define_kernel(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr,"
    " Tensor kv_indices, Tensor kv_last_page_len, int page_size, int max_q_len, int max_kv_len,"
    " float scaling, int sliding_window, float softcap, Tensor? sinks, Tensor(a!) out) -> ()",
    _paged_attention,
)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    max_q_len: int,
    max_kv_len: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally from the last tokens of each request to its pages.

    Args:
        q: ``[T, num_q_heads, head_dim]``, the requests' queries one after another.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``.
        qo_indptr: ``[bs + 1]`` int32: where each request's queries begin.
        kv_indptr: ``[bs + 1]`` int32: where each request's pages begin in ``kv_indices``.
        kv_indices: ``[>= kv_indptr[-1]]`` int32: page numbers.
        kv_last_page_len: ``[bs]`` int32: keys in each request's last page, 1 to ``page_size``.
        page_size: KV slots in a page.
        max_q_len: Bound on a request's queries; 1 selects the decode path, where ``T == bs``.
        max_kv_len: Bound on a request's keys.
        scaling: Factor on the scores.
        sliding_window: Keys that a query sees, itself included; None sees all.
        softcap: As in `graphpact.LayerSpec`.
        sinks: As in `graphpact.LayerSpec`.

    Returns:
        ``[T, num_q_heads, v_head_dim]``.

    Raises:
        RuntimeError: The index tensors contradict each other or the bounds (checked on a CPU).
    """
    out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
    _paged(
        q,
        k_cache,
        v_cache,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        page_size,
        max_q_len,
        max_kv_len,
        scaling,
        sliding_window or 0,
        softcap or 0.0,
        sinks,
        out,
    )
    return out
