"""The data that a recorded attention kernel reads from a builder's metadata, and models of such kernels.

Metadata objects of different engines have different fields. A graph keeps the tensors of the captured object
by address, and its host numbers by value. A reader takes the kernel's arguments from the object. A model of
the kernel then computes on a CPU what the real kernel computes, from the same arguments.

    PagedReads       requests over pages of a KV cache, in one launch or several (`Part`)
    IndexedReads     requests over a list of KV slots, with the offset of each request in it
    RecurrentReads   requests with recurrent states; see `graphpact_adapters.recurrent`

The models of the first two are the kernels of `graphpact_kernels`, which refuse reads out of bounds.

Does not: know an engine's metadata (see `graphpact_adapters.vllm.readers`), or build it; list the tensors of
reads (see ``read_leaves``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch

from graphpact.attention import KVBuffers, LayerSpec, new_kv
from graphpact.errors import KernelRefusal, named_options
from graphpact_kernels import (
    AttendCall,
    PagedRows,
    PageTableCall,
    PageTableRows,
    ScoreOptions,
    define_kernel,
    page_table_attention,
    paged_attention,
)


class Reads(Protocol):
    """The reads of a kernel: a dataclass with tensors, host numbers, and tuples of such dataclasses."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Write keys and values, attend, and return ``[T, num_q_heads, v_head_dim]``."""


@named_options
@dataclass(frozen=True)
class Part:
    """One launch of a paged attention kernel, for requests that follow each other in the batch.

    Args:
        seq_lens: ``[n]`` int32: keys of each request, those of this step included; 0 for a padding row. A
            tuple of host numbers if each request has its own recorded launch.
        block_table: ``[n, blocks]`` int32: block ids, read for ``seq_lens`` keys.
        query_start_loc: ``[n + 1]`` int32: where each request's queries begin, relative to the first query of
            the part. None if every request has ``query_len`` queries. A tuple of host numbers as above.
        query_len: Queries of each request, with ``query_start_loc=None``.
        first_token: The index of the part's first query in the batch.
        num_tokens: The number of its queries, those of padding rows included.
        max_query_len: The bound on a request's queries with which the kernel is launched, or None.
        max_seq_len: The bound on a request's keys, or None.
        causal: Whether a query sees no later key.
        name: The field of the metadata that holds this part, such as ``decode``, for findings; "" if the
            metadata object itself is the part.
        names: The metadata's names for the fields above, where they differ, for findings.
    """

    seq_lens: torch.Tensor | tuple[int, ...]
    block_table: torch.Tensor
    query_start_loc: torch.Tensor | tuple[int, ...] | None = None
    query_len: int | None = None
    first_token: int = 0
    num_tokens: int = 0
    max_query_len: int | None = None
    max_seq_len: int | None = None
    causal: bool = True
    name: str = field(default="", compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)


