"""Correct plugins with metadata made in other ways: on the host, on streams, by two bodies, with plans.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy, metadata_slot
from graphpact.graphs import Event, Stream
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import Variant
from graphpact_museum.variants.slots import CPU, own_slot


def _with_two_bodies(base: type[Any]) -> type[Any]:
    class TwoBodies(base):  # type: ignore[misc]
        """Writes at capture what is the same for every batch, and at replay what is not."""

        fill_is_device_only = False

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare the query offsets as a constant."""
            slots = [s for s in super().declare_slots(limits) if s.name != "fa3.cu_seqlens_q"]
            constant = GraphSlot(
                "fa3.cu_seqlens_q",
                lambda bs, _: (bs + 1,),
                torch.int32,
                axis="bs",
                slice_fn=lambda buffer, n: buffer[: n + 1],
                padding_policy=PaddingPolicy.FILL_ONCE,
                pad_value=0,
                owner="variant",
                reason="the same offsets for every batch of the lane",
                copy_from_fb=False,
                role="offsets",
            )
            return [*slots, constant]

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Refresh all but the constant."""
            del shape
            spare = torch.empty_like(captured.cu_seqlens_q)
            self.fill_metadata(view, replace(captured, cu_seqlens_q=spare))
            return captured

    return TwoBodies


def _on_the_host(base: type[Any]) -> type[Any]:
    class OnTheHost(base):  # type: ignore[misc]
        """Counts keys with numpy in host memory, which a copy leaves in its own time."""

        fill_is_device_only = False

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.copied: Event | None = None
            self.staging: torch.Tensor | None = None

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare the host memory."""
            staging = own_slot("staging", lambda bs, _: (bs,), torch.int32, role="staging", device=CPU)
            return [*super().declare_slots(limits), staging]

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Count keys on the host; eager steps have their own from the device."""
            registry = self._registry
            if registry is None or self.driver is None:
                return
            if registry.slot_of(metadata.seq_lens_k) is None:
                return
            if self.copied is None:
                self.copied = self.driver.event()
            else:
                self.copied.synchronize()
            staging = registry.get_slot("variant.staging").slice_for(view.batch_size, 0)
            staging.numpy()[:] = view.seq_lens_cpu.numpy() + view.uncounted_keys
            self.driver.copy_async(metadata.seq_lens_k, staging)
            self.copied.record()

    return OnTheHost


def _on_a_side_stream(base: type[Any]) -> type[Any]:
    class OnASideStream(base):  # type: ignore[misc]
        """Refreshes metadata on a stream of its own, between two waits."""

        fill_is_device_only = False

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.side: Stream | None = None

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Fork, refresh, join."""
            assert self.driver is not None  # noqa: S101  it has a lane
            main = self.driver.current_stream()
            self.side = self.side or self.driver.stream()
            self.side.wait_stream(main)
            with self.side:
                base.init_metadata_replay(self, view=view, shape=shape, captured=captured)
            main.wait_stream(self.side)
            return captured

    return OnASideStream


def _attends_on_a_side_stream(base: type[Any]) -> type[Any]:
    class Attends(base):  # type: ignore[misc]
        """Attends on a stream that is forked and joined inside the graph."""

        def forward(self, *args: Any) -> torch.Tensor:
            """Fork, attend, join."""
            if self.driver is None:
                eager: torch.Tensor = super().forward(*args)
                return eager
            main, side = self.driver.current_stream(), self.driver.stream()
            side.wait_stream(main)
            with side:
                out: torch.Tensor = super().forward(*args)
            main.wait_stream(side)
            return out

    return Attends


def _leaves_all_to_the_graph(base: type[Any]) -> type[Any]:
    class Recorded(base):  # type: ignore[misc]
        """Has a replay hook that does nothing: its graphs make metadata."""

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Return what was captured."""
            del view, shape
            return captured

    return Recorded


class _Plan:
    """The state of a planner, with a tensor of a slot."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys
        self.num_planned = 0


