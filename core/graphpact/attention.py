"""The attention backend's side of the contract: what it declares, binds, refreshes and computes.

A backend writes one body, `AttentionBackend.fill_metadata`, from a view to the tensors of its
metadata. The base class makes both hooks of it, and the eager path too, so that capture and replay
cannot disagree about what a tensor holds. A backend that really needs two bodies overrides the hooks.

Does not: choose shapes, pad batches or record graphs.
"""

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.errors import EngineError, SlotError, UnsupportedModelError
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape


class GraphSupport(enum.Enum):
    """Which batches a graph can hold: a backend declares what it can, a runner what it needs.

    In rising order; each includes the ones before it.
    """

    NEVER = "never"
    UNIFORM_DECODE = "uniform_decode"
    """One query token a request."""
    UNIFORM = "uniform"
    """The same number of query tokens a request."""
    ALWAYS = "always"

    def covers(self, needed: "GraphSupport") -> bool:
        """Return whether this is as much as ``needed``, or more."""
        order = list(GraphSupport)
        return order.index(self) >= order.index(needed)


class HeadLayout(enum.Enum):
    """How the query heads of a layer share keys and values."""

    MHA = "mha"
    """Each has its own."""
    GQA = "gqa"
    """Groups of them share one."""
    MLA = "mla"
    """All share one compressed latent, which is what the cache holds."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer of a model asks of attention.

    Args:
        layer_id: Index of the layer's KV cache.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_q_heads``.
        head_dim: Width of a query and a key head.
        v_head_dim: Width of a value head.
        scaling: Factor on the scores.
        sliding_window: A query sees this many keys, itself included; None sees all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; None leaves them.
        sinks: ``[num_q_heads]`` logits of a virtual key without value (GPT-OSS), or None.
    """

    layer_id: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def head_layout(self) -> HeadLayout:
        """MHA where every query head has a key head of its own, GQA otherwise."""
        return HeadLayout.MHA if self.num_q_heads == self.num_kv_heads else HeadLayout.GQA


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest of everything that a lane can meet; slots and bounds are sized by it.

    Args:
        max_bs: Requests in a step.
        max_num_tokens: Tokens in a step.
        max_context_len: Tokens in a sequence.
        page_size: KV slots in a page.
    """

    max_bs: int
    max_num_tokens: int
    max_context_len: int
    page_size: int

    @property
    def max_pages_per_request(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_context_len // self.page_size)


class KVBuffers(Protocol):
    """The KV cache as a backend sees it: one key and one value tensor a layer.

    ``k[i]`` is ``[num_slots, num_kv_heads, head_dim]``, ``v[i]`` ``[num_slots, num_kv_heads,
    v_head_dim]``; slot 0 is scratch, page ``p`` is slots ``p * page_size`` and on.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]


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
    """

    device: torch.device
    dtype: torch.dtype
    layers: Sequence[LayerSpec]
    limits: Limits
    req_to_token: torch.Tensor
    kv_cache: KVBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares that it can do. None for a set means: any.

    Args:
        modes: Forward modes it serves.
        graph_support: Which of them can be captured.
        dtypes: Of queries and KV cache.
        devices: Device types, such as ``"cpu"`` and ``"cuda"``.
        head_layouts: How its kernels let query heads share keys.
        page_sizes: KV page sizes.
        head_dims: Widths of a query head.
        sliding_window: Whether a layer may have one.
        softcap: Whether a layer may have one.
        sinks: Whether a layer may have them.
        needs_host_plan: Whether a replay hook reads ``seq_lens_cpu``.
        seq_len_fill_value: The length of a padded row that its kernels read as harmless.
    """

    modes: frozenset[ForwardMode]
    graph_support: GraphSupport
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    head_layouts: frozenset[HeadLayout]
    seq_len_fill_value: int
    page_sizes: frozenset[int] | None = None
    head_dims: frozenset[int] | None = None
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    needs_host_plan: bool = False

    def missing(
        self,
        layers: Sequence[LayerSpec],
        *,
        mode: ForwardMode,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
    ) -> list[str]:
        """Return what a model and an engine ask for that is not declared, one phrase each."""
        found: dict[str, None] = {}

        def need(name: str, value: Any, declared: Any) -> None:
            if declared is not None and value not in declared:
                have = ", ".join(sorted(str(getattr(d, "value", d)) for d in declared))
                found[f"{name} {getattr(value, 'value', value)} (has {have})"] = None

        need("mode", mode, self.modes)
        need("dtype", dtype, self.dtypes)
        need("device", device.type, self.devices)
        need("page size", page_size, self.page_sizes)
        for layer in layers:
            need("head layout", layer.head_layout, self.head_layouts)
            need("head width", layer.head_dim, self.head_dims)
            for name, asked in (
                ("sliding_window", layer.sliding_window),
                ("softcap", layer.softcap),
                ("sinks", layer.sinks),
            ):
                if asked is not None and not getattr(self, name):
                    found[f"attention feature {name}"] = None
        return list(found)