@named_options
@dataclass(frozen=True)
class PagedReads:
    """The reads of paged attention in a step.

    Args:
        parts: The launches, in the order of their tokens.
        slot_mapping: ``[T]`` int64: the KV slot that each token writes; -1 for no write.
        num_tokens: The number of tokens that are written and attended, padding tokens included.
    """

    parts: tuple[Part, ...]
    slot_mapping: torch.Tensor
    num_tokens: int

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Write keys and values to ``slot_mapping``, and attend part by part. Rows of no part are zero.

        Raises:
            KernelRefusal: The index tensors contradict each other or the bounds of a launch.
        """
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        _write_new(k, v, layer, self.slot_mapping, self.num_tokens, (k_cache, v_cache))
        out = q.new_zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        for part in self.parts:
            stop = part.first_token + part.num_tokens
            rows = PageTableRows(
                cu_seqlens_q=_offsets(part, q),
                cache_seqlens=_within(_on_device(part.seq_lens, q), part.max_seq_len),
                page_table=part.block_table,
                page_size=page_size,
                max_seqlen_q=part.num_tokens if part.max_query_len is None else part.max_query_len,
            )
            options = replace(ScoreOptions.of(layer), is_causal=part.causal)
            call = PageTableCall(q[part.first_token : stop], k_cache, v_cache, rows, options)
            out[part.first_token : stop] = page_table_attention(call)[0]
        return out


@named_options
@dataclass(frozen=True)
class IndexedReads:
    """The reads of attention over a list of KV slots in a step.

    Args:
        kv_indptr: ``[n + 1]``: where the slots of each request begin in ``kv_indices``.
        kv_indices: ``[>= kv_indptr[-1]]``: KV slots. The kernel uses only the address and the offsets, so
            pass all of the memory that it may read.
        slot_mapping: ``[T]`` int64: the KV slot that each token writes.
        qo_indptr: ``[n + 1]``: where each request's queries begin; None for one query per request.
        appends_new: Whether each request also has its new keys, after those of the list.
        custom_mask: Which keys each query sees, one byte per key, query by query; None for causal attention.
        mask_indptr: ``[n + 1]`` or ``[n]``: where each request's bytes begin in ``custom_mask``.
        max_query_len: The bound on a request's queries with which the kernel is launched, or None.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    slot_mapping: torch.Tensor
    qo_indptr: torch.Tensor | None = None
    appends_new: bool = False
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    max_query_len: int | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Write keys and values to ``slot_mapping``, and attend. Rows of no request are zero.

        Raises:
            KernelRefusal: The index tensors contradict each other or the bound of the launch.
        """
        del page_size  # the list has slots, not pages
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        _write_new(k, v, layer, self.slot_mapping, q.shape[0], (k_cache, v_cache))
        offsets = self.qo_indptr
        if offsets is None:
            offsets = torch.arange(len(self.kv_indptr), device=q.device)
        out = q.new_zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        _indexed(
            *(q, k_cache, v_cache, offsets, self.kv_indptr, self.kv_indices),
            self.slot_mapping if self.appends_new else None,
            *(self.custom_mask, self.mask_indptr),
            q.shape[0] if self.max_query_len is None else self.max_query_len,
            *(layer.scaling, layer.sliding_window or 0, layer.softcap or 0.0, layer.sinks, out),
        )
        return out


def _write_new(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: LayerSpec,
    slot_mapping: torch.Tensor,
    num_tokens: int,
    caches: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write the new keys and values of a layer, if it has any. The values of latents are part of the keys."""
    new = new_kv(k, v, layer)
    if new is not None:
        latent = layer.kv_lora_rank is not None
        values, target = (new[0][..., :0], caches[0]) if latent else (new[1], caches[1])
        write_slots(new[0], values, slot_mapping, num_tokens, caches[0], target)


def _offsets(part: Part, q: torch.Tensor) -> torch.Tensor:
    if part.query_start_loc is not None:
        return _on_device(part.query_start_loc, q)
    width = part.query_len or 1
    return torch.arange(0, (len(part.seq_lens) + 1) * width, width, dtype=torch.int32, device=q.device)


