"""A backend whose list has all keys, as FlashInfer's, checked with a reader that calls the real kernel."""

from dataclasses import dataclass
from typing import Any

import torch
from acme_backend import AcmeAttnBackend
from torch.nn.functional import pad, scaled_dot_product_attention

from graphpact import ForwardMode
from graphpact_adapters.sglang import Backends, IndexedReads


def csr_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lists: Any, scaling: float
) -> torch.Tensor:
    """Return ``[T, heads, width]``: the queries of a request are its last tokens. This is the real kernel."""
    token, ends = torch.arange(len(q), device=q.device), lists.qo_indptr[1:]
    request = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
    first = lists.kv_indptr[request]
    num_keys = lists.kv_indptr[request + 1] - first - (ends[request] - 1 - token)
    position = torch.arange(lists.max_kv_len, device=q.device)
    seen = position < num_keys[:, None]
    # Entries behind the last key may hold anything: they are no slots, and their contents may be NaN.
    slots = torch.where(seen, lists.kv_indices[torch.where(seen, first[:, None] + position, 0)], 0)
    hidden = ~seen[:, :, None, None]
    k, v = (cache[slots].masked_fill(hidden, 0).transpose(1, 2) for cache in (k_cache, v_cache))
    mask = seen[:, None, None]
    return scaled_dot_product_attention(q[:, :, None], k, v, mask, scale=scaling, enable_gqa=True)[:, :, 0]


@dataclass
class CsrMetadata:
    """KV slots of all requests, one after the other, those of the new tokens included."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    qo_indptr: torch.Tensor
    max_kv_len: int


class CsrBackend(AcmeAttnBackend):
    """Prepares `CsrMetadata`. Its graphs are decodes."""

    captured: dict[int, Any]
    forward_metadata: Any

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate room for the longest sequence of every request."""
        del max_num_tokens
        self.kv_indptr = torch.zeros(max_bs + 1, dtype=torch.int32, device=self.req_to_token.device)
        self.kv_indices = self.kv_indptr.new_zeros(max_bs * self.req_to_token.shape[1])

    def init_forward_metadata_out_graph(self, forward_batch: Any, *, in_capture: bool = False) -> None:
        """Prepare a capture or a replay: write the memory of the capture."""
        bs = forward_batch.batch_size
        if in_capture:
            offsets = torch.arange(bs + 1, dtype=torch.int32, device=self.kv_indptr.device)
            longest = self.req_to_token.shape[1]  # a graph keeps the number, so no batch may exceed it
            self.captured[bs] = CsrMetadata(self.kv_indptr[: bs + 1], self.kv_indices, offsets, longest)
        self.forward_metadata = self.captured[bs]
        self._fill(forward_batch, self.forward_metadata)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step, in new memory."""
        lens, counts = forward_batch.seq_lens_cpu, torch.ones_like(forward_batch.seq_lens_cpu)
        if forward_batch.forward_mode.is_extend():
            counts = torch.tensor(forward_batch.extend_seq_lens_cpu)
        offsets = pad(counts.cumsum(0), (1, 0)).to(self.req_to_token.device, torch.int32)
        indices = offsets.new_zeros(int(lens.sum()))
        self.forward_metadata = CsrMetadata(torch.zeros_like(offsets), indices, offsets, int(lens.max()))
        self._fill(forward_batch, self.forward_metadata)

    def _fill(self, forward_batch: Any, into: CsrMetadata) -> None:
        bs, total = forward_batch.batch_size, int(forward_batch.seq_lens_cpu.sum())
        lens = forward_batch.seq_lens[:bs]
        into.kv_indptr[1:].copy_(lens.cumsum(0))
        row = torch.arange(bs, device=lens.device).repeat_interleave(lens, output_size=total)
        position = torch.arange(total, device=lens.device) - into.kv_indptr[row]
        into.kv_indices[:total].copy_(self.req_to_token[forward_batch.req_pool_indices[row], position])


@dataclass(frozen=True)
class CsrReads(IndexedReads):
    """The lists, and the number of the launch."""

    max_kv_len: int = 0

    def attend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, cache: Any, page_size: int) -> torch.Tensor:
        """Return what the real kernel returns; the suite's model checks the lists and writes k and v."""
        super().attend(q, k, v, layer, cache, page_size)
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        return csr_attention(q, k_cache, v_cache, self, layer.scaling)


def read(metadata: CsrMetadata, batch: Any) -> CsrReads:
    """Return what the kernel reads."""
    return CsrReads(
        kv_indptr=metadata.kv_indptr,
        kv_indices=metadata.kv_indices,
        slot_mapping=batch.out_cache_loc,
        qo_indptr=metadata.qo_indptr,
        appends_new=False,  # the list has the new keys too
        max_kv_len=metadata.max_kv_len,
    )


modes = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
checked = Backends(CsrBackend, read=read, modes=modes)
