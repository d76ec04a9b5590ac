"""The attention function that transformers calls; it passes calls to the `Attention` of the forward pass.

The function is registered with transformers' ``AttentionInterface`` under a name without a mask function, so
transformers builds no masks.

Does not: attend; the `Attention` of the forward pass does.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from graphpact_engine.models.active import activated, active

ATTENTION_NAME = "graphpact"


class Attention(Protocol):
    """The implementation that the registered attention function calls."""

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """Return the output ``[T, heads, v_head_dim]`` of one layer.

        Args:
            module: The attention module of the model.
            q: ``[T, heads, head_dim]``.
            k: ``[T, kv_heads, head_dim]``; None for a layer without its own keys (frozen KV).
            v: ``[T, kv_heads, v_head_dim]``, or None.
            asked: The other arguments of transformers' call, by name; always with ``scaling``.
        """
        ...


def attending(attention: Attention) -> AbstractContextManager[None]:
    """Let ``attention`` serve the forward passes inside the context."""
    return activated("attention", attention)


def active_attention() -> Attention | None:
    """Return the `Attention` that serves the forward pass of this thread, or None outside `attending`."""
    attention: Attention | None = getattr(active, "attention", None)
    return attention


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over ``[1, heads, T, dim]``; the signature is defined by transformers."""
    asked["attention_mask"] = attention_mask
    if asked.get("scaling") is None:
        asked["scaling"] = query.shape[-1] ** -0.5
    q = query[0].transpose(0, 1)
    k, v = (None if t is None else t[0].transpose(0, 1) for t in (key, value))
    out = active.attention.attend(module, q, k, v, asked)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_function)
