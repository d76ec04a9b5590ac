"""Correct runners, written from scratch, for each level of graph support; they choose their own sizes.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from graphpact.attention import GraphSupport
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.lane.reference_runner import broken_at_attention
from graphpact_museum.exhibit import variant

_ADAPTERS = "variant.adapters"


class _NeverRunner(GraphRunner):
    """A runner of all modes that captures nothing."""

    modes = frozenset(ForwardMode)
    needs = GraphSupport.NEVER

    def shapes(self) -> Sequence[GraphShape]:
        """Return nothing."""
        return ()


@variant(
    on="reference_runner",
    lanes=("decode", "extend", "mixed", "target_verify", "draft_decode", "draft_extend", "idle"),
)
def runner_that_never_captures(_: type[Any]) -> type[Any]:
    """A runner of all modes captures nothing."""
    return _NeverRunner


class _FibonacciRunner(GraphRunner):
    """A runner that captures 1, 2, 3, 5, 8 and so on requests, and searches these sizes itself."""

    modes = frozenset({ForwardMode.DECODE})
    needs = GraphSupport.UNIFORM_DECODE

    @cached_property
    def ladder(self) -> list[int]:
        """The request counts, the smallest first; the last is the largest step."""
        if self.context.batch_sizes is not None:
            return sorted({*self.context.batch_sizes})
        most = self.context.limits.max_bs
        sizes = [1, 2]
        while sizes[-1] < most:
            sizes.append(sizes[-1] + sizes[-2])
        return [size for size in sizes if size < most] + [most]

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each step of the ladder."""
        width = self.context.tokens_per_request or 1
        return [GraphShape(self.context.mode, size, size * width) for size in self.ladder]

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Search the ladder by the number of requests, or by that of the largest rank where ranks gather."""
        mode, width = self.context.mode, self.context.tokens_per_request or 1
        if batch.forward_mode not in (mode, ForwardMode.IDLE):
            return EagerReason.WRONG_MODE
        if batch.num_tokens != batch.batch_size * width:
            return EagerReason.OTHER_WIDTH
        together = batch.global_num_tokens_cpu
        requests = batch.batch_size if together is None else -(-max(together) // width)
        at = bisect_left(self.ladder, requests)
        if at == len(self.ladder):
            return EagerReason.OVER_LARGEST
        return GraphShape(mode, self.ladder[at], self.ladder[at] * width)


@variant(on="reference_runner", lanes=("decode", "idle"))
def runner_of_uniform_decode(_: type[Any]) -> type[Any]:
    """Capture sizes are Fibonacci numbers, and fit() is a binary search."""
    return _FibonacciRunner


class _UniformRunner(_FibonacciRunner):
    """A `_FibonacciRunner` for verification and draft extend, where each request has several tokens."""

    modes = frozenset({ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND})
    needs = GraphSupport.UNIFORM


@variant(on="reference_runner", lanes=("target_verify", "draft_extend"))
def runner_of_uniform_steps(_: type[Any]) -> type[Any]:
    """The runner chooses its own capture sizes for verification and draft extend."""
    return _UniformRunner


class _TwoAxesRunner(GraphRunner):
    """A runner that captures prefills of few and of many requests, each with few and with many tokens."""

    modes = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})
    needs = GraphSupport.ALWAYS

    @cached_property
    def grid(self) -> list[GraphShape]:
        """The shapes, by tokens, then by requests."""
        limits = self.context.limits
        tokens = {limits.max_num_tokens // 2, limits.max_num_tokens}
        requests = {-(-limits.max_bs // 2), limits.max_bs}
        longest, mode = limits.max_context_len, self.context.mode
        pairs = product(sorted(tokens), sorted(requests))
        return [GraphShape(mode, bs, most) for most, bs in pairs if bs <= most <= bs * longest]

    def shapes(self) -> Sequence[GraphShape]:
        """Return the grid."""
        return tuple(self.grid)

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the first shape with room for the batch, or for the largest rank where ranks gather."""
        if batch.forward_mode not in (self.context.mode, ForwardMode.IDLE):
            return EagerReason.WRONG_MODE
        tokens = max((batch.num_tokens, *(batch.global_num_tokens_cpu or ())))
        for shape in self.grid:
            if batch.batch_size <= shape.batch_size and tokens <= shape.num_tokens:
                return shape
        return EagerReason.OVER_LARGEST


@variant(on="reference_runner", lanes=("extend", "mixed"))
def runner_of_two_axes(_: type[Any]) -> type[Any]:
    """Prefill is captured in full, for few and many requests with few and many tokens."""
    return _TwoAxesRunner


