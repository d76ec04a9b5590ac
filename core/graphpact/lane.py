"""`Lane`: one runner, backend, driver, registry and model, and the one place where a step happens.

    run       launch(prepare(batch)), observed by `run_step`
    prepare   fit, then the four hooks in their order, then the pact: all that a replay needs
    launch    the graph's replay, or an eager run, and the live rows of the outputs
    capture   a prepared dummy batch, plus binding: metadata bound, region recorded, pact written

Hooks are resolved once, when the lane is built: to the plugin's bound method where nothing else
implements the hook, to pluggy's caller where something observes it.

Outputs of a replay live until the next replay of the lane's driver; copy what is needed longer. The host
tensors of a batch belong to the engine and are read until `run` returns, never after it.

Does not: schedule, sample, or know what the model is.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, get_args

import pluggy
import torch

from graphpact import hookspecs
from graphpact.attention import AttentionBackend, kv_tensors
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, PaddingPolicy, SharedBuffers
from graphpact.errors import CaptureError, ConfigError, EngineError
from graphpact.graphs import DeclaredMemory, Externals, Graph, GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.memory_map import MemoryMap
from graphpact.pact import Pact, walk
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, Step, StepOutputs
from graphpact.tensors import storage_id

PactMode = Literal["always", "sampled", "off"]


@dataclass(slots=True)
class ShapeStats:
    """What happened to one captured shape. Times in seconds."""

    capture_seconds: float = 0.0
    num_nodes: int = 0
    externals: Externals = "all"
    """How much is known of the memory that the graph reads: the pact covers what the backend holds of it."""
    replays: int = 0
    raw_rows: int = 0
    raw_tokens: int = 0

    def padding_waste(self, shape: GraphShape) -> float:
        """Return the share of replayed tokens that were padding, 0 where nothing was replayed."""
        return 1 - self.raw_tokens / (self.replays * shape.num_tokens) if self.replays else 0.0


@dataclass(slots=True)
class LaneStats:
    """Counts of one lane since it was built."""

    shapes: dict[GraphShape, ShapeStats] = field(default_factory=dict)
    eager: Counter[tuple[ForwardMode, EagerReason]] = field(default_factory=Counter)
    pact_checks: int = 0

    @property
    def externals(self) -> Externals:
        """How much is known of the memory that the graphs read: of all shapes the least."""
        order: tuple[Externals, ...] = get_args(Externals)
        return max((s.externals for s in self.shapes.values()), key=order.index, default="all")

    @property
    def replays(self) -> int:
        """Replays over all shapes."""
        return sum(s.replays for s in self.shapes.values())


@dataclass(slots=True)
class CapturedShape:
    """One captured shape: all that a replay needs of it.

    Args:
        step: Static inputs, metadata and live batch, as the recorded work sees them.
        metadata: What the capture hook returned: every replay refreshes that, whatever the last one returned.
        graph: What was recorded, and its outputs.
        pact: What the capture promised.
        stats: What happened to it.
        held: Attributes of the backend that the graph reads; by name, since a graph keeps no memory alive.
        admitted: The kinds of batch whose every field is known to have a slot.
    """

    step: Step
    metadata: Any
    graph: Graph
    pact: Pact
    stats: ShapeStats
    held: Sequence[str]
    admitted: set[tuple[object, ...]] = field(default_factory=set)


@dataclass(slots=True)
class PreparedStep:
    """A batch that is ready to be launched.

    Args:
        batch: The live batch.
        fit: The shape that it replays, or why it runs eagerly.
        number: Which preparation of its lane it is; the next one overwrites the slots.
    """

    batch: ForwardBatch
    fit: GraphShape | EagerReason
    number: int


class Lane:
    """One way from a batch to outputs.

    Args:
        name: For reports, such as ``"decode"``.
        model: The forward pass.
        runner: Decides shapes, views, and what a graph holds.
        backend: Derives metadata and attends.
        driver: Records graphs. A lane that captures nothing runs beside it.
        pact: Check every replay, one in ``pact_sample_every``, or none.
        pact_sample_every: The interval of ``"sampled"``.
        metadata_in_graph: Whether the graphs record the backend's `fill_metadata`; None records it where
            the backend declares ``fill_is_device_only``.
        share_pool: Where the static inputs get their memory, so that lanes share it; None for memory of
            the lane's own.
        eager_reason: Why this lane captures nothing although its runner has shapes; None where it captures.
        observers: Hook wrappers, each a plugin object of pluggy; the first is the outermost.

    Attributes:
        registry: The graph-resident memory; None for a lane that captures nothing.

    Raises:
        EngineError: A hook that a graph needs has no implementation.
        ConfigError: Metadata work is to be recorded that the backend cannot; an observer that is none.
    """

    def __init__(
        self,
        name: str,
        *,
        model: Forward,
        runner: GraphRunner,
        backend: AttentionBackend,
        driver: GraphDriver,
        pact: PactMode = "always",
        pact_sample_every: int = 100,
        metadata_in_graph: bool | None = None,
        share_pool: SharedBuffers | None = None,
        eager_reason: EagerReason | None = None,
        observers: Sequence[object] = (),
    ) -> None:
        self.name = name
        self.model = model
        self.runner = runner
        self.backend = backend
        self.driver = driver
        self.eager_reason = eager_reason
        self.stats = LaneStats()
        self.on_capture: Callable[[GraphShape], None] | None = None
        """Called with each shape after it was captured."""
        shapes = tuple(
            runner.shapes()
        )  # asked in any case: impossible ones are refused on every machine
        self.shapes = () if eager_reason is not None else shapes
        """What is captured, or will be."""
        self.registry = self._make_registry(share_pool) if self.shapes else None
        self._captured: dict[GraphShape, CapturedShape] = {}
        self._pact_every = {"always": 1, "sampled": pact_sample_every, "off": 0}[pact]
        self._steps_to_check = 1
        self._prepared = 0
        if self.registry is not None:
            backend.attach(self.registry, driver)
            backend.records_metadata = self._records_metadata(metadata_in_graph)
            driver.declare(declared_memory(self.registry, backend))
        self._resolve_hooks(observers)

    # -- the step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> StepOutputs:
        """Return the outputs of ``batch``, cut to its live rows, through a graph where one fits.

        They live until the next replay of the lane's driver.
        """
        outputs: StepOutputs = self._run_step(lane=self, batch=batch)
        return outputs

    def prepare(self, batch: ForwardBatch) -> PreparedStep:
        """Make ``batch`` ready to be launched: everything of a step that comes before the replay.

        A step may be prepared while an earlier one still runs on the device, once that was launched. Like
        `launch` it is called in `torch.inference_mode`, as `run` does.
        """
        self._require_consistent(batch)
        self._prepared += 1
        fit = self.fit(batch)
        if isinstance(fit, GraphShape):
            captured = self._captured[fit]
            step, kind = captured.step, batch.kind
            if kind not in captured.admitted:
                self._admit(batch, kind, captured)
            self._populate(registry=self.registry, batch=batch, shape=fit)
            view = self._prepare_replay(registry=self.registry, batch=batch, shape=fit)
            meta = self._init_metadata_replay(view=view, shape=fit, captured=captured.metadata)
            step.live, step.metadata = batch, meta
            if self._is_pact_due():
                captured.pact.check(view=view, metadata=meta, **_root(self.backend, captured.held))
        return PreparedStep(batch, fit, self._prepared)

    def launch(self, prepared: PreparedStep) -> StepOutputs:
        """Replay or run what was prepared last, and return its outputs, cut to the live rows.

        Raises:
            EngineError: Another step was prepared since, or this one was launched already.
        """
        if prepared.number != self._prepared:
            raise EngineError(
                f"lane {self.name!r}: a step is launched that was not the last to be prepared",
                hint="launch each step once, before the next is prepared: they share their slots",
            )
        self._prepared += 1
        batch, fit = prepared.batch, prepared.fit
        if isinstance(fit, EagerReason):
            self.stats.eager[batch.forward_mode, fit] += 1
            return self.forward_eager(batch)
        captured = self._captured[fit]
        captured.graph.replay()
        captured.stats.replays += 1
        captured.stats.raw_rows += batch.batch_size
        captured.stats.raw_tokens += batch.num_tokens
        outputs: StepOutputs = captured.graph.outputs
        return outputs.rows(batch.batch_size, batch.num_tokens)

    @torch.inference_mode()
    def run_eager(self, batch: ForwardBatch) -> StepOutputs:
        """Return the outputs of ``batch`` without any graph, from metadata in new memory. Not counted."""
        self._require_consistent(batch)
        return self.forward_eager(batch)

    def forward_eager(
        self, batch: ForwardBatch, backend: AttentionBackend | None = None
    ) -> StepOutputs:
        """Do what a graph of ``batch`` would record, without a graph and without looking at the batch first.

        Args:
            batch: Live, or a padded view.
            backend: What derives metadata and attends; the lane's own by default.
        """
        backend = backend or self.backend
        with self.driver.unprepared(batch.host_tensors()):
            metadata = backend.init_metadata_eager(batch)
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        step = Step(shape, batch, self.driver, backend, metadata, live=batch)
        return self.runner.compose(self.model, step)()

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the captured shape that ``batch`` replays, or why there is none."""
        if not self.shapes:
            return self.eager_reason or EagerReason.NO_GRAPHS
        fit = self.runner.fit(batch)
        if isinstance(fit, GraphShape) and fit not in self._captured:
            return EagerReason.NOT_CAPTURED
        return fit

    # -- capture ---------------------------------------------------------------------------------

    def capture_all(self) -> None:
        """Capture every shape, the largest first: a memory pool then fits the smaller ones.

        Raises:
            CaptureError: See `capture`.
        """
        for shape in sorted(self.shapes, key=lambda s: (s.num_tokens, s.batch_size), reverse=True):
            self.capture(shape)

    def capture(self, shape: GraphShape, batch: ForwardBatch | None = None) -> None:
        """Record the graph of ``shape`` and write its pact.

        Args:
            shape: What is captured.
            batch: What is captured in the place of the runner's dummy. It is really run, on the memory that
                it names: for who owns that memory, such as a suite that compares captures.

        Raises:
            CaptureError: The model or the backend did what no graph can hold.
            EngineError: The lane captures nothing, or an output has other rows than its axis says.
        """
        driver, registry = self.driver, self.registry
        if registry is None:
            raise EngineError(f"lane {self.name!r} cannot capture {shape}: it has no graphs")
        start = time.perf_counter()
        self._prepared += 1
        with torch.inference_mode():
            if batch is None:
                batch = self.runner.dummy(shape)
                self._require_scratch(shape, batch)
            self._populate(registry=registry, batch=batch, shape=shape)
            view = self._prepare_replay(registry=registry, batch=batch, shape=shape)
            with driver.unprepared(view.host_tensors()):
                metadata = self._init_metadata_capture(view=view, shape=shape)
            step = Step(shape, view, driver, self.backend, metadata, batch)
            region = self.runner.compose(self.model, step)

            def record() -> StepOutputs:
                self.backend.record_metadata(step.view, step.metadata)
                return region()

            graph = driver.capture(record)
        try:
            self._require_outputs(graph.outputs, shape)
            used = {storage_id(t) for t in graph.external_tensors() or ()}
            memory = MemoryMap(registry, self.backend)
            held = [*memory.attributes(used)]
            roots = {"view": view, "metadata": metadata, **_root(self.backend, held)}
            pact = Pact.of(shape, registry, **roots)
            if driver.strict:
                self._require_slots(shape, metadata, memory, used)
        except BaseException:
            graph.release()
            raise
        stats = ShapeStats(time.perf_counter() - start, graph.num_nodes, graph.externals)
        self._captured[shape] = CapturedShape(step, metadata, graph, pact, stats, held)
        self.stats.shapes[shape] = stats
        if self.on_capture is not None:
            self.on_capture(shape)

    @property
    def captured(self) -> Mapping[GraphShape, CapturedShape]:
        """The record of every captured shape, in the order of capture."""
        return MappingProxyType(self._captured)

    @property
    def records_metadata(self) -> bool:
        """Whether the graphs compute the backend's metadata, or its replay hook does."""
        return self.backend.records_metadata

    def held_by_backend(self, shape: GraphShape) -> dict[str, Any]:
        """Return, as the root ``backend`` of the pact of ``shape``, what of the backend its graph reads."""
        return _root(self.backend, self._captured[shape].held)

    def close(self) -> None:
        """Release every graph and its memory; batches run eagerly from here on."""
        for captured in self._captured.values():
            captured.graph.release()
        self._captured.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _make_registry(self, share_pool: SharedBuffers | None) -> CudaGraphBufferRegistry:
        registry = CudaGraphBufferRegistry(
            device=self.runner.context.device,
            max_bs=max(shape.batch_size for shape in self.shapes),
            max_num_tokens=max(shape.num_tokens for shape in self.shapes),
            share_pool=share_pool,
            lane=self.name,
        )
        for slot in self.runner.slots():
            registry.register_slot(slot)
        return registry

    def _is_pact_due(self) -> bool:
        if not self._pact_every:
            return False
        self._steps_to_check -= 1
        if self._steps_to_check:
            return False
        self._steps_to_check = self._pact_every
        self.stats.pact_checks += 1
        return True

    def _require_consistent(self, batch: ForwardBatch) -> None:
        """Refuse a batch that contradicts itself, or whose keys go past the rows of ``req_to_token``.

        Raises:
            EngineError: Names the field, or the length.
        """
        batch.require_consistent()
        limit = self.backend.context.limits.max_context_len
        longest = max(batch.seq_lens_cpu.tolist(), default=0)
        if longest + batch.drafts_in_rows > limit:
            raise EngineError(
                f"lane {self.name!r}: a sequence of {longest} tokens and {batch.drafts_in_rows} drafts behind"
                f" it; a row of req_to_token holds {limit}",
                hint="draft less near the end, or lay the lane out for sequences longer by a draft",
            )

    def _admit(
        self, batch: ForwardBatch, kind: tuple[object, ...], captured: CapturedShape
    ) -> None:
        """Let batches of ``kind`` in, once it is known that each of their tensors has a slot.

        Raises:
            EngineError: Names the fields that a graph would silently ignore.
        """
        registry, view = self.registry, captured.step.view.tensors()
        names = list(batch.tensors())
        if batch.ngram_embedding_info is not None:
            names.append("ngram_embedding_info.req_lens")
        plain = [n for n in batch.extra if "." not in n]  # a slot would copy the field of that name
        missing = [n for n in names if registry is None or not registry.has_slot(n) or n in plain]
        unseen = [n for n in batch.tensors() if n not in view and n not in missing]
        if missing or unseen:
            what = ", ".join(map(repr, missing or unseen))
            why = "has no slot for" if missing else "was captured without"
            raise EngineError(
                f"lane {self.name!r}: the batch carries {what}, which {captured.step.shape} {why}",
                hint="declare a slot of that name in the runner's slots(), and give its dummy the field; or"
                " leave the field out of the lane's batches",
            )
        captured.admitted.add(kind)

    def _require_scratch(self, shape: GraphShape, dummy: ForwardBatch) -> None:
        """Refuse a dummy batch that writes where a live request may have its keys: a warm-up really runs.

        Raises:
            CaptureError: Names the KV slot.
        """
        slot = int(dummy.out_cache_loc.max()) if dummy.num_tokens else 0
        if slot >= self.backend.context.limits.page_size:
            raise CaptureError(
                f"lane {self.name!r}: the dummy batch of {shape} writes KV slot {slot}, which a live request"
                " may own",
                hint="a dummy batch lies on scratch: request row 0, KV slot 0",
                rule="GP19",
            )

    def _require_outputs(self, outputs: object, shape: GraphShape) -> None:
        """Refuse what is no `StepOutputs`, and rows that do not agree with their axis.

        Raises:
            EngineError: Says what the region returned.
        """
        if not isinstance(outputs, StepOutputs):
            raise EngineError(
                f"lane {self.name!r}: {shape} gave a {type(outputs).__name__}, not StepOutputs",
                hint='return StepOutputs(logits=(logits, "bs")) from the forward pass',
            )
        outputs.require_rows(shape)

    def _require_slots(
        self, shape: GraphShape, metadata: Any, memory: MemoryMap, used: set[int]
    ) -> None:
        """Refuse metadata in storages that a graph has ``used``, outside the registry.

        No step refreshes such memory, and no strict lane poisons it.

        Raises:
            CaptureError: Names the field.
        """
        for path, value in walk({"metadata": metadata}):
            if (
                isinstance(value, torch.Tensor)
                and storage_id(value) in used
                and not memory.is_declared(value)
            ):
                raise CaptureError(
                    f"lane {self.name!r}: {shape}: the graph reads {path}, which is no slot's memory",
                    hint="declare it in declare_slots() and take it from buffers(name): what is no slot,"
                    " no report shows and no strict lane poisons",
                    rule="GP01",
                )

    def _records_metadata(self, asked: bool | None) -> bool:  # noqa: FBT001  a setting, handed on
        can = self.backend.fill_is_device_only
        if asked and not can:
            raise ConfigError(
                f"lanes.{self.name}.metadata_in_graph = true, but {type(self.backend).__name__} has no"
                " metadata work that a graph can record",
                hint="leave the key out: its metadata is then made by its replay hook",
            )
        return can if asked is None else asked

    # -- hooks -----------------------------------------------------------------------------------

    def _resolve_hooks(self, observers: Sequence[object]) -> None:
        """Resolve every hook to what a step calls."""
        self.plugin_manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.plugin_manager.add_hookspecs(hookspecs)
        # pluggy calls what was registered last first.
        for plugin in (_OwnStep(), self.runner, self.backend, *reversed(observers)):
            self.plugin_manager.register(plugin)
            self.plugin_manager.check_pending()
        self._populate = self._resolve("populate")
        self._prepare_replay = self._resolve("prepare_replay")
        self._init_metadata_capture = self._resolve("init_metadata_capture")
        self._init_metadata_replay = self._resolve("init_metadata_replay")
        self._run_step = self._resolve("run_step")

    def _resolve(self, name: str) -> Callable[..., Any]:
        """Return what a step calls for hook ``name``: a bound method, or pluggy where it is observed."""
        caller: pluggy.HookCaller = getattr(self.plugin_manager.hook, name)
        implementations = caller.get_hookimpls()
        plain = [i for i in implementations if not (i.wrapper or i.hookwrapper)]
        if not plain and self.registry is not None:
            raise EngineError(
                f"lane {self.name!r}: neither runner nor backend implements the hook {name!r}",
                hint=f"decorate the method with @graphpact.hookimpl and call it {name!r}",
            )
        spec = caller.spec
        if (
            plain
            and len(implementations) == 1
            and spec
            and set(plain[0].argnames) == set(spec.argnames)
        ):
            return plain[0].function
        return caller


