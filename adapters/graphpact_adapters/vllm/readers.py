"""What the kernels of vLLM's attention backends read of the metadata of their builders.

    flat    one launch for all requests: ``query_start_loc``, ``seq_lens``, ``block_table`` (FlashAttention,
            Triton, the ROCm family)
    split   decodes first, in a launch of their own: ``num_decodes``, ``num_decode_tokens``, and ``decode``
            with ``seq_lens`` and ``block_table`` (the MLA family)

A kernel gets the slot mapping apart from the metadata, from the forward context.

Does not: read metadata whose kernel does something else; its author gives a reader.
"""

from collections.abc import Callable
from typing import Any

import torch

from graphpact.errors import ConfigError
from graphpact_adapters.reads import PagedReads, Part


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
    """Return the reads of a kernel for decodes alone, whose queries are as many in each request.

    Raises:
        ConfigError: There are prefills, which another kernel computes.
    """
    if metadata.num_prefills:
        raise ConfigError(
            f"{type(metadata).__name__} has {metadata.num_prefills} prefills; this reader knows the decode"
            " kernel",
            hint="check decode and verify steps, or give a reader of your own: Builders(make, read=...)",
        )
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


_FORMS: tuple[tuple[Callable[[Any, torch.Tensor], PagedReads], tuple[str, ...]], ...] = (
    (split, ("decode", "num_decodes", "num_decode_tokens", "num_prefills", "num_actual_tokens")),
    (flat, ("query_start_loc", "seq_lens", "block_table", "num_actual_tokens", "max_query_len", "causal")),
)
"""Readers, and the fields by which their metadata is known."""


def read(metadata: Any, slot_mapping: torch.Tensor) -> PagedReads:
    """Return what the kernel reads of a metadata object of vLLM, in the first form whose fields it has.

    Raises:
        ConfigError: It has the fields of no form.
    """
    for reader, names in _FORMS:
        if all(hasattr(metadata, name) for name in names):
            return reader(metadata, slot_mapping)
    kind = type(metadata)
    missing = {reader.__name__: [n for n in names if not hasattr(metadata, n)] for reader, names in _FORMS}
    lacks = "; ".join(f"{name} needs {', '.join(fields)}" for name, fields in missing.items())
    raise ConfigError(
        f"no reader for {kind.__module__}.{kind.__qualname__}: {lacks}",
        hint="say what its kernel reads, as graphpact_adapters.reads.PagedReads: Builders(make, read=...)",
    )
