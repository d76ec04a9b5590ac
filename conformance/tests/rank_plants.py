"""Runners with faults on one rank, for tests of ranks as processes, which import this module.

Does not: test anything.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from graphpact.attention import AttentionBackend
from graphpact.batch import ForwardBatch
from graphpact.parallel import get_attention_tp_size
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.fields import COUNT, GATHERED
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner


def is_rank(number: int) -> bool:
    """Return whether this is the process of a rank."""
    return distributed.is_initialized() and distributed.get_rank() == number


class InSteps(ReferenceRunner):
    """A runner that calls ``fault`` on rank 1 before it fills its slots for a live batch."""

    fault: Callable[[], object]

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots."""
        is_live = batch.global_num_tokens_cpu is not None
        if is_live and is_rank(1):
            type(self).fault()
        super().populate(registry, batch, shape)


class Dies(InSteps):
    """A runner whose rank 1 is killed."""

    @staticmethod
    def fault() -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(InSteps):
    """A runner whose rank 1 sleeps."""

    @staticmethod
    def fault() -> None:
        """Sleep for long."""
        time.sleep(3600)


class Raises(InSteps):
    """A runner whose rank 1 raises."""

    @staticmethod
    def fault() -> None:
        """Raise an error."""
        raise ValueError("no memory on this rank")


class Leaves(InSteps):
    """A runner whose rank 1 ends its process."""

    @staticmethod
    def fault() -> None:
        """End this process."""
        os._exit(7)


class WaitsInFit(ReferenceRunner):
    """A runner whose rank 1 waits in ``fit`` for a vote of rank 0, which does not vote."""

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the shape, after a vote on rank 1."""
        if is_rank(1) and batch.global_num_tokens_cpu is not None:
            distributed.all_reduce(torch.zeros(1))
        return super().fit(batch)


class CountsPadding(ReferenceRunner):
    """A runner whose rank 1 counts its padding rows as live tokens."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots."""
        super().populate(registry, batch, shape)
        if is_rank(1) and registry.has_slot(COUNT):
            registry.get_slot(COUNT).buffer.fill_(shape.num_tokens // get_attention_tp_size())


class CapturesOtherCount(ReferenceRunner):
    """A runner whose rank 1 captures with no live tokens."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots."""
        super().populate(registry, batch, shape)
        if is_rank(1) and batch.global_num_tokens_cpu is None:
            registry.get_slot(COUNT).buffer.fill_(0)


class GathersItsOwn(ReferenceRunner):
    """A runner that fills the tokens of the gathered buffer with those of each rank."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots."""
        super().populate(registry, batch, shape)
        if is_rank(0) or is_rank(1):
            registry.get_slot(GATHERED[0]).buffer.fill_(max(batch.num_tokens, 1))


class MasksLiveTokens(ReferenceRunner):
    """A runner whose rank 1 masks its last live token."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots."""
        super().populate(registry, batch, shape)
        if is_rank(1) and batch.global_num_tokens_cpu is not None:
            registry.get_slot(COUNT).buffer.sub_(1).clamp_(min=0)


class Refuses(ReferenceRunner):
    """A runner that has a shape for no batch where there are ranks."""

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the shape, on ranks a reason."""
        is_of_ranks = distributed.is_initialized()
        return EagerReason("no_memory", "ranks have no memory") if is_of_ranks else super().fit(batch)


class RaisesEverywhere(ReferenceRunner):
    """A runner that raises in every step of all ranks, but not in one process."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Raise for batches of ranks."""
        if batch.global_num_tokens_cpu is not None:
            raise ValueError("ranks are not supported")
        super().populate(registry, batch, shape)


class IsWrong(ReferenceRunner):
    """A runner that has nothing to do with ranks, and gives every request another position."""

    def populate(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots, positions from 1 too high."""
        super().populate(registry, batch, shape)
        registry.get_slot("positions").buffer.add_(1)


class Right(ReferenceRunner):
    """A right runner, as a class of its own."""


@contextmanager
def planted(name: str) -> Iterator[tuple[type[AttentionBackend], type[GraphRunner]]]:
    """Yield the suite's backend and the runner of a name."""
    yield ReferenceBackend, globals()[name]


@contextmanager
def broken() -> Iterator[None]:
    """Raise, as a plugin that cannot be imported does."""
    raise ImportError("no such library on this rank")
    yield