@dataclass(slots=True)
class EagerBuffers:
    """Buffers for metadata that no graph reads: made when asked for, sized for one batch."""

    slots: dict[str, GraphSlot]
    shape: GraphShape
    device: torch.device
    fill: int | None = None

    def __call__(self, name: str) -> torch.Tensor:
        """Return a new buffer for the slot called ``name``, holding its initial value, or ``fill``."""
        slot = self.slots[name]
        shape = slot.shape_fn(self.shape.batch_size, self.shape.num_tokens)
        value = slot.initial_value if self.fill is None else self.fill
        return torch.full(shape, value, dtype=slot.dtype, device=slot.device or self.device)


class AttentionBackend(abc.ABC):
    """Base class of attention plugins.

    A subclass sets `capabilities` and writes `declare_slots`, `allocate_metadata`, `fill_metadata`
    and `forward`.
    """

    capabilities: ClassVar[Capabilities]

    metadata_in_graph: Callable[[ForwardBatch, Any], None] | None = None
    """A method ``(view, metadata) -> None``, where a backend has one: the same work as `fill_metadata`,
    done by the device alone. A lane may record it as the graph's first nodes, and then a replay prepares
    nothing."""

    records_metadata: bool = False
    """Whether its lane records `metadata_in_graph`; the lane says so."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context
        self.driver: GraphDriver | None = None
        """The lane's driver, from which streams and copies from host memory are had; None before
        `attach`."""
        self._registry: CudaGraphBufferRegistry | None = None

    # -- what a backend writes -------------------------------------------------------------------

    @abc.abstractmethod
    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return every buffer that the backend's metadata needs, sized by ``limits``."""

    @abc.abstractmethod
    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Callable[[str], torch.Tensor]
    ) -> Any:
        """Return a metadata object for ``shape`` whose tensors come from ``buffers`` or ``view``.

        Args:
            view: The batch as the kernels will see it; its tensors may be kept.
            shape: The padded counts.
            buffers: ``name -> tensor`` for the declared slots, already sliced for ``shape``.
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
        for slot in self.declare_slots(self.context.limits):
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

        def buffers(name: str) -> torch.Tensor:
            return registry.get_slot(name).slice_for(shape.batch_size, shape.num_tokens)

        metadata = self.allocate_metadata(view, shape, buffers)
        self.fill_metadata(view, metadata)
        return metadata

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refill the captured metadata: the same body as at capture, unless the graph does it."""
        del shape  # the captured metadata was bound for it
        if not self.records_metadata:
            self.fill_metadata(view, captured)
        return captured

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        """Return metadata for a batch that runs without a graph: the same body, in new memory.

        Args:
            batch: The batch; its tensors may be kept.
            fill: What the new memory holds before the body writes it; the slots' initial values by
                default. What differs between two fills is what the body leaves unwritten.
        """
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        slots = {slot.name: slot for slot in self.declare_slots(self.context.limits)}
        metadata = self.allocate_metadata(
            batch, shape, EagerBuffers(slots, shape, self.context.device, fill)
        )
        self.fill_metadata(batch, metadata)
        return metadata


def require_capabilities(
    name: str,
    capabilities: Capabilities,
    layers: Sequence[LayerSpec],
    *,
    mode: ForwardMode,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
) -> None:
    """Refuse a model that asks of backend ``name`` what it does not declare.

    Raises:
        UnsupportedModelError: Lists everything that is missing.
    """
    missing = capabilities.missing(
        layers, mode=mode, dtype=dtype, device=device, page_size=page_size
    )
    if missing:
        raise UnsupportedModelError(
            f"attention backend {name!r} cannot run this model's {mode.value}: it lacks "
            + "; ".join(missing),
            hint="select another engine.attention_backend; `graphpact plugins` lists what each has",
        )
