"""The runner's side of the contract: which shapes are captured, and how a batch becomes a view.

`GraphRunner` holds what every runner of full graphs shares, `DecodeRunner` what those of decode do.
`EagerRunner`, which captures nothing, is the runner of a lane without graphs.

Does not: record, check or replay; `graphpact.lane` does that in one place for all runners.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from graphpact.attention import Capabilities, GraphSupport, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, SharedBuffers, build_decode_registry
from graphpact.errors import ConfigError, EngineError
from graphpact.hookspecs import hookimpl
from graphpact.shapes import BucketLadder, EagerReason, GraphShape

if TYPE_CHECKING:
    from graphpact.lane import Lane


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What a runner is built with.

    Args:
        device: The lane's device.
        backend: What the lane's attention backend declares.
        max_bs: Requests that a step may have at most.
        batch_sizes: Request counts to capture, or None for the runner's own ladder.
        lane: The lane's name.
        share_pool: Where the runner's registry takes the memory of its inputs from, so that lanes share
            it; None for memory of its own.
        eager_reason: Why this lane cannot capture here and runs eagerly instead; see
            `GraphRunner.eager_reason`. None where it can.
        mode: What the lane's batches are.
        limits: The largest of everything: a runner that pads tokens, or drafts, sizes its shapes by it.
        num_token_non_padded: Whether layers ask for the number of real tokens, and so for a slot of that
            name: those that must not route padding.
        require_gathered_buffer: Whether activations are gathered over ranks, so that this number is a
            rank's share of the padded shape; see `graphpact.parallel`.
    """

    device: torch.device
    backend: Capabilities
    max_bs: int
    batch_sizes: Sequence[int] | None = None
    lane: str | None = None
    share_pool: SharedBuffers | None = None
    eager_reason: EagerReason | None = None
    mode: ForwardMode = ForwardMode.DECODE
    limits: Limits | None = None
    num_token_non_padded: bool = False
    require_gathered_buffer: bool = False


