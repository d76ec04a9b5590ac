"""A small engine in the shape of vLLM's: builders that return new metadata, which layers find by their names.

A builder is called for each step of its group of layers. Its metadata is a new object over memory that the
builder keeps. Layers read it from a context of the step, not from the builder. Graphs are tapes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphpact_guard import GraphKey, Guard
from graphpact_tape import TapeDriver

KEYS = 16


class BatchDescriptor(NamedTuple):
    """The name of a graph.

    Args:
        num_tokens: Tokens with padding.
        uniform: Whether all requests have as many.
    """

    num_tokens: int
    uniform: bool = True


@dataclass
class CommonMetadata:
    """What all builders are given.

    Args:
        seq_lens: ``[num_reqs]`` int64: keys of each request, 0 for padding.
        max_seq_len: The most.
    """

    seq_lens: torch.Tensor
    max_seq_len: int


@dataclass
class Metadata:
    """What a layer reads.

    Args:
        seq_lens: ``[num_reqs]`` int64: keys of each request.
        max_seq_len: A limit of the kernel.
        causal: Whether a query sees its own key.
    """

    seq_lens: torch.Tensor
    max_seq_len: int
    causal: bool = True


class Builder:
    """A right builder: new objects over its own memory, and the largest limit in captures."""

    def __init__(self, max_reqs: int) -> None:
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int64)

    def build(self, common: CommonMetadata) -> Metadata:
        """Return the metadata of a step."""
        reqs = len(common.seq_lens)
        self.seq_lens[:reqs].copy_(common.seq_lens)
        return Metadata(self.seq_lens[:reqs], common.max_seq_len)

    def build_for_capture(self, common: CommonMetadata) -> Metadata:
        """Return the metadata of a capture."""
        return self.build(CommonMetadata(common.seq_lens, KEYS))


@dataclass
class Held:
    """The metadata that a builder made last: what the guard knows of the builder.

    Args:
        metadata: It.
    """

    metadata: Metadata


@dataclass
class Inputs:
    """Static inputs.

    Args:
        q: ``[max_tokens]``: queries.
    """

    q: torch.Tensor


class BuilderEngine:
    """An engine with two groups of layers, each with a builder, under a guard."""

    def __init__(self, builders: dict[str, Builder], guard: Guard, sizes: tuple[int, ...] = (4, 2)) -> None:
        self.builders, self.guard, self.sizes = builders, guard, sizes
        self.inputs = Inputs(torch.zeros(max(sizes)))
        self.keys = torch.randn(KEYS, generator=torch.Generator().manual_seed(1))
        self._driver = TapeDriver(torch.device("cpu"))
        self._context: dict[str, Metadata] = {}
        self._graphs: dict[BatchDescriptor, Any] = {}
        for size in sizes:
            self._capture(BatchDescriptor(size))

    @contextmanager
    def _forward_context(self, metadata: dict[str, Metadata]) -> Iterator[None]:
        self._context = metadata
        try:
            yield
        finally:
            self._context = {}

    def _forward(self, q: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens]``: each query times the sums of its request's keys, layer by layer."""
        for layer in self.builders:
            metadata = self._context[layer]
            seen = torch.arange(KEYS)[None] < metadata.seq_lens[:, None]
            if not metadata.causal:
                seen = ~seen
            q = q * (self.keys * seen)[:, : metadata.max_seq_len].sum(dim=1)
        return q

    def _capture(self, desc: BatchDescriptor) -> None:
        common = CommonMetadata(torch.ones(desc.num_tokens, dtype=torch.int64), 1)
        metadata = {layer: builder.build_for_capture(common) for layer, builder in self.builders.items()}
        held = {layer: Held(each) for layer, each in metadata.items()}
        with (
            self.guard.capturing(
                self.key(desc), held, {"Inputs": self.inputs, "model inputs": self.model_inputs(desc)}
            ),
            self._forward_context(metadata),
            self._driver.capturing() as capture,
        ):
            capture.outputs = self._forward(self.inputs.q[: desc.num_tokens])
        self._graphs[desc] = capture.graph

    def model_inputs(self, desc: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Return the arguments of the model: views of the static inputs."""
        return {"q": self.inputs.q[: desc.num_tokens]}

    @staticmethod
    def key(desc: BatchDescriptor) -> GraphKey:
        """Return the key of a graph."""
        return GraphKey(runner="CudaGraphManager", shape=str(desc.num_tokens))

    @torch.inference_mode()
    def step(self, q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the output of a batch, from the smallest graph that fits."""
        desc = BatchDescriptor(min(size for size in self.sizes if size >= len(q)))
        self.inputs.q[: desc.num_tokens] = 0
        self.inputs.q[: len(q)].copy_(q)
        padded = torch.zeros(desc.num_tokens, dtype=torch.int64)
        padded[: len(q)] = lengths
        common = CommonMetadata(padded, int(padded.max()))
        for layer, builder in self.builders.items():
            self.guard.prepared(layer, builder.build(common), "metadata")
        self.guard.passed("model inputs", self.model_inputs(desc))
        self.guard.replaying(self.key(desc))
        self._graphs[desc].replay()
        out: torch.Tensor = self._graphs[desc].outputs[: len(q)]
        return out

    def expected(self, q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return what a step must give, from the keys alone."""
        sums = torch.stack([self.keys[:n].sum() for n in lengths.tolist()])
        return q * sums ** len(self.builders)
