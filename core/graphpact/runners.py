"""The runner's side of the contract: which shapes are captured, how a batch is padded, what a graph holds.

A runner is policy. It holds no graph, no lane and no tensor: the lane captures and replays, the registry has
the memory. `GraphRunner` has ready what full graphs of any mode need; a subclass says which shapes there are.
`EagerRunner`, which captures nothing, is the runner of a lane without graphs.

Does not: record, check or replay; `graphpact.lane` does that in one place for all runners.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from graphpact.attention import Capabilities, DraftLimits, GraphSupport, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, input_slots
from graphpact.errors import ConfigError, EngineError
from graphpact.hookspecs import hookimpl
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Forward, Region, Step


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What a runner is built with.

    Args:
        device: The lane's device.
        backend: What the lane's attention backend declares.
        limits: The largest of everything: shapes are sized by it.
        mode: What the lane's batches are.
        batch_sizes: Request counts to capture, or None for the runner's own.
        lane: The lane's name, for messages.
        num_token_non_padded: Whether layers ask for the number of real tokens, and so for a slot of that
            name: those that must not route padding.
        require_gathered_buffer: Whether activations are gathered over ranks, so that this number is a
            rank's share of the padded shape; see `graphpact.parallel`.
    """

    device: torch.device
    backend: Capabilities
    limits: Limits
    mode: ForwardMode = ForwardMode.DECODE
    batch_sizes: Sequence[int] | None = None
    lane: str | None = None
    num_token_non_padded: bool = False
    require_gathered_buffer: bool = False

    @property
    def tokens_per_request(self) -> int | None:
        """Tokens that each request of the mode brings; None where requests bring different numbers."""
        draft = self.limits.draft
        if self.mode.is_ragged:
            return None
        if self.mode is ForwardMode.DRAFT_DECODE:
            return draft.topk
        if self.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            return draft.num_draft_tokens
        return 1

    @property
    def padded_seq_len(self) -> int:
        """``seq_lens`` of a padded request."""
        return self.backend.padded_seq_len(self.mode, self.tokens_per_request or 1)

    def require_batch_sizes(self, default: Sequence[int]) -> Sequence[int]:
        """Return the configured request counts, or ``default``.

        Raises:
            ConfigError: A count that no step can have.
        """
        sizes = default if self.batch_sizes is None else self.batch_sizes
        if max(sizes, default=0) > self.limits.max_bs:
            raise ConfigError(
                f"lanes.{self.lane}.batch_sizes has {max(sizes)}, but a step has at most"
                f" engine.max_num_seqs = {self.limits.max_bs} requests",
                hint="leave the larger sizes out, or raise engine.max_num_seqs",
            )
        return sizes


class GraphRunner(abc.ABC):
    """Base class of runner plugins.

    A subclass sets `modes` and `needs`, and writes `shapes`. The rest serves full graphs of every mode as it
    is: the whole forward pass in one graph, requests and tokens padded.

    A runner may keep events and host state of its own, never graphs, lanes or tensors.
    """

    modes: ClassVar[frozenset[ForwardMode]]
    needs: ClassVar[GraphSupport]
    """What it asks of the backend that it captures."""
    driver: ClassVar[str | None] = None
    """The graph driver that ``auto`` means for it; None for the device's own."""

    def __init__(self, context: RunnerContext) -> None:
        self.context = context

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return why a lane may run eagerly where `driver` cannot record on ``device``.

        None, which is what most runners say: it may not, and the driver's reason is an error at start.
        A driver that was named in the configuration is never given up.
        """
        del device
        return None

    # -- policy ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def shapes(self) -> Sequence[GraphShape]:
        """Return the shapes to capture; none for a runner that captures nothing.

        Asked anew it returns the same; `CaptureSizes` makes shapes of sizes.
        """

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the shape that ``batch`` replays, one of `shapes`, or why there is none. Host work only."""
        return EagerReason.NO_GRAPHS if self._sizes is None else self._sizes.fit(batch)

    def slots(self) -> Sequence[GraphSlot]:
        """Return the declarations of the static inputs: a slot for each field that a batch has."""
        context = self.context
        return input_slots(
            context.mode,
            seq_len_fill_value=context.padded_seq_len,
            num_draft_steps=context.limits.draft.num_steps,
            num_draft_tokens=context.limits.draft.num_draft_tokens,
            trees=context.limits.draft.topk > 1,
            num_token_non_padded=context.num_token_non_padded,
            require_gathered_buffer=context.require_gathered_buffer,
        )

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch of exactly ``shape`` that a live one could have been, on scratch memory only."""
        return dummy_batch(shape, self.context)

    def compose(self, forward: Forward, step: Step) -> Region:
        """Return what the graph of a shape records: by default one forward pass.

        Args:
            forward: The model. Called as often as the runner needs, each time with a batch, its metadata, and
                how its layers attend.
            step: The captured shape. Recorded work reads ``step.view`` and ``step.metadata`` as they are now;
                an eager call (``step.driver.eager_call``) may read ``step.live`` and ``step.metadata`` in
                every replay.
        """
        return lambda: forward(step.view, step.metadata, step.backend.forward)

    # -- the two hooks ---------------------------------------------------------------------------

    @hookimpl
    def populate(
        self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> None:
        """Fill the slots from ``batch`` and pad them to ``shape`` by their policies."""
        registry.fill_from(
            batch,
            raw_bs=batch.batch_size,
            padded_bs=shape.batch_size,
            raw_num_tokens=batch.num_tokens,
            padded_num_tokens=shape.num_tokens,
        )

    @hookimpl
    def prepare_replay(
        self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> ForwardBatch:
        """Return the static inputs of ``shape``, the same object every time."""
        return registry.static_inputs(batch, shape)

    # -- inside ----------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> CaptureSizes | None:
        shapes = self.shapes()
        return CaptureSizes(tuple(shapes)) if shapes else None


class DecodeRunner(GraphRunner):
    """Captures decode for every size of `default_batch_sizes`, or for those that are configured."""

    modes = frozenset({ForwardMode.DECODE})
    needs = GraphSupport.UNIFORM_DECODE

    @abc.abstractmethod
    def default_batch_sizes(self) -> list[int]:
        """Return the request counts to capture where none are configured."""

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each request count."""
        sizes = self.context.require_batch_sizes(self.default_batch_sizes())
        return CaptureSizes.uniform(ForwardMode.DECODE, sizes).shapes