class GraphRunner(abc.ABC):
    """Base class of runner plugins.

    A subclass sets `modes` and `needs`, and writes `make_ladder`, `make_registry` and `dummy_batch`.
    """

    modes: ClassVar[frozenset[ForwardMode]]
    needs: ClassVar[GraphSupport]
    """What it asks of the backend that it captures."""
    driver: ClassVar[str | None] = None
    """The graph driver that ``auto`` means for it; None for the device's own."""

    def __init__(self, context: RunnerContext) -> None:
        self.context = context
        self.lane: Lane | None = None
        ladder = self.make_ladder()
        self.ladder = ladder if context.eager_reason is None else None
        self._views: dict[GraphShape, ForwardBatch] = {}

    # -- what a runner writes --------------------------------------------------------------------

    @abc.abstractmethod
    def make_ladder(self) -> BucketLadder | None:
        """Return the shapes to capture, or None for a runner that captures nothing."""

    @abc.abstractmethod
    def make_registry(self) -> CudaGraphBufferRegistry | None:
        """Return a registry with the slots of the runner's inputs, sized for its ladder.

        None where `ladder` is None.
        """

    @abc.abstractmethod
    def dummy_batch(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch of exactly ``shape`` that a live one could have been, on scratch memory only."""

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return why a lane may run eagerly where `driver` cannot record on ``device``.

        None, which is what most runners say: it may not, and the driver's reason is an error at start.
        A driver that was named in the configuration is never given up.
        """
        del device
        return None

    # -- what the base class makes of it ---------------------------------------------------------

    def capture(self, lane: "Lane") -> None:
        """Capture every shape of the ladder through ``lane``, the largest first.

        The largest first, because a memory pool then fits the smaller ones.
        """
        self.lane = lane
        for shape in reversed(self.ladder.shapes if self.ladder else []):
            lane.capture(shape)

    def can_run(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the captured shape that ``batch`` replays, or why there is none."""
        if self.ladder is None:
            return self.context.eager_reason or EagerReason.NO_GRAPHS
        if self.lane is None:
            return EagerReason.NOT_CAPTURED
        fit = self.ladder.fit(batch)
        if isinstance(fit, GraphShape) and not self.lane.is_captured(fit):
            return EagerReason.NOT_CAPTURED
        return fit

    def run(self, batch: ForwardBatch, shape: GraphShape | None = None) -> torch.Tensor:
        """Replay ``batch`` through its graph and return the real rows of the outputs.

        Args:
            batch: The live batch.
            shape: What `can_run` answered; asked again where it is not given.

        Raises:
            EngineError: No captured shape holds the batch.
        """
        fit = self.can_run(batch) if shape is None else shape
        if isinstance(fit, EagerReason) or self.lane is None:
            raise EngineError(
                f"no graph for {batch.batch_size} requests: {fit}",
                hint="Lane.run() falls back to eager execution and counts the reason",
            )
        return self.lane.replay(batch, fit)

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
        """Populate the slots and return the view of ``shape``, the same object every time."""
        if self.lane is None:
            raise EngineError(
                "prepare_replay() was called before capture() gave the runner its lane"
            )
        self.lane.populate(registry=registry, batch=batch, shape=shape)
        view = self._views.get(shape)
        if view is None:
            view = self._views[shape] = registry.extract_buffer(
                padded_bs=shape.batch_size,
                padded_num_tokens=shape.num_tokens,
                forward_batch_template=batch,
            )
        return view


class DecodeRunner(GraphRunner):
    """Captures the whole forward pass of decode for every bucket of a ladder of request counts.

    A padded row is a request of the backend's fill length on request row 0 and KV slot 0, at position 0:
    it reads and writes scratch. A subclass writes `default_batch_sizes`.
    """

    modes = frozenset({ForwardMode.DECODE})
    needs = GraphSupport.UNIFORM_DECODE

    @abc.abstractmethod
    def default_batch_sizes(self) -> list[int]:
        """Return the request counts to capture where none are configured."""

    def make_ladder(self) -> BucketLadder:
        """Return the configured buckets, or the default ladder.

        Raises:
            ConfigError: A bucket that no step can fill.
        """
        sizes = self.context.batch_sizes
        if sizes is None:
            sizes = self.default_batch_sizes()
        if max(sizes, default=0) > self.context.max_bs:
            raise ConfigError(
                f"lanes.decode.batch_sizes has {max(sizes)}, but a step has at most"
                f" engine.max_num_seqs = {self.context.max_bs} requests",
                hint="leave the larger buckets out, or raise engine.max_num_seqs",
            )
        return BucketLadder(ForwardMode.DECODE, sizes)

    def make_registry(self) -> CudaGraphBufferRegistry | None:
        """Return the inputs of decode, padded with the length that the backend reads as empty."""
        if self.ladder is None:
            return None
        largest = self.ladder.largest
        return build_decode_registry(
            max_bs=largest.batch_size,
            max_num_token=largest.num_tokens,
            device=self.context.device,
            seq_len_fill_value=self.context.backend.seq_len_fill_value,
            enable_num_token_non_padded=self.context.num_token_non_padded,
            require_gathered_buffer=self.context.require_gathered_buffer,
            register_global_num_tokens=False,
            enable_mrope=False,
            zero_input_ids=True,
            share_pool=self.context.share_pool,
            lane=self.context.lane,
        )

    def dummy_batch(self, shape: GraphShape) -> ForwardBatch:
        """Return requests of the backend's fill length on row 0 and slot 0: padding, every row."""
        length = self.context.backend.seq_len_fill_value
        size, device = shape.batch_size, self.context.device
        counts = self.context.num_token_non_padded

        def full(value: int, where: torch.device = device) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=where)

        return ForwardBatch(
            forward_mode=shape.mode,
            batch_size=size,
            input_ids=full(0),
            positions=full(max(length - 1, 0)),
            out_cache_loc=full(0),
            req_pool_indices=full(0),
            seq_lens=full(length),
            seq_lens_cpu=full(length, torch.device("cpu")),
            num_token_non_padded=full(size)[:1].int() if counts else None,
            num_token_non_padded_cpu=size if counts else None,
        )


class EagerRunner(GraphRunner):
    """Captures nothing: every batch of its lane runs eagerly, and that is its reason."""

    modes = frozenset(ForwardMode)
    needs = GraphSupport.NEVER

    def make_ladder(self) -> None:
        """Return None: there is nothing to capture.

        Raises:
            ConfigError: Shapes to capture, or buffers to share, were configured all the same.
        """
        if self.context.share_pool is not None:
            raise ConfigError(
                f"lanes.{self.context.lane}.share_buffers = true for the runner 'eager', which has no"
                " buffers",
                hint="leave share_buffers out, or select a runner that captures",
            )
        if self.context.batch_sizes is not None:
            raise ConfigError(
                f"batch_sizes = {list(self.context.batch_sizes)} for the runner 'eager', which captures"
                " nothing",
                hint="leave batch_sizes out, or select a runner that captures",
            )

    def make_registry(self) -> None:
        """Return None: there is no graph-resident memory."""

    def dummy_batch(self, shape: GraphShape) -> ForwardBatch:
        """Refuse: nothing is captured, so no dummy is ever asked for."""
        raise EngineError(f"the eager runner captures nothing, least of all {shape}")
