"""A typical new attention backend for SGLang, with lengths and page table in its own buffers."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class AcmeMetadata:
    """What the kernel reads.

    Args:
        cache_seqlens_int32: ``[bs]`` int32: keys of each request.
        cu_seqlens_q: ``[bs + 1]`` int32: where each request's queries begin.
        page_table: ``[bs, pages]`` int32: the pages of each request.
        max_seq_len_q: The most queries of a request.
    """

    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor
    max_seq_len_q: int


class AcmeAttnBackend:
    """Prepares the metadata of a step for all layers; in SGLang it extends `AttentionBackend`."""

    def __init__(self, model_runner: Any) -> None:
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.page_size = model_runner.page_size
        self.forward_metadata: AcmeMetadata | None = None
        self.captured: dict[int, AcmeMetadata] = {}

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read: a graph keeps the addresses of its capture."""
        del max_num_tokens
        pages = -(-self.req_to_token.shape[1] // self.page_size)  # drafts may exceed the context length
        self.seq_lens = torch.zeros(max_bs, dtype=torch.int32, device=self.req_to_token.device)
        self.page_table = torch.zeros(max_bs, pages, dtype=torch.int32, device=self.req_to_token.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay on the host, which for this kernel is all the work."""
        bs = forward_batch.batch_size
        if in_capture:
            width = len(forward_batch.input_ids) // bs
            self.captured[bs] = AcmeMetadata(
                cache_seqlens_int32=self.seq_lens[:bs],
                cu_seqlens_q=torch.arange(bs + 1, dtype=torch.int32, device=self.seq_lens.device) * width,
                page_table=self.page_table[:bs],
                max_seq_len_q=width,
            )
        metadata = self.forward_metadata = self.captured[bs]
        metadata.cache_seqlens_int32.copy_(self.keys(forward_batch))
        metadata.page_table.copy_(self.pages(forward_batch))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record nothing."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step, in new memory."""
        bs, tokens = forward_batch.batch_size, len(forward_batch.input_ids)
        counts = torch.full((bs,), tokens // bs)
        if forward_batch.forward_mode.is_extend() and not forward_batch.forward_mode.is_target_verify():
            counts = torch.tensor(forward_batch.extend_seq_lens_cpu)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self.forward_metadata = AcmeMetadata(
            cache_seqlens_int32=self.keys(forward_batch).to(torch.int32),
            cu_seqlens_q=offsets.to(self.req_to_token.device, torch.int32),
            page_table=self.pages(forward_batch),
            max_seq_len_q=int(counts.max()),
        )

    def keys(self, forward_batch: Any) -> torch.Tensor:
        """Return the keys of each request; in a target verify ``seq_lens`` does not count the drafts."""
        bs = forward_batch.batch_size
        lens: torch.Tensor = forward_batch.seq_lens[:bs]
        verifies = forward_batch.forward_mode.is_target_verify()
        return lens + len(forward_batch.input_ids) // bs if verifies else lens

    def pages(self, forward_batch: Any) -> torch.Tensor:
        """Return the pages of each request."""
        rows = forward_batch.req_pool_indices[: forward_batch.batch_size]
        pages: torch.Tensor = self.req_to_token[rows, :: self.page_size] // self.page_size
        return pages
