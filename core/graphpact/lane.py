"""`Lane`: one runner, one backend, one driver, one registry, and the one place where a step happens.

    run      a batch that fits a captured shape is replayed, any other runs eagerly, with the reason
    capture  a replay of a dummy batch, plus binding: metadata is allocated, the region recorded, the
             pact written
    replay   view, metadata, pact, graph

Hooks are resolved once, when the lane is built: to the plugin's bound method where nothing else
implements the hook, to pluggy's caller where something looks on.

Does not: schedule, sample, or know what the model is.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import pluggy
import torch

from graphpact import hookspecs
from graphpact.attention import AttentionBackend, kv_tensors
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, PaddingPolicy
from graphpact.errors import CaptureError, ConfigError, EngineError
from graphpact.graphs import DeclaredMemory, Graph, GraphDriver
from graphpact.pact import Pact, walk
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape

PactMode = Literal["always", "sampled", "off"]


class ModelFn(Protocol):
    """What a lane runs: a forward pass from a batch to logits, a row for each request or each token."""

    def __call__(
        self, batch: ForwardBatch, backend: AttentionBackend, metadata: Any
    ) -> torch.Tensor:
        """Return ``[bs, vocab]`` logits of each request's last token, or ``[T, vocab]`` of all tokens."""


class RunFn(Protocol):
    """`Lane.run`, or what stands around it."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits of ``batch``."""


@dataclass(slots=True)
class ShapeStats:
    """What happened to one captured shape. Times in seconds."""

    capture_seconds: float = 0.0
    num_nodes: int = 0
    replays: int = 0
    raw_rows: int = 0

    def padding_waste(self, shape: GraphShape) -> float:
        """Return the share of replayed rows that were padding, 0 where nothing was replayed."""
        return 1 - self.raw_rows / (self.replays * shape.batch_size) if self.replays else 0.0


@dataclass(slots=True)
class LaneStats:
    """Counts of one lane since it was built."""

    shapes: dict[GraphShape, ShapeStats] = field(default_factory=dict)
    eager: Counter[tuple[ForwardMode, EagerReason]] = field(default_factory=Counter)
    pact_checks: int = 0

    @property
    def replays(self) -> int:
        """Replays over all shapes."""
        return sum(s.replays for s in self.shapes.values())


@dataclass(slots=True)
class Captured:
    """One captured shape: what a replay needs of it."""

    graph: Graph
    metadata: Any
    pact: Pact
    stats: ShapeStats
    held: Sequence[str]
    """Attributes of the backend that the graph reads; by name, since a graph keeps no memory alive."""


