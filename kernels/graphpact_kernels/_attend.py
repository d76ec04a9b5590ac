"""Dense attention over gathered keys, ragged and padded: the shared part of the portable attention kernels.

A kernel passes the KV slots of its keys (`Keys`) and the query offsets to

    attend_ragged   on a CPU: offsets and lengths are read on the host, and the layout computed from them is
                    kept for all layers of a step (`LayoutCache`)
    attend_padded   on other devices: nothing is read on the host, every request is padded to the bounds

Does not: know any library's index tensors; each kernel turns its own into KV slots.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from graphpact_kernels.call import AttendCall, ScoreOptions

__tracebackhide__ = True  # a driver names the line that calls a kernel


@dataclass(frozen=True, slots=True)
class Keys:
    """The KV slots of the keys of every request.

    Args:
        slots: ``[bs, nk]``, ``nk`` at least 1: KV slot of each key; any number where no query sees a key.
        lens: ``[bs]``: keys of each request; its last query is at the position of its last key.
        planned: ``[bs]``: the number of keys of each request that a plan covers, or None for all. Other keys
            are not attended.
    """

    slots: torch.Tensor
    lens: torch.Tensor
    planned: torch.Tensor | None = None

    @property
    def seen(self) -> torch.Tensor:
        """``[bs]``: upper bound on the attended keys of each request."""
        return self.lens if self.planned is None else torch.minimum(self.lens, self.planned)


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Which keys the queries of each request see.

    Args:
        slots: ``[b, nk]``: KV slot of each key. A key that no query sees has the slot of one that is seen, or
            scratch: its weight is zero, but NaN times zero is NaN, and its own slot may be unowned memory:
            past the length of the request, or in a page that was freed before a sliding window.
        allowed: ``[b, nq, nk]`` bool: which keys each query sees.
        unseeing: ``[b, nq, 1, 1]`` bool: which queries see no key; None if each sees one.
    """

    slots: torch.Tensor
    allowed: torch.Tensor
    unseeing: torch.Tensor | None

    @classmethod
    def of(cls, slots: torch.Tensor, allowed: torch.Tensor) -> "SeenKeys":
        """Return them for the slots of all keys, ``[b, nk]``, and ``allowed``, ``[b, nq, nk]``."""
        seen = allowed.any(dim=1)
        first = slots.gather(1, seen.int().argmax(dim=1, keepdim=True))
        first = torch.where(seen.any(dim=1, keepdim=True), first, 0)
        return cls(torch.where(seen, slots, first), allowed, ~allowed.any(dim=-1)[:, :, None, None])


@dataclass(frozen=True)
class StepLayout:
    """The layout of a step, computed from a kernel's index tensors on a CPU; all layers share it.

    Args:
        offsets: ``bs + 1`` numbers: where each request's queries begin.
        lengths: ``bs`` numbers: keys of each request.
        keys: The KV slots of the keys.
        cache: Results of `seen_keys`, by window and causality.
    """

    offsets: list[int]
    lengths: list[int]
    keys: Keys
    cache: dict[tuple[int, bool], SeenKeys] = field(default_factory=dict)

    @functools.cached_property
    def width(self) -> int:
        """The number of queries of each request if it is the same for all, else 0."""
        counts = {end - start for start, end in itertools.pairwise(self.offsets)}
        return counts.pop() if len(counts) == 1 else 0

    def seen_keys(self, options: ScoreOptions) -> SeenKeys:
        """Return the keys that the queries see, which are `width` for each request."""
        by = options.sliding_window, options.is_causal
        if by not in self.cache:
            keys, width = self.keys, self.width
            if width == 1:  # the only query is at the last key, so it sees all keys
                options = replace(options, is_causal=False)
            at = (keys.lens - width)[:, None] + torch.arange(width)
            seen = SeenKeys.of(keys.slots, visible(at, keys.slots.shape[1], keys.seen, options))
            if seen.unseeing is not None and not bool(seen.unseeing.any()):
                seen = replace(seen, unseeing=None)
            self.cache[by] = seen
        return self.cache[by]