@dataclass
class _Planned:
    """The base's metadata, and a plan."""

    inner: Any
    plan: _Plan


def _keeps_a_plan(base: type[Any]) -> type[Any]:
    class KeepsAPlan(base):  # type: ignore[misc]
        """Kernels read what a plan object holds, which counts its steps and is made anew in place."""

        fill_is_device_only = False

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare the plan's memory."""
            plan = own_slot("plan", lambda bs, _: (bs,), torch.int32, role="plan")
            return [*super().declare_slots(limits), plan]

        def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Planned:
            """Return the metadata and its plan."""
            inner = super().allocate_metadata(view, shape, buffers)
            return _Planned(inner, _Plan(buffers("variant.plan")))

        def fill_metadata(self, view: ForwardBatch, metadata: _Planned) -> None:
            """Fill, and plan."""
            super().fill_metadata(view, metadata.inner)
            metadata.plan.keys.copy_(metadata.inner.cache_seqlens)
            metadata.plan.num_planned += 1

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend by the plan."""
            inner, plan = args[-1].inner, args[-1].plan
            planned = replace(inner, cache_seqlens=plan.keys)
            out: torch.Tensor = super().forward(*args[:-1], planned)
            return out

    return KeepsAPlan


@dataclass
class _Indexed:
    """The base's metadata, and the index of each token in the batch."""

    inner: Any
    index: torch.Tensor


def _reads_a_constant(base: type[Any]) -> type[Any]:
    class ReadsAConstant(base):  # type: ignore[misc]
        """Its kernel takes the index of each token from memory that is written once."""

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare the index."""
            index = metadata_slot(
                "variant.index",
                lambda _, tokens: (tokens,),
                torch.int64,
                role="constant",
                axis="tokens",
                contents=lambda new: torch.arange(len(new), out=new),
            )
            return [*super().declare_slots(limits), index]

        def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Indexed:
            """Return the metadata and the index."""
            inner = super().allocate_metadata(view, shape, buffers)
            return _Indexed(inner, buffers("variant.index"))

        def fill_metadata(self, view: ForwardBatch, metadata: _Indexed) -> None:
            """Fill what depends on the batch."""
            super().fill_metadata(view, metadata.inner)

        def plan_metadata(self, view: ForwardBatch, metadata: _Indexed) -> None:
            """Plan what depends on the batch."""
            super().plan_metadata(view, metadata.inner)

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend, and take each row by its index."""
            out: torch.Tensor = super().forward(*args[:-1], args[-1].inner)
            return out[args[-1].index]

    return ReadsAConstant


def _reads_zero_as_empty(base: type[Any]) -> type[Any]:
    class ReadsZero(base):  # type: ignore[misc]
        """Pads with length 0; a row without keys gives zeros."""

        capabilities = replace(base.capabilities, seq_len_fill_value=0)

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, metadata: Any
        ) -> torch.Tensor:
            """Attend, and skip rows without keys."""
            out: torch.Tensor = super().forward(q, k, v, layer, metadata)
            is_empty = ~self.keys_of(metadata)[1].any(dim=1)
            return out.masked_fill(is_empty[:, None, None], 0)

    return ReadsZero