class Lane:
    """One way from a batch to logits.

    Args:
        name: For reports, such as ``"decode"``.
        model: The forward pass.
        runner: Decides shapes and views.
        backend: Derives metadata and attends.
        driver: Records graphs; None for a runner that captures nothing.
        pact: Check every replay, one in ``pact_sample_every``, or none.
        pact_sample_every: The interval of ``"sampled"``.
        metadata_in_graph: Whether the backend's metadata work is recorded in the graph; None records it
            where the backend can.
        observers: More hook implementations (wrappers); each is a plugin object of pluggy.

    Raises:
        EngineError: A hook that a graph needs has no implementation, or there is no driver for it.
        ConfigError: Metadata work is to be recorded that the backend cannot.
    """

    def __init__(
        self,
        name: str,
        *,
        model: ModelFn,
        runner: GraphRunner,
        backend: AttentionBackend,
        driver: GraphDriver | None,
        pact: PactMode = "always",
        pact_sample_every: int = 100,
        metadata_in_graph: bool | None = None,
        observers: Sequence[object] = (),
    ) -> None:
        self.name = name
        self.model = model
        self.runner = runner
        self.backend = backend
        self.driver = driver
        self.stats = LaneStats()
        self.on_capture: Callable[[GraphShape], None] | None = None
        self.registry = runner.make_registry()
        self._has_trees = self.registry is not None and self.registry.has_slot("tree_mask")
        self._captured: dict[GraphShape, Captured] = {}
        self._pact_every = {"always": 1, "sampled": pact_sample_every, "off": 0}[pact]
        self._steps_to_check = 1
        if self.registry is None and runner.ladder is not None:
            raise EngineError(
                f"lane {name!r}: its runner has shapes to capture, and its make_registry() returned none",
                hint="return a CudaGraphBufferRegistry, or make_ladder() = None for a lane without graphs",
            )
        if self.registry is not None:
            if driver is None:
                raise EngineError(
                    f"lane {name!r}: its runner captures graphs and there is no driver"
                )
            self.registry.join_lane(name)
            backend.attach(self.registry, driver)
            backend.records_metadata = self._records_metadata(metadata_in_graph)
            driver.declare(declared_memory(self.registry, backend))
        self.plugin_manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.plugin_manager.add_hookspecs(hookspecs)
        for plugin in (runner, backend, *observers):
            self.plugin_manager.register(plugin)
            self.plugin_manager.check_pending()
        self.populate = self._resolve("populate")
        self.prepare_replay = self._resolve("prepare_replay")
        self.init_metadata_capture = self._resolve("init_metadata_capture")
        self.init_metadata_replay = self._resolve("init_metadata_replay")

    # -- the step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits of ``batch``, as the model gives them, through a graph where one fits."""
        self._require_fit(batch)
        fit = self.runner.can_run(batch)
        if isinstance(fit, EagerReason):
            self.stats.eager[batch.forward_mode, fit] += 1
            return self._run_eager(batch)
        return self.runner.run(batch, fit)

    def run_eager(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits of ``batch`` without any graph, from metadata in new memory."""
        self._require_fit(batch)
        with torch.inference_mode():
            return self._run_eager(batch)

    def capture(self, shape: GraphShape, batch: ForwardBatch | None = None) -> None:
        """Record the graph of ``shape`` and write its pact.

        Args:
            shape: What is captured.
            batch: What is captured in the place of the runner's dummy. It is really run, on the memory that
                it names: for who owns that memory, such as a suite that compares captures.

        Raises:
            CaptureError: The model or the backend did what no graph can hold.
            EngineError: The lane's runner captures nothing.
        """
        if self.driver is None or self.registry is None:
            raise EngineError(f"lane {self.name!r} cannot capture {shape}: it has no graphs")
        if shape.mode.is_ragged and 1 < shape.batch_size == shape.num_tokens:
            raise CaptureError(
                f"lane {self.name!r}: {shape} has as many tokens as requests: nobody could tell whether its"
                " outputs go by requests or by tokens",
                hint="capture it with more tokens",
            )
        start = time.perf_counter()
        with torch.inference_mode():
            if batch is None:
                batch = self.runner.dummy_batch(shape)
                self._require_scratch(shape, batch)
            view = self.prepare_replay(registry=self.registry, batch=batch, shape=shape)
            with self.driver.unprepared(view.host_tensors()):
                metadata = self.init_metadata_capture(view=view, shape=shape)
            graph = self.driver.capture(lambda: self._region(view, metadata))
        try:
            used = {t.untyped_storage().data_ptr() for t in graph.external_tensors() or ()}
            held = self._held_by_backend(used)
            backend = _root(self.backend, held)
            pact = Pact.of(shape, self.registry, view=view, metadata=metadata, **backend)
            if self.driver.strict:
                self._require_slots(shape, metadata, used)
        except BaseException:
            graph.release()
            raise
        stats = ShapeStats(time.perf_counter() - start, graph.num_nodes)
        self._captured[shape] = Captured(graph, metadata, pact, stats, held)
        self.stats.shapes[shape] = stats
        if self.on_capture is not None:
            self.on_capture(shape)

    def replay(self, batch: ForwardBatch, shape: GraphShape) -> torch.Tensor:
        """Return the logits of ``batch`` through the graph of ``shape``.

        The result is memory of the graph: the next replay overwrites it.
        """
        captured = self._captured[shape]
        if batch.tree_mask is not None and not self._has_trees:
            raise EngineError(
                f"lane {self.name!r}: the batch has a tree_mask, and {shape} was captured for chains, without"
                " a slot of that name",
                hint="register a slot 'tree_mask' before capture, or run trees in a lane of their own",
            )
        view = self.prepare_replay(registry=self.registry, batch=batch, shape=shape)
        metadata = self.init_metadata_replay(view=view, shape=shape, captured=captured.metadata)
        if self._pact_every:
            self._steps_to_check -= 1
            if not self._steps_to_check:
                self._steps_to_check = self._pact_every
                self.stats.pact_checks += 1
                backend = _root(self.backend, captured.held)
                captured.pact.check(view=view, metadata=metadata, **backend)
        captured.graph.replay()
        captured.stats.replays += 1
        captured.stats.raw_rows += batch.batch_size
        logits: torch.Tensor = captured.graph.outputs
        by_request = logits.shape[0] == shape.batch_size
        return logits[: batch.batch_size if by_request else batch.num_tokens]

    @property
    def records_metadata(self) -> bool:
        """Whether the graphs compute the backend's metadata, or its replay hook does."""
        return self.backend.records_metadata

    def is_captured(self, shape: GraphShape) -> bool:
        """Return whether there is a graph of ``shape``."""
        return shape in self._captured

    def captured(self, shape: GraphShape) -> Captured:
        """Return what a replay of ``shape`` needs.

        Raises:
            EngineError: It is not captured.
        """
        if shape not in self._captured:
            raise EngineError(
                f"lane {self.name!r} has no graph of {shape}", hint="capture the shape first"
            )
        return self._captured[shape]

    def held_by_backend(self, shape: GraphShape) -> dict[str, Any]:
        """Return, as the root ``backend`` of the pact of ``shape``, what of the backend its graph reads."""
        return _root(self.backend, self.captured(shape).held)

    def graphs(self) -> list[tuple[GraphShape, Graph]]:
        """Return every captured shape and its graph, in the order of capture."""
        return [(shape, captured.graph) for shape, captured in self._captured.items()]

    def pacts(self) -> list[tuple[GraphShape, Pact]]:
        """Return every captured shape and its pact, in the order of capture."""
        return [(shape, captured.pact) for shape, captured in self._captured.items()]

    def close(self) -> None:
        """Release every graph and its memory; batches run eagerly from here on."""
        self.runner.lane = None
        for captured in self._captured.values():
            captured.graph.release()
        self._captured.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _run_eager(self, batch: ForwardBatch) -> torch.Tensor:
        if self.driver is None or not self.driver.strict:
            return self.model(batch, self.backend, self.backend.init_metadata_eager(batch))
        with self.driver.unprepared(batch.host_tensors()):
            metadata = self.backend.init_metadata_eager(batch)
        return self.model(batch, self.backend, metadata)

    def _require_fit(self, batch: ForwardBatch) -> None:
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

    def _region(self, view: ForwardBatch, metadata: Any) -> torch.Tensor:
        """Do what a graph records."""
        self.backend.record_metadata(view, metadata)
        return self.model(view, self.backend, metadata)

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

    def _held_by_backend(self, used: set[int]) -> list[str]:
        """Return the attributes of the backend whose storages, by address, a graph has ``used``."""
        return [
            name
            for name, value in vars(self.backend).items()
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in used
        ]

    def _require_slots(self, shape: GraphShape, metadata: Any, used: set[int]) -> None:
        """Refuse metadata in storages that a graph has ``used``, outside the registry.

        Nobody refreshes it, or poisons it.

        Raises:
            CaptureError: Names the field.
        """
        context, registry = self.backend.context, self.registry
        others = [*kv_tensors(context.kv_cache).values(), context.req_to_token]
        known = {t.untyped_storage().data_ptr() for t in others}
        for path, value in walk({"metadata": metadata}):
            if (
                isinstance(value, torch.Tensor)
                and value.untyped_storage().data_ptr() in used - known
                and registry is not None
                and registry.slot_of(value) is None
            ):
                raise CaptureError(
                    f"lane {self.name!r}: {shape}: the graph reads {path}, which is no slot's memory",
                    hint="declare it in declare_slots() and take it from buffers(name): what is no slot,"
                    " no report shows and no strict lane poisons",
                    rule="GP01",
                )

    def _records_metadata(self, asked: bool | None) -> bool:  # noqa: FBT001  a setting, handed on
        can = self.backend.metadata_in_graph is not None
        if asked and not can:
            raise ConfigError(
                f"lanes.{self.name}.metadata_in_graph = true, but {type(self.backend).__name__} has no"
                " metadata work that a graph can record",
                hint="leave the key out: its metadata is then made by its replay hook",
            )
        return can if asked is None else asked

    def _resolve(self, name: str) -> Callable[..., Any]:
        """Return what a step calls for hook ``name``: a bound method, or pluggy where others look on."""
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
    context = backend.context
    caches = kv_tensors(context.kv_cache)
    names = {t.data_ptr(): name for name, t in caches.items()}
    names[context.req_to_token.data_ptr()] = "req_to_token"

    def name_of(tensor: torch.Tensor) -> str | None:
        slot = registry.slot_of(tensor)
        if slot is not None:
            return slot.label
        address = tensor.untyped_storage().data_ptr()
        for name, value in vars(backend).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == address:
                return f"{type(backend).__name__}.{name}"
        return names.get(address)

    slots = {slot.name: slot.buffer for slot in registry if slot.buffer is not None}
    once = {slot.name for slot in registry if slot.padding_policy is PaddingPolicy.FILL_ONCE}
    host = [slot for slot in registry if slot.device == torch.device("cpu")]
    host_memory = [*(slot.buffer for slot in host), *map(registry.template_of, host)]
    return DeclaredMemory(
        refreshed=[t for name, t in slots.items() if name not in once],
        workspaces=[t for name, t in slots.items() if name in once],
        caches=[*caches.values()],
        host=[t for t in host_memory if t is not None],
        name_of=name_of,
    )
