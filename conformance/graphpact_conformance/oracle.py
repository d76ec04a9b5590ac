"""Attention in float64, one token and one head at a time, from the requests' lists of slots.

Does not: read a batch, a page table or metadata.
"""

import torch

from graphpact import LayerSpec
from graphpact_conformance.problems import ProblemRequest


def attend(
    requests: list[ProblemRequest],
    layer: LayerSpec,
    steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> list[torch.Tensor]:
    """Write the new keys and values of a layer, step by step, and return the attention outputs.

    Args:
        requests: The requests of the batch, in its order.
        layer: The layer.
        steps: Queries ``[T, num_q_heads, head_dim]``, keys ``[T, num_kv_heads, head_dim]`` and values
            ``[T, num_kv_heads, v_head_dim]`` of the new tokens, in each step.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``; written.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``; written.

    Returns:
        ``[T, num_q_heads, v_head_dim]`` float64 for each step.
    """
    tokens = [token for request in requests for token in request.tokens]
    outputs = []
    for step, (q, k, v) in enumerate(steps):
        for t, token in enumerate(tokens):
            k_cache[token.slots[step]] = k[t]
            v_cache[token.slots[step]] = v[t]
        out = torch.empty(len(tokens), layer.num_q_heads, layer.v_head_dim, dtype=torch.float64)
        t = 0
        for request in requests:
            for j in range(len(request.tokens)):
                seen = keys_of(request, j, step)
                if layer.sliding_window is not None:
                    seen = seen[-layer.sliding_window :]
                for head in range(layer.num_q_heads):
                    out[t, head] = _attend_one(q[t], head, layer, k_cache[seen], v_cache[seen])
                t += 1
        outputs.append(out)
    return outputs


def keys_of(request: ProblemRequest, token: int, step: int) -> list[int]:
    """Return the slots that a new token sees: the cached ones, those of its path, its own up to ``step``."""
    *before, own = request.path(token)
    path = [slot for j in before for slot in request.tokens[j].slots]
    return request.cached + path + request.tokens[own].slots[: step + 1]


def _attend_one(
    q: torch.Tensor, head: int, layer: LayerSpec, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return ``[v_head_dim]``: attention of one head of a query ``[heads, head_dim]`` over all of ``k``."""
    shared = head * layer.num_kv_heads // layer.num_q_heads
    scores = k[:, shared].double() @ q[head].double() * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    weights = scores.exp()
    total = weights.sum()
    if layer.sinks is not None:
        total = total + layer.sinks[head].double().exp()
    return (weights / total) @ v[:, shared].double()
