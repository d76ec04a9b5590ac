"""Edits of runners that several modules use: they change the slots that a runner fills, or its outputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.override import named_after, override
from graphpact_museum.exhibit import Make

Fit: TypeAlias = GraphShape | EagerReason
"""The result of a runner's ``fit``: a captured shape, or the reason to run a batch eagerly."""
LONG_CONTEXT = EagerReason("museum_long_context", "a request is longer than the captured context")
AfterFill: TypeAlias = Callable[[Any, CudaGraphBufferRegistry, ForwardBatch, GraphShape], None]
"""``(runner, registry, batch, shape)``: changes filled slots."""


def after_fill(edit: AfterFill) -> Make:
    """Make an edit of runners that run ``edit`` after they have filled their slots."""

    def populate(self: Any, right: Any, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        right(registry, batch, shape)
        edit(self, registry, batch, shape)

    return named_after(edit, lambda base: override(base, populate))


def after_fill_of_captures(edit: AfterFill) -> Make:
    """Make an edit of runners that run ``edit`` after the fill of a capture, but not of a replay."""

    def at_capture(runner: Any, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        if _is_new(runner, shape):
            edit(runner, registry, batch, shape)

    return named_after(edit, after_fill(at_capture))


def rows_of(
    registry: CudaGraphBufferRegistry, name: str, batch: ForwardBatch, shape: GraphShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the live and the padding rows of a slot."""
    slot = registry.get_slot(name)
    whole = slot.slice_for(shape.batch_size, shape.num_tokens)
    live = batch.batch_size if slot.axis == "bs" else batch.num_tokens
    return whole[:live], whole[live:]


def keeps_tails(base: type[Any], *names: str) -> type[Any]:
    """Return a runner that does not reset the padding rows of some slots."""

    def populate(_: Any, right: Any, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        tails = [rows_of(registry, name, batch, shape)[1] for name in names]
        kept = [tail.clone() for tail in tails]
        right(registry, batch, shape)
        for tail, old in zip(tails, kept, strict=True):
            tail.copy_(old)

    return override(base, populate)


def keeps(base: type[Any], name: str) -> type[Any]:
    """Return a runner that writes a slot, if it is registered, only at capture."""

    def populate(self: Any, right: Any, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
        if not registry.has_slot(name):
            right(registry, batch, shape)
            return
        live, _ = rows_of(registry, name, batch, shape)
        kept = live.clone()
        right(registry, batch, shape)
        if not _is_new(self, shape):
            live.copy_(kept)

    return override(base, populate)


SHORT_TIER = 16
"""The most tokens of a request in the short tier of `with_length_tiers`."""


def with_length_tiers(base: type[Any], is_short: Callable[[ForwardBatch], bool]) -> type[Any]:
    """Return a runner with two graphs of each size, for short and for long requests.

    The dummy of a tier has requests of the tier's longest length.

    Args:
        base: A runner of uniform batches.
        is_short: Whether a batch takes the short tier.
    """

    def shapes(_: Any, right: Any) -> Any:
        return [replace(shape, variant=tier) for shape in right() for tier in ("short", "long")]

    def fit(self: Any, _: Any, batch: ForwardBatch) -> Fit:
        return CaptureSizes(tuple(self.shapes())).fit(batch, "short" if is_short(batch) else "long")

    def dummy(self: Any, right: Any, shape: GraphShape) -> ForwardBatch:
        batch: ForwardBatch = right(shape)
        longest = self.context.limits.max_context_len - batch.drafts_in_rows
        lens = torch.full_like(batch.seq_lens, SHORT_TIER if shape.variant == "short" else longest)
        return replace(batch, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())

    return override(base, shapes, fit, dummy)


def _is_new(runner: Any, shape: GraphShape) -> bool:
    """Return whether a runner fills a shape for the first time, which is at its capture; note the shape."""
    seen = vars(runner).setdefault("shapes_seen", set())
    is_new = shape not in seen
    seen.add(shape)
    return is_new


PadValue: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor | int]
"""``(runner, live rows) -> value``: returns the value of padding rows."""


def pads(name: str) -> Callable[[PadValue], Make]:
    """Return a decorator of an edit that gives the padding rows of a slot another value."""

    def decorate(value: PadValue) -> Make:
        def populate(self: Any, right: Any, registry: Any, batch: ForwardBatch, shape: GraphShape) -> None:
            right(registry, batch, shape)
            live, tail = rows_of(registry, name, batch, shape)
            pad = value(self, live)
            if isinstance(pad, int):
                tail.fill_(pad)
            elif len(pad):
                tail.copy_(pad.expand_as(tail))

        return named_after(value, lambda base: override(base, populate))

    return decorate


def returning(edit: Callable[[Any, RegionContext, torch.Tensor], torch.Tensor]) -> Make:
    """Make an edit of runners that return other outputs: ``(runner, step, output) -> output``."""

    def compose(self: Any, right: Any, forward: Forward, step: RegionContext) -> Region:
        region = right(forward, step)

        def edited() -> StepOutputs:
            outputs = region()
            return StepOutputs(**{n: (edit(self, step, t), outputs.axes[n]) for n, t in outputs.items()})

        return edited

    return named_after(edit, lambda base: override(base, compose))


def without_axis(region: Region) -> Region:
    """Return a region whose outputs have no axis, so that they are not cut to the live rows."""

    def whole() -> StepOutputs:
        return StepOutputs(**{name: (tensor, "none") for name, tensor in region().items()})

    return whole
