"""The runner's side of the contract: which shapes are captured, and how a batch becomes a view.

`GraphRunner` holds what every runner of full graphs shares. `EagerRunner`, which captures nothing, is
the runner of a lane without graphs.

Does not: record, check or replay; `graphpact.lane` does that in one place for all runners.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from graphpact.attention import Capabilities, GraphSupport
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, SharedBuffers
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
    """

    device: torch.device
    backend: Capabilities
    max_bs: int
    batch_sizes: Sequence[int] | None = None
    lane: str | None = None
    share_pool: SharedBuffers | None = None


class GraphRunner(abc.ABC):
    """Base class of runner plugins.

    A subclass sets `modes` and `needs`, and writes `make_ladder`, `make_registry` and `dummy_batch`.
    """

    modes: ClassVar[frozenset[ForwardMode]]
    needs: ClassVar[GraphSupport]
    """What it asks of the backend that it captures."""

    def __init__(self, context: RunnerContext) -> None:
        self.context = context
        self.lane: Lane | None = None
        self.ladder = self.make_ladder()
        self._views: dict[GraphShape, ForwardBatch] = {}

    # -- what a runner writes --------------------------------------------------------------------

    @abc.abstractmethod
    def make_ladder(self) -> BucketLadder | None:
        """Return the shapes to capture, or None for a runner that captures nothing."""

    @abc.abstractmethod
    def make_registry(self) -> CudaGraphBufferRegistry | None:
        """Return a registry with the slots of the runner's inputs, sized for its ladder."""

    @abc.abstractmethod
    def dummy_batch(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch of exactly ``shape`` that a live one could have been, on scratch memory only."""

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
            return EagerReason.NO_GRAPHS
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
