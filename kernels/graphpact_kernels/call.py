"""`AttendCall`: the arguments of one call of an attention kernel, and their shapes and dtypes.

A backend makes a call for each layer of a step and passes it through its kernel provider to a kernel. Each
kernel has its own index tensors, the rows of the call: `graphpact_kernels.page_table_attention.PageTableRows`
and `graphpact_kernels.paged_attention.PagedRows`. Operators take tensors and numbers one by one, as torch
requires; the functions of those modules unpack a call.

The classes are not frozen, because a frozen dataclass takes about three times as long to make. Treat them as
read-only.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from graphpact import LayerSpec

Rows_co = TypeVar("Rows_co", covariant=True)
"""The index tensors of a kernel: the queries of each row and the pages of its keys. A row is a request, or
one draft token of a tree."""


@dataclass(slots=True)
class ScoreOptions:
    """How scores are computed, and which keys a query sees.

    Args:
        scaling: Factor on the scores.
        sliding_window: Number of keys that a query sees, its own included; 0 for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for unchanged scores.
        sinks: ``[num_q_heads]`` logits of a virtual key without value, or None.
        is_causal: Whether the last query of a row is at the position of its last key. Otherwise each query
            sees all keys of its row.
    """

    scaling: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    is_causal: bool = True

    @classmethod
    def of(cls, layer: LayerSpec) -> "ScoreOptions":
        """Return the options of ``layer``, causal."""
        return cls(layer.scaling, layer.sliding_window or 0, layer.softcap or 0.0, layer.sinks)


@dataclass(slots=True)
class AttendCall(Generic[Rows_co]):
    """One call of an attention kernel: the attention of one layer in one step.

    Args:
        q: ``[T, num_q_heads, head_dim]``: the queries of the rows, one row after another.
        k_cache: ``[num_slots, num_kv_heads, head_dim]``, of the dtype of ``q``.
        v_cache: ``[num_slots, num_kv_heads, v_head_dim]``; may be a view of ``k_cache``.
        rows: The index tensors of queries and keys.
        options: How scores are computed, and which keys a query sees.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: Rows_co
    options: ScoreOptions

    def new_output(self) -> torch.Tensor:
        """Return uninitialised memory for the output: ``[T, num_q_heads, v_head_dim]``."""
        return self.q.new_empty((*self.q.shape[:2], self.v_cache.shape[2]))
