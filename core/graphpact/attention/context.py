"""`BackendContext`: what a backend and its kernels are built with; `KVBuffers`, the KV cache.

Does not: allocate any of it; engines do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from graphpact.attention.capabilities import LayerSpec, Limits
from graphpact.batch import ForwardMode

ProviderName = Literal["auto", "native", "portable"]
"""What can be asked for."""


class KVBuffers(Protocol):
    """The KV cache as a backend sees it: one key and one value tensor a layer.

    ``k[i]`` is ``[num_slots, num_kv_heads, head_dim]``, ``v[i]`` ``[num_slots, num_kv_heads,
    v_head_dim]``; slot 0 is scratch, page ``p`` is slots ``p * page_size`` and on. Where a layer keeps
    latents (MLA), ``v[i]`` is a view of ``k[i]``: the first ``kv_lora_rank`` of each key.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]


def kv_tensors(kv_cache: KVBuffers) -> dict[str, torch.Tensor]:
    """Return the memory of a KV cache, each tensor once, by a name for messages.

    A value that is a view of its key is no memory of its own.
    """
    found: dict[str, torch.Tensor] = {}
    for i, (k, v) in enumerate(zip(kv_cache.k, kv_cache.v, strict=True)):
        shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        found[f"the {'latents' if shared else 'keys'} of layer {i}"] = k
        if not shared:
            found[f"the values of layer {i}"] = v
    return found


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is built with.

    Args:
        device: The lane's device.
        dtype: Of queries, keys, values and the KV cache.
        layers: Every layer's demands, by ``layer_id``.
        limits: The largest of everything.
        req_to_token: ``[max_requests + 1, max_context_len]`` int32: KV slot of each position of each
            request row. Row 0 is all zeros.
        kv_cache: The KV cache.
        mode: What the lane's batches are.
        provider: Which of the backend's kernels: see `graphpact.attention.providers`.
    """

    device: torch.device
    dtype: torch.dtype
    layers: Sequence[LayerSpec]
    limits: Limits
    req_to_token: torch.Tensor
    kv_cache: KVBuffers
    mode: ForwardMode = ForwardMode.DECODE
    provider: ProviderName = "auto"
