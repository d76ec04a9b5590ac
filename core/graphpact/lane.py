"""`Lane`: one runner, backend, driver, registry and model. It runs every step.

    run       launch(prepare(batch)), wrapped by observers of `run_step`
    prepare   fit, the hooks in their order, the pact check
    launch    the graph's replay, or an eager run; then the live rows of the outputs
    capture   the same for a dummy batch, plus binding: metadata bound, region recorded, pact written

Hooks are resolved once, when the lane is built: to the plugin's bound method, or to pluggy's caller where an
observer wraps the hook.

Outputs of a replay are valid until the next replay of the lane's driver; copy what is needed longer. The
host tensors of a batch belong to the engine; the lane reads them only until `run` returns.

Does not: schedule, sample, or know the kind of model.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, get_args

import pluggy
import torch

from graphpact import hookspecs
from graphpact.attention import AttentionBackend, kv_tensors
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry, GraphSlot, PaddingPolicy, SharedBuffers
from graphpact.errors import CaptureError, ConfigError, EngineError, all_returned, returned
from graphpact.graphs import DeclaredMemory, Graph, GraphDriver
from graphpact.graphs.driver import Externals
from graphpact.hookspecs import hookimpl
from graphpact.memory_map import MemoryMap
from graphpact.pact import Pact, walk
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, Region, Step, StepOutputs, attended_rows
from graphpact.tensors import equal, storage_id

PactMode = Literal["always", "sampled", "off"]


@dataclass(slots=True)
class ShapeStats:
    """Statistics of one captured shape.

    Its ``replays``, the live requests and tokens in them (``raw_rows``, ``raw_tokens``), ``capture_seconds``,
    ``num_nodes``, and ``externals``: how completely the driver reports the memory that the graph reads.
    """

    capture_seconds: float = 0.0
    num_nodes: int = 0
    externals: Externals = "all"
    replays: int = 0
    raw_rows: int = 0
    raw_tokens: int = 0

    def padding_waste(self, shape: GraphShape) -> float:
        """Return the share of padding among the replayed tokens; 0 without replays."""
        return 1 - self.raw_tokens / (self.replays * shape.num_tokens) if self.replays else 0.0


@dataclass(slots=True)
class LaneStats:
    """Counts of one lane: ``shapes``, ``eager`` runs by mode and reason, and ``pact_checks``."""

    shapes: dict[GraphShape, ShapeStats] = field(default_factory=dict)
    eager: Counter[tuple[ForwardMode, EagerReason]] = field(default_factory=Counter)
    pact_checks: int = 0

    @property
    def externals(self) -> Externals:
        """The least complete `ShapeStats.externals` of all shapes."""
        order: tuple[Externals, ...] = get_args(Externals)
        return max((s.externals for s in self.shapes.values()), key=order.index, default="all")

    @property
    def replays(self) -> int:
        """Replays over all shapes."""
        return sum(s.replays for s in self.shapes.values())


@dataclass(slots=True)
class CapturedShape:
    """The record of one captured shape.

    Args:
        step: Static inputs, metadata and live batch, for the recorded work.
        metadata: The metadata of the capture hook. Every replay hook gets this object, not an earlier result.
        graph: The recorded graph with its outputs.
        pact: The pact of the capture.
        stats: Its statistics.
        held: Names of the backend's attributes that the graph reads; names, since they keep no memory alive.
        admitted: Kinds of batch whose every field has a slot.
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
        number: Index of the preparation in its lane; the next one overwrites the slots.
    """

    batch: ForwardBatch
    fit: GraphShape | EagerReason
    number: int


class Lane:
    """Runs batches through captured graphs, or eagerly.

    Args:
        name: For reports, such as ``"decode"``.
        model: The forward pass.
        runner: Decides shapes, views, and what a graph records.
        backend: Derives metadata and attends.
        driver: Records graphs. Eager lanes have one too and do not use it.
        pact: Check every replay, one in ``pact_sample_every``, or none.
        pact_sample_every: The interval of ``"sampled"``.
        metadata_in_graph: Whether the graphs record the backend's `fill_metadata`; None: as the backend
            declares by ``fill_is_device_only``.
        share_pool: Memory for static inputs that lanes share; None: the lane allocates its own.
        eager_reason: Why this lane captures nothing although its runner has shapes; None if it captures.
        observers: Hook wrappers, each a plugin object of pluggy; the first is the outermost.

    Attributes:
        name, model, runner, backend, driver: The arguments.
        registry: The graph-resident memory; None for a lane that captures nothing.
        stats: The lane's `LaneStats`.

    Raises:
        EngineError: A hook that a graph needs has no implementation.
        ConfigError: ``metadata_in_graph`` is True and the backend's metadata work cannot be recorded.
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
        # Called in eager lanes too: it refuses impossible sizes.
        shapes = all_returned(runner.shapes(), GraphShape, runner, "shapes")
        self.shapes = () if eager_reason is not None else shapes
        """The shapes to capture."""
        self.registry = self._make_registry(share_pool) if self.shapes else None
        self._captured: dict[GraphShape, CapturedShape] = {}
        self._pact_every = {"always": 1, "sampled": pact_sample_every, "off": 0}[pact]
        self._steps_to_check = 1
        self._prepared = 0
        if self.registry is not None:
            if runner.eager_attention:
                backend.driver = driver
            else:
                backend.attach(self.registry, driver)
            backend.records_metadata = self._records_metadata(metadata_in_graph)
            driver.declare(declared_memory(self.registry, backend))
        self._resolve_hooks(observers)

    # -- the step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> StepOutputs:
        """Return the outputs of ``batch``, cut to its live rows; through a graph if a shape fits.

        They are valid until the next replay of the lane's driver.
        """
        outputs: StepOutputs = self._run_step(lane=self, batch=batch)
        returned(outputs, StepOutputs, self._outermost, "run_step")
        return outputs

    def prepare(self, batch: ForwardBatch) -> PreparedStep:
        """Prepare ``batch`` for `launch`; an earlier step may still run on the device.

        Only one prepared step may wait for its launch. Call both in `torch.inference_mode`, as `run` does.
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
            rows = self._rows(view, batch)
            meta = self._init_metadata_replay(view=rows, shape=fit, captured=captured.metadata)
            step.live, step.rows, step.metadata = batch, rows, meta
            if self._is_pact_due():
                captured.pact.check(view=view, metadata=meta, **_root(self.backend, captured.held))
        return PreparedStep(batch, fit, self._prepared)

    def launch(self, prepared: PreparedStep) -> StepOutputs:
        """Run the step that was prepared last and return its outputs, cut to the live rows.

        Raises:
            EngineError: Another step was prepared since, or this one was launched already.
        """
        if prepared.number != self._prepared:
            raise EngineError(
                f"lane {self.name!r}: a step is launched that was not the last to be prepared",
                hint="launch each step once, before the next is prepared: steps share their slots",
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
        """Return the outputs of ``batch`` without a graph, with metadata in new memory. Not counted."""
        self._require_consistent(batch)
        return self.forward_eager(batch)

    def forward_eager(
        self, batch: ForwardBatch, backend: AttentionBackend | None = None, live: ForwardBatch | None = None
    ) -> StepOutputs:
        """Run the region of ``batch`` without a graph, and without checking the batch; see `region_of`."""
        return self.region_of(batch, backend, live)()

    def region_of(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend | None = None,
        live: ForwardBatch | None = None,
        driver: GraphDriver | None = None,
    ) -> Region:
        """Return the region of ``batch``, with metadata in new memory.

        Args:
            batch: A live batch, or a padded view.
            backend: Derives metadata and attends; by default the lane's.
            live: The live batch of a padded view; by default ``batch``.
            driver: Records the region, with the lane's workspaces, as a capture does. None: it runs eagerly.
        """
        backend, live = backend or self.backend, live or batch
        rows = self._rows(batch, live)
        with self.driver.unprepared(rows.host_tensors()):
            metadata = backend.init_metadata_eager(rows)
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        recorded = None if driver is None else self.registry
        step = Step(shape, batch, driver or self.driver, backend, metadata, live, rows, recorded)
        return self.runner.compose(self.model, step)

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the captured shape that ``batch`` replays, or the reason why there is none."""
        if not self.shapes:
            return self.eager_reason or EagerReason.NO_GRAPHS
        fit: GraphShape | EagerReason = self.runner.fit(batch)
        if isinstance(fit, GraphShape):
            return fit if fit in self._captured else EagerReason.NOT_CAPTURED
        returned(fit, GraphShape | EagerReason, self.runner, "fit")
        return fit

    # -- capture ---------------------------------------------------------------------------------

    def capture_all(self) -> None:
        """Capture every shape, the largest first, whose memory pool the smaller ones reuse; see `capture`."""
        for shape in sorted(self.shapes, key=lambda s: (s.num_tokens, s.batch_size), reverse=True):
            self.capture(shape)

    def capture(self, shape: GraphShape, batch: ForwardBatch | None = None) -> None:
        """Record the graph of ``shape`` and write its pact.

        Args:
            shape: The shape to capture.
            batch: Captured instead of the runner's dummy. It runs on the memory that it names, so the caller
                has to own it; the conformance suite compares captures this way.

        Raises:
            CaptureError: The model or the backend does work that a graph cannot hold.
            EngineError: The lane has no graphs, or an output's rows do not agree with its axis.
        """
        driver, registry = self.driver, self.registry
        if registry is None:
            raise EngineError(f"lane {self.name!r} cannot capture {shape}: it has no graphs")
        start = time.perf_counter()
        self._prepared += 1
        fixed = [slot for slot in registry if driver.strict and slot.role == "constant"]
        constants = [(slot, slot.buffer.clone()) for slot in fixed if slot.buffer is not None]
        with torch.inference_mode():
            if batch is None:
                batch = returned(self.runner.dummy(shape), ForwardBatch, self.runner, "dummy")
                self._require_scratch(shape, batch)
            none = self._populate(registry=registry, batch=batch, shape=shape)
            returned(none, type(None), self.runner, "populate")
            view = self._prepare_replay(registry=registry, batch=batch, shape=shape)
            returned(view, ForwardBatch, self.runner, "prepare_replay")
            rows = self._rows(view, batch)
            with driver.unprepared(rows.host_tensors()):
                metadata = self._init_metadata_capture(view=rows, shape=shape)
            step = Step(shape, view, driver, self.backend, metadata, batch, rows, registry)
            region: Region = self.runner.compose(self.model, step)
            returned(region, Callable, self.runner, "compose")

            def record() -> StepOutputs:
                self.backend.record_metadata(step.view, step.metadata)
                return region()

            graph: Graph = returned(driver.capture(record), Graph, driver, "capture")
        try:
            self._require_outputs(graph.outputs, shape)
            used = {storage_id(t) for t in graph.external_tensors() or ()}
            memory = MemoryMap(registry, self.backend)
            held = [*memory.attributes(used)]
            roots = {"view": view, "metadata": metadata, **_root(self.backend, held)}
            forms = ("metadata",) if self.runner.eager_attention else ()
            pact = Pact.of(shape, registry, forms=forms, **roots)
            if driver.strict:
                self._require_slots(shape, metadata, memory, used)
                self._require_constants(shape, constants)
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

    def held_by_backend(self, shape: GraphShape) -> dict[str, Any]:
        """Return the pact's root ``backend`` of ``shape``: the backend's attributes that its graph reads."""
        return _root(self.backend, self._captured[shape].held)

    def close(self) -> None:
        """Release every graph and its memory; later batches run eagerly."""
        captured, self._captured = self._captured, {}
        with ExitStack() as stack:  # every graph is released, also if the release of another one raises
            for each in captured.values():
                stack.callback(each.graph.release)

    # -- inside ----------------------------------------------------------------------------------

    def _make_registry(self, share_pool: SharedBuffers | None) -> CudaGraphBufferRegistry:
        registry = CudaGraphBufferRegistry(
            device=self.runner.context.device,
            max_bs=max(shape.batch_size for shape in self.shapes),
            max_num_tokens=max(shape.num_tokens for shape in self.shapes),
            share_pool=share_pool,
            lane=self.name,
        )
        for slot in all_returned(self.runner.slots(), GraphSlot, self.runner, "slots"):
            registry.register_slot(slot)
        return registry

    def _rows(self, view: ForwardBatch, live: ForwardBatch) -> ForwardBatch:
        """Return the batch that metadata is made from."""
        return attended_rows(view, live, self.backend) if self.runner.eager_attention else view

    def _is_pact_due(self) -> bool:
        """Count this replay, and return whether its pact is checked."""
        if not self._pact_every:
            return False
        self._steps_to_check -= 1
        if self._steps_to_check:
            return False
        self._steps_to_check = self._pact_every
        self.stats.pact_checks += 1
        return True

    def _require_consistent(self, batch: ForwardBatch) -> None:
        """Raise `EngineError` if fields of ``batch`` conflict or a row of ``req_to_token`` is too short."""
        batch.require_consistent()
        limit = self.backend.context.limits.max_context_len
        longest = max(batch.seq_lens_cpu.tolist(), default=0)
        if longest + batch.drafts_in_rows > limit:
            raise EngineError(
                f"lane {self.name!r}: a sequence of {longest} tokens plus {batch.drafts_in_rows} drafts;"
                f" a row of req_to_token holds {limit}",
                hint="draft fewer tokens near the end, or raise max_context_len by one draft",
            )

    def _admit(self, batch: ForwardBatch, kind: tuple[object, ...], captured: CapturedShape) -> None:
        """Admit batches of ``kind``; raise `EngineError` for tensors that a graph would silently ignore."""
        registry, view = self.registry, captured.step.view.tensors()
        names = list(batch.tensors())
        if batch.ngram_embedding_info is not None:
            names.append("ngram_embedding_info.req_lens")
        plain = [n for n in batch.extra if "." not in n]  # a slot would copy the field of that name
        missing = [n for n in names if registry is None or not registry.has_slot(n) or n in plain]
        not_in_view = [n for n in batch.tensors() if n not in view and n not in missing]
        if missing or not_in_view:
            fields = ", ".join(map(repr, missing or not_in_view))
            why = "has no slot for" if missing else "was captured without"
            raise EngineError(
                f"lane {self.name!r}: the batch carries {fields}, which {captured.step.shape} {why}",
                hint="declare a slot of that name in the runner's slots(), and give its dummy() the field; or"
                " leave the field out of the lane's batches",
            )
        captured.admitted.add(kind)

    def _require_scratch(self, shape: GraphShape, dummy: ForwardBatch) -> None:
        """Raise `CaptureError` for a dummy batch that writes KV slots of live requests: a warm-up runs."""
        slot = int(dummy.out_cache_loc.max()) if dummy.num_tokens else 0
        if slot >= self.backend.context.limits.page_size:
            raise CaptureError(
                f"lane {self.name!r}: the dummy batch of {shape} writes KV slot {slot}, which a live request"
                " may own",
                hint="let dummy() use scratch memory only: request row 0, KV slot 0",
                rule="GP19",
            )

    def _require_outputs(self, outputs: object, shape: GraphShape) -> None:
        """Raise `EngineError` unless ``outputs`` are `StepOutputs` with as many rows as their axes say."""
        if not isinstance(outputs, StepOutputs):
            raise EngineError(
                f"lane {self.name!r}: {shape} returned a {type(outputs).__name__}, not StepOutputs",
                hint='return StepOutputs(logits=(logits, "bs")) from the forward pass',
            )
        outputs.require_rows(shape)

    def _require_slots(self, shape: GraphShape, metadata: Any, memory: MemoryMap, used: set[int]) -> None:
        """Raise `CaptureError` for metadata that lies in storages ``used`` by the graph and in no slot."""
        for path, leaf in walk({"metadata": metadata}):
            if isinstance(leaf, torch.Tensor) and storage_id(leaf) in used and not memory.is_declared(leaf):
                raise CaptureError(
                    f"lane {self.name!r}: {shape}: the graph reads {path}, which is no slot's memory",
                    hint="declare it in declare_slots(), a constant with role='constant', and take it from"
                    " buffers(name): reports show and strict lanes poison slots only",
                    rule="GP01",
                )

    def _require_constants(
        self, shape: GraphShape, constants: Sequence[tuple[BoundSlot, torch.Tensor]]
    ) -> None:
        """Raise `CaptureError` for a constant that the capture changed: graphs of all shapes read it."""
        for slot, before in constants:
            if slot.buffer is not None and not equal(slot.buffer, before):
                raise CaptureError(
                    f"lane {self.name!r}: the capture of {shape} wrote {slot.label}, a constant",
                    hint="write it by `contents` alone; a value that differs by shape is a host number of the"
                    " metadata, or an element of a constant index",
                    rule="GP19",
                )

    def _records_metadata(self, setting: bool | None) -> bool:  # noqa: FBT001  passed through
        can = self.backend.fill_is_device_only and not self.runner.eager_attention
        if setting and not can:
            raise ConfigError(
                f"lanes.{self.name}.metadata_in_graph = true, but {type(self.backend).__name__} has no"
                " metadata work that a graph can record",
                hint="leave the key out: the replay hook then computes the metadata",
            )
        return can if setting is None else setting

    # -- hooks -----------------------------------------------------------------------------------

    def _resolve_hooks(self, observers: Sequence[object]) -> None:
        """Resolve every hook to the callable that a step calls."""
        self.plugin_manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.plugin_manager.add_hookspecs(hookspecs)
        # pluggy calls plugins in reverse order of registration.
        backend = _EagerMetadata(self.backend) if self.runner.eager_attention else self.backend
        for plugin in (_OwnStep(), self.runner, backend, *reversed(observers)):
            self.plugin_manager.register(plugin)
            self.plugin_manager.check_pending()
        self._populate = self._resolve("populate")
        self._prepare_replay = self._resolve("prepare_replay")
        self._init_metadata_capture = self._resolve("init_metadata_capture")
        self._init_metadata_replay = self._resolve("init_metadata_replay")
        self._run_step = self._resolve("run_step")
        self._outermost = self.plugin_manager.hook.run_step.get_hookimpls()[-1].plugin

    def _resolve(self, name: str) -> Callable[..., Any]:
        """Return the callable of hook ``name``: a bound method, or pluggy's caller if it is wrapped."""
        caller: pluggy.HookCaller = getattr(self.plugin_manager.hook, name)
        implementations = caller.get_hookimpls()
        plain = [i for i in implementations if not (i.wrapper or i.hookwrapper)]
        if not plain and self.registry is not None:
            raise EngineError(
                f"lane {self.name!r}: neither runner nor backend implements the hook {name!r}",
                hint=f"decorate the method with @graphpact.hookimpl and call it {name!r}",
            )
        spec = caller.spec
        if plain and len(implementations) == 1 and spec and set(plain[0].argnames) == set(spec.argnames):
            return plain[0].function
        return caller


class _EagerMetadata:
    """The metadata hooks of a lane whose attention leaves the graphs: new metadata in each step."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch) -> Any:
        """Return the metadata of the eager calls in this capture or replay."""
        return self.backend.init_metadata_eager(view)

    init_metadata_capture = init_metadata_replay


class _OwnStep:
    """The implementation of `run_step` that observers wrap."""

    @hookimpl
    def run_step(self, lane: Lane, batch: ForwardBatch) -> StepOutputs:
        """Prepare and launch."""
        return lane.launch(lane.prepare(batch))


def _root(backend: AttentionBackend, held: Sequence[str]) -> dict[str, Any]:
    """Return the pact's root ``backend`` with the attributes ``held``; empty without any."""
    if not held:
        return {}
    return {"backend": SimpleNamespace(**{name: getattr(backend, name, None) for name in held})}


def declared_memory(registry: CudaGraphBufferRegistry, backend: AttentionBackend) -> DeclaredMemory:
    """Return the memory around a lane's graphs, by its use. Constants are not in it: nothing writes them."""
    caches = kv_tensors(backend.context.kv_cache)
    slots = {s.name: s.buffer for s in registry if s.buffer is not None and s.role != "constant"}
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
