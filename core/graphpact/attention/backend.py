"""`AttentionBackend`, the base class of attention plugins.

A backend implements one method, `AttentionBackend.fill_metadata`, which computes the tensors of its metadata
from a view. The base class uses it for both hooks and for eager steps, so that capture and replay agree. A
backend that must compute metadata differently at replay also overrides `AttentionBackend.refresh_metadata`.

A draft decode has several steps in one graph. Its metadata is a `DraftMetadata` with one entry per step. The
same method computes each entry from `ForwardBatch.at_draft_step`.

Does not: choose shapes, pad batches or record graphs.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch

from graphpact.attention.capabilities import Capabilities, LayerSpec, Limits
from graphpact.attention.context import BackendContext
from graphpact.attention.providers import KernelProvider, choose_provider
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.buffers.arenas import new_buffer
from graphpact.errors import EngineError, SlotError
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import HookMethods
from graphpact.plugin_calls import all_returned
from graphpact.shapes import GraphShape


def new_kv(
    k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the keys and values that `AttentionBackend.forward` writes, or None if it writes none.

    Raises:
        EngineError: One of them is given without the other.
    """
    if k is not None and v is not None:
        return k, v
    if k is None and v is None:
        return None
    given, missing = ("keys", "values") if v is None else ("values", "keys")
    raise EngineError(
        f"layer {layer.layer_id}: forward got {given} and no {missing}",
        hint="pass both k and v to write them, or None for both to read the cache only",
    )


PlanInvariant: TypeAlias = Callable[[Any, ForwardBatch, Any], bool | None]
"""``(backend, view, metadata) -> holds``: whether a statement about the plan in ``metadata`` is true.

It returns None if it cannot tell, as for a library's plan that only the library's kernels can read."""


@dataclass(frozen=True, slots=True)
class DraftMetadata:
    """The metadata of a draft decode: one entry of ``steps`` for each draft step, in order."""

    steps: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of a backend's declared slots: ``buffers(name)``.

    Args:
        of_slot: Returns the memory of a slot, given its name, sliced for the shape.
        in_graph: Whether a graph will read the metadata. If so, its host numbers must be valid for every
            batch of the shape; otherwise only for this batch.
    """

    of_slot: Callable[[str], torch.Tensor]
    in_graph: bool

    def __call__(self, name: str) -> torch.Tensor:
        """Return the slot's memory, sliced for the shape."""
        return self.of_slot(name)


