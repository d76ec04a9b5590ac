"""What the portable attention kernels share: dense attention over gathered keys, ragged and padded.

A kernel says where its keys lie (`Keys`) and which queries belong to which request, and calls

    attend_ragged   on a CPU: the offsets and lengths were read on the host, as a kernel may read its own;
                    what is made of them is made once for all layers of a step (`Steps`)
    attend_padded   elsewhere: nothing is read on the host, every request is padded to the bounds

Does not: know any library's index tensors; each kernel turns its own into slots.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from graphpact.tensors import storage_id

__tracebackhide__ = True  # a driver names the line that calls a kernel


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How scores are made and which keys a query sees."""

    scaling: float
    sliding_window: int = 0
    """Keys that a query sees, itself included; 0 for all."""
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    is_causal: bool = True
    """Whether the last query of a request stands at its last key; else every query sees every key."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the keys of every request lie.

    Args:
        slots: ``[bs, nk]``, ``nk`` at least 1: KV slot of each key; past a request's length any valid slot
            of its own.
        lens: ``[bs]``: keys of each request; its last query stands at the last of them.
        planned: ``[bs]``: how many of them a plan covers; None for all. The others are not attended.
    """

    slots: torch.Tensor
    lens: torch.Tensor
    planned: torch.Tensor | None = None

    @property
    def seen(self) -> torch.Tensor:
        """``[bs]``: keys of each request that are attended at most."""
        return self.lens if self.planned is None else torch.minimum(self.lens, self.planned)


@dataclass(frozen=True)
class StepLayout:
    """What a kernel on a CPU made of its index tensors: the same for every layer of a step.

    Args:
        offsets: ``bs + 1`` numbers: where each request's queries begin.
        lengths: ``bs`` numbers: keys of each request.
        keys: Where they lie.
        masks: Of requests that bring as many queries each: which keys they see, by options, once made.
    """

    offsets: list[int]
    lengths: list[int]
    keys: Keys
    masks: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def width(self) -> int:
        """Queries of each request where all bring as many; 0 elsewhere."""
        counts = {end - start for start, end in itertools.pairwise(self.offsets)}
        return counts.pop() if len(counts) == 1 else 0

    def mask(self, options: ScoreOptions) -> torch.Tensor:
        """Return ``[bs, width, nk]``: which keys each query sees by ``options``."""
        by = options.sliding_window, options.is_causal
        if by not in self.masks:
            keys, width = self.keys, self.width
            if width == 1:  # it stands at the last key: no key is behind it
                options = replace(options, is_causal=False)
            at = (keys.lens - width)[:, None] + torch.arange(width)
            self.masks[by] = visible(at, keys.slots.shape[1], keys.seen, options)
        return self.masks[by]


class Steps:
    """The last few steps, by what their index tensors held.

    Layers ask for one step after another, so all but the first find it. Contents are compared and not
    identities: what is found is what would be made again.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Hashable, torch.Tensor, StepLayout]] = []

    def find(
        self, numbers: Hashable, pages: torch.Tensor, make: Callable[[], StepLayout]
    ) -> StepLayout:
        """Return the step of ``numbers`` and ``pages``; made where it is none of the last few."""
        for had, held, step in self._last:
            if had == numbers and torch.equal(held, pages):
                return step
        step = make()
        # Two sets of indices, and the two parts of a cascade.
        self._last = [(numbers, pages.clone(), step), *self._last[:3]]
        return step


def gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[b, nk, heads, dim]`` at ``slots`` ``[b, nk]``."""
    at = slots.reshape(-1)

    def take(cache: torch.Tensor) -> torch.Tensor:
        return cache.index_select(0, at).view(*slots.shape, *cache.shape[1:])

    keys = take(k_cache)
    if storage_id(v_cache) == storage_id(k_cache):
        return keys, keys[..., : v_cache.shape[2]]  # latents: a value is part of its key
    return keys, take(v_cache)


Mask = Callable[[int], torch.Tensor]
"""``request -> [nq, nk]`` bool: which keys its queries see, instead of the causal rule."""


