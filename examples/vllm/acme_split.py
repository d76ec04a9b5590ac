"""A builder with a plan of splits, checked with a reader that calls the real kernel."""

from dataclasses import dataclass
from typing import Any

import torch
from acme_attention import AcmeMetadataBuilder

from graphpact_adapters.kernel_reads import write_slots
from graphpact_adapters.vllm import Builders


@dataclass
class SplitMetadata:
    """What the kernel reads. ``num_splits`` is the plan: over how many splits the keys of a request go."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_splits: torch.Tensor
    keys_per_split: int
    most_splits: int
    tokens: int


class SplitBuilder(AcmeMetadataBuilder):
    """Builds `SplitMetadata`. Its memory for the plan lives as long as the builder."""

    keys_per_split = 256

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_splits = torch.zeros_like(self.seq_lens)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> Any:
        """Return the metadata of a step; at a capture ``max_seq_len`` is that of the model."""
        made = super().build(common_prefix_len, common_attn_metadata)
        size, num_splits = self.keys_per_split, self.num_splits[: len(made.seq_lens)]
        num_splits.copy_((made.seq_lens + (size - 1)) // size)
        most = -(-made.max_seq_len // size)
        lists = (made.query_start_loc, made.seq_lens, made.block_table)
        return SplitMetadata(*lists, num_splits, size, most, made.num_actual_tokens)


def split_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, reads: Any, page_size: int, scaling: float
) -> torch.Tensor:
    """Return ``[T, heads, width]``: partial results of each split, merged. This is the real kernel."""
    token, ends = torch.arange(len(q), device=q.device), reads.query_start_loc[1:]
    request = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
    num_keys = reads.seq_lens[request] - ends[request] + token + 1
    num_keys = torch.where(token < ends[-1], num_keys, 0)  # padding tokens see no key
    group = q.shape[1] // k_cache.shape[1]
    out = q.new_zeros(*q.shape[:2], v_cache.shape[2], dtype=torch.float32)
    total, top = out.new_zeros(q.shape[:2]), out.new_full(q.shape[:2], torch.finfo(torch.float32).min)
    for split in range(reads.most_splits):
        position = split * reads.keys_per_split + torch.arange(reads.keys_per_split, device=q.device)
        seen = (position < num_keys[:, None]) & (split < reads.num_splits[request])[:, None]
        page = reads.block_table[request[:, None], torch.where(seen, position // page_size, 0)]
        slots = torch.where(seen, page * page_size + position % page_size, 0)
        # What no query sees may be NaN, and NaN times a weight of zero is NaN.
        k, v = (cache[slots].float().masked_fill(~seen[..., None, None], 0) for cache in (k_cache, v_cache))
        scores = torch.einsum("thd,tshd->ths", q.float(), k.repeat_interleave(group, 2)) * scaling
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        highest = torch.maximum(top, scores.amax(-1))
        weight, keep = (scores - highest[..., None]).exp(), (top - highest).exp()
        out = out * keep[..., None] + torch.einsum("ths,tshd->thd", weight, v.repeat_interleave(group, 2))
        total, top = total * keep + weight.sum(-1), highest
    return (out / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).to(q.dtype)


@dataclass
class SplitReads(SplitMetadata):
    """The metadata, and the KV slots of new tokens, which vLLM gives to the layer."""

    slot_mapping: torch.Tensor

    def attend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, cache: Any, page_size: int) -> torch.Tensor:
        """Write k and v to the cache, and return what the real kernel returns."""
        k_cache, v_cache = cache.k[layer.cache_layer], cache.v[layer.cache_layer]
        if k is not None:
            write_slots(k, v, self.slot_mapping, self.tokens, k_cache, v_cache)
        out = q.new_zeros(len(q), layer.num_q_heads, layer.v_head_dim)
        live = q[: self.tokens]
        out[: self.tokens] = split_attention(live, k_cache, v_cache, self, page_size, layer.scaling)
        return out


def read(metadata: SplitMetadata, slot_mapping: torch.Tensor) -> SplitReads:
    """Return what the kernel reads."""
    return SplitReads(**vars(metadata), slot_mapping=slot_mapping)


class SmallSplits(SplitBuilder):
    """The same builder with small splits, so that short requests have several."""

    keys_per_split = 16


checked = Builders(SplitBuilder, read=read)
small = Builders(SmallSplits, read=read)
