"""Attention over a paged KV cache, from FlashInfer's index tensors.

The arguments are those of FlashInfer's paged wrappers (``qo_indptr``, ``kv_indptr``, ``kv_indices``,
``kv_last_page_len``), and so are the checks: the last query offset must be the number of query rows,
and a causal request must have at least as many keys as queries. On a CPU the kernel reads its own
index tensors, as a kernel may, and works on the lengths that are really there; elsewhere it works on
the bounds that it was given, so that it never waits for the device.

Does not: write the KV cache.
"""

import itertools

import torch
from torch.nn import functional

from graphpact.kernels._library import define_kernel


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scaling: float,
    softcap: float,
    sinks: torch.Tensor | None,
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
    if softcap == 0.0 and sinks is None:
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scaling
        )
    else:
        scores = grouped @ keys.transpose(-1, -2) * scaling
        if softcap != 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, kv_heads, group, 1, 1)
            column = column.expand(batch, -1, -1, num_q, 1).reshape(batch, kv_heads, -1, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        if sinks is not None:
            weights = weights[..., :-1]
        out = weights @ values
    out = out.view(batch, kv_heads, group, num_q, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_q, heads, -1)


def _allowed(
    q_positions: torch.Tensor, num_keys: int, kv_lens: torch.Tensor, sliding_window: int
) -> torch.Tensor:
    """Return ``[b, nq, nk]``: causal, within the request's keys, within the window where there is one."""
    key = torch.arange(num_keys, device=q_positions.device)
    at = q_positions[:, :, None]
    allowed = (key <= at) & (key < kv_lens[:, None, None])
    if sliding_window > 0:
        allowed &= key > at - sliding_window
    return allowed


def _check(
    q: torch.Tensor, qo_indptr: torch.Tensor, kv_lens: torch.Tensor, max_kv_len: int
) -> list[int]:
    """Make FlashInfer's checks on the host and return the query offsets."""
    offsets: list[int] = qo_indptr.tolist()
    if offsets[-1] != q.shape[0]:
        raise RuntimeError(f"qo_indptr[-1] is {offsets[-1]}, q has {q.shape[0]} rows")
    num_q = qo_indptr[1:] - qo_indptr[:-1]
    if bool((num_q < 0).any()):
        raise RuntimeError(f"qo_indptr decreases: {offsets}")
    if bool((kv_lens < num_q).any()):
        raise RuntimeError(
            f"causal attention of more queries than keys: {num_q.tolist()} over {kv_lens.tolist()}"
        )
    if int(kv_lens.max()) > max_kv_len:
        raise RuntimeError(f"{int(kv_lens.max())} keys, planned for at most {max_kv_len}")
    return offsets


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
    pages = kv_indptr[1:] - kv_indptr[:-1]
    kv_lens = (pages - 1) * page_size + kv_last_page_len
    offsets: list[int] | None = None
    if q.device.type == "cpu":
        offsets = _check(q, qo_indptr, kv_lens, max_kv_len)
        max_kv_len = int(kv_lens.max())

    # KV slot of every key of every request. Keys that are not there repeat the request's own first key:
    # no weight falls on them, and what nobody owns, which may be NaN, is not even multiplied by zero.
    key = torch.arange(max_kv_len, device=q.device)
    entry = (kv_indptr[:-1, None] + key // page_size).clamp_(max=kv_indices.shape[0] - 1)
    slots = kv_indices[entry] * page_size + key % page_size
    slots = torch.where(key < kv_lens[:, None], slots, slots[:, :1])

    if max_q_len == 1:
        allowed = _allowed(kv_lens[:, None] - 1, max_kv_len, kv_lens, sliding_window)
        dense = _attend(
            q[:, None], k_cache[slots], v_cache[slots], allowed, scaling, softcap, sinks
        )
        out.copy_(dense[:, 0])
        return

    if offsets is not None:  # ragged: each request on its own, without padding
        for i, (start, end) in enumerate(itertools.pairwise(offsets)):
            if start == end:
                continue
            length = int(kv_lens[i])
            mine = slots[i : i + 1, :length]
            at = torch.arange(length - (end - start), length)[None]
            allowed = _allowed(at, length, kv_lens[i : i + 1], sliding_window)
            dense = _attend(
                q[None, start:end],
                k_cache[mine],
                v_cache[mine],
                allowed,
                scaling,
                softcap,
                sinks,
            )
            out[start:end] = dense[0]
        return

    # Padded to [bs, max_q_len]; rows that are not there repeat the request's first and are dropped.
    num_q = qo_indptr[1:] - qo_indptr[:-1]
    column = torch.arange(max_q_len, device=q.device)
    live = column < num_q[:, None]
    rows = torch.where(live, qo_indptr[:-1, None] + column, 0)
    at = torch.where(live, (kv_lens - num_q)[:, None] + column, 0)
    allowed = _allowed(at, max_kv_len, kv_lens, sliding_window)
    dense = _attend(q[rows], k_cache[slots], v_cache[slots], allowed, scaling, softcap, sinks)
    row = torch.arange(q.shape[0], device=q.device)
    request = torch.searchsorted(qo_indptr[1:], row, right=True)
    request = request.clamp_(max=num_q.shape[0] - 1)
    out.copy_(dense[request, row - qo_indptr[request]])


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
