"""Variants: correct plugins in another style, which the suite must pass.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from graphpact.attention import Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy, metadata_slot
from graphpact.graphs import Event, GraphDriver, Stream
from graphpact.hookspecs import hookimpl
from graphpact.pact import bounded
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact.step import Forward, Region, Step, StepOutputs
from graphpact_conformance.museum.exhibit import Variant

CPU = torch.device("cpu")


def _slot(name: str, *shape: Any, **more: Any) -> GraphSlot:
    """Return a slot of a length for each request, or what ``more`` says."""
    declared: dict[str, Any] = {
        "axis": "bs",
        "role": "lengths",
        "padding_policy": PaddingPolicy.KEEP_PAD,
        "reason": "every step writes the rows that its kernels read",
        "owner": "variant",
        "copy_from_fb": False,
    }
    return GraphSlot(f"variant.{name}", *shape, **(declared | more))


# -- metadata of other types -------------------------------------------------------------------------


def _as_plain_object(base: type[Any]) -> type[Any]:
    class Plain:
        """The fields of the base's metadata as attributes of a plain object."""

        def __init__(self, made: Any) -> None:
            for field in fields(made):
                setattr(self, field.name, getattr(made, field.name))

    class Made(base):  # type: ignore[misc]
        """Makes metadata of a plain class."""

        def allocate_metadata(self, *args: Any) -> Plain:
            """Return a plain object."""
            return Plain(super().allocate_metadata(*args))

    return Made


def _as_mapping(base: type[Any]) -> type[Any]:
    class Made(base):  # type: ignore[misc]
        """Makes metadata that is a dict."""

        fill_is_device_only = False

        def allocate_metadata(self, *args: Any) -> dict[str, Any]:
            """Return a dict."""
            made = super().allocate_metadata(*args)
            return {field.name: getattr(made, field.name) for field in fields(made)}

        def fill_metadata(self, view: ForwardBatch, metadata: dict[str, Any]) -> None:
            """Fill the dict's tensors."""
            super().fill_metadata(view, SimpleNamespace(**metadata))

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend by the dict."""
            out: torch.Tensor = super().forward(*args[:-1], SimpleNamespace(**args[-1]))
            return out

    return Made


class _Tuple(NamedTuple):
    """TRT-LLM's fields."""

    out_cache_loc: torch.Tensor
    block_kv_indices: torch.Tensor
    seq_lens_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seq_len_q: int
    sum_seq_lens_q: int
    max_seq_len_k: int
    is_uniform: bool
    workspace: torch.Tensor | None


def _as_named_tuple(base: type[Any]) -> type[Any]:
    class Made(base):  # type: ignore[misc]
        """Makes metadata that cannot be changed, but for what its tensors hold; a new one in every step."""

        def allocate_metadata(self, *args: Any) -> _Tuple:
            """Return a named tuple."""
            made = super().allocate_metadata(*args)
            return _Tuple(*(getattr(made, field.name) for field in fields(made)))

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: _Tuple) -> _Tuple:
            """Refresh, and return another tuple of the same tensors."""
            base.init_metadata_replay(self, view=view, shape=shape, captured=captured)
            return captured._replace()

    return Made


@dataclass
class _Bounded:
    """The longest sequence, and the base's metadata."""

    inner: Any
    longest: int = bounded()