class _BreakableRunner(_TwoAxesRunner):
    """A `_TwoAxesRunner` with attention outside the graphs."""

    needs = GraphSupport.NEVER
    eager_attention = True

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return a forward pass in segments."""
        return broken_at_attention(forward, step)


@variant(on="reference_runner", lanes=("extend", "mixed"))
def runner_of_segments(_: type[Any]) -> type[Any]:
    """Prefill is captured without attention, for few and many requests with few and many tokens."""
    return _BreakableRunner


class _ConstantOutputsRunner(_FibonacciRunner):
    """A runner with two more outputs: a constant with the row of each request, and an expanded flag."""

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return a forward pass with the two outputs."""
        rows = torch.arange(step.view.batch_size, device=step.view.device)

        def region() -> StepOutputs:
            outputs = forward(step.view, step.metadata, step.backend.forward)
            given = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
            is_last = (step.view.seq_lens.sum() >= 0).expand(step.view.batch_size)
            return StepOutputs(**given, order=(rows, "bs"), is_last=(is_last, "bs"))

        return region


@variant(on="reference_runner", lanes="decode")
def outputs_that_no_replay_writes(_: type[Any]) -> type[Any]:
    """One output is a constant, and another output is expanded."""
    return _ConstantOutputsRunner


class _ChosenTokensRunner(_FibonacciRunner):
    """A runner that returns chosen tokens, whether each is even, and a number without dimensions."""

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return a forward pass with the three outputs."""

        def region() -> StepOutputs:
            outputs = forward(step.view, step.metadata, step.backend.forward)
            given = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
            best, axis = outputs.logits.argmax(dim=-1), outputs.axes["logits"]
            count = torch.full((), 2, device=best.device)
            return StepOutputs(
                **given, best=(best, axis), is_even=(best % 2 == 0, axis), count=(count, "none")
            )

        return region


@variant(on="reference_runner", lanes="decode")
def runner_that_chooses_tokens(_: type[Any]) -> type[Any]:
    """A graph returns chosen tokens, a flag for each token, and a number without dimensions."""
    return _ChosenTokensRunner


class _TwoGraphsRunner(_FibonacciRunner):
    """A runner that captures each size with and without adapters; batches with adapter ids need the first.

    Ranks that gather always take the graph with adapters, so that they agree whatever their batches contain.
    """

    def shapes(self) -> Sequence[GraphShape]:
        """Return two shapes of each size."""
        both = ("adapters", "")
        return [replace(shape, variant=variant) for shape in super().shapes() for variant in both]

    def slots(self) -> Sequence[GraphSlot]:
        """Return the inputs, and the adapter of each request."""
        adapters = GraphSlot(
            _ADAPTERS,
            lambda bs, _: (bs,),
            torch.int64,
            axis="bs",
            padding_policy=PaddingPolicy.ZERO,
            optional=True,
            owner="variant",
        )
        return [*super().slots(), adapters]

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch, with adapter ids if the graph of the shape reads them."""
        batch = super().dummy(shape)
        if shape.variant:
            zeros = torch.zeros(shape.batch_size, dtype=torch.int64, device=batch.device)
            batch.extra = {**batch.extra, _ADAPTERS: zeros}
        return batch

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape of the batch's variant."""
        has = _ADAPTERS in batch.extra or batch.global_num_tokens_cpu is not None
        found = super().fit(batch)
        return replace(found, variant="adapters" if has else "") if isinstance(found, GraphShape) else found


@variant(on="reference_runner", lanes="decode")
def two_graphs_of_each_size(_: type[Any]) -> type[Any]:
    """A batch with adapter ids takes another graph than a batch without."""
    return _TwoGraphsRunner


class _FrozenRunner(_FibonacciRunner):
    """A runner that drafts in two passes on a cache that the model only reads.

    The second pass takes the tokens that the first pass chose. A draft of a single step has only one pass.
    """

    frozen_kv = True

    @cached_property
    def ladder(self) -> list[int]:
        """The row counts: topk rows for each request."""
        topk, sizes = self.context.limits.draft.topk, self.context.batch_sizes
        if sizes is not None:
            return sorted({*sizes})
        most = self.context.limits.max_bs // topk
        return [size * topk for size in sorted({1, most})]

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the passes over the same keys; the outputs are those of the last pass."""
        is_single = self.context.limits.draft.num_steps == 1

        def region() -> StepOutputs:
            first = forward(step.view, step.metadata, step.backend.forward)
            if is_single:
                return first
            following = {"input_ids": first.logits.argmax(dim=1), "positions": step.view.positions + 1}
            if step.view.mrope_positions is not None:
                following["mrope_positions"] = step.view.mrope_positions + 1
            return forward(step.view.with_tensors(following), step.metadata, step.backend.forward)

        return region


@variant(on="reference_runner", lanes=("decode_frozen", "decode_frozen_tree"))
def runner_on_a_frozen_cache(_: type[Any]) -> type[Any]:
    """Drafts take two passes on a cache that the model only reads, or one pass for a single step."""
    return _FrozenRunner