def _marks_the_end_of_rows(base: type[Any]) -> type[Any]:
    class Marks(base):  # type: ignore[misc]
        """Has -1 in its table behind a request's last key, which its kernel never follows."""

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and mark."""
            super().fill_metadata(view, metadata)
            at = torch.arange(metadata.table.shape[1], device=view.device)
            lens = view.seq_lens + (0 if metadata.drafts.shape[1] else view.uncounted_keys)
            metadata.table.masked_fill_(at >= lens[:, None], -1)

    return Marks


def _writes_no_more_than_is_read(base: type[Any]) -> type[Any]:
    class WritesLess(base):  # type: ignore[misc]
        """Leaves in its table what is there, behind a request's last key."""

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and restore the entries that are not read."""
            before = metadata.table.clone()
            super().fill_metadata(view, metadata)
            at = torch.arange(metadata.table.shape[1], device=view.device)
            lens = view.seq_lens + (0 if metadata.drafts.shape[1] else view.uncounted_keys)
            metadata.table.copy_(torch.where(at < lens[:, None], metadata.table, before))

    return WritesLess


def _sorts_requests(base: type[Any]) -> type[Any]:
    class Sorts(base):  # type: ignore[misc]
        """Lays requests out in its table by their lengths, the longest first."""

        def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fill, and reorder rows of the table and whose each token is."""
            super().fill_metadata(view, metadata)
            order = torch.argsort(view.seq_lens, descending=True, stable=True)
            metadata.table.copy_(metadata.table[order].clone())
            metadata.request.copy_(torch.argsort(order)[metadata.request])

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Count keys in the same order, on the host."""
            lens = view.seq_lens_cpu
            order = torch.argsort(lens, descending=True, stable=True)
            super().plan_metadata(replace(view, seq_lens_cpu=lens[order]), metadata)

    return Sorts


VARIANTS: list[Variant] = [
    Variant(
        name="two-bodies",
        style="Capture and replay have two bodies; only capture writes the data that is equal for every"
        " batch.",
        base="fa3",
        lanes=("decode", "target_verify"),
        make=_with_two_bodies,
    ),
    Variant(
        name="metadata-made-on-the-host",
        style="Keys are counted with numpy in host memory, from which the driver copies asynchronously.",
        base="trtllm_mla",
        lanes=("decode", "draft_extend"),
        make=_on_the_host,
    ),
    Variant(
        name="metadata-on-a-side-stream",
        style="Metadata is refreshed on a stream that is forked and joined.",
        base="fa3",
        lanes=("decode", "mixed"),
        make=_on_a_side_stream,
    ),
    Variant(
        name="attention-on-a-side-stream",
        style="Attention runs on a stream that is forked and joined inside the graph.",
        base="trtllm_mla",
        lanes=("decode",),
        make=_attends_on_a_side_stream,
    ),
    Variant(
        name="replay-hook-that-does-nothing",
        style="The graph makes all metadata, and the replay hook returns what was captured.",
        base="fa3",
        lanes=("decode", "draft_decode_tree"),
        make=_leaves_all_to_the_graph,
    ),
    Variant(
        name="plan-object",
        style="Kernels read the tensor of a plan object, which counts its steps and is updated in place.",
        base="fa3",
        lanes=("decode", "draft_extend"),
        make=_keeps_a_plan,
    ),
    Variant(
        name="constant-in-a-slot",
        style="The kernel reads an arange from a slot that is written once and is no step's work.",
        base="reference",
        lanes=("decode", "extend", "draft_decode"),
        make=_reads_a_constant,
    ),
    Variant(
        name="length-zero-is-empty",
        style="Padding rows have no keys, and their outputs are zeros.",
        base="reference",
        lanes=("decode", "target_verify", "mixed"),
        make=_reads_zero_as_empty,
    ),
    Variant(
        name="table-marked-behind-the-last-key",
        style="A table has -1 after each request's last key, which the kernel does not read.",
        base="reference",
        lanes=("decode", "draft_decode"),
        make=_marks_the_end_of_rows,
    ),
    Variant(
        name="table-kept-behind-the-last-key",
        style="A table keeps old entries after each request's last key, which the kernel does not read.",
        base="reference",
        lanes=("decode", "target_verify_tree"),
        make=_writes_no_more_than_is_read,
    ),
    Variant(
        name="requests-sorted-by-length",
        style="Requests are sorted by length, for an even load.",
        base="reference",
        lanes=("decode", "target_verify"),
        make=_sorts_requests,
    ),
]
