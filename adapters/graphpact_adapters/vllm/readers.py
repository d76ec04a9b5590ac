"""What the kernels of vLLM's attention backends read of the metadata of their builders.

    flat    one launch for all requests: ``query_start_loc``, ``seq_lens``, ``block_table`` (FlashAttention,
            Triton, the ROCm family)
    split   decodes first, in a separate launch: ``num_decodes``, ``num_decode_tokens``, and ``decode`` with
            ``seq_lens`` and ``block_table`` (the MLA family)
    mamba   states by ``state_indices_tensor_d``; drafts with ``query_start_loc_d`` and
            ``num_accepted_tokens`` (Mamba1, Mamba2, the short convolution)
    delta   states by ``spec_...`` for drafts to verify, if there is a mask of them, and by ``non_spec_...``
            for decodes. No kernel of a decode reads the contents of the mask (GDN, KDA)
    linear  states by ``state_indices_tensor`` or ``state_indices_tensor_d``, -1 for none (Linear, Bailing)

A kernel gets the slot mapping from the forward context, separately from the metadata.

Does not: read the metadata of other kernels; their authors write a reader.
"""

from collections.abc import Callable
from typing import Any

import torch

from graphpact.errors import ConfigError
from graphpact_adapters.kernel_reads import PagedReads, Part, Reads
from graphpact_adapters.recurrent import RecurrentReads


def flat(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a kernel with one launch for all requests."""
    tokens = metadata.num_actual_tokens
    part = Part(
        seq_lens=metadata.seq_lens,
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        num_tokens=tokens,
        max_query_len=metadata.max_query_len,
        max_seq_len=getattr(metadata, "max_seq_len", None),
        causal=metadata.causal,
    )
    return PagedReads((part,), slot_mapping, tokens)


def split(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return the reads of a kernel for decodes, which all have equally many queries.

    Raises:
        ConfigError: There are prefills, which another kernel computes.
    """
    _refuse_prefills(metadata)
    decode, tokens = metadata.decode, metadata.num_decode_tokens
    starts = getattr(decode, "query_start_loc", None)
    part = Part(
        seq_lens=decode.seq_lens,
        block_table=decode.block_table,
        query_start_loc=starts,
        query_len=None if starts is not None else tokens // metadata.num_decodes,
        num_tokens=tokens,
        max_query_len=getattr(decode, "max_query_len", None),
        max_seq_len=getattr(decode, "max_seq_len", None),
        causal=metadata.causal,
        name="decode",
    )
    return PagedReads((part,), slot_mapping, metadata.num_actual_tokens)


def mamba(metadata: Any, slot_mapping: torch.Tensor) -> RecurrentReads:
    """Return the reads of a scan whose decodes and drafts have the same fields.

    Raises:
        ConfigError: There are prefills, or the state indices of decodes are not in these fields.
    """
    _refuse_prefills(metadata)
    if metadata.state_indices_tensor_d is None:
        raise ConfigError(
            f"{type(metadata).__name__} has {metadata.num_decodes} decodes, but no state_indices_tensor_d",
            hint="check only decode steps, Builders(make, modes={ForwardMode.DECODE}), or write a reader,"
            " Builders(make, read=...)",
        )
    return RecurrentReads(
        metadata.state_indices_tensor_d,
        slot_mapping,
        metadata.num_decode_tokens,
        query_start_loc=metadata.query_start_loc_d,
        num_accepted_tokens=metadata.num_accepted_tokens,
    )


def delta(metadata: Any, slot_mapping: torch.Tensor) -> RecurrentReads:
    """Return the reads of a gated delta rule, whose drafts and decodes have separate fields.

    Raises:
        ConfigError: There are prefills.
    """
    _refuse_prefills(metadata)
    tokens = metadata.num_actual_tokens
    if metadata.spec_sequence_masks is None:
        return RecurrentReads(
            metadata.non_spec_state_indices_tensor,
            slot_mapping,
            tokens,
            num_requests=tokens if metadata.num_decodes else 0,
            skipped=(0, -1),
        )
    return RecurrentReads(
        metadata.spec_state_indices_tensor,
        slot_mapping,
        tokens,
        num_requests=metadata.num_spec_decodes,
        query_start_loc=metadata.spec_query_start_loc,
        num_accepted_tokens=metadata.num_accepted_tokens,
        skipped=(0, -1),
    )


def linear(metadata: Any, slot_mapping: torch.Tensor) -> RecurrentReads:
    """Return the reads of linear attention, whose padding rows have the state index -1.

    Raises:
        ConfigError: There are prefills.
    """
    _refuse_prefills(metadata)
    indices = getattr(metadata, "state_indices_tensor_d", None)
    accepted = getattr(metadata, "num_accepted_tokens", None)
    return RecurrentReads(
        metadata.state_indices_tensor if indices is None else indices,
        slot_mapping,
        metadata.num_decode_tokens,
        num_requests=metadata.num_decodes,
        query_start_loc=None if accepted is None else metadata.query_start_loc_d,
        num_accepted_tokens=accepted,
        skipped=(-1,),
    )


def _refuse_prefills(metadata: Any) -> None:
    if metadata.num_prefills:
        raise ConfigError(
            f"{type(metadata).__name__} has {metadata.num_prefills} prefills; this reader knows only the"
            " decode kernel",
            hint="check only steps without prefills, Builders(make, modes={ForwardMode.DECODE}), or write a"
            " reader, Builders(make, read=...)",
        )


_FORMS: tuple[tuple[Callable[[Any, torch.Tensor], Reads], tuple[str, ...]], ...] = (
    (
        delta,
        (
            "spec_sequence_masks",
            "spec_state_indices_tensor",
            "non_spec_state_indices_tensor",
            "num_spec_decodes",
        ),
    ),
    (
        mamba,
        ("state_indices_tensor_d", "query_start_loc_d", "num_accepted_tokens", "num_decodes", "num_reqs"),
    ),
    (linear, ("state_indices_tensor", "query_start_loc", "num_decodes", "num_decode_tokens", "num_prefills")),
    (split, ("decode", "num_decodes", "num_decode_tokens", "num_prefills", "num_actual_tokens")),
    (flat, ("query_start_loc", "seq_lens", "block_table", "num_actual_tokens", "max_query_len", "causal")),
)
"""Readers, and the fields by which they recognize their metadata."""


def read_vllm_metadata(metadata: Any, slot_mapping: torch.Tensor) -> Reads:
    """Return the reads of the kernel from a metadata object of vLLM, by the first form whose fields it has.

    Raises:
        ConfigError: The object does not have all fields of any form.
    """
    for reader, names in _FORMS:
        if all(hasattr(metadata, name) for name in names):
            return reader(metadata, slot_mapping)
    kind = type(metadata)
    missing = {reader.__name__: [n for n in names if not hasattr(metadata, n)] for reader, names in _FORMS}
    lacks = "; ".join(f"{name} needs {', '.join(fields)}" for name, fields in missing.items())
    raise ConfigError(
        f"no reader for {kind.__module__}.{kind.__qualname__}: {lacks}",
        hint="write a reader for its kernel: Builders(make, read=...); docs/how-to/vllm-readers.md has one",
    )
