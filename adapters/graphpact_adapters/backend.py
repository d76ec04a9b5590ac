"""`BuilderBackend`: the metadata builders of another engine, as a backend of the suite's lanes.

It does what the engine does around a builder. Before each build it writes the persistent buffers (`lend`).
The builder makes metadata from them. A kernel reads the metadata (`graphpact_adapters.kernel_reads`).

    capture   lend a dummy or a live batch, build for a capture; the graph keeps what the kernel then reads,
              after what builders do inside it (`in_graph`)
    replay    lend the padded batch, build, and drop the result: the graph reads the captured tensors; with
              tasks the engine updates the kernels of the graph by the result (`graphpact_adapters.tasks`)
    eager     lend the batch as it is, build, and read the result

A draft of several steps is one region. Before each step the engine advances its buffers, and the builder
updates the captured metadata. Both are recorded (`begin_step`), so a replay builds nothing. An engine that
prepares all steps before the first one has separate metadata for each step (`steps_of`).

Host and device are two memories, as in the engine: builders get the device `DEVICE`, whose name is not
``cpu``.

So a kernel reads the tensors of the capture, with the contents that the last build left in them. The outputs
show whether that is right. A builder need not return the same tensors again.

Does not: know an engine (each adapter has a subclass), or judge; see `graphpact_adapters.experiments`.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Buffers,
    DraftMetadata,
    KVBuffers,
    LayerSpec,
    Limits,
)
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact.errors import EngineError
from graphpact.shapes import GraphShape
from graphpact.tensors import same, storage_id
from graphpact_adapters.kernel_reads import Reads
from graphpact_adapters.read_leaves import leaves
from graphpact_adapters.tasks import TaskRecorder, Tasks
from graphpact_conformance.lane.holders import holder_of
from graphpact_tape import HostMemory, poison, two_memories

Phase = Literal["capture", "replay", "eager", "draft"]
DEVICE = torch.device("cpu", 0)
"""The device of builders. It differs from the host ``cpu``, but its tensors are in this machine's memory."""
NUM_GROUPS = 2
"""The number of KV-cache groups of a lane. Their builders share the persistent buffers."""


@dataclass
class Built:
    """What kernels read after one build, by KV-cache group, or by the step of a draft.

    Args:
        reads: One entry for each group; layer ``i`` reads that of group ``i % len(reads)``. Empty for a step
            without requests, and for the dropped result of a replay that no reader understands. After a
            capture, `BuilderBackend.in_graph` may replace it.
    """

    reads: tuple[Reads, ...]


@dataclass(frozen=True)
class DraftStep:
    """The metadata of one step of a draft.

    Args:
        step: The number of the step.
        num_reqs: Requests, padding rows included.
        built: What kernels read, as captured. None in an eager draft: its steps are built one by one.
    """

    step: int
    num_reqs: int
    built: Built | None


@dataclass(frozen=True)
class Words:
    """The engine's terms, for the texts of findings.

    Args:
        subject: What the author writes: a builder or a backend.
        allocates: The method in which it allocates the memory that graphs read.
        largest: The sizes of the largest step, as the engine passes them.
        next_reader: Who reads the lent buffers after it.
        no_graphs: How an author declares that the engine captures no graph of a kind of step.
    """

    subject: str
    allocates: str
    largest: str
    next_reader: str
    no_graphs: str


@dataclass(frozen=True)
class LentChange:
    """A buffer of the engine that a builder has changed.

    Args:
        name: The buffer.
        call: The builder's method.
        phase: The phase of the build.
        before: The buffer before the call.
        after: The buffer after it.
    """

    name: str
    call: str
    phase: Phase
    before: torch.Tensor
    after: torch.Tensor


@dataclass
class _Captured:
    """One captured shape: what its graph reads, and which of that memory was freed and is poisoned."""

    built: Built
    gone: set[int] = field(default_factory=set)


Metadata = Built | DraftMetadata
"""The metadata of one step of a lane, or of each step of a draft."""


