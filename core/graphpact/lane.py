"""`Lane`: runs every step with one runner, backend, driver, registry and model.

    run       launch(prepare(batch)), a step
    prepare   fit, the hooks in their order, the pact check
    launch    the replay of the graph, or an eager run; then cut the outputs to the live rows
    capture   the same hooks for a dummy batch, then record the region and write the pact

Outputs of a replay are valid until the next replay of the lane's driver; copy outputs that are needed longer.
The host tensors of a batch belong to the engine. The lane reads them only until `run` returns.

Does not: schedule, sample, or know the kind of model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NoReturn, cast

import torch

from graphpact.attention import AttentionBackend
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, SharedBuffers
from graphpact.errors import CaptureError, EngineError
from graphpact.graphs import Graph, GraphDriver
from graphpact.hooks import Hooks
from graphpact.hookspecs import hookimpl
from graphpact.memory_map import MemoryMap, declared_memory
from graphpact.metadata import metadata_source
from graphpact.pact import Pact
from graphpact.plugin_calls import all_returned, returned
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.stats import LaneStats, ShapeStats
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact.tensors import storage_id

PactMode = Literal["always", "sampled", "off"]


@dataclass(slots=True)
class CapturedShape:
    """The record of one captured shape.

    Args:
        context: The static inputs, metadata and live batch of the recorded region.
        metadata: The result of the capture hook. Every replay hook gets this object, not an earlier result.
        graph: The recorded graph with its outputs.
        pact: The pact of the capture.
        stats: The statistics of the shape.
        held: Names of the backend's attributes whose tensors the graph reads. The pact checks them, because a
            graph would still read the old memory after the backend rebinds one. Only names are stored, so
            that no memory is kept alive.
        admitted: Kinds of batch of which every field has a slot.
    """

    context: RegionContext
    metadata: Any
    graph: Graph
    pact: Pact[GraphShape]
    stats: ShapeStats
    held: Sequence[str]
    admitted: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def backend_state(self) -> dict[str, Any]:
        """The pact's part ``backend``: the current values of the attributes in `held`; may be empty."""
        return _backend_state(self.context.backend, self.held)


@dataclass(slots=True, eq=False)
class PreparedStep:
    """A batch that is ready to be launched.

    Args:
        batch: The live batch.
        fit: The shape to replay, or why the batch runs eagerly.
    """

    batch: ForwardBatch
    fit: GraphShape | EagerReason