def _bounds_by_the_batch(base: type[Any]) -> type[Any]:
    class Bounds(base):  # type: ignore[misc]
        """Captures a bound at the limits, and tells in every step how long the longest sequence is."""

        def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> _Bounded:
            """Return the metadata and the bound."""
            most = self.context.limits.max_context_len
            return _Bounded(super().allocate_metadata(view, shape, buffers), most)

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: _Bounded) -> _Bounded:
            """Refresh, and say what the batch needs; the graph keeps its bound."""
            base.init_metadata_replay(self, view=view, shape=shape, captured=captured)
            lens = view.seq_lens_cpu.tolist()
            return replace(captured, longest=max(lens, default=0))

        def fill_metadata(self, view: ForwardBatch, metadata: _Bounded) -> None:
            """Fill what is inside."""
            super().fill_metadata(view, metadata.inner)

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend by what is inside."""
            out: torch.Tensor = super().forward(*args[:-1], args[-1].inner)
            return out

    return Bounds


# -- metadata made in other ways ---------------------------------------------------------------------


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
            staging = _slot("staging", lambda bs, _: (bs,), torch.int32, role="staging", device=CPU)
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
            plan = _slot("plan", lambda bs, _: (bs,), torch.int32, role="plan")
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


# -- memory of its own -------------------------------------------------------------------------------


def _has_a_workspace(base: type[Any]) -> type[Any]:
    class HasAWorkspace(base):  # type: ignore[misc]
        """Puts queries into a workspace, and takes them from there."""

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare the workspace."""
            layer = self.context.layers[0]
            work = _slot(
                "workspace",
                lambda _, tokens: (tokens, layer.num_q_heads, layer.head_dim),
                self.context.dtype,
                axis="none",
                padding_policy=PaddingPolicy.FILL_ONCE,
                pad_value=0,
                role="workspace",
            )
            return [*super().declare_slots(limits), work]

        def forward(self, q: torch.Tensor, *args: Any) -> torch.Tensor:
            """Attend through the workspace."""
            if self._registry is not None:
                whole = self._registry.get_slot("variant.workspace").slice_for(0, 0)
                if len(q) <= len(whole):  # an eager step may be larger than any graph
                    work = whole[: len(q)]
                    work.copy_(q)
                    q = work.clone()
            out: torch.Tensor = super().forward(q, *args)
            return out

    return HasAWorkspace


def _skips_padded_outputs(base: type[Any]) -> type[Any]:
    class Skips(base):  # type: ignore[misc]
        """Writes no output of a padded row into its output buffer, which was zeroed once."""

        def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
            """Declare an output buffer for each layer."""
            layer = self.context.layers[0]
            outs = [
                _slot(
                    f"out{at.layer_id}",
                    lambda _, tokens: (tokens, layer.num_q_heads, layer.v_head_dim),
                    self.context.dtype,
                    axis="none",
                    padding_policy=PaddingPolicy.FILL_ONCE,
                    pad_value=0,
                    role="workspace",
                )
                for at in self.context.layers
            ]
            return [*super().declare_slots(limits), *outs]

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, metadata: Any
        ) -> torch.Tensor:
            """Attend, and write what is real."""
            out: torch.Tensor = super().forward(q, k, v, layer, metadata)
            if self._registry is None:
                return out
            whole = self._registry.get_slot(f"variant.out{layer.layer_id}").slice_for(0, 0)
            if len(q) > len(whole):
                return out
            kept: torch.Tensor = whole[: len(q)]
            is_real = metadata.out_cache_loc >= self.context.limits.page_size
            kept.copy_(torch.where(is_real[:, None, None], out, kept))
            return kept.clone()

    return Skips