class EagerRunner(GraphRunner):
    """Captures nothing: every batch of its lane runs eagerly, and that is its reason."""

    modes = frozenset(ForwardMode)
    needs = GraphSupport.NEVER

    def shapes(self) -> Sequence[GraphShape]:
        """Return none: there is nothing to capture.

        Raises:
            ConfigError: Sizes to capture were configured all the same.
        """
        if self.context.batch_sizes is not None:
            raise ConfigError(
                f"lanes.{self.context.lane}.batch_sizes = {list(self.context.batch_sizes)} for the runner"
                " 'eager', which captures nothing",
                hint="leave batch_sizes out, or select a runner that captures",
            )
        return ()


def dummy_batch(shape: GraphShape, context: RunnerContext) -> ForwardBatch:
    """Return a batch of exactly ``shape`` on scratch memory: request row 0, KV slot 0, token 0.

    Its lengths are those of padded requests, or as many as the new tokens of a request where that is more.
    Its positions agree with them.

    Args:
        shape: What is captured.
        context: Of the runner: mode, draft widths, the backend's lengths, whether real tokens are counted.

    Raises:
        EngineError: A token count that is no whole number of tokens a request, in a mode that is not ragged.
    """
    mode, bs, tokens, device = shape.mode, shape.batch_size, shape.num_tokens, context.device
    draft: DraftLimits = context.limits.draft
    if mode.is_ragged:
        new = torch.tensor([tokens // bs + (row < tokens % bs) for row in range(bs)])
    else:
        if tokens % bs:
            raise EngineError(
                f"{shape} has no whole number of tokens a request",
                hint="only extend and mixed batches are ragged",
            )
        new = torch.full((bs,), tokens // bs)
    lens = torch.full((bs,), context.padded_seq_len)
    counted = mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE)
    if counted:
        lens = lens.maximum(new)
    positions = _positions(mode, lens, new)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    loc = zeros
    if mode is ForwardMode.DRAFT_DECODE:
        loc = torch.zeros(tokens, draft.num_steps, dtype=torch.int64)
    tree = mode is ForwardMode.TARGET_VERIFY and draft.topk > 1
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=bs,
        input_ids=zeros,
        positions=positions,
        out_cache_loc=loc,
        req_pool_indices=torch.zeros(bs, dtype=torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        extend_seq_lens=new if mode.is_ragged else None,
        extend_seq_lens_cpu=new.clone() if mode.is_ragged else None,
        tree_mask=torch.ones(tokens, tokens // bs, dtype=torch.bool) if tree else None,
        num_correct_drafts=torch.zeros(bs, dtype=torch.int32)
        if mode is ForwardMode.DRAFT_EXTEND
        else None,
        num_token_non_padded=torch.tensor([tokens], dtype=torch.int32)
        if context.num_token_non_padded
        else None,
        num_token_non_padded_cpu=tokens if context.num_token_non_padded else None,
    )
    return batch.to(device)


def _positions(mode: ForwardMode, lens: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``[T]``: where each request's new tokens are; branches of a draft all at its first place."""
    if mode is ForwardMode.DRAFT_DECODE:
        return lens.repeat_interleave(new)
    first = lens if mode is ForwardMode.TARGET_VERIFY else lens - new
    begins = new.cumsum(0) - new
    place = torch.arange(int(new.sum())) - begins.repeat_interleave(new)
    return first.repeat_interleave(new) + place
