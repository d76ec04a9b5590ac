"""What a backend supports (`Capabilities`), and what models and engines need (`LayerSpec`, `Limits`).

Does not: compute attention, or choose a backend.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphpact.batch import ForwardMode
from graphpact.errors import named_options


class GraphSupport(enum.Enum):
    """The kinds of batches that graphs can hold: what a backend supports, or what a runner needs.

    The values are in rising order, and each includes the ones before it: NEVER; UNIFORM_DECODE, one query
    token per request; UNIFORM, the same number of query tokens for every request; ALWAYS.
    """

    NEVER = "never"
    UNIFORM_DECODE = "uniform_decode"
    UNIFORM = "uniform"
    ALWAYS = "always"

    def covers(self, needed: "GraphSupport") -> bool:
        """Return whether this includes ``needed``."""
        order = list(GraphSupport)
        return order.index(self) >= order.index(needed)

    @classmethod
    def for_width(cls, tokens_per_request: int | None) -> "GraphSupport":
        """Return the graph support that batches with ``tokens_per_request`` tokens per request need.

        None means that the requests have different numbers of tokens.
        """
        if tokens_per_request is None:
            return cls.ALWAYS
        return cls.UNIFORM_DECODE if tokens_per_request == 1 else cls.UNIFORM


class HeadLayout(enum.Enum):
    """How the query heads of a layer share keys and values.

    Attributes:
        MHA: Each query head has its own key head.
        GQA: Groups of query heads share a key head.
        MLA: All query heads share one compressed latent, which the cache stores.
    """

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"


@named_options
@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer of a model.

    Args:
        layer_id: Index of the layer.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_q_heads``.
        head_dim: Width of a query head and of a key head.
        v_head_dim: Width of a value head.
        scaling: Factor on the scores.
        sliding_window: Number of keys that a query sees, including its own; None if it sees all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None leaves them unchanged.
        sinks: ``[num_q_heads]`` logits of a virtual key without value (GPT-OSS), model weights; or None.
        kv_lora_rank: Width of the latent that all query heads share (MLA in absorbed form); None for other
            layers. A key has one head of ``head_dim``: the latent followed by the rope part. The value is the
            latent, that is, the first ``v_head_dim == kv_lora_rank`` elements of the key.
        kv_layer: Index of the layer whose KV cache this layer reads and writes; None for its own cache.
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
        """The head layout: MLA for latents, MHA if every query head has its own key head, otherwise GQA."""
        if self.kv_lora_rank is not None:
            return HeadLayout.MLA
        return HeadLayout.MHA if self.num_q_heads == self.num_kv_heads else HeadLayout.GQA


@named_options
@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The largest draft of a lane that drafts or verifies. Every number is 1 for other lanes.

    Args:
        num_steps: Steps of one draft decode.
        topk: Branches per request in a draft decode.
        num_draft_tokens: Tokens per request in target verify and draft extend.
    """

    num_steps: int = 1
    topk: int = 1
    num_draft_tokens: int = 1

    def tokens_per_request(self, mode: ForwardMode) -> int | None:
        """Return the tokens per request in a batch of ``mode``; None if it is ragged."""
        if mode.is_ragged:
            return None
        if mode is ForwardMode.DRAFT_DECODE:
            return self.topk
        is_drafted = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
        return self.num_draft_tokens if is_drafted else 1

    def for_backend(self, mode: ForwardMode) -> "DraftLimits":
        """Return the part of the limits for which the backend of a lane of ``mode`` needs slots."""
        drafts = mode is ForwardMode.DRAFT_DECODE
        trees = drafts or mode is ForwardMode.TARGET_VERIFY
        return DraftLimits(
            self.num_steps if drafts else 1,
            self.topk if trees else 1,
            self.num_draft_tokens if trees or mode is ForwardMode.DRAFT_EXTEND else 1,
        )


@named_options
@dataclass(frozen=True, slots=True)
class Limits:
    """The largest counts of a lane, which set the sizes of slots.

    A slot's ``shape_fn`` gets the number of requests and tokens, so its rows need no limits; its columns do.

    Args:
        max_bs: Requests in a step, for workspaces and for captured upper bounds of host numbers.
        max_num_tokens: Tokens in a step, for the same uses.
        max_context_len: Tokens in a sequence, including drafts: the columns of a table of KV slots.
        page_size: KV slots per page: slot ``s`` is in page ``s // page_size``.
        draft: The largest draft: the columns by draft step, branch or draft token.
    """

    max_bs: int
    max_num_tokens: int
    max_context_len: int
    page_size: int
    draft: DraftLimits = DraftLimits()

    @property
    def max_pages_per_request(self) -> int:
        """Pages of a sequence of ``max_context_len`` tokens: the number of columns of a page table."""
        return -(-self.max_context_len // self.page_size)


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares to support. If a set is None, every value is supported.

    Args:
        modes: Forward modes.
        graph_support: Batches that can be captured.
        dtypes: Dtypes of queries and KV cache.
        devices: Device types, such as ``"cpu"`` and ``"cuda"``.
        head_layouts: Ways in which query heads share keys.
        page_sizes: KV page sizes.
        head_dims: Widths of a query head.
        sliding_window: Whether layers may have a sliding window.
        softcap: Whether layers may have a softcap.
        sinks: Whether layers may have sinks.
        trees: Whether drafts may have branches: top-k > 1 in draft decode, and a tree mask in target verify.
        needs_host_plan: Whether the replay hook reads ``seq_lens_cpu``.
        seq_len_fill_value: ``seq_lens`` of a padding row: a value that the kernels accept.
        eager_rows: The tokens that an attention call between two segments of a graph gets: those of the
            batch, or with ``"padded"`` those of the shape, for kernels that check the number of queries.
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
    eager_rows: Literal["live", "padded"] = "live"

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
        """Return what a model and an engine require and the backend does not declare, one phrase each."""
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
            need("head_dim", layer.head_dim, self.head_dims)
            for name, asked in (
                ("sliding_window", layer.sliding_window),
                ("softcap", layer.softcap),
                ("sinks", layer.sinks),
            ):
                if asked is not None and not getattr(self, name):
                    found[f"attention feature {name}"] = None
        if topk > 1 and not self.trees:
            found[f"drafts with top-k {topk}"] = None
        return list(found)

    def padded_seq_len(self, mode: ForwardMode, tokens_per_request: int = 1) -> int:
        """Return the ``seq_lens`` of a padding row in a batch of ``mode``.

        In draft extend it is at least the number of new tokens, so that every causal query has a key.
        """
        if mode is ForwardMode.DRAFT_EXTEND:
            return max(self.seq_len_fill_value, tokens_per_request)
        return self.seq_len_fill_value


def in_words(declared: Iterable[Any]) -> list[str]:
    """Return declared values as text, sorted; numbers by size."""
    values = [getattr(value, "value", value) for value in declared]
    return [str(v) for v in sorted(values, key=lambda v: v if isinstance(v, int) else str(v))]
