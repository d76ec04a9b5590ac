"""Attention over a paged KV cache, from FlashInfer's index tensors.

Arguments and checks are those of FlashInfer's paged wrappers (``qo_indptr``, ``kv_indptr``, ``kv_indices``,
``kv_last_page_len``): the last query offset must be the number of query rows, and a causal request must have
at least as many keys as queries. The mask is FlashInfer's packed one. Like FlashInfer's kernels it reads the
planned chunks of keys from a plan. On a CPU the kernel reads its index tensors on the host and uses the true
lengths; on other devices it uses the given bounds, so that it never waits for the device.

Does not: write the KV cache.
"""

from dataclasses import dataclass

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

__tracebackhide__ = True  # a driver names the line that calls a kernel


@dataclass(frozen=True, slots=True)
class _Layout:
    """The index tensors of queries and keys, and the bounds; see `paged_attention`."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    page_size: int
    max_q_len: int
    max_kv_len: int
    mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    o_indptr: torch.Tensor | None = None
    kv_chunk_size: torch.Tensor | None = None

    def kv_lens(self) -> torch.Tensor:
        """Return ``[bs]``: keys of each request, on the device."""
        pages = self.kv_indptr[1:] - self.kv_indptr[:-1]
        lens = (pages - 1) * self.page_size + self.kv_last_page_len
        return torch.where(pages > 0, lens, 0)

    def planned(self) -> torch.Tensor | None:
        """Return ``[bs]``: the keys that the plan's chunks cover; None without a plan."""
        if self.o_indptr is None or self.kv_chunk_size is None:
            return None
        return (self.o_indptr[1:] - self.o_indptr[:-1]) * self.kv_chunk_size

    def keys(self, kv_lens: torch.Tensor, num_keys: int, planned: torch.Tensor | None) -> Keys:
        """Return the keys of every request, in ``num_keys`` columns, rounded up to whole pages."""
        size, device = self.page_size, kv_lens.device
        if not len(self.kv_indices):  # no request has a key
            return Keys(kv_lens.new_zeros(len(kv_lens), size), kv_lens, planned)
        page = torch.arange(-(-num_keys // size), device=device)
        entry = (self.kv_indptr[:-1, None] + page).clamp_(max=self.kv_indices.shape[0] - 1)
        first = self.kv_indices[entry] * size
        slots = (first[:, :, None] + torch.arange(size, device=device)).flatten(1)
        return Keys(own_slots(slots, kv_lens), kv_lens, planned)


_steps = Steps()


def _step_of(q: torch.Tensor, layout: _Layout) -> StepLayout:
    """Return the layout of the checked index tensors."""
    plan = layout.o_indptr, layout.kv_chunk_size
    qo_indptr: list[int] = layout.qo_indptr.tolist()
    kv_indptr: list[int] = layout.kv_indptr.tolist()
    last_page_len: list[int] = layout.kv_last_page_len.tolist()
    numbers = (
        *(tuple(each) for each in (qo_indptr, kv_indptr, last_page_len)),
        *(None if each is None else tuple(each.tolist()) for each in plan),
        *(q.shape[0], layout.kv_indices.shape[0]),
        *(layout.page_size, layout.max_q_len, layout.max_kv_len),
    )

    def make() -> StepLayout:
        lengths = _check(q, layout, qo_indptr, kv_indptr, last_page_len)
        planned = layout.planned()
        if planned is not None and all(
            most >= length for most, length in zip(planned.tolist(), lengths, strict=True)
        ):
            planned = None  # the plan covers all keys
        keys = layout.keys(torch.tensor(lengths), max([1, *lengths]), planned)
        return StepLayout(qo_indptr, lengths, keys)

    return _steps.find(numbers, layout.kv_indices[: max(kv_indptr[-1], 0)], make)


def _check(
    q: torch.Tensor,
    layout: _Layout,
    qo_indptr: list[int],
    kv_indptr: list[int],
    last_page_len: list[int],
) -> list[int]:
    """Make FlashInfer's checks, and those of the bounds; return the keys of each request."""
    capacity, page_size = layout.kv_indices.shape[0], layout.page_size
    if qo_indptr[0] != 0 or qo_indptr[-1] != q.shape[0]:
        raise KernelRefusal(
            f"qo_indptr goes from {qo_indptr[0]} to {qo_indptr[-1]}, q has {q.shape[0]} rows",
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
        if num_q > layout.max_q_len:
            raise KernelRefusal(
                f"request {i}: {num_q} queries, planned for at most {layout.max_q_len}", rule="GP08"
            )
        if keys > layout.max_kv_len:
            raise KernelRefusal(
                f"request {i}: {keys} keys, planned for at most {layout.max_kv_len}", rule="GP08"
            )
        kv_lens.append(keys)
    return kv_lens


def _attend_ragged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: _Layout,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """Attend with the index tensors read on the host: every request has its own length."""
    step = _step_of(q, layout)
    if not q.shape[0]:
        return
    if layout.mask is None or layout.mask_indptr is None:
        attend_ragged(q, k_cache, v_cache, step, options, out)
        return
    packed, begins, seen = layout.mask, layout.mask_indptr.tolist(), step.keys.seen
    offsets, lengths = step.offsets, step.lengths

    def mask(request: int) -> torch.Tensor:
        shape = offsets[request + 1] - offsets[request], lengths[request]
        bit = torch.arange(shape[0] * shape[1])
        bits = (packed[begins[request] + bit // 8] >> (bit % 8) & 1).bool().view(shape)
        return bits & (torch.arange(shape[1]) < seen[request])

    attend_ragged(q, k_cache, v_cache, step, options, out, mask=mask)


def _attend_padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: _Layout,
    options: ScoreOptions,
    out: torch.Tensor,
) -> None:
    """Attend without host reads: every request is padded to the bounds."""
    keys = layout.keys(layout.kv_lens(), layout.max_kv_len, layout.planned())
    mask = None
    if layout.mask is not None and layout.mask_indptr is not None:
        row = torch.arange(layout.max_q_len, device=q.device)[None, :, None]
        key = torch.arange(keys.slots.shape[1], device=q.device)
        bit = row * keys.lens[:, None, None] + key
        byte = (layout.mask_indptr[:-1, None, None] + bit // 8).clamp_(max=layout.mask.shape[0] - 1)
        mask = (layout.mask[byte] >> (bit % 8) & 1).bool() & (key < keys.seen[:, None, None])
    indptr, max_q_len = layout.qo_indptr, layout.max_q_len
    attend_padded(q, k_cache, v_cache, indptr, keys, max_q_len, options, out, mask=mask)


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
    layout = _Layout(
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        page_size,
        max_q_len,
        max_kv_len,
        mask,
        mask_indptr,
        o_indptr,
        kv_chunk_size,
    )
    options = ScoreOptions(scaling, sliding_window, softcap, sinks)
    attend = _attend_ragged if _library.may_read(q) else _attend_padded
    attend(q, k_cache, v_cache, layout, options, out)


_SCHEMA = (
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr,"
    " Tensor kv_indices, Tensor kv_last_page_len, int page_size, int max_q_len, int max_kv_len,"
    " float scaling, int sliding_window, float softcap, Tensor? sinks, Tensor? mask,"
    " Tensor? mask_indptr, Tensor? o_indptr, Tensor? kv_chunk_size, Tensor(a!) out) -> ()"
)
_paged = define_forms(_SCHEMA, _paged_attention)


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
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    o_indptr: torch.Tensor | None = None,
    kv_chunk_size: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Attend causally, or by a mask, from the last tokens of each request to its pages.

    Args:
        q: ``[T, num_q_heads, head_dim]``, the requests' queries one after another.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``; may be a view of ``k_cache``.
        qo_indptr: ``[bs + 1]`` int32: where each request's queries begin.
        kv_indptr: ``[bs + 1]`` int32: where each request's pages begin in ``kv_indices``.
        kv_indices: ``[>= kv_indptr[-1]]`` int32: page numbers.
        kv_last_page_len: ``[bs]`` int32: keys in each request's last page, 1 to ``page_size``.
        page_size: KV slots in a page.
        max_q_len: Bound on a request's queries.
        max_kv_len: Bound on a request's keys.
        scaling: Factor on the scores.
        sliding_window: Keys that a query sees, its own included; None for all. Ignored with a mask.
        softcap: As in `graphpact.LayerSpec`.
        sinks: As in `graphpact.LayerSpec`.
        mask: ``[capacity]`` uint8: ``num_q * num_kv`` bits of each request, query by query, lowest bit
            first: which keys the query sees. FlashInfer's ``packed_custom_mask``.
        mask_indptr: ``[bs + 1]`` int32: where each request's bytes begin in ``mask``.
        o_indptr: ``[bs + 1]`` int32, of a plan: where each request's chunks begin in the list of chunks.
            Keys that no chunk covers are not attended, as in a kernel with a stale plan.
        kv_chunk_size: ``[1]`` int32, of a plan: keys in a chunk.
        compiled: Whether the C++ kernel attends, which `graphpact_kernels.compiled.load` has loaded.

    Returns:
        ``[T, num_q_heads, v_head_dim]``.

    Raises:
        KernelRefusal: The index tensors contradict each other or the bounds (checked on a CPU).
    """
    out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
    _paged[compiled](
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
        mask,
        mask_indptr,
        o_indptr,
        kv_chunk_size,
        out,
    )
    return out
