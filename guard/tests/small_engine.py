"""A small engine in the shape of SGLang's: a backend that prepares metadata, and graphs by padded size.

Its graphs are tapes, so that a wrong backend gives wrong numbers without a message, as on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch

from graphpact_guard import GraphKey, Guard
from graphpact_tape import TapeDriver

KEYS = 16


@dataclass
class Metadata:
    """What the kernel reads.

    Args:
        lengths: ``[bs]`` int64: keys of each request.
        scale: A factor.
        max_len: The most keys of a request; nothing that is recorded reads it.
        flag: Whether a bias is added.
        sizes: Host numbers.
    """

    lengths: torch.Tensor
    scale: torch.Tensor
    max_len: int = 0
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)


class Backend:
    """A right backend: one metadata object for each size, refreshed in place."""

    def __init__(self, max_bs: int) -> None:
        self.lengths = torch.zeros(max_bs, dtype=torch.int64)
        self.scale = torch.ones(1)
        self.keys = torch.randn(KEYS, generator=torch.Generator().manual_seed(1))
        self.captured: dict[int, Any] = {}
        self.forward_metadata: Any = None

    def make(self, bs: int) -> Any:
        """Return the metadata of a size."""
        return Metadata(self.lengths[:bs], self.scale)

    def prepare(self, lengths: torch.Tensor, *, in_capture: bool) -> None:
        """Prepare a capture or a replay for padded lengths."""
        bs = len(lengths)
        if in_capture:
            self.captured[bs] = self.make(bs)
        self.forward_metadata = self.captured[bs]
        self.forward_metadata.lengths.copy_(lengths)
        self.forward_metadata.max_len = int(lengths.max())

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return ``[bs]``: each query times the sum of its request's keys."""
        meta = self.forward_metadata
        seen = torch.arange(KEYS)[None] < meta.lengths[:, None]
        total = (self.keys * seen).sum(dim=1) * meta.scale
        if meta.flag:
            total = total + 1
        return q * total * meta.sizes[0]


@dataclass
class Inputs:
    """Static inputs.

    Args:
        q: ``[max_bs]``: queries.
    """

    q: torch.Tensor


class SmallEngine:
    """An engine that captures sizes and replays padded batches, under a guard."""

    def __init__(self, backend: Backend, guard: Guard, sizes: tuple[int, ...] = (4, 2)) -> None:
        self.backend, self.guard, self.sizes = backend, guard, sizes
        self.inputs = Inputs(torch.zeros(max(sizes)))
        self._driver = TapeDriver(torch.device("cpu"))
        self._graphs: dict[int, Any] = {}
        for bs in sizes:
            self._capture(bs)

    @staticmethod
    def key(bs: int) -> GraphKey:
        """Return the key of a size."""
        return GraphKey(runner="Runner", shape=str(bs))

    def _capture(self, bs: int) -> None:
        self.backend.prepare(torch.ones(bs, dtype=torch.int64), in_capture=True)
        watched = self.guard.capturing(self.key(bs), {"Backend": self.backend}, {"Inputs": self.inputs})
        with watched, self._driver.capturing() as capture:
            capture.outputs = self.backend.attend(self.inputs.q[:bs])
        self._graphs[bs] = capture.graph

    @torch.inference_mode()
    def step(self, q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the attention of a batch, from the smallest graph that fits."""
        raw = len(q)
        bs = min(size for size in self.sizes if size >= raw)
        self.inputs.q[:bs] = 0
        self.inputs.q[:raw].copy_(q)
        padded = torch.ones(bs, dtype=torch.int64)
        padded[:raw] = lengths
        before = self.backend.forward_metadata
        self.backend.prepare(padded, in_capture=False)
        now = self.backend.forward_metadata
        self.guard.prepared("Backend", None if now is before else now)
        self.guard.replaying(self.key(bs))
        self._graphs[bs].replay()
        out: torch.Tensor = self._graphs[bs].outputs[:raw]
        return out

    def expected(self, q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return what a step must give, from the keys alone."""
        sums = torch.stack([self.backend.keys[:n].sum() for n in lengths.tolist()])
        return q * sums