class LayoutCache:
    """The layouts of the last few steps, by the contents of their index tensors.

    All layers of a step need the same layout, so only the first layer computes it. Contents are compared, not
    identities, so a cached layout equals a new one.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Hashable, torch.Tensor, StepLayout]] = []

    def find(self, numbers: Hashable, pages: torch.Tensor, make: Callable[[], StepLayout]) -> StepLayout:
        """Return the layout of ``numbers`` and ``pages``; if it is not cached, ``make`` it."""
        for its_numbers, its_pages, layout in self._last:
            if its_numbers == numbers and torch.equal(its_pages, pages):
                return layout
        layout = make()
        # Four layouts are enough for two sets of indices, or for the two parts of a cascade.
        self._last = [(numbers, pages.clone(), layout), *self._last[:3]]
        return layout


def gather(call: AttendCall[object], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[b, nk, num_kv_heads, dim]`` at ``slots`` ``[b, nk]`` of the caches."""
    at = slots.reshape(-1)

    def take(cache: torch.Tensor) -> torch.Tensor:
        return cache.index_select(0, at).view(*slots.shape, *cache.shape[1:])

    keys = take(call.k_cache)
    # The value of a latent is its first part. Two caches may share a storage too.
    if call.v_cache.data_ptr() == call.k_cache.data_ptr() and call.v_cache.stride() == call.k_cache.stride():
        return keys, keys[..., : call.v_cache.shape[2]]
    return keys, take(call.v_cache)


Mask = Callable[[int], torch.Tensor]
"""``request -> [nq, nk]`` bool: which keys its queries see, instead of the causal rule."""


def visible(
    q_positions: torch.Tensor, num_keys: int, seen: torch.Tensor, options: ScoreOptions
) -> torch.Tensor:
    """Return ``[b, nq, nk]``: which of the first ``seen`` ``[b]`` keys each query sees, by its position."""
    key = torch.arange(num_keys, device=q_positions.device)
    at = q_positions[:, :, None]
    allowed = (key < seen[:, None, None]).expand(*q_positions.shape, num_keys)
    if options.is_causal:
        allowed = allowed & (key <= at)
    if options.sliding_window > 0:
        allowed = allowed & (key > at - options.sliding_window)
    return allowed


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: SeenKeys,
    options: ScoreOptions,
    *,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend densely. The output of a query that sees no key is zero.

    Its log-sum-exp is the logit of the sink, or minus infinity without sinks.

    Args:
        q: ``[b, nq, hq, d]``.
        k: ``[b, nk, hkv, d]``.
        v: ``[b, nk, hkv, dv]``.
        seen: Which of the keys each query sees.
        options: Scaling, softcap, sinks.
        with_lse: Whether to return the log-sum-exp of the scores.

    Returns:
        ``[b, nq, hq, dv]``, and ``[b, nq, hq]`` float32 (float64 of float64) or None.
    """
    batch, num_q, heads, _ = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Query heads that share a key head become queries of that head, so that no key is repeated.
    grouped = q.view(batch, num_q, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * num_q, -1)
    mask = seen.allowed[:, None]
    if num_q > 1 and group > 1:
        mask = mask.repeat(1, 1, group, 1)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    lse = None
    if options.softcap == 0.0 and options.sinks is None and not with_lse:
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=options.scaling
        )
    else:
        wide = lse_dtype(q)  # scores need more than 16 bits
        scores = grouped.to(wide) @ keys.to(wide).transpose(-1, -2) * options.scaling
        if options.softcap != 0.0:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if options.sinks is not None:
            column = options.sinks.to(scores.dtype).view(1, kv_heads, group, 1, 1)
            column = column.expand(batch, -1, -1, num_q, 1).reshape(batch, kv_heads, -1, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        if with_lse:
            lse = torch.logsumexp(scores, dim=-1)
            lse = lse.view(batch, kv_heads, group, num_q).permute(0, 3, 1, 2)
            lse = lse.reshape(batch, num_q, heads)
        if options.sinks is not None:
            weights = weights[..., :-1]
        out = (weights @ values.to(wide)).to(q.dtype)
    out = out.view(batch, kv_heads, group, num_q, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(batch, num_q, heads, -1)
    return out if seen.unseeing is None else out.masked_fill(seen.unseeing, 0.0), lse


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exp for queries ``q``: float32, or float64 for float64."""
    return torch.promote_types(q.dtype, torch.float32)