def _makes_constants_lazily(base: type[Any]) -> type[Any]:
    class Lazy(base):  # type: ignore[misc]
        """Makes a constant when metadata is first asked for, and holds it for good."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.ones: Any = None

        def allocate_metadata(self, *args: Any) -> Any:
            """Make the constant, outside any graph."""
            if self.ones is None:
                self.ones = torch.ones((), device=self.context.device, dtype=self.context.dtype)
            return super().allocate_metadata(*args)

        def forward(self, *args: Any) -> torch.Tensor:
            """Attend, times one."""
            out: torch.Tensor = super().forward(*args) * self.ones
            return out

    return Lazy


# -- runners -----------------------------------------------------------------------------------------


def _pads_by_itself(base: type[Any]) -> type[Any]:
    class PadsByItself(base):  # type: ignore[misc]
        """Copies fields and fills tails with calls of its own."""

        @hookimpl
        def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
            """Copy, then fill."""
            for slot in registry:
                if not slot.copy_from_fb or slot.axis == "none":
                    continue
                target = slot.slice_for(shape.batch_size, shape.num_tokens)
                source = getattr(batch, slot.name)
                target[: len(source)].copy_(source)
                target[len(source) :].fill_(slot.initial_value)
            if registry.has_slot("num_token_non_padded"):
                slot = registry.get_slot("num_token_non_padded")
                if slot.post_fill is not None:
                    counts = SimpleNamespace(padded_num_tokens=shape.num_tokens)
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
            staging = _slot("lengths", lambda bs, _: (bs,), torch.int64, role="staging", device=CPU)
            return [*super().slots(), staging]

        def compose(self, forward: Forward, step: Step) -> Region:
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
            """Decline a batch with a request that has cached keys."""
            new = batch.extend_seq_lens_cpu
            if batch.batch_size and new is not None and not torch.equal(batch.seq_lens_cpu, new):
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


# -- what is recorded --------------------------------------------------------------------------------


def _attends_between_segments(base: type[Any]) -> type[Any]:
    class Breakable(base):  # type: ignore[misc]
        """Records everything but attention, which is an eager call between two segments."""

        def compose(self, forward: Forward, step: Step) -> Region:
            """Return a forward pass whose attention reads the metadata of each replay."""

            def attend(
                q: torch.Tensor,
                k: torch.Tensor | None,
                v: torch.Tensor | None,
                layer: LayerSpec,
                metadata: Any,
            ) -> torch.Tensor:
                del metadata  # that of the capture
                return step.driver.eager_call(step.attend, q, k, v, layer)

            return lambda: forward(step.view, step.metadata, attend)

    return Breakable


def _runs_three_times(base: type[Any]) -> type[Any]:
    class ThreeTimes(base):  # type: ignore[misc]
        """Records three forward passes in one graph, each with its own outputs."""

        def compose(self, forward: Forward, step: Step) -> Region:
            """Return three passes over the same view; the last one's rows are the step's."""

            def region() -> StepOutputs:
                first, second, last = (
                    forward(step.view, step.metadata, step.backend.forward) for _ in range(3)
                )
                given = {name: (tensor, last.axes[name]) for name, tensor in last.items()}
                for which, outputs in (("first", first), ("second", second)):
                    for name, tensor in outputs.items():
                        given[f"{which}_{name}"] = tensor, outputs.axes[name]
                return StepOutputs(**given)

            return region

    return ThreeTimes


VARIANTS: list[Variant] = [
    Variant(
        name="metadata-of-a-plain-class",
        style="Metadata is a plain object, not a dataclass.",
        base="trtllm_mla",
        lanes=("decode", "extend"),
        make=_as_plain_object,
    ),
    Variant(
        name="metadata-is-a-dict",
        style="Metadata is a dict, made by the hooks.",
        base="trtllm_mla",
        lanes=("decode", "draft_decode"),
        make=_as_mapping,
    ),
    Variant(
        name="metadata-is-a-named-tuple",
        style="Metadata is a named tuple, a new one in every step, with the same tensors.",
        base="trtllm_mla",
        lanes=("target_verify", "extend"),
        make=_as_named_tuple,
    ),
    Variant(
        name="bound-of-the-batch-at-hand",
        style="A bounded host number is captured at the limits, and has the value of the batch at replay.",
        base="fa3",
        lanes=("decode", "extend"),
        make=_bounds_by_the_batch,
    ),
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
    Variant(
        name="workspace-of-its-own",
        style="Attention uses a workspace of the backend.",
        base="flashinfer",
        lanes=("decode", "extend"),
        make=_has_a_workspace,
    ),
    Variant(
        name="outputs-of-padded-rows-unwritten",
        style="A kernel writes only live rows, into an output buffer that was zeroed once.",
        base="fa3",
        lanes=("decode", "draft_extend"),
        make=_skips_padded_outputs,
    ),
    Variant(
        name="constant-made-on-first-use",
        style="A constant is made on the first use of metadata, outside any graph, and kept.",
        base="trtllm_mla",
        lanes=("decode",),
        make=_makes_constants_lazily,
    ),
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
    Variant(
        name="attention-between-segments",
        style="Attention is an eager call between two segments of a graph, with the metadata of each replay.",
        base="reference_runner",
        lanes=("decode", "extend"),
        make=_attends_between_segments,
    ),
    Variant(
        name="three-passes-in-one-graph",
        style="The model runs three times in one graph, each pass with its own outputs.",
        base="reference_runner",
        lanes=("decode", "extend"),
        make=_runs_three_times,
    ),
]
"""All variants."""
