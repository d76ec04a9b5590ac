"""What a graph of vLLM must find in its memory before a replay.

The numbers of the scheduler are on the host: lengths and offsets of queries. From them and from the block
table follows what the fields must hold whose meaning is known by their names (`FIELDS`): those of what vLLM
gives to all builders, and those of the metadata that a capture read. Padding rows have no queries and no
keys, on the host too, and padding tokens the slot -1. Cross attention reads the keys of an encoder, whose
numbers are on the host too.

Does not: know other fields, such as plans; an eager run covers them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact_guard import Expected
from graphpact_vllm.seams.builders import Built

PAD_SLOT = -1
_COMMON = "CommonAttentionMetadata"
_GIVEN = ("seq_lens", "query_start_loc", "slot_mapping")
"""The fields of what vLLM gives to all builders that are checked, beside the lengths on the host."""


def has_exact_lengths(vllm_config: Any) -> bool:
    """Return whether the host knows the lengths of a step, and every rank has all keys.

    With asynchronous scheduling of drafts, and with drafts that the device drops, the host has a bound.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return (
        (speculative is None or not vllm_config.scheduler_config.async_scheduling)
        and not getattr(speculative, "enable_adaptive_verification", False)
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
    )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The padded rows of a step.

    Args:
        offsets: ``[rows + 1]`` int64, on the host: where the queries of each request begin.
        seq_lens: ``[rows]`` int64, on the host: keys of each request, its queries included.
        block_table: ``[rows, pages]`` int: its pages.
        page_size: KV slots in a page; 0 for a recurrent state, or if unknown.
        live: Requests with queries; the rest is padding.
        writes_keys: Whether each query has a key, which is written to its slot.
    """

    offsets: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    live: int
    writes_keys: bool = True

    @classmethod
    def of(cls, built: Built) -> "StepRows | None":
        """Return the rows of the step for which ``built`` was made; None if the host lacks its lengths."""
        common = built.common
        if common is None or common.seq_lens_cpu_upper_bound is None:
            return None
        rows = common.num_reqs
        offsets = common.query_start_loc_cpu[: rows + 1].to(torch.int64)
        counts = offsets.diff()
        seq_lens = common.seq_lens_cpu_upper_bound[:rows].to(torch.int64)
        return cls(
            offsets,
            torch.where(counts > 0, seq_lens, 0),
            common.block_table_tensor[:rows],
            0 if built.is_recurrent else built.page_size,  # a state has no slot for each token
            int((counts > 0).sum()),
        )


def expected_of(
    built: Mapping[str, Built], leaves: Mapping[tuple[str, str], torch.Tensor], *, is_dummy: bool = False
) -> Iterator[Expected]:
    """Yield what the known fields must be; see `GraphRecord.leaves`.

    Args:
        built: What each builder made for the step, by its name.
        leaves: The tensors that the capture read, by builder and field.
        is_dummy: Whether the step has no requests: then all that is known is that it must write no KV slot.
    """
    for name in dict.fromkeys(owner for owner, _ in leaves):
        each = built.get(name)
        rows = None if each is None else StepRows.of(each)
        if each is None or rows is None:
            continue
        if is_dummy:
            no_rows = replace(rows, offsets=torch.zeros_like(rows.offsets), live=0)
            yield from _slots(no_rows, _COMMON, "slot_mapping", each.common.slot_mapping)
            continue
        yield from _host_lengths(rows, each.common.seq_lens_cpu_upper_bound)
        given = {field: getattr(each.common, field) for field in _GIVEN}
        for field, memory in given.items():
            yield from FIELDS[field](rows, _COMMON, field, memory)
        known = {memory.data_ptr() for memory in given.values()}
        read = _rows_of_keys(rows, each.common)
        for (owner, field), memory in leaves.items():
            expect = FIELDS.get(field.rpartition(".")[2])
            if owner == name and expect is not None and memory.data_ptr() not in known:
                found = expect(read, owner, field, memory)
                yield from map(_live, found) if each.pads_rows_itself else found


def _rows_of_keys(rows: StepRows, common: Any) -> StepRows:
    """Return the rows with the keys that layers read: those of an encoder in cross attention."""
    if common.encoder_seq_lens_cpu is None:
        return rows
    lengths = torch.from_numpy(common.encoder_seq_lens_cpu[: len(rows.seq_lens)])
    return replace(rows, seq_lens=lengths.to(torch.int64), writes_keys=False)


def _live(expected: Expected) -> Expected:
    """Return what the live rows must be, without padding rows."""
    live = expected.live
    return replace(expected, actual=expected.actual[:live], expected=expected.expected[:live])


def _host_lengths(rows: StepRows, memory: torch.Tensor) -> Iterator[Expected]:
    """Yield the lengths on the host: a plan for padding rows is made of them."""
    yield Expected(
        owner=_COMMON,
        field="seq_lens_cpu_upper_bound",
        actual=memory[: len(rows.seq_lens)],
        expected=rows.seq_lens.to(memory),
        live=rows.live,
    )


def _lengths(rows: StepRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    yield from _rows(rows, owner, field, memory, rows.seq_lens)


def _offsets(rows: StepRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    actual, expected = memory[: len(rows.offsets)], rows.offsets
    if len(actual) == len(expected):
        yield Expected(
            owner=owner,
            field=field,
            actual=actual,
            expected=expected.to(memory),
            live=rows.live + 1,
            rule="GP05",
        )


def _slots(rows: StepRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    if not rows.page_size or not rows.writes_keys:
        return
    expected = torch.full((len(memory),), PAD_SLOT, dtype=memory.dtype)
    counts = rows.offsets.diff()
    for row in range(rows.live):
        begin, count, length = int(rows.offsets[row]), int(counts[row]), int(rows.seq_lens[row])
        position = torch.arange(length - count, length)
        pages = rows.block_table[row].cpu()[position // rows.page_size].long()
        slots = pages * rows.page_size + position % rows.page_size
        expected[begin : begin + count] = slots.to(memory.dtype)
    yield Expected(
        owner=owner,
        field=field,
        actual=memory,
        expected=expected.to(memory.device),
        live=int(rows.offsets[-1]),
    )


def _pages(rows: StepRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    if not rows.page_size or memory.dim() != 2 or len(memory) < rows.live:
        return
    actual = memory[: rows.live]
    expected = actual.clone()
    for row in range(rows.live):
        used = -(-int(rows.seq_lens[row]) // rows.page_size)
        expected[row, :used] = rows.block_table[row, :used].to(memory.dtype)
    yield Expected(owner=owner, field=field, actual=actual, expected=expected, live=rows.live)


def _rows(
    rows: StepRows, owner: str, field: str, memory: torch.Tensor, expected: torch.Tensor
) -> Iterator[Expected]:
    actual = memory[: len(expected)]
    if len(actual) == len(expected):
        yield Expected(owner=owner, field=field, actual=actual, expected=expected.to(memory), live=rows.live)


FIELDS: dict[str, Callable[[StepRows, str, str, torch.Tensor], Iterator[Expected]]] = {
    "seq_lens": _lengths,
    "cache_seqlens": _lengths,
    "query_start_loc": _offsets,
    "qo_indptr": _offsets,
    "slot_mapping": _slots,
    "block_table": _pages,
    "page_table": _pages,
}
"""The fields of attention metadata whose meaning is known, by name."""
