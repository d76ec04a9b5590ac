"""The driver contract: `GraphDriver` records a callable once, `Graph` replays what was recorded.

What every driver promises: a replay repeats the recorded device work on the tensors, by address, that
it was recorded with, with the Python numbers that it was recorded with, and runs no Python of the
recorded callable. Work that cannot be recorded raises `CaptureError`, and no graph is kept.

Does not: warm kernels up or order shapes; the lane and its runner do.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch


class Graph(abc.ABC):
    """One recorded region.

    Attributes:
        outputs: What the recorded callable returned. Its tensors belong to the graph: each replay
            overwrites them, and so may a replay of another graph of the same driver.
        num_nodes: Recorded operations (kernel launches, for CUDA), or -1 where the driver cannot tell.
        pool_nbytes: Bytes of memory that the recorded region allocated and the graph keeps: its outputs
            and what lies between them and its inputs; 0 once released. -1 where the driver cannot tell.
    """

    outputs: Any
    num_nodes: int
    pool_nbytes: int = -1

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the recorded work once."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give up the recorded work and its memory; the graph cannot be replayed afterwards."""

    def external_tensors(self) -> list[torch.Tensor] | None:
        """Return the tensors of recorded work whose memory the graph did not allocate.

        They must stay where they are for as long as the graph is replayed. Equal views come once; once
        released there are none. None where the driver cannot tell.
        """
        return None


class GraphDriver(abc.ABC):
    """Records graphs on one device. One instance is one memory pool.

    Args:
        device: Where the recorded work runs.
    """

    name: ClassVar[str]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this driver cannot record on ``device`` here, or None where it can."""

    @abc.abstractmethod
    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then record one more run of it.

        Args:
            fn: The region. It must do the same device work in every run, and nothing else that matters.
            warmup: Runs before the recorded one, so that lazy set-up work is not recorded.

        Raises:
            CaptureError: ``fn`` did something that a graph cannot hold; the message names the line.
        """