class Lane:
    """Runs batches through captured graphs, or eagerly.

    Args:
        name: The name in reports, such as ``"decode"``.
        model: The forward pass.
        runner: Decides shapes, views, and what a graph records.
        backend: Computes metadata and attention.
        driver: Records graphs. Eager lanes also have a driver, but do not use it.
        pact: Whether to check every replay, one in ``pact_sample_every``, or none.
        pact_sample_every: The interval of ``"sampled"``.
        metadata_in_graph: Whether the graphs record the backend's `fill_metadata`. None means that the
            backend's ``fill_is_device_only`` decides.
        share_pool: Memory for static inputs that lanes share; None if the lane allocates its inputs.
        eager_reason: Why this lane captures nothing although its runner has shapes; None if it captures.
        observers: Hook wrappers, each a plugin object of pluggy; the first is the outermost.

    Attributes:
        name, model, runner, backend, driver: The arguments.
        registry: The graph-resident memory; None for a lane that captures nothing.
        shapes: The shapes to capture.
        stats: The counters of the lane.
        hooks: The hooks of the runner, the backend and the observers.

    Raises:
        EngineError: A hook that graphs need has no implementation.
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
        # Eager lanes call it too, because it refuses impossible sizes.
        shapes = all_returned(runner.shapes(), GraphShape, runner, "shapes")
        self.shapes = () if eager_reason is not None else shapes
        self.registry = self._make_registry(share_pool) if self.shapes else None
        self._metadata = metadata_source(backend, eager=runner.eager_attention, in_graph=metadata_in_graph)
        if self.registry is not None:
            self._metadata.attach(self.registry, driver)
            driver.declare(declared_memory(self.registry, backend))
        self._captured: dict[GraphShape, CapturedShape] = {}
        self._pending: PreparedStep | None = None
        """The last prepared step, until it is launched or its slots are filled again."""
        self._pact_every = {"always": 1, "sampled": pact_sample_every, "off": 0}[pact]
        self._steps_to_check = 1
        self.hooks = Hooks([_LaneHooks(), runner, self._metadata.hooks], observers)
        self._populate = self._resolve("populate")
        self._prepare_replay = self._resolve("prepare_replay")
        self._init_metadata_capture = self._resolve("init_metadata_capture")
        self._init_metadata_replay = self._resolve("init_metadata_replay")
        self._run_step = self._resolve("run_step")
        self._launch = self._resolve("launch")
        self._capture = self._resolve("capture")

    # -- the step --------------------------------------------------------------------------------

    def run(self, batch: ForwardBatch) -> StepOutputs:
        """Run ``batch``, through a graph if a shape fits, and return its outputs, cut to the live rows.

        The outputs are valid until the next replay of the lane's driver.
        """
        if torch.is_inference_mode_enabled():  # as in the steps of an engine: entering it again takes time
            return self._checked_outputs(self._run_step(lane=self, batch=batch), "run_step")
        with torch.inference_mode():
            return self._checked_outputs(self._run_step(lane=self, batch=batch), "run_step")

    def prepare(self, batch: ForwardBatch) -> PreparedStep:
        """Prepare ``batch`` for `launch`. An earlier step may still run on the device.

        Only one prepared step may wait for its launch. Call both in `torch.inference_mode`, as `run` does.
        """
        self._require_consistent(batch)
        fit = self.fit(batch)
        if isinstance(fit, GraphShape):
            captured = self._captured[fit]
            if batch.kind not in captured.admitted:
                self._admit(batch, captured)
            view, attended = self._fill(batch, fit)
            metadata = self._init_metadata_replay(view=attended, shape=fit, captured=captured.metadata)
            context = captured.context
            context.live, context.attended, context.metadata = batch, attended, metadata
            if self._is_pact_due():
                captured.pact.check(view=view, metadata=metadata, **captured.backend_state)
        self._pending = PreparedStep(batch, fit)
        return self._pending

    def launch(self, prepared: PreparedStep) -> StepOutputs:
        """Run the last prepared step and return its outputs, cut to the live rows.

        Raises:
            EngineError: Another step was prepared after it, or it was launched already.
        """
        if prepared is not self._pending:
            raise EngineError(
                f"lane {self.name!r}: the launched step is not the one that was prepared last",
                hint="launch each step once, before the next one is prepared: steps share their slots",
            )
        self._pending = None
        return self._checked_outputs(self._launch(lane=self, prepared=prepared), "launch")

    def _fill(self, batch: ForwardBatch, shape: GraphShape) -> tuple[ForwardBatch, ForwardBatch]:
        """Fill the slots with ``batch``, padded to ``shape``. Captures and steps both begin with this.

        Returns:
            The static inputs, and the batch that metadata is made from.
        """
        self._pending = None
        nothing = self._populate(registry=self.registry, batch=batch, shape=shape)
        if nothing is not None:
            returned(nothing, type(None), self.hooks.outermost("populate"), "populate")
        view = self._prepare_replay(registry=self.registry, batch=batch, shape=shape)
        if not isinstance(view, ForwardBatch):
            returned(view, ForwardBatch, self.hooks.outermost("prepare_replay"), "prepare_replay")
        return view, self._metadata.attended(view, batch)

    # -- capture ---------------------------------------------------------------------------------

    def capture_all(self) -> None:
        """Capture every shape, the largest first, so that smaller ones reuse its memory; see `capture`."""
        for shape in sorted(self.shapes, key=lambda s: (s.num_tokens, s.batch_size), reverse=True):
            self.capture(shape)

    def capture(self, shape: GraphShape, batch: ForwardBatch | None = None) -> None:
        """Record the graph of ``shape`` and write its pact.

        Args:
            shape: The shape to capture.
            batch: The batch to capture instead of the runner's dummy. It runs on the KV slots and request
                rows that it names, so the caller must own them. The conformance suite compares captures this
                way.

        Raises:
            CaptureError: The model or the backend does work that a graph cannot record.
            EngineError: The lane has no graphs, or an output does not have the rows of its axis.
        """
        if self.registry is None:
            raise EngineError(f"lane {self.name!r} cannot capture {shape}: it has no graphs")
        earlier = self._captured.get(shape)
        try:
            self._capture(lane=self, shape=shape, batch=batch)
        except BaseException:
            self._keep_only(shape, earlier)
            raise

    @torch.inference_mode()
    def _capture_and_bind(self, shape: GraphShape, batch: ForwardBatch | None) -> CapturedShape:
        """Prepare a step of ``shape``, record its region, and write the pact between them."""
        start = time.perf_counter()
        live = self._dummy(shape) if batch is None else batch
        view, attended = self._fill(live, shape)
        with self.driver.unprepared(attended.host_tensors()):
            metadata = self._init_metadata_capture(view=attended, shape=shape)
        context = RegionContext(
            shape, view, self.driver, self.backend, metadata, live, attended, self.registry
        )
        graph = self._record(context)
        try:
            self._require_outputs(graph.outputs, shape)
            used = {storage_id(tensor) for tensor in graph.external_tensors() or ()}
            held = [*MemoryMap(self.registry, self.backend).attributes(used)]
            parts = {"view": view, "metadata": metadata, **_backend_state(self.backend, held)}
            pact = Pact.of(shape, self.registry, forms=self._metadata.unpromised, **parts)
        except BaseException:
            graph.release()
            raise
        stats = ShapeStats(time.perf_counter() - start, graph.num_nodes, graph.externals)
        captured = CapturedShape(context, metadata, graph, pact, stats, held)
        self._captured[shape], self.stats.shapes[shape] = captured, stats
        return captured

    def _record(self, context: RegionContext) -> Graph:
        """Record the region that the runner composes, with any metadata work, and return the graph."""
        region = self.compose(context)
        returned(region, Callable, self.runner, "compose")

        def record() -> StepOutputs:
            self._metadata.record(context)
            return region()

        graph: Graph = returned(self.driver.capture(record), Graph, self.driver, "capture")
        return graph

    def _keep_only(self, shape: GraphShape, earlier: CapturedShape | None) -> None:
        """Release the graph of a failed capture of ``shape``, and keep the ``earlier`` capture, if any."""
        failed = self._captured.get(shape)
        if failed is None or failed is earlier:
            return
        del self._captured[shape], self.stats.shapes[shape]
        if earlier is not None:
            self._captured[shape], self.stats.shapes[shape] = earlier, earlier.stats
        failed.graph.release()

    @property
    def captured(self) -> Mapping[GraphShape, CapturedShape]:
        """The record of every captured shape, in the order of capture."""
        return MappingProxyType(self._captured)

    def close(self) -> None:
        """Release every graph and its memory; later batches run eagerly."""
        captured, self._captured = self._captured, {}
        with ExitStack() as stack:  # every graph is released, even if the release of another one raises
            for each in captured.values():
                stack.callback(each.graph.release)

    # -- eager runs ------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_eager(self, batch: ForwardBatch) -> StepOutputs:
        """Run ``batch`` without a graph, with metadata in new memory, and return its outputs. Not counted."""
        self._require_consistent(batch)
        return self.forward_eager(batch)

    def forward_eager(
        self, batch: ForwardBatch, backend: AttentionBackend | None = None, live: ForwardBatch | None = None
    ) -> StepOutputs:
        """Run the region of ``batch`` without a graph and without checking the batch; see `region_of`."""
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
            backend: Computes metadata and attention; by default the lane's backend.
            live: The live batch of a padded view; by default ``batch``.
            driver: Records the region with the lane's workspaces, as in a capture; None to run it eagerly.
        """
        backend, live = backend or self.backend, live or batch
        attended = self._metadata.attended(batch, live)
        with self.driver.unprepared(attended.host_tensors()):
            metadata = backend.init_metadata_eager(attended)
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)
        recorded = None if driver is None else self.registry
        context = RegionContext(
            shape, batch, driver or self.driver, backend, metadata, live, attended, recorded
        )
        return self.compose(context)

    def compose(self, context: RegionContext) -> Region:
        """Return the region of a step, as the runner composes it from the model; a subclass may wrap it."""
        return self.runner.compose(self.model, context)

    # -- which shape, which batch ----------------------------------------------------------------

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the captured shape that ``batch`` replays, or the reason to run it eagerly."""
        if not self.shapes:
            return self.eager_reason or EagerReason.NO_GRAPHS
        if not batch.can_run_graph:  # the reason is on this rank, or on another one
            batch = replace(batch, global_num_tokens_cpu=None, global_batch_sizes_cpu=None)
        fit: GraphShape | EagerReason = self.runner.fit(batch)
        if isinstance(fit, GraphShape):
            if not batch.can_run_graph:
                return EagerReason.OTHER_RANK
            return fit if fit in self._captured else EagerReason.NOT_CAPTURED
        returned(fit, GraphShape | EagerReason, self.runner, "fit")
        return fit

    def _admit(self, batch: ForwardBatch, captured: CapturedShape) -> None:
        """Accept batches of this kind; raise `EngineError` for tensors that a graph would silently ignore."""
        registry, view = self.registry, captured.context.view.tensors()
        names = list(batch.tensors())
        if batch.ngram_embedding_info is not None:
            names.append("ngram_embedding_info.req_lens")
        plain = [n for n in batch.extra if "." not in n]  # a slot would copy the field of this name
        missing = [n for n in names if registry is None or not registry.has_slot(n) or n in plain]
        not_in_view = [n for n in batch.tensors() if n not in view and n not in missing]
        if missing or not_in_view:
            fields = ", ".join(map(repr, missing or not_in_view))
            why = "has no slot for" if missing else "was captured without"
            raise EngineError(
                f"lane {self.name!r}: the batch carries {fields}, which {captured.context.shape} {why}",
                hint=(
                    "declare a slot of that name in the runner's slots() and set the field in its dummy(), "
                    "or leave the field out of the lane's batches"
                ),
            )
        captured.admitted.add(batch.kind)

    def _require_consistent(self, batch: ForwardBatch) -> None:
        """Raise `EngineError` if fields of ``batch`` conflict or a row of ``req_to_token`` is too short."""
        batch.require_consistent()
        limit = self.backend.context.limits.max_context_len
        longest = max(batch.seq_lens_cpu.tolist(), default=0)
        if longest + batch.drafts_in_rows > limit:
            raise EngineError(
                f"lane {self.name!r}: a sequence has {longest} tokens and {batch.drafts_in_rows} drafts, "
                f"but a row of req_to_token holds {limit}",
                hint="draft fewer tokens near the end, or raise max_context_len by one draft",
            )

    def _dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return the runner's dummy batch.

        Raises:
            CaptureError: It writes KV slots that live requests may own. A capture would overwrite them.
        """
        dummy: ForwardBatch = returned(self.runner.dummy(shape), ForwardBatch, self.runner, "dummy")
        slot = int(dummy.out_cache_loc.max()) if dummy.num_tokens else 0
        if slot < self.backend.context.limits.page_size:
            return dummy
        raise CaptureError(
            f"lane {self.name!r}: the dummy batch of {shape} writes KV slot {slot}, which a live request may"
            " own",
            hint="let dummy() use only scratch memory: request row 0, KV slot 0",
            rule="GP19",
        )

    def _require_outputs(self, outputs: object, shape: GraphShape) -> None:
        """Raise `EngineError` unless ``outputs`` are `StepOutputs` with as many rows as their axes have."""
        if not isinstance(outputs, StepOutputs):
            raise EngineError(
                f"lane {self.name!r}: {shape} returned a {type(outputs).__name__}, not StepOutputs",
                hint='return StepOutputs(logits=(logits, "bs")) from the forward pass',
            )
        outputs.require_rows(shape)

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

    def _resolve(self, name: str) -> Callable[..., Any]:
        """Return the callable of the hook ``name``, which steps call."""
        resolved = self.hooks.resolve(name)
        if resolved is not None:
            return resolved
        if self.registry is None:
            return _never_called
        raise EngineError(
            f"lane {self.name!r}: neither runner nor backend implements the hook {name!r}",
            hint=f"name the method {name!r} and decorate it with @graphpact.hookimpl",
        )

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

    def _checked_outputs(self, outputs: object, hook: str) -> StepOutputs:
        """Return ``outputs``; raise `EngineError` if an observer of ``hook`` returned something else."""
        if not isinstance(outputs, StepOutputs):
            returned(outputs, StepOutputs, self.hooks.outermost(hook), hook)
        return cast("StepOutputs", outputs)

    def _replay_or_run(self, prepared: PreparedStep) -> StepOutputs:
        """Replay the graph of a prepared step, or run it eagerly, and count it."""
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


class _LaneHooks:
    """The lane's implementations of the observers' hooks."""

    @hookimpl
    def run_step(self, lane: Lane, batch: ForwardBatch) -> StepOutputs:
        """Prepare and launch."""
        return lane.launch(lane.prepare(batch))

    @hookimpl
    def launch(self, lane: Lane, prepared: PreparedStep) -> StepOutputs:
        """Replay, or run eagerly."""
        return lane._replay_or_run(prepared)  # noqa: SLF001  a part of the lane

    @hookimpl
    def capture(self, lane: Lane, shape: GraphShape, batch: ForwardBatch | None) -> CapturedShape:
        """Prepare, record, bind."""
        return lane._capture_and_bind(shape, batch)  # noqa: SLF001  a part of the lane


def _never_called(**_: Any) -> NoReturn:
    """Replace a hook that a lane without graphs does not call."""
    raise AssertionError("a lane without graphs called a hook of replays")


def _backend_state(backend: AttentionBackend, names: Sequence[str]) -> dict[str, Any]:
    """Return the pact's part ``backend``: the backend's attributes ``names``; may be empty."""
    if not names:
        return {}
    return {"backend": SimpleNamespace(**{name: getattr(backend, name, None) for name in names})}