def _on_device(numbers: torch.Tensor | tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
    """Return numbers as a tensor; a graph keeps host numbers as they are."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    return torch.tensor(numbers, dtype=torch.int32, device=q.device)


# -- the parts of a kernel that page_table_attention lacks ----------------------------------------------


def _write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_tokens: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    slots = slot_mapping[:num_tokens].long()
    if len(slots) < num_tokens or num_tokens > len(k):
        raise KernelRefusal(
            f"cannot write {num_tokens} tokens: slot_mapping has {len(slot_mapping)} entries, and there are"
            f" {len(k)} keys",
            rule="GP05",
        )
    lowest, highest = (int(slots.min()), int(slots.max())) if num_tokens else (0, 0)
    if lowest < -1 or highest >= len(k_cache):
        wrong = lowest if lowest < -1 else highest
        at = int((slots == wrong).nonzero()[0])
        raise KernelRefusal(
            f"token {at} writes KV slot {wrong}; the cache has {len(k_cache)} slots, and -1 writes none",
            rule="GP04",
        )
    kept = slots >= 0
    k_cache[slots[kept]] = k[:num_tokens][kept]
    if v.shape[-1]:
        v_cache[slots[kept]] = v[:num_tokens][kept]


_write_op = define_kernel(
    "write_slots(Tensor k, Tensor v, Tensor slot_mapping, int num_tokens, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache) -> ()",
    _write,
    namespace="graphpact_adapters",
)


def write_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_tokens: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Write the keys and values of the first tokens to their KV slots, in one node of a graph.

    Args:
        k: ``[T, heads, width]``.
        v: ``[T, heads, width]``; width 0 for latents, whose values are part of the keys.
        slot_mapping: ``[T]``: the slot of each token; -1 for no write.
        num_tokens: The number of tokens to write.
        k_cache: ``[slots, heads, width]``, written.
        v_cache: The same for values; for latents it may be ``k_cache``.

    Raises:
        KernelRefusal: GP05 for too few slots or keys, GP04 for a slot beyond the cache.
    """
    _write_op(k, v, slot_mapping, num_tokens, k_cache, v_cache)


def _copy_bounded(seq_lens: torch.Tensor, most: int, out: torch.Tensor) -> None:
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    if longest > most:
        at = int(seq_lens.argmax())
        raise KernelRefusal(
            f"request {at}: {longest} keys; the kernel was launched for at most {most} (max_seq_len)",
            rule="GP08",
        )
    out.copy_(seq_lens)


_bounded_lens = define_kernel(
    "bounded_lens(Tensor seq_lens, int most, Tensor(a!) out) -> ()",
    _copy_bounded,
    namespace="graphpact_adapters",
)


def _within(seq_lens: torch.Tensor, most: int | None) -> torch.Tensor:
    """Return the lengths, checked against the launch bound: keys beyond it would not be attended."""
    if most is None:
        return seq_lens
    out = torch.empty_like(seq_lens)
    _bounded_lens(seq_lens, most, out)
    return out


def _attend_indexed(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    new_slots: torch.Tensor | None,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    max_q_len: int,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    starts, offsets = kv_indptr.tolist(), qo_indptr.tolist()
    if len(offsets) != len(starts):
        raise KernelRefusal(
            f"kv_indptr has {len(starts)} offsets and qo_indptr {len(offsets)}: both need one more than there"
            " are requests",
            rule="GP05",
        )
    rows = []
    for request, (first, stop) in enumerate(pairwise(starts)):
        if not 0 <= first <= stop <= len(kv_indices):
            raise KernelRefusal(
                f"request {request}: its keys are {first}:{stop} of {len(kv_indices)} KV slots; offsets must"
                " not decrease, and must end within the list",
                rule="GP13" if first <= stop else "GP07",
            )
        keys = kv_indices[first:stop].int()
        if new_slots is not None:
            keys = torch.cat([keys, new_slots[offsets[request] : offsets[request + 1]].int()])
        rows.append(keys)
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    options = ScoreOptions(scaling, sliding_window, softcap, sinks)
    if mask is None or mask_indptr is None:
        table = PageTableRows(
            cu_seqlens_q=qo_indptr.int(),
            cache_seqlens=lens,
            page_table=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            page_size=1,
            max_seqlen_q=max_q_len,
        )
        page_table_attention(PageTableCall(q, k_cache, v_cache, table, options), out=out)
        return
    packed, ends = _packed(mask, mask_indptr.tolist(), offsets, lens.tolist())
    paged = PagedRows(
        qo_indptr=qo_indptr.int(),
        kv_indptr=torch.tensor([0, *lens.cumsum(0).tolist()], dtype=torch.int32),
        kv_indices=torch.cat(rows),
        kv_last_page_len=torch.ones_like(lens),
        page_size=1,
        max_q_len=max_q_len,
        max_kv_len=int(lens.max()),
        mask=packed,
        mask_indptr=ends,
    )
    out.copy_(paged_attention(AttendCall(q, k_cache, v_cache, paged, options)))


def _packed(
    mask: torch.Tensor, starts: list[int], offsets: list[int], lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask with a bit for each byte, lowest bit first, and where each request's part begins."""
    parts, begins = [], [0]
    for request, keys in enumerate(lens):
        first, count = starts[request], (offsets[request + 1] - offsets[request]) * keys
        if not 0 <= first <= len(mask) - count:
            raise KernelRefusal(
                f"request {request}: its mask is {first}:{first + count} of {len(mask)} bytes", rule="GP13"
            )
        bits = torch.nn.functional.pad(mask[first : first + count].bool().int(), (0, -count % 8))
        parts.append((bits.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8))
        begins.append(begins[-1] + len(parts[-1]))
    return torch.cat(parts), torch.tensor(begins, dtype=torch.int32)


_indexed = define_kernel(
    "indexed_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr,"
    " Tensor kv_indices, Tensor? new_slots, Tensor? mask, Tensor? mask_indptr, int max_q_len, float scaling,"
    " int sliding_window, float softcap, Tensor? sinks, Tensor(a!) out) -> ()",
    _attend_indexed,
    namespace="graphpact_adapters",
)


class Reader(Protocol):
    """A function that returns the reads of a layer's kernel from a builder's metadata."""

    def __call__(self, metadata: Any, slot_mapping: torch.Tensor) -> Reads:
        """Return the reads of a metadata object.

        Args:
            metadata: The metadata that the builder returned.
            slot_mapping: ``[T]`` int64: the runner's tensor, which kernels get separately from the metadata.
        """


__all__ = [
    "IndexedReads",
    "PagedReads",
    "Part",
    "Reader",
    "Reads",
    "write_slots",
]