def attend_ragged(
    call: AttendCall[object],
    layout: StepLayout,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    mask: Mask | None = None,
) -> None:
    """Attend with offsets and lengths from the host; rows past the last offset are not written.

    Args:
        call: Queries, caches, options.
        layout: Offsets of the queries, KV slots of the keys.
        out: ``[T, num_q_heads, v_head_dim]``, written.
        lse: ``[T, num_q_heads]`` of `lse_dtype`, written; None to skip it.
        mask: Replaces the causal rule.
    """
    keys, offsets, options = layout.keys, layout.offsets, call.options
    if mask is None and layout.width:
        end = offsets[-1]
        rows = call.q[:end].view(-1, layout.width, *call.q.shape[1:])
        part = None if lse is None else lse[:end]
        _write(call, rows, layout.seen_keys(options), out[:end], part)
        return
    seen = keys.seen
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        length = layout.lengths[i]
        slots = keys.slots[i : i + 1, : max(length, 1)]
        if mask is None:
            at = torch.arange(length - (end - start), length)[None]
            allowed = visible(at, slots.shape[1], seen[i : i + 1], options)
        else:
            allowed = mask(i)[None]
        part = None if lse is None else lse[start:end]
        _write(call, call.q[None, start:end], SeenKeys.of(slots, allowed), out[start:end], part)


def _write(
    call: AttendCall[object], q: torch.Tensor, seen: SeenKeys, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Attend from ``q`` ``[b, nq, hq, d]`` to the keys that it sees, and write all rows of ``out``."""
    result, sums = dense(q, *gather(call, seen.slots), seen, call.options, with_lse=lse is not None)
    out.copy_(result.flatten(0, 1))
    if lse is not None and sums is not None:
        lse.copy_(sums.flatten(0, 1))


def attend_padded(
    call: AttendCall[object],
    q_indptr: torch.Tensor,
    keys: Keys,
    max_q_len: int,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    """Attend without host reads: every request is padded to ``max_q_len`` queries.

    Args:
        call: Queries, caches, options.
        q_indptr: ``[bs + 1]``: where each request's queries begin; rows past the last one get zeros.
        keys: The KV slots of the keys.
        max_q_len: Bound on a request's queries.
        out: ``[T, num_q_heads, v_head_dim]``, written.
        lse: ``[T, num_q_heads]`` of `lse_dtype`, written; None to skip it.
        mask: ``[bs, max_q_len, nk]`` bool, replaces the causal rule.
    """
    q, options = call.q, call.options
    if q_indptr.shape[0] == 1 or not q.shape[0]:  # no request, or no query
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    num_q = q_indptr[1:] - q_indptr[:-1]
    column = torch.arange(max_q_len, device=q.device)
    live = column < num_q[:, None]
    # Padding queries repeat query 0 and see no key.
    rows = torch.where(live, q_indptr[:-1, None] + column, 0)
    if mask is None:
        at = (keys.lens - num_q)[:, None] + column
        mask = visible(at, keys.slots.shape[1], keys.seen, options)
    seen = SeenKeys.of(keys.slots, mask & live[:, :, None])
    result, sums = dense(q[rows], *gather(call, seen.slots), seen, options, with_lse=lse is not None)
    row = torch.arange(q.shape[0], dtype=q_indptr.dtype, device=q.device)
    request = torch.searchsorted(q_indptr[1:], row, right=True).clamp_(max=num_q.shape[0] - 1)
    place = (row - q_indptr[request]).clamp_(max=max_q_len - 1)
    there = row < q_indptr[-1]
    out.copy_(torch.where(there[:, None, None], result[request, place], 0))
    if lse is not None and sums is not None:
        lse.copy_(torch.where(there[:, None], sums[request, place], float("-inf")))
