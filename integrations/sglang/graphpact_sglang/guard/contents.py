"""What a decode or verify graph of SGLang must find in its memory before a replay.

`expected_inputs` has the static inputs: live rows are the scheduler's own, padding rows are what SGLang
reserves: request row 0, KV slot 0, position 0, and the length that the backend asked for. `expected_metadata`
has the fields of attention metadata whose meaning is known by their names (`FIELDS`), computed from the
lengths and ``req_to_token``.

Does not: know other fields, such as plans and split counts; an eager run covers them.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec

from graphpact_guard import Expected
from graphpact_sglang.guard.live_tokens import expected_count

QUERY_OFFSETS = ("qo_indptr", "cu_seqlens_q")
"""Fields that say where the queries of each request begin."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The padded rows of one decode or verify step.

    Args:
        raw: Live requests.
        padded: Requests with padding.
        width: Queries of a request: 1, or draft tokens.
        is_tree: Whether the draft tokens are a tree, not a chain.
        seq_lens: ``[padded]`` int: keys of each request, without draft tokens.
        requests: ``[padded]`` int: its row in ``req_to_token``.
        req_to_token: ``[rows, max_context_len]`` int32: KV slots.
        page_size: KV slots in a page.
    """

    raw: int
    padded: int
    width: int
    is_tree: bool
    seq_lens: torch.Tensor
    requests: torch.Tensor
    req_to_token: torch.Tensor
    page_size: int

    @classmethod
    def of(cls, runner: Any) -> "DecodeRows":
        """Return the rows of the step that a decode runner has loaded."""
        pool = runner.model_runner.req_to_token_pool
        return cls(
            runner.raw_bs,
            runner.bs,
            runner.captured_req_width,
            runner.captured_req_width > 1 and get_spec().speculative_eagle_topk > 1,
            runner.buffers.seq_lens[: runner.bs],
            runner.buffers.req_pool_indices[: runner.bs],
            pool.req_to_token,
            runner.model_runner.page_size,
        )


def expected_inputs(runner: Any, batch: Any) -> Iterator[Expected]:
    """Yield what the static inputs of a decode runner must be for the live ``batch``."""
    width = runner.captured_req_width
    fields = (
        *request_fields(runner),
        ("out_cache_loc", width, 0),
        ("positions", width, 0),
        ("input_ids", width, None),
    )
    yield from expected_rows(runner, {name: getattr(batch, name, None) for name, _, _ in fields}, fields)
    count = getattr(batch, "global_num_token_non_padded", None)
    if count is not None:
        yield from expected_count(runner, int(count), runner.bs * width)


def request_fields(runner: Any) -> Iterator[tuple[str, int, float | None]]:
    """Yield the fields with a row for each request that every runner has; see `expected_rows`."""
    yield "seq_lens", 1, runner.seq_len_fill_value
    yield "seq_lens_cpu", 1, runner.seq_len_fill_value
    yield "req_pool_indices", 1, 0


def expected_rows(
    runner: Any, live: Mapping[str, torch.Tensor | None], fields: Iterable[tuple[str, int, float | None]]
) -> Iterator[Expected]:
    """Yield what static inputs of a runner must be.

    Args:
        runner: A runner that pads requests.
        live: What the live batch has in each field; fields that it lacks are not checked.
        fields: Name, rows of a request, and what padding rows must hold; None if they may hold anything.
    """
    for field, each, pad in fields:
        given, memory = live.get(field), getattr(runner.buffers, field, None)
        if given is None or memory is None or given.shape[1:] != memory.shape[1:]:
            continue
        rows, raw = (runner.bs if pad is not None else runner.raw_bs) * each, runner.raw_bs * each
        expected = torch.full_like(memory[:rows], pad or 0)
        expected[:raw] = given[:raw]
        yield Expected(
            owner=type(runner.buffers).__name__,
            field=field,
            actual=memory[:rows],
            expected=expected,
            live=raw,
        )


def expected_metadata(
    rows: DecodeRows, leaves: Mapping[tuple[str, str], torch.Tensor], only: Container[str] | None = None
) -> Iterator[Expected]:
    """Yield what the known fields among ``leaves`` must be; see `GraphRecord.leaves`.

    Args:
        rows: The rows of the step.
        leaves: The tensors by owner and field.
        only: The fields that are checked; None for all.
    """
    for (owner, field), memory in leaves.items():
        expect = FIELDS.get(field)
        if expect is not None and (only is None or field in only):
            yield from expect(rows, owner, field, memory)


def _uniform_offsets(rows: DecodeRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    actual = memory[: rows.padded + 1]
    expected = torch.arange(rows.padded + 1, dtype=memory.dtype, device=memory.device) * rows.width
    yield Expected(owner=owner, field=field, actual=actual, expected=expected, live=rows.raw + 1, rule="GP07")


def _lengths(rows: DecodeRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    # FlashAttention attends to the drafts of a tree in a second call.
    num_drafts = rows.width if rows.width > 1 and not rows.is_tree else 0
    expected = rows.seq_lens + num_drafts
    actual = memory[: rows.padded]
    yield Expected(owner=owner, field=field, actual=actual, expected=expected.to(memory.dtype), live=rows.raw)


def _key_offsets(rows: DecodeRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    if rows.width > 1:  # some backends count draft tokens here and some do not
        return
    expected = torch.zeros(rows.padded + 1, dtype=memory.dtype, device=memory.device)
    torch.cumsum(rows.seq_lens, 0, dtype=memory.dtype, out=expected[1:])
    yield Expected(
        owner=owner, field=field, actual=memory[: rows.padded + 1], expected=expected, live=rows.raw + 1
    )


def _slots(rows: DecodeRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    if rows.width > 1:
        return
    lengths = rows.seq_lens.tolist()
    parts = [rows.req_to_token[row, :n] for row, n in zip(rows.requests.tolist(), lengths, strict=True)]
    expected = torch.cat(parts).to(memory.dtype)
    yield Expected(
        owner=owner,
        field=field,
        actual=memory[: len(expected)],
        expected=expected,
        live=sum(lengths[: rows.raw]),
    )


def _pages(rows: DecodeRows, owner: str, field: str, memory: torch.Tensor) -> Iterator[Expected]:
    actual = memory[: rows.padded]
    expected = actual.clone()
    for at, (row, n) in enumerate(zip(rows.requests.tolist(), rows.seq_lens.tolist(), strict=True)):
        pages = rows.req_to_token[row, : n : rows.page_size] // rows.page_size
        expected[at, : len(pages)] = pages.to(memory.dtype)
    yield Expected(owner=owner, field=field, actual=actual, expected=expected, live=rows.raw)


FIELDS: dict[str, Callable[[DecodeRows, str, str, torch.Tensor], Iterator[Expected]]] = {
    "cache_seqlens_int32": _lengths,
    "cu_seqlens_q": _uniform_offsets,
    "qo_indptr": _uniform_offsets,
    "cu_seqlens_k": _key_offsets,
    "kv_indptr": _key_offsets,
    "kv_indices": _slots,
    "page_table": _pages,
}
"""The fields of attention metadata whose meaning is known, by name."""