class _OwnStep:
    """The step itself: what observers of `run_step` wrap."""

    @hookimpl
    def run_step(self, lane: Lane, batch: ForwardBatch) -> StepOutputs:
        """Prepare and launch."""
        return lane.launch(lane.prepare(batch))


def _root(backend: AttentionBackend, held: Sequence[str]) -> dict[str, Any]:
    """Return the root of the pact for what a backend holds, and none where it holds nothing."""
    if not held:
        return {}
    return {"backend": SimpleNamespace(**{name: getattr(backend, name, None) for name in held})}


def declared_memory(registry: CudaGraphBufferRegistry, backend: AttentionBackend) -> DeclaredMemory:
    """Return what the memory around a lane's graphs is for.

    Slots are written anew by the preparation of every replay, but for those that are filled once and for
    all: workspaces.
    """
    caches = kv_tensors(backend.context.kv_cache)
    slots = {slot.name: slot.buffer for slot in registry if slot.buffer is not None}
    once = {slot.name for slot in registry if slot.padding_policy is PaddingPolicy.FILL_ONCE}
    host = [slot for slot in registry if slot.device == torch.device("cpu")]
    host_memory = [*(slot.buffer for slot in host), *map(registry.template_of, host)]
    return DeclaredMemory(
        refreshed=[t for name, t in slots.items() if name not in once],
        workspaces=[t for name, t in slots.items() if name in once],
        caches=[*caches.values()],
        host=[t for t in host_memory if t is not None],
        name_of=MemoryMap(registry, backend).name_of,
    )
