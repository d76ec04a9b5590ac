"""`AttentionBackend`, the base class of attention plugins: what it binds, refreshes and computes.

A backend writes one body, `AttentionBackend.fill_metadata`, from a view to the tensors of its
metadata. The base class makes both hooks of it, and the eager path too, so that capture and replay
cannot disagree about what a tensor holds. A backend that really needs two bodies overrides the hooks.

A draft decode is several steps in one graph. Its metadata is a `DraftMetadata`, one entry a step, each
made by the same body from what that step sees, `ForwardBatch.at_draft_step`.

Does not: choose shapes, pad batches or record graphs.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from graphpact.attention.capabilities import Capabilities, LayerSpec, Limits
from graphpact.attention.context import BackendContext
from graphpact.attention.providers import KernelProvider, choose_provider
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.errors import EngineError, SlotError
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape


def new_kv(
    k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the keys and values that `AttentionBackend.forward` writes, or None where it only attends.

    Raises:
        EngineError: One of them without the other.
    """
    if k is not None and v is not None:
        return k, v
    if k is None and v is None:
        return None
    given, missing = ("keys", "values") if v is None else ("values", "keys")
    raise EngineError(
        f"layer {layer.layer_id}: forward got {given} and no {missing}",
        hint="pass k and v to write them, or None for both to attend to what the cache holds",
    )


@dataclass(frozen=True, slots=True)
class DraftMetadata:
    """The metadata of a draft decode.

    Args:
        steps: What `AttentionBackend.forward` takes in each step, the first step first.
    """

    steps: tuple[Any, ...]


class Buffers(Protocol):
    """Where a backend's metadata takes its tensors from: ``name -> tensor`` for the declared slots."""

    in_graph: bool
    """Whether a graph will read them. Then host numbers of the metadata have to hold for every batch of the
    shape; else for this batch alone."""

    def __call__(self, name: str) -> torch.Tensor:
        """Return the slot's memory, sliced for the shape."""


@dataclass(slots=True)
class SlotBuffers:
    """The slots of a registry, as a graph of ``shape`` reads them."""

    registry: CudaGraphBufferRegistry
    shape: GraphShape
    draft_step: int = 0
    in_graph: bool = True

    def __call__(self, name: str) -> torch.Tensor:
        """Return the slot's memory, sliced for the shape; of a workspace the one that all steps use."""
        twin = _at_step(name, self.draft_step)
        slot = self.registry.get_slot(twin if self.registry.has_slot(twin) else name)
        return slot.slice_for(self.shape.batch_size, self.shape.num_tokens)


@dataclass(slots=True)
class EagerBuffers:
    """Buffers for metadata that no graph reads: made when asked for, sized for one batch.

    Workspaces are not made anew: ``workspace`` returns the one that all steps of the backend use.
    """

    slots: Mapping[str, GraphSlot]
    shape: GraphShape
    device: torch.device
    workspace: Callable[[GraphSlot], torch.Tensor]
    fill: int | None = None
    in_graph: bool = False

    def __call__(self, name: str) -> torch.Tensor:
        """Return a new buffer for the slot called ``name``, holding its initial value, or ``fill``."""
        slot = self.slots[name]
        if slot.is_workspace:
            return self.workspace(slot)
        shape = slot.shape_fn(self.shape.batch_size, self.shape.num_tokens)
        value = slot.initial_value if self.fill is None else self.fill
        return torch.full(shape, value, dtype=slot.dtype, device=slot.device or self.device)


