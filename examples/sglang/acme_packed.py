"""A backend with other names in its metadata, checked with a reader that returns what the kernel reads."""

from typing import Any, NamedTuple

import torch
from acme_backend import AcmeAttnBackend

from graphpact_adapters.sglang import Backends, PagedReads, Part


class PackedMetadata(NamedTuple):
    """Lengths, pages and offsets, under the names of the kernel's arguments."""

    kv_lens: torch.Tensor
    kv_pages: torch.Tensor
    q_offsets: torch.Tensor


class PackedBackend(AcmeAttnBackend):
    """Prepares `PackedMetadata`."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._pack()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step."""
        super().init_forward_metadata(forward_batch)
        self._pack()

    def _pack(self) -> None:
        made: Any = self.forward_metadata
        self.forward_metadata: Any = PackedMetadata(
            made.cache_seqlens_int32, made.page_table, made.cu_seqlens_q
        )


def read(metadata: PackedMetadata, batch: Any) -> PagedReads:
    """Return what the kernel reads: one launch of paged attention."""
    tokens = len(batch.out_cache_loc)
    launch = Part(
        seq_lens=metadata.kv_lens,
        block_table=metadata.kv_pages,
        query_start_loc=metadata.q_offsets,
        num_tokens=tokens,
        names={"seq_lens": "kv_lens", "block_table": "kv_pages", "query_start_loc": "q_offsets"},
    )
    return PagedReads((launch,), batch.out_cache_loc, tokens)


checked = Backends(PackedBackend, read=read)
