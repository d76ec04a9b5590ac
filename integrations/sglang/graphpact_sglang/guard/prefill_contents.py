"""What a prefill graph of SGLang must find in its memory before a replay.

A prefill graph has a number of tokens, and a batch has fewer. Its padding tokens are zeros that write KV
slot 0. A full graph has a number of requests too, and those that a batch lacks are empty. Attention of a
breakable graph is an eager call, which gets the live tokens alone, so its offsets must end at their number.

Does not: check inputs under context parallelism, which reorders them, or metadata of a batch that SGLang
splits in two.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphpact_guard import Expected
from graphpact_sglang.guard.contents import QUERY_OFFSETS
from graphpact_sglang.guard.live_tokens import expected_count
from graphpact_sglang.seams.runners import PER_REQUEST

_OFFSETS_OF_ALL = "fa_skip_cu_seqlens_q"
"""Offsets of FlashAttention's kernel without a cache, which wants an owner for every row that it gets."""
_PER_REQUEST = (
    "seq_lens",
    "extend_seq_lens",
    "extend_prefix_lens",
    "extend_start_loc",
    "req_pool_indices",
    "orig_seq_lens",
)
_REORDERS = ("enable_cp_bcg_capture", "enable_cp_v2_bcg_capture")
"""Attributes of a prefill runner that say whether context parallelism reorders its inputs."""


def expected_prefill_inputs(runner: Any, batch: Any, static: Any) -> Iterator[Expected]:
    """Yield what the static inputs of a prefill runner must be after it has loaded a batch.

    Args:
        runner: SGLang's ``PrefillCudaGraphRunner``.
        batch: The live batch.
        static: The padded batch that the runner made of it.
    """
    if any(getattr(runner, name, False) for name in _REORDERS):
        return
    tokens, padded = len(batch.input_ids), len(static.input_ids)
    owner = type(runner.buffers).__name__
    for field in ("input_ids", "positions", "out_cache_loc"):
        memory, live = getattr(static, field), getattr(batch, field)
        expected = torch.zeros_like(memory)
        expected[:tokens] = live
        yield Expected(owner=owner, field=field, actual=memory, expected=expected, live=tokens)
    yield from _per_request(runner, batch)
    count = getattr(batch, "global_num_token_non_padded_cpu", None)
    yield from expected_count(runner, tokens if count is None else count, padded)


def _per_request(runner: Any, batch: Any) -> Iterator[Expected]:
    """Yield the static inputs of requests: those that the batch lacks are empty, behind the live tokens."""
    memories = getattr(runner, PER_REQUEST, None) or {}
    bs = batch.batch_size
    rows = runner._capture_req_slots if runner._is_full_backend else bs  # noqa: SLF001
    for field in _PER_REQUEST:
        live = getattr(batch, field)
        if live is None or field not in memories:
            continue
        memory = memories[field][:rows]
        expected = torch.full_like(memory, len(batch.input_ids) if field == "extend_start_loc" else 0)
        expected[:bs] = live
        yield Expected(
            owner=type(runner).__name__,
            field=f"{PER_REQUEST}.{field}",
            actual=memory,
            expected=expected,
            live=bs,
        )


def expected_prefill_metadata(
    runner: Any,
    batch: Any,
    static: Any,
    leaves: Mapping[tuple[str, str], torch.Tensor],
    made: Mapping[str, object],
) -> Iterator[Expected]:
    """Yield what known fields of attention metadata must be.

    Args:
        runner: SGLang's ``PrefillCudaGraphRunner``.
        batch: The live batch.
        static: The padded batch.
        leaves: The tensors of metadata that the graph reads; see `GraphRecord.leaves`.
        made: Metadata that was made for this batch, by the backend's name. The eager attention of a breakable
            graph reads it.
    """
    is_split = runner.model_runner.server_args.enable_two_batch_overlap
    if is_split or any(getattr(runner, name, False) for name in _REORDERS):
        return
    if runner._is_full_backend:  # noqa: SLF001
        yield from _of_full_graph(runner, batch, static, leaves)
    elif hasattr(static, "global_num_token_non_padded_cpu"):  # since 0.5.21
        yield from _of_eager_attention(batch, static, made)


def _of_full_graph(
    runner: Any, batch: Any, static: Any, leaves: Mapping[tuple[str, str], torch.Tensor]
) -> Iterator[Expected]:
    """Yield lengths and offsets of all requests of a full graph; those that the batch lacks are empty."""
    bs, slots = batch.batch_size, runner._capture_req_slots  # noqa: SLF001
    for (owner, field), memory in leaves.items():
        if field == _OFFSETS_OF_ALL:
            expected = memory.clone()
            expected[-1] = len(static.input_ids)
            yield Expected(
                owner=owner, field=field, actual=memory, expected=expected, live=len(memory) - 1, rule="GP05"
            )
        if field not in (*QUERY_OFFSETS, "cu_seqlens_k", "cache_seqlens_int32"):
            continue
        live = batch.extend_seq_lens if field in QUERY_OFFSETS else batch.seq_lens
        lengths = memory.new_zeros(slots)
        lengths[:bs] = live
        is_offset = field != "cache_seqlens_int32"
        yield Expected(
            owner=owner,
            field=field,
            actual=memory[: slots + is_offset],
            expected=_offsets(lengths) if is_offset else lengths,
            live=bs + is_offset,
        )


def _of_eager_attention(batch: Any, static: Any, made: Mapping[str, object]) -> Iterator[Expected]:
    """Yield where the queries of each request begin: the last end is the number of queries that are given."""
    given = static.global_num_token_non_padded_cpu  # SGLang gives attention as many queries
    given = len(static.input_ids) if given is None else given
    bs = batch.batch_size
    for owner, metadata in made.items():
        for field in QUERY_OFFSETS:
            memory = getattr(metadata, field, None)
            if not isinstance(memory, torch.Tensor) or not given:
                continue
            expected = _offsets(batch.extend_seq_lens.to(memory.dtype))
            expected[bs] = given
            yield Expected(
                owner=owner,
                field=f"forward_metadata.{field}",
                actual=memory[: bs + 1],
                expected=expected,
                live=bs,
                rule="GP05",
            )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[n + 1]``: where each of ``[n]`` lengths begins, and the end."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=lengths.dtype), (1, 0))