class AttentionBackend(abc.ABC):
    """Base class of attention plugins.

    A subclass sets `capabilities` and writes `declare_slots`, `allocate_metadata`, `fill_metadata`
    and `forward`.
    """

    capabilities: ClassVar[Capabilities]

    providers: ClassVar[Sequence[type[KernelProvider]]] = ()
    """Sets of kernels to choose from, the best first; none for a backend with one set of its own."""

    claims: ClassVar[Mapping[str, str]] = {}
    """More than yes and no about capabilities, for `graphpact check`: of one that is declared
    ``"since 1.2"``; of one that is not, ``"not_implemented"`` or ``"unknown"``. Keys are such as ``"mode
    mixed"``, ``"page_size 1"``, ``"heads mla"``, ``"dtype bfloat16"``, ``"feature sinks"``."""

    fill_is_device_only: ClassVar[bool] = False
    """Whether `fill_metadata` is device work alone, without a host number that changes between replays. A
    lane may then record it as the first nodes of a graph, and a replay hook need not do it."""

    records_metadata: bool = False
    """Whether the lane records `fill_metadata` in its graphs. The lane sets it."""

    plan_metadata: Callable[[ForwardBatch, Any], None] | None = None
    """A method ``(view, metadata) -> None``, where a backend has one: work of the host that no graph holds,
    such as a kernel's plan, made from ``seq_lens_cpu``. Done after `fill_metadata`, and before each replay
    also where the graph does the rest. Reads no device tensor."""

    def __init__(self, context: BackendContext) -> None:
        _require_caches(context)
        self.context = context
        provider, self.passed_over = choose_provider(type(self).__name__, self.providers, context)
        """Why kernels better than those in use were not taken, by the name of their provider."""
        self.kernels: Any = None if provider is None else provider(context)
        """An instance of one of `providers`; None where there are none."""
        self.driver: GraphDriver | None = None
        """The lane's driver, from which streams and copies from host memory are had; None before
        `attach`."""
        self._registry: CudaGraphBufferRegistry | None = None
        self._workspaces: dict[str, torch.Tensor] = {}
        """Of eager steps, by slot; empty where a registry has them."""

    # -- what a backend writes -------------------------------------------------------------------

    @abc.abstractmethod
    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return every buffer that the backend's metadata needs, sized by ``limits``."""

    @abc.abstractmethod
    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        """Return a metadata object for ``shape`` whose tensors come from ``buffers`` or ``view``.

        Args:
            view: The batch as the kernels will see it; its tensors may be kept.
            shape: The padded counts.
            buffers: The declared slots' memory, already sliced for ``shape``.
        """

    @abc.abstractmethod
    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Write what ``view`` says into the tensors of ``metadata``, in place.

        Reads no device tensor on the host. Rebinds nothing.
        """

    @abc.abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Any,
    ) -> torch.Tensor:
        """Write ``k`` and ``v``, where they are given, to the KV cache of ``layer.cache_layer``, and attend.

        Without them the cache is read as it is (frozen KV, cross attention). `new_kv` tells the two cases
        apart.

        Args:
            q: ``[T, num_q_heads, head_dim]``.
            k: ``[T, num_kv_heads, head_dim]``, rotated already; None writes nothing.
            v: ``[T, num_kv_heads, v_head_dim]``; None where ``k`` is.
            layer: Whose attention it is.
            metadata: What the hooks made for this step.

        Returns:
            ``[T, num_q_heads, v_head_dim]``.

        Raises:
            EngineError: One of ``k`` and ``v`` without the other.
        """

    # -- what the base class makes of it ---------------------------------------------------------

    def attach(self, registry: CudaGraphBufferRegistry, driver: GraphDriver | None = None) -> None:
        """Register the backend's slots in the registry of the lane that will capture it.

        Args:
            registry: The lane's.
            driver: The lane's.

        Raises:
            EngineError: Another lane has it already: its graphs read that lane's slots.
            SlotError: A slot that a fill would write, without a role, or against the registry's rules.
        """
        if self._registry is not None:
            raise EngineError(
                f"{type(self).__name__} is attached to a lane already",
                hint="build one backend for each lane",
            )
        limits = self.context.limits
        slots = [
            slot
            for step in range(limits.draft.num_steps)
            for slot in self.declare_slots(limits)
            if not (step and slot.is_workspace)
            for slot in [replace(slot, name=_at_step(slot.name, step)) if step else slot]
        ]
        for slot in slots:
            if slot.copy_from_fb or slot.post_fill is not None:
                raise SlotError(
                    f"{slot.label}: a backend's slots are filled by its fill_metadata, in eager steps too,"
                    " where no registry copies or computes anything",
                    hint="declare it with copy_from_fb=False and without source_fn and post_fill",
                )
            if slot.role is None:
                raise SlotError(
                    f"{slot.label}: a backend's slot without a role",
                    hint="declare it with metadata_slot(name, rows, dtype, role=...): tools go by the role",
                )
            registry.register_slot(slot)
        self._registry = registry
        self._workspaces.clear()
        self.driver = driver

    @hookimpl
    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Bind slices of the registered slots for ``shape`` and fill them."""
        registry = self._registry
        if registry is None:
            raise EngineError(
                f"{type(self).__name__} is attached to no registry",
                hint="Lane() attaches it; outside a lane call attach() before capture",
            )
        return self._make_metadata(view, shape, lambda step: SlotBuffers(registry, shape, step))

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refill the captured metadata: the same body as at capture, unless the graph does it."""
        del shape  # the captured metadata was bound for it
        self._refresh_metadata(view, captured, fill=not self.records_metadata)
        return captured

    def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata where the graph does that work; a lane calls it inside the capture."""
        if self.records_metadata:
            for at, part in each_step(view, metadata):
                self.fill_metadata(at, part)

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        """Return metadata for a batch that runs without a graph: the same body, in new memory.

        Args:
            batch: The batch; its tensors may be kept.
            fill: What the new memory holds before the body writes it; the slots' initial values by
                default. What differs between two fills is what the body leaves unwritten. Workspaces are
                not new memory: every step has the same.
        """
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        slots = {slot.name: slot for slot in self.declare_slots(self.context.limits)}
        buffers = EagerBuffers(slots, shape, self.context.device, self._workspace, fill)
        return self._make_metadata(batch, shape, lambda _: buffers)

    # -- inside ----------------------------------------------------------------------------------

    def _workspace(self, slot: GraphSlot) -> torch.Tensor:
        """Return the workspace of ``slot``: the registry's, or one that lives as long as the backend."""
        if self._registry is not None and self._registry.has_slot(slot.name):
            return self._registry.get_slot(slot.name).slice_for(0, 0)
        if slot.name not in self._workspaces:
            limits, device = self.context.limits, slot.device or self.context.device
            with torch.inference_mode(mode=False):  # a step outside inference mode may write it too
                self._workspaces[slot.name] = torch.full(
                    slot.shape_fn(limits.max_bs, limits.max_num_tokens),
                    slot.initial_value,
                    dtype=slot.dtype,
                    device=device,
                )
        return self._workspaces[slot.name]

    def _make_metadata(
        self,
        view: ForwardBatch,
        shape: GraphShape,
        buffers: Callable[[int], Buffers],
    ) -> Any:
        """Bind and fill metadata; ``buffers`` gives those of a step."""
        if view.is_tree:
            self._require_trees()
        if view.out_cache_loc.dim() > 1:  # of a draft decode, or of an idle rank in one
            metadata: Any = DraftMetadata(
                tuple(
                    self.allocate_metadata(view.at_draft_step(step), shape, buffers(step))
                    for step in range(view.num_draft_steps)
                )
            )
        else:
            metadata = self.allocate_metadata(view, shape, buffers(0))
        self._refresh_metadata(view, metadata, fill=True)
        return metadata

    def _require_trees(self) -> None:
        """Refuse drafts that are a tree where the kernels, or the slots, are for chains.

        Raises:
            EngineError: Says which.
        """
        if not self.capabilities.trees:
            raise EngineError(
                f"the batch's drafts are a tree, and {type(self).__name__} serves chains alone",
                hint="draft without branches, or select an attention backend whose capabilities have trees",
            )
        if self.context.limits.draft.topk == 1:
            raise EngineError(
                "the batch's drafts are a tree, and the lane was laid out for chains: its"
                " limits.draft.topk is 1",
                hint="build the backend with Limits(draft=DraftLimits(topk=...)) of the draft",
            )

    def _refresh_metadata(self, view: ForwardBatch, metadata: Any, *, fill: bool) -> None:
        plan = self.plan_metadata
        if not fill and plan is None:
            return
        for at, part in each_step(view, metadata):
            if fill:
                self.fill_metadata(at, part)
            if plan is not None:
                plan(at, part)


