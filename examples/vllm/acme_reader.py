"""A builder with other names in its metadata, checked with a reader that returns what the kernel reads."""

from typing import Any, NamedTuple

import torch
from acme_attention import AcmeMetadataBuilder

from graphpact_adapters.vllm import Builders, PagedReads, Part


class PackedMetadata(NamedTuple):
    """Lengths, pages and offsets, under the names of the kernel's arguments."""

    kv_lens: torch.Tensor
    kv_pages: torch.Tensor
    q_offsets: torch.Tensor
    tokens: int


class PackedBuilder(AcmeMetadataBuilder):
    """Builds `PackedMetadata`."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> Any:
        """Return the metadata of a step."""
        made = super().build(common_prefix_len, common_attn_metadata)
        return PackedMetadata(made.seq_lens, made.block_table, made.query_start_loc, made.num_actual_tokens)


def read(metadata: PackedMetadata, slot_mapping: torch.Tensor) -> PagedReads:
    """Return what the kernel reads: one launch of paged attention."""
    launch = Part(
        seq_lens=metadata.kv_lens,
        block_table=metadata.kv_pages,
        query_start_loc=metadata.q_offsets,
        num_tokens=metadata.tokens,
    )
    return PagedReads((launch,), slot_mapping, metadata.tokens)


checked = Builders(PackedBuilder, read=read)
