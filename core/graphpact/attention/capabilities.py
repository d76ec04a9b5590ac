"""What an attention backend declares that it can do, and what a model and an engine ask of it.

Does not: attend, or choose a backend.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.batch import ForwardMode


class GraphSupport(enum.Enum):
    """Which batches a graph can hold: a backend declares what it can, a runner what it needs.

    In rising order; each includes the ones before it.
    """

    NEVER = "never"
    UNIFORM_DECODE = "uniform_decode"
    """One query token a request."""
    UNIFORM = "uniform"
    """The same number of query tokens a request."""
    ALWAYS = "always"

    def covers(self, needed: "GraphSupport") -> bool:
        """Return whether this is as much as ``needed``, or more."""
        order = list(GraphSupport)
        return order.index(self) >= order.index(needed)


class HeadLayout(enum.Enum):
    """How the query heads of a layer share keys and values."""

    MHA = "mha"
    """Each has its own."""
    GQA = "gqa"
    """Groups of them share one."""
    MLA = "mla"
    """All share one compressed latent, which is what the cache holds."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer of a model asks of attention.

    Args:
        layer_id: Index of the layer.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_q_heads``.
        head_dim: Width of a query and a key head.
        v_head_dim: Width of a value head.
        scaling: Factor on the scores.
        sliding_window: A query sees this many keys, itself included; None sees all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None leaves them.
        sinks: ``[num_q_heads]`` logits of a virtual key without value (GPT-OSS), or None.
        kv_lora_rank: Width of the latent that all query heads share (MLA in absorbed form), None for other
            layers. A key is the latent and the rotated part after it, one head of ``head_dim``; the value
            is the latent again, the first ``v_head_dim == kv_lora_rank`` of the key.
        kv_layer: Index of the layer whose KV cache this layer reads and writes; None for its own.
    """

    layer_id: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    kv_lora_rank: int | None = None
    kv_layer: int | None = None

    @property
    def cache_layer(self) -> int:
        """Index of the KV cache that the layer reads and writes."""
        return self.layer_id if self.kv_layer is None else self.kv_layer

    @property
    def head_layout(self) -> HeadLayout:
        """MLA for latents; MHA where every query head has a key head of its own, GQA otherwise."""
        if self.kv_lora_rank is not None:
            return HeadLayout.MLA
        return HeadLayout.MHA if self.num_q_heads == self.num_kv_heads else HeadLayout.GQA


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The largest draft of a lane that drafts or verifies; all 1 for a lane that does neither.

    Args:
        num_steps: Steps that one draft decode has.
        topk: Branches of a request in a draft decode.
        num_draft_tokens: Tokens of a request in target verify and draft extend.
    """

    num_steps: int = 1
    topk: int = 1
    num_draft_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest of everything that a lane can meet; slots and bounds are sized by it.

    Args:
        max_bs: Requests in a step.
        max_num_tokens: Tokens in a step.
        max_context_len: Tokens in a sequence.
        page_size: KV slots in a page.
        draft: The largest draft.
    """

    max_bs: int
    max_num_tokens: int
    max_context_len: int
    page_size: int
    draft: DraftLimits = DraftLimits()

    @property
    def max_pages_per_request(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_context_len // self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares that it can do. None for a set means: any.

    Args:
        modes: Forward modes it serves.
        graph_support: Which of them can be captured.
        dtypes: Of queries and KV cache.
        devices: Device types, such as ``"cpu"`` and ``"cuda"``.
        head_layouts: How its kernels let query heads share keys.
        page_sizes: KV page sizes.
        head_dims: Widths of a query head.
        sliding_window: Whether a layer may have one.
        softcap: Whether a layer may have one.
        sinks: Whether a layer may have them.
        trees: Whether a draft may have branches: top-k above 1 in draft decode, and a tree mask in target
            verify.
        needs_host_plan: Whether a replay hook reads ``seq_lens_cpu``.
        seq_len_fill_value: The length of a padded row that its kernels read as harmless.
    """

    modes: frozenset[ForwardMode]
    graph_support: GraphSupport
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    head_layouts: frozenset[HeadLayout]
    seq_len_fill_value: int
    page_sizes: frozenset[int] | None = None
    head_dims: frozenset[int] | None = None
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    trees: bool = False
    needs_host_plan: bool = False

    def missing(
        self,
        layers: Sequence[LayerSpec],
        *,
        mode: ForwardMode,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        topk: int = 1,
    ) -> list[str]:
        """Return what a model and an engine ask for that is not declared, one phrase each."""
        found: dict[str, None] = {}

        def need(name: str, value: Any, declared: Any) -> None:
            if declared is not None and value not in declared:
                have = ", ".join(in_words(declared))
                found[f"{name} {getattr(value, 'value', value)} (has {have})"] = None

        need("mode", mode, self.modes)
        need("dtype", dtype, self.dtypes)
        need("device", device.type, self.devices)
        need("page size", page_size, self.page_sizes)
        for layer in layers:
            need("head layout", layer.head_layout, self.head_layouts)
            need("head width", layer.head_dim, self.head_dims)
            for name, asked in (
                ("sliding_window", layer.sliding_window),
                ("softcap", layer.softcap),
                ("sinks", layer.sinks),
            ):
                if asked is not None and not getattr(self, name):
                    found[f"attention feature {name}"] = None
        if topk > 1 and not self.trees:
            found[f"drafts with {topk} branches"] = None
        return list(found)

    def padded_seq_len(self, mode: ForwardMode, tokens_per_request: int = 1) -> int:
        """Return the ``seq_lens`` of a padded row in a batch of ``mode``.

        Where ``seq_lens`` counts the new tokens it is no less than them: a causal query needs its own key.
        """
        if mode is ForwardMode.DRAFT_EXTEND:
            return max(self.seq_len_fill_value, tokens_per_request)
        return self.seq_len_fill_value


def in_words(declared: Iterable[Any]) -> list[str]:
    """Return declared values in words, in order; numbers by their size."""
    values = [getattr(value, "value", value) for value in declared]
    return [str(v) for v in sorted(values, key=lambda v: v if isinstance(v, int) else str(v))]