def begins_steps(metadata: object) -> bool:
    """Return whether this is the metadata of a draft whose steps are built when they begin."""
    return isinstance(metadata, DraftMetadata) and all(isinstance(at, DraftStep) for at in metadata.steps)


@dataclass
class LayerCache:
    """The KV cache of one layer.

    Args:
        k: Its keys, by layer.
        v: Its values, by layer.
    """

    k: Any
    v: Any


@contextmanager
def renumbered(cache: KVBuffers, layer: LayerSpec, slots: torch.Tensor) -> Iterator[KVBuffers]:
    """Yield a copy of the cache of a layer in another numbering, and write it back at the end.

    Args:
        cache: The KV cache of the suite.
        layer: The layer.
        slots: ``[slots]`` int64: for each slot of the suite its number in the copy, each once.
    """
    at, has_latents = layer.cache_layer, layer.kv_lora_rank is not None
    k, v = torch.empty_like(cache.k[at]), torch.empty_like(cache.v[at])
    k[slots] = cache.k[at]
    if has_latents:
        v = k[..., : layer.v_head_dim]
    else:
        v[slots] = cache.v[at]
    yield LayerCache({at: k}, {at: v})
    cache.k[at].copy_(k[slots])
    if not has_latents:
        cache.v[at].copy_(v[slots])


