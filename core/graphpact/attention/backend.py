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
from graphpact.attention.providers import KernelProvider, ProviderName, choose_provider
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.errors import EngineError, SlotError
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape


class KVBuffers(Protocol):
    """The KV cache as a backend sees it: one key and one value tensor a layer.

    ``k[i]`` is ``[num_slots, num_kv_heads, head_dim]``, ``v[i]`` ``[num_slots, num_kv_heads,
    v_head_dim]``; slot 0 is scratch, page ``p`` is slots ``p * page_size`` and on. Where a layer keeps
    latents (MLA), ``v[i]`` is a view of ``k[i]``: the first ``kv_lora_rank`` of each key.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]


def kv_tensors(kv_cache: KVBuffers) -> dict[str, torch.Tensor]:
    """Return the memory of a KV cache, each tensor once, by a name for messages.

    A value that is a view of its key is no memory of its own.
    """
    found: dict[str, torch.Tensor] = {}
    for i, (k, v) in enumerate(zip(kv_cache.k, kv_cache.v, strict=True)):
        shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        found[f"the {'latents' if shared else 'keys'} of layer {i}"] = k
        if not shared:
            found[f"the values of layer {i}"] = v
    return found


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is built with.

    Args:
        device: The lane's device.
        dtype: Of queries, keys, values and the KV cache.
        layers: Every layer's demands, by ``layer_id``.
        limits: The largest of everything.
        req_to_token: ``[max_requests + 1, max_context_len]`` int32: KV slot of each position of each
            request row. Row 0 is all zeros.
        kv_cache: The KV cache.
        mode: What the lane's batches are.
        provider: Which of the backend's kernels: see `graphpact.attention.providers`.
    """

    device: torch.device
    dtype: torch.dtype
    layers: Sequence[LayerSpec]
    limits: Limits
    req_to_token: torch.Tensor
    kv_cache: KVBuffers
    mode: ForwardMode = ForwardMode.DECODE
    provider: ProviderName = "auto"


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

    Workspaces are not made anew: where the backend has them in a registry, eager steps use those.
    """

    slots: dict[str, GraphSlot]
    shape: GraphShape
    device: torch.device
    fill: int | None = None
    registry: CudaGraphBufferRegistry | None = None
    in_graph: bool = False

    def __call__(self, name: str) -> torch.Tensor:
        """Return a new buffer for the slot called ``name``, holding its initial value, or ``fill``."""
        slot = self.slots[name]
        if self.registry is not None and self.fill is None and _is_workspace(slot):
            return self.registry.get_slot(name).slice_for(0, 0)
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

    metadata_in_graph: Callable[[ForwardBatch, Any], None] | None = None
    """A method ``(view, metadata) -> None``, where a backend has one: the same work as `fill_metadata`,
    done by the device alone. A lane may record it as the graph's first nodes, and then a replay prepares
    nothing."""

    records_metadata: bool = False
    """Whether its lane records `metadata_in_graph`; the lane says so."""

    plan_metadata: Callable[[ForwardBatch, Any], None] | None = None
    """A method ``(view, metadata) -> None``, where a backend has one: work of the host that no graph holds,
    such as a kernel's plan, made from ``seq_lens_cpu``. Done after `fill_metadata`, and before each replay
    also where the graph does the rest. Reads no device tensor."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context
        provider, self.passed_over = choose_provider(type(self).__name__, self.providers, context)
        """Why kernels better than those in use were not taken, by the name of their provider."""
        self.kernels: Any = None if provider is None else provider(context)
        """An instance of one of `providers`; None where there are none."""
        self.driver: GraphDriver | None = None
        """The lane's driver, from which streams and copies from host memory are had; None before
        `attach`."""
        self._registry: CudaGraphBufferRegistry | None = None

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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Write ``k`` and ``v`` to the KV cache and attend.

        Args:
            q: ``[T, num_q_heads, head_dim]``.
            k: ``[T, num_kv_heads, head_dim]``, rotated already.
            v: ``[T, num_kv_heads, v_head_dim]``.
            layer: Whose attention it is.
            metadata: What the hooks made for this step.

        Returns:
            ``[T, num_q_heads, v_head_dim]``.
        """

    # -- what the base class makes of it ---------------------------------------------------------

    def attach(self, registry: CudaGraphBufferRegistry, driver: GraphDriver | None = None) -> None:
        """Register the backend's slots in the registry of the lane that will capture it.

        Args:
            registry: The lane's.
            driver: The lane's.

        Raises:
            EngineError: Another lane has it already: its graphs read that lane's slots.
            SlotError: A slot that a fill would write, or against the registry's rules.
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
            if not (step and _is_workspace(slot))
            for slot in [replace(slot, name=_at_step(slot.name, step)) if step else slot]
        ]
        for slot in slots:
            if slot.copy_from_fb or slot.post_fill is not None:
                raise SlotError(
                    f"{slot.label}: a backend's slots are filled by its fill_metadata, in eager steps too,"
                    " where no registry copies or computes anything",
                    hint="declare it with copy_from_fb=False and without source_fn and post_fill",
                )
            registry.register_slot(slot)
        self._registry = registry
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
        """Do what a graph records of the metadata's work; a lane calls it inside the capture."""
        if self.records_metadata and self.metadata_in_graph is not None:
            for at, part in each_step(view, metadata):
                self.metadata_in_graph(at, part)

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        """Return metadata for a batch that runs without a graph: the same body, in new memory.

        Args:
            batch: The batch; its tensors may be kept.
            fill: What the new memory holds before the body writes it; the slots' initial values by
                default. What differs between two fills is what the body leaves unwritten.
        """
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        slots = {slot.name: slot for slot in self.declare_slots(self.context.limits)}
        buffers = EagerBuffers(slots, shape, self.context.device, fill, self._registry)
        return self._make_metadata(batch, shape, lambda _: buffers)

    # -- inside ----------------------------------------------------------------------------------

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


def _at_step(name: str, step: int) -> str:
    """Return the name of a declared slot's twin for a later step of a draft."""
    return f"{name}.step{step}" if step else name


def _is_workspace(slot: GraphSlot) -> bool:
    """Return whether ``slot`` is memory that kernels only pass through: one serves every step."""
    return slot.padding_policy is PaddingPolicy.FILL_ONCE and slot.axis == "none"


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