class AttentionBackend(HookMethods, abc.ABC):
    """Base class of attention plugins.

    A subclass sets `capabilities` and implements `declare_slots`, `allocate_metadata`, `fill_metadata` and
    `forward`. If replays prepare metadata differently from captures, it also overrides `refresh_metadata`.
    """

    capabilities: ClassVar[Capabilities]

    providers: ClassVar[Sequence[type[KernelProvider]]] = ()
    """Kernel providers to choose from, the best first; empty for a backend that has only one set of
    kernels.
    """

    claims: ClassVar[Mapping[str, str]] = {}
    """Details about capabilities, for `graphpact check`. The value is ``"since 1.2"`` for a declared
    capability, and ``"not_implemented"`` or ``"unknown"`` for one that is not declared. Keys are, for
    example, ``"mode mixed"``, ``"page_size 1"``, ``"heads mla"``, ``"dtype bfloat16"``, ``"feature
    sinks"`` and ``"feature fill_is_device_only"``.
    """

    fill_is_device_only: ClassVar[bool] = False
    """Whether `fill_metadata` does only device work and sets no host number that changes between replays. A
    lane may then record it as the first nodes of a graph instead of running it in the replay hook.
    """

    records_metadata: bool = False
    """Whether the lane records `fill_metadata` in its graphs. The lane sets it."""

    plan_metadata: Callable[[ForwardBatch, Any], None] | None = None
    """An optional method ``(view, metadata) -> None`` for host work, such as making a kernel's plan from
    ``seq_lens_cpu``. It runs after `fill_metadata` or `refresh_metadata`, and before every replay even if the
    graph fills the metadata. It must not read a device tensor.
    """

    plan_invariants: ClassVar[Mapping[str, PlanInvariant]] = {}
    """Statements about the plan that are true after every right fill: at capture, at replay and in an eager
    step. A key is the statement, such as ``"the chunks of each row hold all its keys"``. Its value is called
    for each draft step separately. It may read device tensors on the host, because only checks call it, and
    no step does.
    """

    def __init__(self, context: BackendContext) -> None:
        _require_caches(context)
        self.context = context
        asked = context.provider, context.device, context
        provider, self.passed_over = choose_provider(type(self).__name__, self.providers, *asked)
        """Why better kernels are not used: the reason by the name of their provider."""
        self.kernels: Any = None if provider is None else provider(context)
        """An instance of one of `providers`; None without providers."""
        self.driver: GraphDriver | None = None
        """The lane's driver, which provides streams and copies from host memory; None before `attach`."""
        self._registry: CudaGraphBufferRegistry | None = None
        self._workspaces: dict[str, torch.Tensor] = {}
        """Workspaces of eager steps by slot; empty if a registry holds them."""

    # -- implemented by a subclass -------------------------------------------------------------------

    @abc.abstractmethod
    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return a slot for every buffer that the metadata needs, with sizes from ``limits``."""

    @abc.abstractmethod
    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        """Return a metadata object for ``shape`` whose tensors come from ``buffers`` or ``view``.

        ``view`` is the batch that the kernels read. The metadata may keep references to its tensors.
        """

    @abc.abstractmethod
    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Compute the tensors of ``metadata`` from ``view``, in place.

        It must not read a device tensor on the host or rebind a field.
        """

    def refresh_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Update the captured ``metadata`` for a replay; by default, call `fill_metadata`.

        It may leave host numbers and slots of the role ``constant`` unchanged. A strict lane poisons all
        other slots before each step. It is not called if the graph fills the metadata.
        """
        self.fill_metadata(view, metadata)

    @abc.abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Write ``k`` and ``v``, if given, to the KV cache of ``layer.cache_layer``, then compute attention.

        Without them the cache is only read (frozen KV, cross attention). `new_kv` distinguishes the two
        cases.

        Args:
            q: ``[T, num_q_heads, head_dim]``.
            k: ``[T, num_kv_heads, head_dim]``, after rope, or None.
            v: ``[T, num_kv_heads, v_head_dim]``, or None. Give both ``k`` and ``v`` or neither.
            layer: The layer.
            metadata: The metadata of this step.

        Returns:
            ``[T, num_q_heads, v_head_dim]``. Every row is written, including padding rows, because a model
            may compute a scale over all rows. The row of a padding token depends on scratch memory only, or
            is zeros; a copy of a live request's row would carry that request into the scale.

        Raises:
            EngineError: One of ``k`` and ``v`` is given without the other.
        """

    # -- the base class --------------------------------------------------------------------------

    def attach(self, registry: CudaGraphBufferRegistry, driver: GraphDriver | None = None) -> None:
        """Register the backend's slots in the registry of its lane, and keep the lane's driver.

        Raises:
            EngineError: It is attached to a lane already, whose graphs read its slots.
            SlotError: A slot would be written by a fill, has no role, or breaks the registry's rules.
        """
        if self._registry is not None:
            hint = "build one backend for each lane"
            raise EngineError(f"{type(self).__name__} is attached to a lane already", hint=hint)
        limits = self.context.limits
        slots = all_returned(self.declare_slots(limits), GraphSlot, self, "declare_slots")
        for slot in slots:
            if slot.copy_from_fb or slot.post_fill is not None or slot.role is None:
                raise SlotError(
                    f"{slot.label}: a backend's slot needs a role and must be filled by fill_metadata; "
                    "eager steps have no registry that copies a batch field or calls post_fill",
                    hint="declare it with metadata_slot(name, rows, dtype, role=...)",
                )
        for step in range(limits.draft.num_steps):
            for slot in slots:
                if not (step and slot.role in ("workspace", "constant")):
                    registry.register_slot(replace(slot, name=_at_step(slot.name, step)))
        self._registry = registry
        self._workspaces.clear()
        self.driver = driver

    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
        """Bind slices of the registered slots for ``shape`` and fill them."""
        registry = self._registry
        if registry is None:
            raise EngineError(
                f"{type(self).__name__} is attached to no registry",
                hint="Lane() attaches it; outside a lane call attach() before capture",
            )

        def of_step(step: int) -> Buffers:
            def of_slot(name: str) -> torch.Tensor:
                own = _at_step(name, step)  # all draft steps share a workspace or a constant
                slot = registry.get_slot(own if registry.has_slot(own) else name)
                return slot.slice_for(shape.batch_size, shape.num_tokens)

            return Buffers(of_slot, in_graph=True)

        return self._make_metadata(view, shape, of_step)

    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh the captured metadata for a replay, unless the graph fills it."""
        del shape  # the captured metadata is bound to it
        self._run(None if self.records_metadata else self.refresh_metadata, view, captured)
        return captured

    def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill the metadata if the graph does that work. A lane calls it inside the capture."""
        if self.records_metadata:
            for at, part in each_step(view, metadata):
                self.fill_metadata(at, part)

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        """Return metadata in new memory for a batch that runs without a graph, filled by `fill_metadata`.

        Args:
            batch: The batch. The metadata may keep references to its tensors.
            fill: Initial contents of the new memory, by default the slots' initial values. Two calls with
                different values show which elements `fill_metadata` leaves unwritten. Workspaces keep their
                contents.
        """
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        slots = {slot.name: slot for slot in self.declare_slots(self.context.limits)}

        def new(name: str) -> torch.Tensor:
            slot = slots[name]
            if slot.role == "workspace":
                return self._workspace(slot)
            size = slot.shape_fn(shape.batch_size, shape.num_tokens)
            value = slot.initial_value if fill is None else fill
            return new_buffer(slot, size, slot.device or self.context.device, value)

        return self._make_metadata(batch, shape, lambda _: Buffers(new, in_graph=False))

    # -- inside ----------------------------------------------------------------------------------

    def _workspace(self, slot: GraphSlot) -> torch.Tensor:
        """Return the workspace of ``slot``: the one in the registry, or one that the backend keeps."""
        if self._registry is not None and self._registry.has_slot(slot.name):
            return self._registry.get_slot(slot.name).slice_for(0, 0)
        if slot.name not in self._workspaces:
            limits, device = self.context.limits, slot.device or self.context.device
            with torch.inference_mode(mode=False):  # so that a step outside inference mode can write it too
                shape = slot.shape_fn(limits.max_bs, limits.max_num_tokens)
                self._workspaces[slot.name] = new_buffer(slot, shape, device, slot.initial_value)
        return self._workspaces[slot.name]

    def _make_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Callable[[int], Buffers]) -> Any:
        """Return bound and filled metadata; ``buffers`` returns the buffers of a draft step."""
        if view.is_tree:
            self._require_trees()
        if view.out_cache_loc.dim() > 1:  # a draft decode, or an idle rank in one
            views = enumerate(map(view.at_draft_step, range(view.num_draft_steps)))
            steps = (self.allocate_metadata(at, shape, buffers(step)) for step, at in views)
            metadata: Any = DraftMetadata(tuple(steps))
        else:
            metadata = self.allocate_metadata(view, shape, buffers(0))
        self._run(self.fill_metadata, view, metadata)
        return metadata

    def _require_trees(self) -> None:
        """Raise `EngineError` for draft trees if the kernels or the slots support only chains."""
        if not self.capabilities.trees:
            raise EngineError(
                f"the batch's drafts are a tree; {type(self).__name__} supports chains only",
                hint=(
                    "draft with top-k = 1, or select an attention backend that declares trees in its "
                    "capabilities"
                ),
            )
        if self.context.limits.draft.topk == 1:
            raise EngineError(
                "the batch's drafts are a tree; the lane is sized for chains: its limits.draft.topk is 1",
                hint="build the backend with Limits(draft=DraftLimits(topk=...)) of the draft",
            )

    def _run(self, body: Callable[..., None] | None, view: ForwardBatch, metadata: Any) -> None:
        """Call ``body`` and `plan_metadata`, where they are given, for each step."""
        bodies = [each for each in (body, self.plan_metadata) if each is not None]
        for at, part in each_step(view, metadata) if bodies else ():
            for each in bodies:
                each(at, part)


