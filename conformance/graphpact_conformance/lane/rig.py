"""`Rig`: a lane of a backend and a runner, with its memory and a record of each step.

The lane runs as in an engine, through `Lane.run`. An observer of the hooks sees view and metadata, and may
edit them before the replay. Unowned memory is poisoned: freed request rows hold slots out of range, and free
KV slots hold NaN. This makes reads of stale rows visible.

The model (`graphpact_conformance.model`) reads every field of the batch with a slot. So a wrong value in any
of these fields changes the outputs. A runner may run the model several times in one region. The record of a
step then also contains the token ids and the attention of each pass, even if the runner does not return them.

Does not: check anything; `graphpact_conformance.experiments` compares the records.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    KVBuffers,
    ProviderName,
)
from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry, SharedBuffers
from graphpact.errors import PactBreach
from graphpact.graphs import Graph, GraphDriver
from graphpact.lane import Lane, PactMode
from graphpact.pact import Promise
from graphpact.runners import GraphRunner
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Attend, Forward, Region, RegionContext, StepOutputs
from graphpact.tensors import equal, storage_id
from graphpact_conformance.draws.cases import composes
from graphpact_conformance.draws.fields import completed
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.lane import memory
from graphpact_conformance.lane.reference_runner import ReferenceRunner, SegmentsRunner
from graphpact_conformance.lane.runners import (
    batch_beside,
    drawn_batch,
    fields_of,
    own_reasons,
    planned_shapes,
    runner_context,
)
from graphpact_conformance.lane.snapshots import (
    Observer,
    arguments_of,
    awaited_updates,
    each_due,
    snapshot,
)
from graphpact_conformance.lane.tracer import tracing_captures
from graphpact_conformance.lane.watched_hooks import WatchedHooks
from graphpact_conformance.model import Model, Passes
from graphpact_conformance.oracle import Answer, OracleBackend, answer
from graphpact_conformance.records.global_state import Call, StateWatch
from graphpact_conformance.records.kv_memory import KvMemory
from graphpact_conformance.records.plans import PlanWatch
from graphpact_conformance.records.raised import DeclinedError, need_of
from graphpact_conformance.records.steps import Leaf, Ready, StepRecord, copies
from graphpact_tape.poison import poison
from graphpact_tape.tape import Tape, TapeDriver
from graphpact_tape.trace import TracedCall

CPU = torch.device("cpu")


class Rig:
    """One lane and its memory.

    Args:
        config: The configuration of the lane.
        backend: The backend class.
        runner: The runner class.
        driver: Makes the lane's driver from a device.
        strict: Whether a `StrictObserver` observes the lane; its driver is strict then.
        in_graph: As ``Lane(metadata_in_graph=...)``.
        provider: Kernel provider of the backend.
        device: The device of everything but the oracle.
        pact: As ``Lane(pact=...)``.
        capture: Whether the runner captures its shapes.
        copies_attention: See `Model`.
        watch: Charges changes of the process's state to the plugin's calls; by default a new one.
        plans: Notes broken invariants of plans after each preparation; None for a rig that notes none.
        share_pool: As ``Lane(share_pool=...)``.
        kv_memory: The class of its KV cache.
        oracle: The class whose attention is right.
        observers: Observers of the lane, outside those of the rig.
        model: Makes the model.
        memory: A rig whose page table and KV cache it uses; None for memory of its own.

    Attributes:
        table: The page table, ``[rows, positions]`` int32.
        cache: The KV cache.
        declines: The declared reasons with which the runner leaves a batch that a graph holds to an eager
            step.
    """

    def __init__(
        self,
        config: Config,
        *,
        backend: type[AttentionBackend],
        runner: type[GraphRunner] = ReferenceRunner,
        driver: Callable[[torch.device], GraphDriver] = TapeDriver,
        strict: bool = False,
        in_graph: bool | None = None,
        provider: ProviderName = "auto",
        device: torch.device = CPU,
        pact: PactMode = "off",
        capture: bool = True,
        copies_attention: bool = False,
        watch: StateWatch | None = None,
        plans: PlanWatch | None = None,
        share_pool: SharedBuffers | None = None,
        kv_memory: type[KvMemory] = KvMemory,
        oracle: type[OracleBackend] = OracleBackend,
        observers: Sequence[object] = (),
        model: Callable[..., Model] = Model,
        memory: "Rig | None" = None,
    ) -> None:
        self.config, self.device, self.oracle = config, device, oracle
        self.watch = StateWatch() if watch is None else watch
        self._plans = None if strict else plans  # in a strict lane copies of a plan may be in flight
        self.layers = [
            replace(at, sinks=None if at.sinks is None else at.sinks.to(device)) for at in config.layers
        ]
        if memory is None:
            empty = Problem(config.case, [], 0)
            self.cache = kv_memory(config, device)
            self.cache.load(empty)
            self.table = empty.page_table(config).to(device, copy=True)
        else:
            self.cache, self.table = memory.cache, memory.table
        mode, limits = config.case.lane_mode, config.backend_limits
        context = BackendContext(
            *(device, config.dtype, self.layers, limits, self.table, self.cache.kv, mode, provider)
        )
        with self.watch.during(Call(f"the constructor of {backend.__name__}")):
            self.backend = backend(context)
        self._slots: dict[int, BoundSlot] = {}
        self._allocated: dict[int, tuple[Graph, set[str]]] = {}  # the outputs that a graph allocated
        self._names: dict[int, str] = {}  # by storage; an attribute may be bound anew
        self.observer = Observer(keeps_inputs=not strict)  # in a strict lane copies may be in flight
        records = driver(device)
        strict_observers = [records.strict_observer()] if strict else []
        with self.watch.during(Call(f"the constructor of {runner.__name__}")):
            self.runner = runner(runner_context(config, self.backend.capabilities, device, runner))
        self.declines = own_reasons(self.runner)
        self.fields = fields_of(self.runner)
        self.net = model(config, self.layers, device, self.fields, composed=composes(runner))
        self.net.copies_attention = copies_attention
        self.lane = _RigLane(
            mode.value,
            model=self.model,
            runner=self.runner,
            backend=self.backend,
            driver=records,
            pact=pact,
            metadata_in_graph=in_graph if self.runner.shapes() else None,
            observers=[*observers, self.observer, WatchedHooks(self.watch), *strict_observers],
            share_pool=share_pool,
        )
        if self._plans is not None and self.backend.plan_invariants:
            self.observer.prepared = self._note_plan
            self.lane.composing = self._note_composed
        if capture:
            self.capture()

    # -- plans -----------------------------------------------------------------------------------

    def _note_plan(self, view: ForwardBatch, metadata: Any) -> None:
        """Note the broken invariants of a replay whose hook has made the metadata."""
        if self._plans is not None and not self.backend.records_metadata:
            self._plans.note("init_metadata_replay", self.backend, view, metadata, self.observer.shape)

    def _note_recorded(self) -> None:
        """Note the broken invariants of a replay whose graph has made the metadata."""
        seen, is_kit = self.observer, not self._may_draw  # regions of other runners may write the view
        if self._plans is not None and is_kit and seen.view is not None and seen.metadata is not None:
            self._plans.note("init_metadata_replay", self.backend, seen.view, seen.metadata, seen.shape)

    def _note_composed(self, context: RegionContext) -> None:
        """Note the broken invariants of a capture or of an eager step, before its region runs."""
        if self._plans is None or context.backend is not self.backend:
            return
        hook = "init_metadata_eager" if context.registry is None else "init_metadata_capture"
        self._plans.note(hook, self.backend, context.attended, context.metadata, context.shape)

    # -- capture ---------------------------------------------------------------------------------

    @property
    def planned(self) -> tuple[GraphShape, ...]:
        """The runner's shapes, the smallest first."""
        return planned_shapes(self.runner)

    @property
    def captured(self) -> list[GraphShape]:
        """The captured shapes, in the order of their captures."""
        return list(self.lane.captured)

    def capture(
        self,
        shape: GraphShape | None = None,
        batch: ForwardBatch | None = None,
        *,
        ready: Ready | None = None,
    ) -> None:
        """Capture with dummy batches, and replace earlier captures of the same shapes.

        Args:
            shape: The shape; None for every shape of the runner.
            batch: A live batch that is captured in place of the dummy; its memory is loaded.
            ready: Called with view and metadata of each capture.
        """
        self.observer.ready = ready
        try:
            with self.watch.during(Call("a capture", may_draw=self._may_draw)):
                if shape is None:
                    self.lane.capture_all()
                else:
                    self.lane.capture(shape, None if batch is None else self._as_a_dummy(batch, shape))
            if shape is None:
                self.observer.forget()
        finally:
            self.observer.ready = None

    def _as_a_dummy(self, batch: ForwardBatch, shape: GraphShape) -> ForwardBatch:
        """Return the batch with every optional field that the runner's dummy of the shape has."""
        has = self.runner.dummy(shape).tensors()
        return completed(batch, [slot for slot in self.fields if slot.name in has])

    def close(self) -> None:
        """Release every graph and its memory; later batches run eagerly until the next capture."""
        self.lane.close()

    def runs_of_capture(self, problem: Problem, shape: GraphShape) -> list[list[TracedCall]]:
        """Capture a live batch, and return the operations of each run: warm-ups, then the recorded one.

        Args:
            problem: The batch.
            shape: The shape that is captured.
        """
        self.load(problem)
        with tracing_captures(self.lane.driver) as runs:
            self.capture(shape, self.batch_of(problem))
        return runs

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return the runner's dummy batch of a shape."""
        return self.runner.dummy(shape)

    @property
    def _may_draw(self) -> bool:
        """Whether regions may draw from the default generator; those of runners may, to sample drafts."""
        return type(self.runner) not in (ReferenceRunner, SegmentsRunner)

    def serve_declined(self, shape: GraphShape | None) -> None:
        """Make declined batches replay in the graph of ``shape``, such as the dummy; None for no graph."""
        self.lane.serves = {} if shape is None else dict.fromkeys(self.declines, shape)

    @property
    def padded_seq_len(self) -> int:
        """The length of a padding row that the backend declares."""
        case = self.config.case
        return self.backend.capabilities.padded_seq_len(case.lane_mode, case.tokens_per_request or 1)

    @property
    def writer(self) -> str:
        """The name of the backend's method that writes the metadata of a replay, for texts."""
        if self.runner.eager_attention:
            return "`init_metadata_eager`"
        if not self.backend.records_metadata:  # otherwise the graph runs `fill_metadata`
            for name in ("init_metadata_replay", "refresh_metadata"):
                if getattr(type(self.backend), name) is not getattr(AttentionBackend, name):
                    return f"`{name}`"
        return "`fill_metadata`"

    # -- memory that graphs read -----------------------------------------------------------------

    @property
    def slots(self) -> list[BoundSlot]:
        """The slots of the lane's registry."""
        return list(self.registry)

    def states(self) -> dict[str, torch.Tensor]:
        """Return the external memory of graphs by name, without the slots that every step writes."""
        return memory.states(self.lane, self.net.tensors(), self._names)

    def held(self) -> dict[str, torch.Tensor]:
        """Return copies of the backend's tensors and of slots that are filled once, without scratch rows."""
        return memory.held(self.lane, self.config)

    def external(self, shape: GraphShape) -> list[torch.Tensor]:
        """Return the tensors that a graph reads outside KV cache and page table, in order of use."""
        return memory.external(self.lane, shape)

    def name_of(self, tensor: torch.Tensor, shape: GraphShape) -> str:
        """Return the name of the holder of a tensor that a graph reads, or the line that reads it."""
        return memory.name_of(self.lane, shape, tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of ``tensor`` belongs to a slot or an attribute of the backend."""
        return memory.holds(self.lane, tensor)

    def trace(self, shape: GraphShape) -> list[TracedCall]:
        """Return the recorded calls of the graph of a shape; empty where its driver has no trace."""
        graph = self.lane.captured[shape].graph
        return (graph.trace or []) if isinstance(graph, Tape) else []

    def promises(self, shape: GraphShape) -> dict[str, Promise]:
        """Return the promises of a shape's pact, by path; empty if it was not captured."""
        captured = self.lane.captured.get(shape)
        return {} if captured is None else {p.path: p for p in captured.pact.promises}

    def num_segments(self, shape: GraphShape) -> int:
        """Return the number of segments of a graph; it is 1 if the graph has no eager calls."""
        return self.lane.captured[shape].graph.num_segments

    @property
    def registry(self) -> CudaGraphBufferRegistry:
        """The lane's registry. Only lanes that capture have one."""
        assert self.lane.registry is not None  # noqa: S101  lanes with graphs have one
        return self.lane.registry

    # -- the model -------------------------------------------------------------------------------

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs of one forward pass."""
        return self.net(batch, metadata, attend)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of queries, keys and values of all layers, and sinks, which an engine may write."""
        sinks = [layer.sinks for layer in self.layers if layer.sinks is not None]
        return [*(weight for layer in self.net.weights for weight in layer), *sinks]

    # -- memory ----------------------------------------------------------------------------------

    def load(self, problem: Problem) -> None:
        """Set page table and KV cache to the state before ``problem``, with poison in unowned memory."""
        self.load_table(problem)
        self.cache.load(problem)

    def load_table(self, problem: Problem) -> None:
        """Set the page table to the requests of ``problem``; the KV cache keeps what earlier steps wrote."""
        self.table.copy_(problem.page_table(self.cache.config))

    def batch_of(self, problem: Problem, whole: Problem | None = None) -> ForwardBatch:
        """Return the batch of a problem for this lane.

        Args:
            problem: The batch.
            whole: A batch with its requests, whose optional fields they have; see `batch_beside`.
        """
        if whole is not None:
            return batch_beside(problem, whole, self.config, self.fields, self.device)
        return drawn_batch(problem, self.config, self.fields, self.device)

    # -- a step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(
        self,
        problem: Problem,
        *,
        eagerly: bool = False,
        fill: Callable[[BoundSlot], None] | None = None,
        ready: Ready | None = None,
        after_load: Callable[[], None] | None = None,
        batch: ForwardBatch | None = None,
        whole: Problem | None = None,
        may_decline: bool = False,
        keeps_cache: bool = False,
    ) -> StepRecord:
        """Run one batch, and return its record, including an error.

        Args:
            problem: The batch, and the memory before it.
            eagerly: Whether to run without a graph.
            fill: Called before the step is prepared, with every slot that the step has to write.
            ready: Called between preparation and replay; see `Ready`.
            after_load: Called after memory is loaded.
            batch: A batch to run instead of the problem's own one.
            whole: A batch with its requests, in whose memory and with whose optional fields they run.
            may_decline: Whether the batch may be left to an eager step, with a declared reason.
            keeps_cache: Whether the KV cache is the one that earlier steps wrote.

        Raises:
            DeclinedError: The runner declined the batch, and ``may_decline`` is false.
        """
        self._clear_outputs()
        (self.load_table if keeps_cache else self.load)(whole or problem)
        if self._plans is not None:
            self._plans.problem = problem
        if after_load is not None:
            after_load()
        batch = self.batch_of(problem, whole) if batch is None else batch
        given = {name: tensor.clone() for name, tensor in batch.tensors().items()}
        self.observer.forget()
        self.observer.ready = ready
        self.observer.before = None if fill is None else each_due(fill)
        step = StepRecord(problem)
        stats = self.lane.stats
        before = {shape: each.replays for shape, each in stats.shapes.items()}
        eager = stats.eager.copy()
        try:
            with self.watch.during(Call("an eager step" if eagerly else "a step", may_draw=self._may_draw)):
                outputs = self.lane.run_eager(batch) if eagerly else self.lane.run(batch)
            step.rows, step.axes, step.stage = copies(outputs), outputs.axes, "done"
        except (Exception, SystemExit) as error:  # the plugin's code may raise anything
            if need_of(error) is not None:
                raise  # a value that the suite lacks is not a fault of the step
            step.error = error
        finally:
            self.observer.ready = self.observer.before = None
        for shape, each in stats.shapes.items():
            step.replayed += [shape] * (each.replays - before.get(shape, 0))
        counted = stats.eager - eager
        step.eager_runs = counted.total()
        step.reason = next((reason for _, reason in counted), None)
        self._see(step)
        if ready is None and step.error is None and self.backend.records_metadata:
            self._note_recorded()
        if self.observer.undo is not None:
            self.observer.undo()
            self.observer.undo = None
        if self._plans is not None:
            self._plans.problem = None
        step.caches = self.cache.contents()
        step.table = self.table.clone().cpu()
        step.changed_fields = [
            name for name, tensor in batch.tensors().items() if not equal(tensor, given[name])
        ]
        step.declined = step.reason if step.reason in self.declines else None
        if step.declined is not None and not may_decline:
            raise DeclinedError(step.declined)
        return step

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the captured shape that ``batch`` replays, or the reason why there is none."""
        return self.lane.fit(batch)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, *, eagerly: bool = False) -> StepOutputs:
        """Run a batch on the current memory; return its outputs uncopied, valid until the next replay."""
        return self.lane.run_eager(batch) if eagerly else self.lane.run(batch)

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the step of a batch, as an engine does while outputs are read, without launching it."""
        self.lane.prepare(batch)

    def synchronize(self) -> None:
        """Wait for every copy from host memory.

        Raises:
            ReplayError: The host memory of a copy was rewritten before.
        """
        self.lane.driver.synchronize()

    def replay(self, problem: Problem, shape: GraphShape) -> StepRecord:
        """Replay a graph on its current inputs, without hooks; the record names ``problem``."""
        graph = self.lane.captured[shape].graph
        graph.replay()
        for key, updated, rebound in awaited_updates(graph):
            self.lane.driver.update_task(key, updated, rebound=rebound)
        step = StepRecord(problem, stage="done", shape=shape)
        step.leaves, step.numbers = self._prepared(problem)
        step.outputs, step.axes = copies(graph.outputs), graph.outputs.axes
        step.tasks = arguments_of(graph)
        return step

    def _clear_outputs(self) -> None:
        """Poison the outputs that graphs allocated. This shows when a graph does not run.

        Other outputs may be memory that no replay writes, such as a constant.
        """
        for captured in self.lane.captured.values():
            graph = captured.graph
            if id(graph) not in self._allocated:  # asked once: later some of the memory may be gone
                others = {storage_id(tensor) for tensor in graph.external_tensors() or ()}
                own = {n for n, tensor in graph.outputs.items() if storage_id(tensor) not in others}
                self._allocated[id(graph)] = graph, own
            for name in self._allocated[id(graph)][1]:
                if self.registry.slot_of(graph.outputs[name]) is None:
                    poison(graph.outputs[name])

    def _see(self, step: StepRecord) -> None:
        """Copy the observed view and metadata into ``step``."""
        seen = self.observer
        if seen.shape is None:
            return
        step.shape = seen.shape
        if seen.view is None:
            return
        if step.stage != "done":
            step.stage = "metadata" if seen.metadata is None else "replay"
        parts = {"view": seen.view}
        if seen.metadata is not None:
            parts["metadata"] = seen.metadata
        step.leaves, step.numbers = self._snapshot(parts, step.problem, seen.shape)
        captured = self.lane.captured.get(seen.shape)
        if seen.metadata is None or captured is None or seen.at_capture:
            return
        try:
            captured.pact.check(**parts, **captured.backend_state)
        except PactBreach as error:
            step.breaches = error.breaches
        if step.stage == "done":
            step.outputs = copies(captured.graph.outputs)
            step.tasks = arguments_of(captured.graph)

    def _prepared(self, problem: Problem) -> tuple[dict[str, Leaf], dict[str, Any]]:
        """Return copies of tensors and host values of the last view and metadata, by path."""
        seen = self.observer
        assert seen.shape is not None  # noqa: S101  set by the last step
        return self._snapshot({"view": seen.view, "metadata": seen.metadata}, problem, seen.shape)

    def _snapshot(
        self, parts: Mapping[str, Any], problem: Problem, shape: GraphShape
    ) -> tuple[dict[str, Leaf], dict[str, Any]]:
        captured = self.lane.captured.get(shape)
        views = [parts["view"], *([] if captured is None else [captured.context.view])]
        return snapshot(
            parts, problem, shape, views=views, inputs=self.observer.inputs, slot_at=self._slot_at
        )

    def _slot_at(self, tensor: torch.Tensor) -> BoundSlot | None:
        """Return the slot in whose memory a tensor begins; the addresses of slots do not change."""
        address = tensor.data_ptr()
        if address not in self._slots:
            slot = self.registry.slot_of(tensor)
            if slot is None:
                return None
            self._slots[address] = slot
        return self._slots[address]

    # -- the oracle ------------------------------------------------------------------------------

    def answer(
        self,
        problem: Problem,
        whole: Problem | None = None,
        *,
        kv: KVBuffers | None = None,
        padded_tokens: int | None = None,
    ) -> Answer:
        """Return the oracle's answer; it is valid for every lane of the same configuration and runner.

        Args:
            problem: The batch.
            whole: See `step`.
            kv: The KV cache before it, which is written; None for the one that `load` makes.
            padded_tokens: Tokens of the shape that ranks share; None for those of `padded_tokens`.
        """
        if kv is None:
            self.load(whole or problem)
            kv = self.cache.copy()
        padded = self.padded_tokens(problem) if padded_tokens is None else padded_tokens
        shared = padded if self.net.counts else None
        compact, batch = self.cache.compact(problem), self.batch_of(problem, whole)
        if compact is not problem:  # a region that the runner composes may move keys in the copy
            batch = replace(batch, out_cache_loc=self.batch_of(compact).out_cache_loc)
        shape = GraphShape(batch.forward_mode, batch.batch_size, batch.num_tokens)

        def compose(forward: Forward, oracle: AttentionBackend, metadata: Any) -> Region:
            runner = type(self.runner)(self.runner.context)
            step = RegionContext(shape, batch, self.lane.driver, oracle, metadata, live=batch, attended=batch)
            return runner.compose(forward, step)

        context = replace(self.backend.context, kv_cache=kv)
        found = answer(compact, batch, self.net, context, shared, compose, self.oracle)
        return replace(found, caches=found.caches | self.cache.right_beside_kv(compact, found.caches))

    def padded_tokens(self, problem: Problem) -> int:
        """Return the tokens of the shape that a batch replays; for an eager batch its own tokens."""
        fit = self.lane.fit(self.batch_of(problem))
        return fit.num_tokens if isinstance(fit, GraphShape) else len(problem.tokens)

    @property
    def num_steps(self) -> int:
        """Draft steps of the last pass."""
        return self.net.num_steps

    @property
    def width_of_pass(self) -> int:
        """Columns of the attention of one pass in ``rows``: those of all layers."""
        return sum(layer.num_q_heads * layer.v_head_dim for layer in self.net.layers)

    @property
    def num_shared(self) -> int:
        """Columns of work across rows, the last ones of ``rows``."""
        return self.net.num_shared

    @property
    def feeds_itself(self) -> bool:
        """Whether later passes of a step read results of earlier ones; then rounding affects keys."""
        return self.net.is_draft

    def other_weights(self, which: Collection[int], ids: Collection[int]) -> AbstractContextManager[None]:
        """Give tokens of ``ids`` other queries (0), keys (1) or values (2) inside the context."""
        return self.net.other_weights(which, ids)

    def where(self, name: str, column: int) -> str:
        """Return the meaning of a column of an output, in words."""
        return self.net.where(name, column)


class _RigLane(Lane):
    """A lane whose regions return what each pass reads and attends to too, unless the runner returns it."""

    serves: Mapping[EagerReason, GraphShape] = {}  # the graph for each declined reason
    composing: Callable[[RegionContext], object] | None = (
        None  # called with each region before it is composed
    )

    def compose(self, context: RegionContext) -> Region:
        """Return the region of the runner, with its passes watched."""
        if self.composing is not None:
            self.composing(context)
        passes = Passes(self.model)
        region = self.runner.compose(passes, context)
        return passes.watching(region) if callable(region) else region

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the shape that serves what the runner declines, otherwise the runner's answer."""
        asked = super().fit(batch)
        return asked if isinstance(asked, GraphShape) else self.serves.get(asked, asked)