def own_slots(slots: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """Return ``slots`` with every entry past a request's length replaced by its first, or by scratch.

    No weight falls on such keys, and what nobody owns, which may be NaN, is not even multiplied by zero.
    """
    column = torch.arange(slots.shape[1], device=slots.device)
    first = torch.where(lens[:, None] > 0, slots[:, :1], 0)
    return torch.where(column < lens[:, None], slots, first)


def visible(
    q_positions: torch.Tensor, num_keys: int, seen: torch.Tensor, options: ScoreOptions
) -> torch.Tensor:
    """Return ``[b, nq, nk]``: which of ``seen`` ``[b]`` keys queries at ``[b, nq]`` positions see."""
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
    allowed: torch.Tensor,
    options: ScoreOptions,
    *,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend densely. Of a query that sees no key the result is no number, its log-sum-exp minus infinity.

    Args:
        q: ``[b, nq, hq, d]``.
        k: ``[b, nk, hkv, d]``.
        v: ``[b, nk, hkv, dv]``.
        allowed: ``[b, nq, nk]`` bool.
        options: Scaling, cap, sinks.
        with_lse: Whether the log-sum-exp of the scores is wanted.

    Returns:
        ``[b, nq, hq, dv]``, and ``[b, nq, hq]`` float32 (float64 of float64) or None.
    """
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
    lse = None
    if options.softcap == 0.0 and options.sinks is None and not with_lse:
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=options.scaling
        )
    else:
        wide = lse_dtype(q)  # as a kernel accumulates: 16 bits are too few for scores
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
    return out.reshape(batch, num_q, heads, -1), lse


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exp for queries ``q``: float32, or float64 for float64."""
    return torch.promote_types(q.dtype, torch.float32)


def attend_ragged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: StepLayout,
    options: ScoreOptions,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    mask: Mask | None = None,
) -> None:
    """Attend with offsets and lengths known on the host; rows past the last offset are not written.

    Args:
        q: ``[T, hq, d]``.
        k_cache: ``[num_slots, hkv, d]``.
        v_cache: ``[num_slots, hkv, dv]``; may be a view of ``k_cache``.
        step: Queries and keys.
        options: See `ScoreOptions`.
        out: ``[T, hq, dv]``, written.
        lse: ``[T, hq]`` of `lse_dtype`, written where it is wanted.
        mask: Instead of the causal rule.
    """
    keys, offsets = step.keys, step.offsets
    if mask is None and step.width:
        end = offsets[-1]
        rows = q[:end].view(-1, step.width, *q.shape[1:])
        # Queries without any key are there only where a request has fewer keys than queries, or none.
        fewest = min(step.lengths)
        is_blind = fewest < step.width if options.is_causal else fewest == 0
        part = None if lse is None else lse[:end]
        held = gather(k_cache, v_cache, keys.slots)
        _write(rows, held, step.mask(options), options, out[:end], part, is_blind=is_blind)
        return
    seen = keys.seen
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        length = step.lengths[i]
        slots = keys.slots[i : i + 1, : max(length, 1)]
        if mask is None:
            at = torch.arange(length - (end - start), length)[None]
            allowed = visible(at, slots.shape[1], seen[i : i + 1], options)
        else:
            allowed = mask(i)[None]
        _write(
            q[None, start:end],
            gather(k_cache, v_cache, slots),
            allowed,
            options,
            out[start:end],
            None if lse is None else lse[start:end],
            is_blind=end - start > length if options.is_causal else length == 0,
        )


def _write(
    q: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor],
    allowed: torch.Tensor,
    options: ScoreOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    is_blind: bool,
) -> None:
    """Attend from ``q`` ``[b, nq, hq, d]`` to what is ``held`` and write all its rows."""
    result, sums = dense(q, *held, allowed, options, with_lse=lse is not None)
    if is_blind:
        result = _without_blind(result, allowed)
    out.copy_(result.flatten(0, 1))
    if lse is not None and sums is not None:
        lse.copy_(sums.flatten(0, 1))


def _without_blind(result: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return ``[b, nq, hq, dv]`` with zeros for each query that sees no key."""
    return result.masked_fill(~allowed.any(dim=-1)[:, :, None, None], 0.0)


def attend_padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_indptr: torch.Tensor,
    keys: Keys,
    max_q_len: int,
    options: ScoreOptions,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    """Attend without reading anything on the host: every request padded to ``max_q_len`` queries.

    Args:
        q: ``[T, hq, d]``.
        k_cache: ``[num_slots, hkv, d]``.
        v_cache: ``[num_slots, hkv, dv]``; may be a view of ``k_cache``.
        q_indptr: ``[bs + 1]``: where each request's queries begin; rows past the last one get zeros.
        keys: Where they lie.
        max_q_len: Bound on a request's queries.
        options: See `ScoreOptions`.
        out: ``[T, hq, dv]``, written.
        lse: ``[T, hq]`` of `lse_dtype`, written where it is wanted.
        mask: ``[bs, max_q_len, nk]`` bool, instead of the causal rule.
    """
    if q_indptr.shape[0] == 1 or not q.shape[0]:  # no request: all rows are nobody's; or no row
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    num_q = q_indptr[1:] - q_indptr[:-1]
    column = torch.arange(max_q_len, device=q.device)
    live = column < num_q[:, None]
    # Rows that are not there repeat the first query of all, and are dropped.
    rows = torch.where(live, q_indptr[:-1, None] + column, 0)
    at = torch.where(live, (keys.lens - num_q)[:, None] + column, 0)
    k, v = gather(k_cache, v_cache, keys.slots)
    allowed = visible(at, k.shape[1], keys.seen, options) if mask is None else mask
    result, sums = dense(q[rows], k, v, allowed, options, with_lse=lse is not None)
    result = _without_blind(result, allowed)
    row = torch.arange(q.shape[0], dtype=q_indptr.dtype, device=q.device)
    request = torch.searchsorted(q_indptr[1:], row, right=True).clamp_(max=num_q.shape[0] - 1)
    place = (row - q_indptr[request]).clamp_(max=max_q_len - 1)
    there = row < q_indptr[-1]
    out.copy_(torch.where(there[:, None, None], result[request, place], 0))
    if lse is not None and sums is not None:
        lse.copy_(torch.where(there[:, None], sums[request, place], float("-inf")))