def _require_caches(context: BackendContext) -> None:
    """Refuse layers that name the KV cache of another layer where there is none that fits them.

    Raises:
        EngineError: Names the layer, the cache and both shapes.
    """
    caches = context.kv_cache
    for layer in context.layers:
        at = layer.kv_layer
        if at is None:
            continue
        asked = [(layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)]
        there = [tuple(t[at].shape[1:]) for t in (caches.k, caches.v) if 0 <= at < len(t)]
        if asked != there:
            have = f"has keys and values {there}" if there else "is not there"
            raise EngineError(
                f"layer {layer.layer_id} has kv_layer={at} and needs keys and values {asked}; the cache of"
                f" layer {at} {have}",
                hint="name a layer whose heads have the same widths, or leave kv_layer out",
            )


def _at_step(name: str, step: int) -> str:
    """Return the name of a declared slot's twin for a later step of a draft."""
    return f"{name}.step{step}" if step else name


def each_step(view: ForwardBatch, metadata: Any) -> Iterator[tuple[ForwardBatch, Any]]:
    """Yield what each step of a draft sees, and its metadata; the whole of any other batch.

    Args:
        view: Of the whole batch.
        metadata: `DraftMetadata`, or that of a batch of one step.
    """
    if not isinstance(metadata, DraftMetadata):
        yield view, metadata
        return
    for step, part in enumerate(metadata.steps):
        yield view.at_draft_step(step), part
