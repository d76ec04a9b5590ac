"""The runner's side of the contract: captured shapes, padding, and the region that a graph records.

A runner only decides. It holds no graph, no lane and no tensor: the lane captures and replays, and the
registry holds the memory. `GraphRunner` implements full graphs of every mode; a subclass chooses the shapes.
`EagerRunner` captures nothing.

Does not: record, check or replay; `graphpact.lane` does.
"""

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from graphpact.attention import Capabilities, DraftLimits, GraphSupport, LayerSpec, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, input_slots
from graphpact.buffers.inputs import PROXIES
from graphpact.errors import ConfigError, EngineError
from graphpact.hookspecs import HookMethods
from graphpact.parallel import get_attention_tp_size
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """The constructor argument of a runner.

    Args:
        device: The lane's device.
        backend: Capabilities of the lane's attention backend.
        limits: The largest counts of the lane, which bound the shapes.
        mode: Forward mode of the lane's batches.
        batch_sizes: Request counts to capture; None for the runner's default.
        token_counts: Token counts to capture in ragged modes; None for the runner's default.
        max_padding_ratio: The largest ratio of a shape's tokens to a batch's tokens, for runners that limit
            it.
        lane: The lane's name, for messages.
        num_token_non_padded: Whether the lane needs a slot of that name, because layers that must not route
            padding need the number of real tokens.
        require_gathered_buffer: Whether activations are gathered over ranks. If so, ``num_token_non_padded``
            counts a rank's share of the padded shape; see `graphpact.parallel`. The tokens of every shape are
            then a multiple of the attention-TP size, so that all ranks have equal shares.
        hidden_size: Width of embeddings, and of the hidden states that batches of a draft model carry.
        dtype: Dtype of hidden states, embeddings, queries, keys and values.
        layers: The model's layers.
        mrope: Whether batches carry ``mrope_positions``.
        input_embeds: Whether batches carry ``input_embeds``.
        pp_proxy_tensors: Widths of the tensors that a pipeline stage gets from the stage before, by name.
            Batches carry each as ``pp_proxy_tensors.NAME`` in `ForwardBatch.extra`, ``[T, width]``.
    """

    device: torch.device
    backend: Capabilities
    limits: Limits
    mode: ForwardMode = ForwardMode.DECODE
    batch_sizes: Sequence[int] | None = None
    token_counts: Sequence[int] | None = None
    max_padding_ratio: float = 2.0
    lane: str | None = None
    num_token_non_padded: bool = False
    require_gathered_buffer: bool = False
    hidden_size: int = 1
    dtype: torch.dtype = torch.float32
    layers: Sequence[LayerSpec] = ()
    mrope: bool = False
    input_embeds: bool = False
    pp_proxy_tensors: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_request(self) -> int | None:
        """Tokens per request in this mode; None if the mode is ragged."""
        return self.limits.draft.tokens_per_request(self.mode)

    @property
    def padded_seq_len(self) -> int:
        """``seq_lens`` of a padding request."""
        return self.backend.padded_seq_len(self.mode, self.tokens_per_request or 1)

    def require_batch_sizes(self, default: Sequence[int]) -> Sequence[int]:
        """Return the configured request counts, or ``default``; raise `ConfigError` above ``max_bs``."""
        most = self.limits.max_bs, "requests", "engine.max_num_seqs"
        ranks = self._sharing_ranks
        unit = ranks // math.gcd(ranks, self.tokens_per_request or ranks)
        return self._configured("batch_sizes", self.batch_sizes, default, *most, unit)

    def require_token_counts(self, default: Sequence[int]) -> Sequence[int]:
        """Return the configured token counts, or ``default``; raise `ConfigError` above the limit."""
        most = self.limits.max_num_tokens, "tokens", "engine.max_num_batched_tokens"
        return self._configured("token_counts", self.token_counts, default, *most, self._sharing_ranks)

    @property
    def _sharing_ranks(self) -> int:
        """Ranks among which the tokens of a shape are divided."""
        return get_attention_tp_size() if self.require_gathered_buffer else 1

    def _configured(
        self,
        key: str,
        asked: Sequence[int] | None,
        default: Sequence[int],
        most: int,
        what: str,
        limit: str,
        unit: int,
    ) -> Sequence[int]:
        sizes = default if asked is None else asked
        if asked is None:
            sizes = sorted({min(-(-size // unit), most // unit) * unit for size in default} - {0})
        if asked is None and not sizes:
            raise ConfigError(
                f"lanes.{self.lane}: a shape that {self._sharing_ranks} ranks can divide has at least {unit}"
                f" {what}; {limit} is {most}",
                hint=f"raise {limit} to {unit} or more",
            )
        if odd := [size for size in sizes if size % unit]:
            raise ConfigError(
                f"lanes.{self.lane}.{key} has {odd[0]}, but {self._sharing_ranks} ranks divide the tokens of"
                " a shape equally",
                hint=f"give multiples of {unit}, or leave {key} out",
            )
        if max(sizes, default=0) > most:
            raise ConfigError(
                f"lanes.{self.lane}.{key} has {max(sizes)}, but a step of this lane has at most {most} {what}"
                f" ({limit})",
                hint=f"leave the larger sizes out, or raise {limit}",
            )
        return sizes


class GraphRunner(HookMethods, abc.ABC):
    """Base class of runner plugins.

    A subclass sets `modes` and `needs`, and implements `shapes`. The default methods implement full graphs
    for every mode: the whole forward pass in one graph, with padded requests and tokens.

    A runner may keep events and host state. It must not keep graphs, lanes or tensors.
    """

    modes: ClassVar[frozenset[ForwardMode]]
    needs: ClassVar[GraphSupport]
    """The graph support that the runner needs from the backend."""
    driver: ClassVar[str | None] = None
    """The graph driver for ``auto``; None for the default driver of the device."""
    declines: ClassVar[Collection[EagerReason]] = ()
    """The reasons that this runner adds: `fit` may return one of them for a batch that a captured shape could
    hold, and the batch then runs eagerly.
    """

    eager_attention: ClassVar[bool] = False
    """Whether attention runs outside the graphs of its lanes. If so, the lane makes new metadata in each step
    by `AttentionBackend.init_metadata_eager`, and regions compute attention by `RegionContext.attend` in
    eager calls.
    """
    frozen_kv: ClassVar[bool] = False
    """Whether the model only reads the KV cache, such as the cache of another model. Each request then has
    ``limits.draft.topk`` equal, consecutive rows in the batch, and ``seq_lens`` does not count a new
    token.
    """

    def __init__(self, context: RunnerContext) -> None:
        self.context = context

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return the reason why a lane may run eagerly if `driver` cannot record on ``device``.

        Return None (the default) if an unavailable driver must be an error at start. A driver that the
        configuration names is always required.
        """
        del device
        return None

    # -- decisions ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def shapes(self) -> Sequence[GraphShape]:
        """Return the shapes to capture, the same at every call; empty for a runner that captures nothing.

        `CaptureSizes` makes shapes from sizes.
        """

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the shape for ``batch``, one of `shapes`, or why it runs eagerly. Only host work."""
        return EagerReason.NO_GRAPHS if self._sizes is None else self._sizes.fit(batch)

    def slots(self) -> Sequence[GraphSlot]:
        """Return the slots of the static inputs, one for each field of a batch.

        A runner that cannot take a field that its context announces returns no slot for it. The lane then
        refuses batches with this field, by an error that names it.
        """
        context, draft = self.context, self.context.limits.draft
        return input_slots(
            context.mode,
            seq_len_fill_value=context.padded_seq_len,
            num_draft_steps=draft.num_steps,
            num_draft_tokens=draft.num_draft_tokens,
            trees=draft.topk > 1,
            num_token_non_padded=context.num_token_non_padded,
            require_gathered_buffer=context.require_gathered_buffer,
            mrope=context.mrope,
            embeds=(context.hidden_size, context.dtype) if context.input_embeds else None,
            proxies={name: (width, context.dtype) for name, width in context.pp_proxy_tensors.items()},
        )

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a valid batch of exactly ``shape`` that uses only scratch memory.

        `fit` gives ``shape`` for it, with its variant, or a reason of `declines`. If the variants of a size
        are tiers of lengths, the dummy of a tier has the longest request that the tier serves: `fit` gives
        the tier to no batch with a longer one. By default each request has the length of a padding row.
        """
        return dummy_batch(shape, self.context)

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the region that the graph of a shape records, by default one forward pass.

        Args:
            forward: The model. The region may call it several times, with a batch, its metadata, and the
                function that computes attention for its layers.
            step: The context of the region. It reads ``step.view`` and ``step.metadata`` at capture. An
                eager call (``step.driver.eager_call``) may read ``step.live`` and ``step.metadata`` in every
                replay. In an eager step (``step.is_eager``) the region runs once, without a graph.
        """
        return lambda: forward(step.view, step.metadata, step.backend.forward)

    # -- hooks -----------------------------------------------------------------------------------

    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Copy ``batch`` into the slots, and pad them to ``shape`` by their policies."""
        registry.fill_from(
            batch,
            raw_bs=batch.batch_size,
            padded_bs=shape.batch_size,
            raw_num_tokens=batch.num_tokens,
            padded_num_tokens=shape.num_tokens,
        )

    def prepare_replay(
        self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> ForwardBatch:
        """Return the static inputs of ``shape``, always the same object."""
        return registry.static_inputs(batch, shape)

    # -- inside ----------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> CaptureSizes | None:
        shapes = self.shapes()
        return CaptureSizes(tuple(shapes)) if shapes else None


class DecodeRunner(GraphRunner):
    """A runner that captures full graphs of uniform batches, in the default or the configured batch sizes.

    It serves decode, and the modes that a subclass adds to `modes`, such as target verify.
    """

    modes = frozenset({ForwardMode.DECODE})
    needs = GraphSupport.UNIFORM_DECODE

    @abc.abstractmethod
    def default_batch_sizes(self) -> list[int]:
        """Return the request counts to capture if the configuration gives none."""

    def shapes(self) -> Sequence[GraphShape]:
        """Return one shape for each request count."""
        sizes = self.context.require_batch_sizes(self.default_batch_sizes())
        return CaptureSizes.uniform(self.context.mode, sizes, self.context.tokens_per_request or 1).shapes


class EagerRunner(GraphRunner):
    """A runner that captures nothing: every batch of its lane runs eagerly."""

    modes = frozenset(ForwardMode)
    needs = GraphSupport.NEVER

    def shapes(self) -> Sequence[GraphShape]:
        """Return no shapes."""
        return ()


def dummy_batch(shape: GraphShape, context: RunnerContext) -> ForwardBatch:
    """Return a batch of exactly ``shape`` on scratch memory: request row 0, KV slot 0, token 0.

    Each length is that of a padding request, or the number of new tokens if that is larger. The positions
    agree with the lengths.

    Args:
        shape: The shape to capture.
        context: The runner's context.

    Raises:
        EngineError: The requests cannot have that many tokens, or the mode is not ragged and the token count
            is not a multiple of the request count.
    """
    mode, bs, tokens, device = shape.mode, shape.batch_size, shape.num_tokens, context.device
    if tokens > bs * context.limits.max_context_len:
        raise EngineError(
            f"lane {context.lane!r}: {shape} has more tokens than its requests can have, so no batch can "
            "fill it",
            hint="let shapes() stop at batch_size * limits.max_context_len tokens",
        )
    draft: DraftLimits = context.limits.draft
    if tokens % bs and not mode.is_ragged:
        raise EngineError(
            f"the tokens of {shape} cannot be divided equally among its requests",
            hint="make the token count a multiple of the request count: the mode is not ragged",
        )
    new = torch.tensor([tokens // bs + (row < tokens % bs) for row in range(bs)])
    lens = torch.full((bs,), context.padded_seq_len)
    if mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE):
        lens = lens.maximum(new)  # their lengths count the new tokens
    steps = (draft.num_steps,) if mode is ForwardMode.DRAFT_DECODE else ()
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=bs,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=_positions(mode, lens, new),
        out_cache_loc=torch.zeros(tokens, *steps, dtype=torch.int64),
        req_pool_indices=torch.zeros(bs, dtype=torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
    )
    if mode.is_ragged:
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = new, new.clone()
    if mode is ForwardMode.TARGET_VERIFY and draft.topk > 1:
        batch.tree_mask = torch.ones(tokens, tokens // bs, dtype=torch.bool)
    if mode is ForwardMode.DRAFT_EXTEND:
        batch.num_correct_drafts = torch.zeros(bs, dtype=torch.int32)
    if context.num_token_non_padded:
        batch.num_token_non_padded = torch.tensor([tokens], dtype=torch.int32)
        batch.num_token_non_padded_cpu = tokens
    if context.mrope:
        batch.mrope_positions = batch.positions.expand(3, -1).clone()
    if context.input_embeds:
        batch.input_embeds = torch.zeros(tokens, context.hidden_size, dtype=context.dtype)
    batch.extra = {
        f"{PROXIES}{name}": torch.zeros(tokens, width, dtype=context.dtype)
        for name, width in context.pp_proxy_tensors.items()
    }
    return batch.to(device)


def _positions(mode: ForwardMode, lens: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``[T]``: positions of the new tokens; all branches of a draft have the first position."""
    if mode is ForwardMode.DRAFT_DECODE:
        return lens.repeat_interleave(new)
    first = lens if mode is ForwardMode.TARGET_VERIFY else lens - new
    begins = new.cumsum(0) - new
    index = torch.arange(int(new.sum())) - begins.repeat_interleave(new)
    return first.repeat_interleave(new) + index
