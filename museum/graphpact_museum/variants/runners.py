"""Correct plugins with runners that pad, stage, list and choose in other ways.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.graphs import Event, GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext
from graphpact_museum.exhibit import Variant
from graphpact_museum.variants.slots import CPU, own_slot


def _pads_by_itself(base: type[Any]) -> type[Any]:
    class PadsByItself(base):  # type: ignore[misc]
        """Copies fields and fills tails with calls of its own."""

        @hookimpl
        def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
            """Fill, copy the fields that the batch has, and compute the counts."""
            counts = SimpleNamespace(padded_num_tokens=shape.num_tokens)
            for slot in registry:
                if slot.copy_from_fb:
                    slot.slice_for(shape.batch_size, shape.num_tokens).fill_(slot.initial_value)
                    source = getattr(batch, slot.name)
                    if source is not None:
                        slot.slice_for(batch.batch_size, batch.num_tokens).copy_(source)
                if slot.post_fill is not None:
                    slot.post_fill(slot.slice_for(0, 0), batch, counts)  # type: ignore[arg-type]

    return PadsByItself


@dataclass(slots=True, kw_only=True)
class _View(ForwardBatch):
    """A view that says how many of its requests are real; a runner's own note."""

    note: str = ""


def _views_of_its_own(base: type[Any]) -> type[Any]:
    class Views(base):  # type: ignore[misc]
        """Makes a view of its own class in every step, from slices that it cut once."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.slices: dict[GraphShape, Mapping[str, Any]] = {}

        @hookimpl
        def prepare_replay(
            self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
        ) -> _View:
            """Put a view together."""
            del batch
            if shape not in self.slices:
                self.slices[shape] = {
                    slot.name: slot.slice_for(shape.batch_size, shape.num_tokens)
                    for slot in registry
                    if slot.copy_from_fb or slot.post_fill is not None
                }
            return _View(
                forward_mode=shape.mode,
                batch_size=shape.batch_size,
                **self.slices[shape],
                note="padded",
            )

    return Views


def _stages_inputs(base: type[Any]) -> type[Any]:
    class Stages(base):  # type: ignore[misc]
        """Fills one host buffer with lengths and their padding, and copies it at once."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.driver: GraphDriver | None = None
            self.copied: Event | None = None

        def slots(self) -> Sequence[GraphSlot]:
            """Add the staging memory to the inputs."""
            staging = own_slot("lengths", lambda bs, _: (bs,), torch.int64, role="staging", device=CPU)
            return [*super().slots(), staging]

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Compose as ever; copies of later steps go through this driver."""
            self.driver = step.driver
            region: Region = super().compose(forward, step)
            return region

        @hookimpl
        def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
            """Fill as ever, and stage lengths."""
            base.populate(self, registry=registry, batch=batch, shape=shape)
            if self.driver is None:
                return  # before the first capture
            if self.copied is None:
                self.copied = self.driver.event()
            else:
                self.copied.synchronize()
            staging = registry.get_slot("variant.lengths").slice_for(shape.batch_size, 0)
            numbers = staging.numpy()
            numbers[: batch.batch_size] = batch.seq_lens_cpu.numpy()
            numbers[batch.batch_size :] = registry.get_slot("seq_lens").initial_value
            target = registry.get_slot("seq_lens").slice_for(shape.batch_size, 0)
            self.driver.copy_async(target, staging)
            self.copied.record()

    return Stages


def _captures_the_longest(base: type[Any]) -> type[Any]:
    class Longest(base):  # type: ignore[misc]
        """Captures dummies of the greatest length there is, on request row 0."""

        def dummy(self, shape: GraphShape) -> ForwardBatch:
            """Return requests of the greatest length."""
            dummy: ForwardBatch = super().dummy(shape)
            most = self.context.limits.max_context_len - dummy.drafts_in_rows
            lens = torch.full_like(dummy.seq_lens, most)
            return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())

    return Longest


def _lists_the_largest_first(base: type[Any]) -> type[Any]:
    class LargestFirst(base):  # type: ignore[misc]
        """Lists its shapes from the largest down, and chooses among them by a search of its own."""

        def shapes(self) -> Sequence[GraphShape]:
            """Return a new list, the largest first."""
            return [*super().shapes()][::-1]

        def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
            """Go down as long as the batch has room."""
            fit = super().fit(batch)
            if isinstance(fit, EagerReason):
                return fit
            largest = max(batch.global_num_tokens_cpu or (0,))
            rooms = [s for s in self.shapes() if s.num_tokens >= max(batch.num_tokens, largest)]
            return rooms[-1]

    return LargestFirst


def _has_tiers(base: type[Any]) -> type[Any]:
    class HasTiers(base):  # type: ignore[misc]
        """Captures a graph for short sequences and one for long ones, of every size."""

        def shapes(self) -> Sequence[GraphShape]:
            """Return every size twice."""
            plain = super().shapes()
            return [replace(shape, variant=tier) for shape in plain for tier in ("short", "long")]

        def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
            """Return the size and its tier; ranks that gather all take the tier of long sequences."""
            is_alone = batch.global_num_tokens_cpu is None
            is_short = max(batch.seq_lens_cpu.tolist(), default=0) <= 16
            sizes = CaptureSizes(tuple(self.shapes()))
            return sizes.fit(batch, "short" if is_alone and is_short else "long")

        def dummy(self, shape: GraphShape) -> ForwardBatch:
            """Return a dummy of the tier."""
            dummy: ForwardBatch = super().dummy(shape)
            if shape.variant == "short":
                return dummy
            lens = torch.full_like(dummy.seq_lens, 40)
            return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone())

    return HasTiers


def _has_a_cap(base: type[Any]) -> type[Any]:
    class HasACap(base):  # type: ignore[misc]
        """Captures no more than 8 requests by itself; larger steps run eagerly, and are counted."""

        def default_batch_sizes(self) -> list[int]:
            """Return every size up to the cap."""
            return [*range(1, min(self.context.limits.max_bs, 8) + 1)]

    return HasACap


_LONG_CONTEXT = EagerReason("museum_long_context", "a request is longer than the captured context")


_HAS_PREFIX = EagerReason("museum_prefix", "a request has cached keys")


def _serves_short_contexts(base: type[Any]) -> type[Any]:
    class ShortContexts(base):  # type: ignore[misc]
        """Replays batches of at most 40 keys per request; leaves longer ones to eager steps, declared."""

        declines = (_LONG_CONTEXT,)

        def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
            """Decline a batch with a long request; ranks that gather know only their own requests."""
            is_long = max(batch.seq_lens_cpu.tolist(), default=0) > 40
            if is_long or batch.global_num_tokens_cpu is not None:
                return _LONG_CONTEXT
            fit: GraphShape | EagerReason = super().fit(batch)
            return fit

    return ShortContexts


def _serves_whole_prompts(base: type[Any]) -> type[Any]:
    class WholePrompts(base):  # type: ignore[misc]
        """Replays prefills of whole prompts, and leaves batches with cached keys to eager steps, declared."""

        declines = (_HAS_PREFIX,)

        def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
            """Decline a batch with cached keys; ranks that gather know only their own requests."""
            new = batch.extend_seq_lens_cpu
            has_prefix = batch.batch_size and new is not None and not torch.equal(batch.seq_lens_cpu, new)
            if has_prefix or batch.global_num_tokens_cpu is not None:
                return _HAS_PREFIX
            fit: GraphShape | EagerReason = super().fit(batch)
            return fit

    return WholePrompts


def _first_column(buffer: torch.Tensor, n: int) -> torch.Tensor:
    return buffer[:n, 0]


def _has_strided_inputs(base: type[Any]) -> type[Any]:
    class Strided(base):  # type: ignore[misc]
        """Has token ids and positions as columns of wider tensors."""

        def slots(self) -> Sequence[GraphSlot]:
            """Return the inputs, two of them with a stride."""
            wide = {"shape_fn": lambda _, tokens: (tokens, 2), "slice_fn": _first_column}
            return [
                replace(slot, **wide) if slot.name in ("input_ids", "positions") else slot
                for slot in super().slots()
            ]

    return Strided


VARIANTS: list[Variant] = [
    Variant(
        name="runner-that-pads-by-itself",
        style="A runner copies and pads with its own calls, slot by slot.",
        base="reference_runner",
        lanes=("mixed", "draft_extend"),
        make=_pads_by_itself,
    ),
    Variant(
        name="decode-runner-that-pads-by-itself",
        style="A decode runner copies and pads with its own calls.",
        base="cuda_graph",
        lanes=("decode", "idle"),
        make=_pads_by_itself,
    ),
    Variant(
        name="runner-with-views-of-its-own",
        style="Views are objects of the runner's own class, created in every step.",
        base="cuda_graph",
        lanes=("decode", "idle"),
        make=_views_of_its_own,
    ),
    Variant(
        name="runner-that-stages-inputs",
        style="Lengths and their padding are written into one host buffer, and copied asynchronously.",
        base="cuda_graph",
        lanes=("decode",),
        make=_stages_inputs,
    ),
    Variant(
        name="dummies-of-the-longest",
        style="Dummies have the maximum sequence length.",
        base="reference_runner",
        lanes=("target_verify", "draft_decode"),
        make=_captures_the_longest,
    ),
    Variant(
        name="decode-dummies-of-the-longest",
        style="Dummies of decode have the maximum sequence length.",
        base="cpu_graph",
        lanes=("decode",),
        make=_captures_the_longest,
    ),
    Variant(
        name="largest-listed-first",
        style="shapes() returns a new list each time, the largest shape first, and fit() has its own search.",
        base="cuda_graph",
        lanes=("decode",),
        make=_lists_the_largest_first,
    ),
    Variant(
        name="tiers-of-length",
        style="Every capture size is captured twice, for short and for long sequences.",
        base="cuda_graph",
        lanes=("decode",),
        make=_has_tiers,
    ),
    Variant(
        name="capture-sizes-with-a-cap",
        style="Steps beyond a cap run eagerly, with an eager reason.",
        base="cuda_graph",
        lanes=("decode",),
        make=_has_a_cap,
    ),
    Variant(
        name="graphs-of-short-contexts",
        style="Batches with a long request run eagerly, with a reason that the runner declares.",
        base="cuda_graph",
        lanes=("decode", "idle"),
        make=_serves_short_contexts,
    ),
    Variant(
        name="graphs-of-whole-prompts",
        style="Prefills with cached keys run eagerly, with a reason that the runner declares.",
        base="reference_runner",
        lanes=("extend",),
        make=_serves_whole_prompts,
    ),
    Variant(
        name="inputs-with-a-stride",
        style="Token ids and positions are columns of wider tensors.",
        base="cuda_graph",
        lanes=("decode",),
        make=_has_strided_inputs,
    ),
]