def _require_caches(context: BackendContext) -> None:
    """Raise `EngineError` for a layer whose ``kv_layer`` has no KV cache, or a cache of other head shapes."""
    caches = context.kv_cache
    for layer in context.layers:
        at = layer.kv_layer
        if at is None:
            continue
        needed = [(layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)]
        present = [tuple(t[at].shape[1:]) for t in (caches.k, caches.v) if 0 <= at < len(t)]
        if needed != present:
            have = f"has keys and values {present}" if present else "does not exist"
            raise EngineError(
                f"layer {layer.layer_id} has kv_layer={at} and needs keys and values {needed}; the cache of"
                f" layer {at} {have}",
                hint="name a layer of the same num_kv_heads, head_dim, v_head_dim, or leave kv_layer out",
            )


def _at_step(name: str, step: int) -> str:
    """Return the name of a declared slot for draft step ``step``."""
    return f"{name}.step{step}" if step else name


def each_step(view: ForwardBatch, metadata: Any) -> Iterator[tuple[ForwardBatch, Any]]:
    """Yield the view and the metadata of each draft step; for other metadata yield both unchanged."""
    if not isinstance(metadata, DraftMetadata):
        yield view, metadata
        return
    for step, part in enumerate(metadata.steps):
        yield view.at_draft_step(step), part