class BuilderBackend(AttentionBackend):
    """A backend that calls one or more builders of an engine; see the module docstring.

    Attributes:
        returned: What kernels would read from the last replay's result, which the engine drops. None before
            the first replay.
        has_exact_bounds: Whether the host's bounds on lengths are exact. False as in engines that speculate.
        lent_changes: Changes to lent buffers, in the order of the builds.
        freed: By shape, the paths of captured tensors that neither the builder nor the engine kept.
        device: The device of builders.
        host: The host memory of builders.
    """

    warmups: ClassVar[int] = 0
    """The number of builds in a capture before the one whose result is recorded."""
    types: ClassVar[set[type]]
    """The classes of the builders made so far."""

    def __init_subclass__(cls) -> None:
        cls.types = set()

    calls: ClassVar[Mapping[Phase, str]]
    """The names of the builders' methods, by phase."""
    words: ClassVar[Words]
    """The engine's terms, for texts."""
    bounds: ClassVar[str] = "the host's bounds of lengths"
    """The engine's name for the lengths that are not exact while it speculates."""
    tasks: ClassVar[Tasks | None] = None
    """The kernel arguments that the engine updates for each replay; None if it updates none."""
    unit: ClassVar[str] = "KV-cache group"
    """What the reads of a step are divided by, for texts."""
    takes_prompts: ClassVar[bool] = False
    """Whether graphs of decodes and drafts get prompts of their width too: the engine goes by shape alone."""
    room: ClassVar[int] = 1
    """Factor on the numbers of requests and tokens in the configuration that builders get."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.returned: Built | None = None
        self.has_exact_bounds = False
        self.lent_changes: list[LentChange] = []
        self.freed: dict[GraphShape, list[str]] = {}
        self.device = DEVICE if context.device.type == "cpu" else context.device
        self.host = HostMemory()
        self._captured: dict[GraphShape, _Captured] = {}
        self._capturing: Built | None = None
        self._now = Built(())  # what kernels read in the current step of a draft
        self._recorder = None if self.tasks is None else TaskRecorder(self.tasks)

    # -- an engine's part ------------------------------------------------------------------------

    @abc.abstractmethod
    def lend(self, view: ForwardBatch, shape: GraphShape | None) -> Any:
        """Write the engine's buffers for a batch, and return the arguments of its builders.

        Args:
            view: The batch, padded to ``shape``. One whose rows are all padding is a dummy.
            shape: The captured shape; None for an eager step.
        """

    @abc.abstractmethod
    def build(self, lent: Any, phase: Phase) -> Built:
        """Call the builders, and return what the kernels read from their metadata."""

    @abc.abstractmethod
    def lent_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the engine's buffers by name."""

    def shared_in_step(self, lent: Any) -> Mapping[str, torch.Tensor]:
        """Return by name the tensors that all builders of a step only read: buffers and host tensors."""
        del lent
        return self.lent_tensors()

    def built_metadata(self) -> Any:
        """Return the metadata of the last build, in the form that the engine's update of tasks takes.

        Raises:
            EngineError: This engine updates no tasks.
        """
        raise EngineError(
            f"{type(self).__name__} updates no tasks",
            hint="leave tasks out of the adapter",
        )

    @abc.abstractmethod
    def host_tensors(self, lent: Any) -> Mapping[str, torch.Tensor]:
        """Return by name the host tensors that builders get with ``lent``."""

    @contextmanager
    def two_memories(self, lent: Any = None) -> Iterator[None]:
        """Enter the context in which builders run; copies between host and device then act as in the engine.

        Args:
            lent: What `lend` returned; None where builders get no tensors on the host.
        """
        self.host.prune()
        if lent is not None:
            self.host.add(self.host_tensors(lent).values())
        with two_memories(self.host, self.device):
            yield

    def call_of(self, group: int) -> str:
        """Return the name of the builder's method that makes the metadata of a group for replays."""
        del group
        return self.calls["replay"]

    @property
    @abc.abstractmethod
    def builders(self) -> Sequence[object]:
        """The builders. They own the memory that they allocated."""

    def in_graph(self, captured: Built) -> None:
        """Do the work that builders record as the first nodes of a graph. By default there is none.

        A capture calls it inside the captured region: in each warm-up, and in the recorded run.
        """

    def begin_step(self, part: DraftStep) -> Built:
        """Advance the engine's buffers to a draft step, and return what its kernels read.

        In a graph this is recorded, so it is only device work on the captured metadata. An eager step is
        built by the engine's builder.

        Raises:
            EngineError: The engine's builders do not support a draft of several steps in one graph.
        """
        raise EngineError(
            f"step {part.step}: {type(self).__name__} has no drafts of several steps in one graph",
            hint="leave draft_decode out of the adapter's modes",
        )

    # -- the hooks -------------------------------------------------------------------------------

    def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Metadata:
        """Build for a capture, and keep what the graph reads."""
        self._captured.pop(shape, None)
        if self._recorder is not None:
            self._recorder.begin(shape)
        for _ in range(self.warmups):
            self._build(view, shape, "capture")
        built = self._build(view, shape, "capture")
        self._captured[shape] = _Captured(built)
        self.freed.pop(shape, None)
        self._capturing = built
        return self.steps_of(view, built)

    def record_metadata(self, view: ForwardBatch, metadata: Metadata) -> None:
        """Record the builders' work as the first nodes of the graph; a draft records it at each step."""
        del view, metadata  # the arguments of the current capture
        if self._capturing is not None:
            self.in_graph(self._capturing)

    def captured(self, shape: GraphShape) -> Built:
        """Return what the graph of a shape reads, with the current arguments of its tasks."""
        built = self._captured[shape].built
        return built if self._recorder is None else Built(self._recorder.now(shape, built.reads))

    def updates(self, path: str, built: Built) -> bool:
        """Return whether the engine updates a leaf of the reads, because it is an argument of tasks."""
        return self._recorder is not None and self._recorder.updates(path, built.reads)

    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Metadata) -> Metadata:
        """Build for a replay, drop the result, and return the captured metadata. For a draft, only lend."""
        if begins_steps(captured):
            self.lend(view, shape)
        else:
            self.returned = self._build(view, shape, "replay")
            if self._recorder is not None:
                with self.two_memories():
                    self._recorder.update(shape, self.built_metadata(), self.returned.reads)
        self._poison_freed()
        return captured

    def init_metadata_eager(self, batch: ForwardBatch, *, fill: int | None = None) -> Metadata:
        """Build for an eager step. The steps of a draft are built when they begin.

        As in engines, no builder is called for a step without requests.
        """
        del fill  # the engine owns the buffers, and keeps them
        if batch.out_cache_loc.dim() == 1:
            return self._build(batch, None, "eager") if batch.batch_size else Built(())
        self.lend(batch, None)
        return self.steps_of(batch, None)

    def steps_of(self, view: ForwardBatch, built: Built | None) -> Metadata:
        """Return the metadata of a step, or of each step of a draft."""
        if built is not None and view.out_cache_loc.dim() == 1:
            return built
        steps = range(view.num_draft_steps)
        return DraftMetadata(tuple(DraftStep(step, view.batch_size, built) for step in steps))

    def expected(self, view: ForwardBatch, shape: GraphShape | None) -> Built:
        """Return what kernels would read from an eager build on the padded batch."""
        return self._build(view, shape, "eager")

    def _build(self, view: ForwardBatch, shape: GraphShape | None, phase: Phase) -> Built:
        type(self).types.update(map(type, self.builders))
        lent = self.lend(view, shape)
        shared = self.shared_in_step(lent)
        before = {name: tensor.clone() for name, tensor in shared.items()}
        with self.two_memories(lent):
            built = self.build(lent, phase)
        for name, tensor in shared.items():
            if not bool(same(tensor, before[name]).all()):
                change = LentChange(name, self.calls[phase], phase, before[name], tensor.clone())
                self.lent_changes.append(change)
        return built

    # -- memory that an engine's allocator would reuse -------------------------------------------

    def _poison_freed(self) -> None:
        """Poison captured tensors that nothing keeps alive, because an engine drops what a capture built.

        On a GPU the allocator would give such memory to other tensors, and the graph would read those.
        """
        for shape, captured in self._captured.items():
            for path, value in leaves(captured.built):
                if not isinstance(value, torch.Tensor) or storage_id(value) in captured.gone:
                    continue
                if self.updates(path, captured.built):
                    continue  # the graph reads the value of the last update
                if not self.keeps(value):
                    captured.gone.add(storage_id(value))
                    self.freed.setdefault(shape, []).append(path)
                    poison(value)

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Return whether the engine or a builder holds the memory of a tensor."""
        lent = {storage_id(each) for each in self.lent_tensors().values()}
        return storage_id(tensor) in lent or holder_of(tensor, *self.builders) is not None

    # -- the base class --------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Built | DraftStep,
    ) -> torch.Tensor:
        """Attend with the model of the builder's kernel. The first layer of a draft step begins the step."""
        if isinstance(metadata, DraftStep):
            if layer.layer_id == 0:
                self._now = self.begin_step(metadata)
            metadata = self._now
        if not metadata.reads:
            return q.new_zeros(0, layer.num_q_heads, layer.v_head_dim)
        group = layer.layer_id % len(metadata.reads)
        page_size = self.context.limits.page_size
        reads, driver, recorder = metadata.reads[group], self.driver, self._recorder
        with self.cache_of(group, layer) as cache:
            if recorder is None or driver is None or not driver.is_capturing:
                return reads.attend(q, k, v, layer, cache, page_size)
            name = self.layer_name(layer)
            return recorder.attend(driver, name, group, reads, (q, k, v), layer, cache, page_size)

    def layer_name(self, layer: LayerSpec) -> str:
        """Return the engine's name for a layer."""
        return f"model.layers.{layer.layer_id}.attn"

    @contextmanager
    def cache_of(self, group: int, layer: LayerSpec) -> Iterator[KVBuffers]:
        """Yield the KV cache with its blocks where the group has them."""
        del group, layer
        yield self.context.kv_cache

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return no slots: the engine and the builder own the memory."""
        del limits
        return ()

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Built:
        """Return the result of an eager build; the hooks above do not call this."""
        del buffers
        return self.expected(view, shape)

    def fill_metadata(self, view: ForwardBatch, metadata: Built) -> None:
        """Do nothing, because a build has written everything."""


Make = Callable[..., object]
"""An author's factory of a builder."""
