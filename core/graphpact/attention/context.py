"""`BackendContext`, the constructor argument of backends and kernels; `KVBuffers`, the KV cache.

Does not: allocate memory; engines do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from graphpact.attention.capabilities import LayerSpec, Limits
from graphpact.batch import ForwardMode
from graphpact.tensors import storage_id

KernelName = Literal["native", "compiled", "portable"]
ProviderName = Literal["auto", KernelName]
"""The values of ``kernel_provider``: ``auto``, and the names of the providers."""


class KVBuffers(Protocol):
    """The KV cache: one key and one value tensor per layer.

    ``k[i]`` is ``[num_slots, num_kv_heads, head_dim]``, ``v[i]`` is ``[num_slots, num_kv_heads,
    v_head_dim]``. KV slot 0 is scratch. Page ``p`` begins at KV slot ``p * page_size``. For a layer with
    latents (MLA) ``v[i]`` is a view of ``k[i]``: the first ``kv_lora_rank`` elements of each key.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]


def kv_tensors(kv_cache: KVBuffers) -> dict[str, torch.Tensor]:
    """Return the tensors of a KV cache by name, for messages, without values that are views of keys."""
    found: dict[str, torch.Tensor] = {}
    for i, (k, v) in enumerate(zip(kv_cache.k, kv_cache.v, strict=True)):
        shared = storage_id(k) == storage_id(v)
        found[f"the {'latents' if shared else 'keys'} of layer {i}"] = k
        if not shared:
            found[f"the values of layer {i}"] = v
    return found


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The constructor argument of a backend.

    Args:
        device: The lane's device.
        dtype: Dtype of queries, keys, values and the KV cache.
        layers: The model's layers, by ``layer_id``.
        limits: The largest counts of the lane.
        req_to_token: ``[max_requests + 1, max_context_len]`` int32: the KV slot of each position, one row per
            request. Row 0 is all zeros.
        kv_cache: The KV cache.
        mode: Forward mode of the lane's batches.
        provider: The requested kernels; see `graphpact.attention.providers`.
    """

    device: torch.device
    dtype: torch.dtype
    layers: Sequence[LayerSpec]
    limits: Limits
    req_to_token: torch.Tensor
    kv_cache: KVBuffers
    mode: ForwardMode = ForwardMode.DECODE
    provider: ProviderName = "auto"
