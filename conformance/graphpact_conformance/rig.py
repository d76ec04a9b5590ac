"""`Rig`: one lane of a backend and a runner, its memory, and a record of each step.

The lane runs as in an engine, through `Lane.run`. An observer of the hooks sees view and metadata, and may
edit them before the replay. Unowned memory is poisoned: freed request rows hold slots out of range, free KV
slots hold NaN. This makes reads of stale rows visible.

The model (`graphpact_conformance.model`) reads every field of the batch with a slot. So a wrong value in any
of these fields changes the outputs. A runner may run it several times in one region. The record of a step
then has the token ids and the attention of each pass too, whatever the runner makes of them.

Does not: check anything; `graphpact_conformance.experiments` compares the records.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Capabilities,
    ProviderName,
    kv_tensors,
)
from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry, GraphSlot
from graphpact.errors import Breach, all_returned
from graphpact.graphs import GraphDriver
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane, PactMode
from graphpact.pact import walk
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Attend, Forward, Region, Step, StepOutputs
from graphpact.tensors import same
from graphpact_conformance.model import ROWS_OF_PASS, Model, Passes
from graphpact_conformance.oracle import Answer, answer
from graphpact_conformance.problems import HIDDEN, Config, Problem, declares_graphs
from graphpact_conformance.reference import ReferenceRunner
from graphpact_tape.guard import is_due
from graphpact_tape.poison import poison
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")
NAN = float("nan")

_Around = Generator[None, Any, Any]

Undo = Callable[[], None]
Ready = Callable[[ForwardBatch, Any], Undo | None]
"""``(view, metadata) -> undo``: called between the hooks and the replay. Its result is called after the step:
it restores memory that no step writes."""


class DeclinedError(Exception):
    """The runner left a batch to an eager step, with a declared reason; an experiment needs a replay."""

    def __init__(self, reason: EagerReason) -> None:
        super().__init__(f"the runner leaves this batch to an eager step: {reason}")


class Observer:
    """An observer that keeps view and metadata of each step.

    Attributes:
        before: Called with registry and shape before a step is prepared; may be None.
        ready: Called with view and metadata after preparation and before the replay; may be None.
        undo: The result of the last call of `ready`.
    """

    def __init__(self) -> None:
        self.before: Callable[[CudaGraphBufferRegistry, GraphShape], None] | None = None
        self.ready: Ready | None = None
        self.undo: Undo | None = None
        self.forget()

    def forget(self) -> None:
        """Drop shape, view and metadata of the last step."""
        self.shape: GraphShape | None = None
        self.view: ForwardBatch | None = None
        self.metadata: Any = None
        self.at_capture = False

    @hookimpl(wrapper=True, tryfirst=True)
    def populate(self, registry: CudaGraphBufferRegistry, shape: GraphShape) -> _Around:
        """Note the shape of a new step."""
        self.forget()
        self.shape = shape
        if self.before is not None:
            self.before(registry, shape)
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def prepare_replay(self) -> _Around:
        """Keep the view of a step."""
        view = yield
        self.view = view
        return view

    @hookimpl(wrapper=True, tryfirst=True)
    def init_metadata_capture(self) -> _Around:
        """Keep the metadata of a capture."""
        self.at_capture = True
        return (yield from self._see())

    @hookimpl(wrapper=True, tryfirst=True)
    def init_metadata_replay(self) -> _Around:
        """Keep the metadata of a replay."""
        return (yield from self._see())

    def _see(self) -> _Around:
        metadata = yield
        self.metadata = metadata
        if self.ready is not None and self.view is not None:
            self.undo = self.ready(self.view, metadata)
        return metadata


@dataclass(frozen=True)
class Leaf:
    """A copy of one tensor of view or metadata.

    Args:
        path: Its path, such as ``metadata.kv_indptr``.
        value: Its contents.
        slot: The slot of its memory; None outside the registry.
        tail: The first index of its padding rows along `dim`; None if it has none.
        dim: The axis of its rows.
        is_due: Whether every step has to write it.
        is_alias: Whether an earlier path has the same memory.
    """

    path: str
    value: torch.Tensor
    slot: BoundSlot | None
    tail: int | None
    dim: int
    is_due: bool
    is_alias: bool

    @property
    def is_resident(self) -> bool:
        """Whether it lies in a slot, and no earlier path has the same memory."""
        return self.slot is not None and not self.is_alias

    @property
    def is_written(self) -> bool:
        """Whether every step has to write it, and no earlier path has the same memory."""
        return self.is_due and not self.is_alias

    @property
    def name(self) -> str:
        """Path and slot, for messages."""
        return self.path if self.slot is None else f"{self.path} ({self.slot.label})"

    @property
    def in_tail(self) -> torch.Tensor:
        """Bool tensor of the shape of `value`, set for padding rows."""
        mask = torch.zeros(self.value.shape, dtype=torch.bool)
        if self.tail is not None:
            mask.narrow(self.dim, self.tail, self.value.shape[self.dim] - self.tail).fill_(1)
        return mask


@dataclass
class StepRecord:
    """The record of one run of one batch.

    Args:
        problem: The batch.
        error: The raised error; None for a step without error.
        stage: The last stage: ``prepare``, ``metadata``, ``replay`` or ``done``.
        shape: The replayed shape; None for an eager run.
        replays: Number of replays that the lane counted.
        reason: The reason of an eager run that the lane counted; None if it counted none.
        declined: The same, if it is a reason of the runner's own, which it declares.
        leaves: The tensors of view and metadata, by path.
        numbers: The host values of view and metadata, by path.
        breaches: Breaches of the pact.
        rows: The outputs of the lane by name, live rows only; None for a step that failed.
        axes: The axes of the outputs.
        outputs: The outputs of the graph, including padding rows; None for an eager run.
        caches: The KV cache after the step.
        table: The page table after the step.
        changed_fields: Fields of the batch that the step changed.
    """

    problem: Problem
    error: BaseException | None = None
    stage: str = "prepare"
    shape: GraphShape | None = None
    replays: int = 0
    reason: EagerReason | None = None
    declined: EagerReason | None = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    breaches: tuple[Breach, ...] = ()
    rows: dict[str, torch.Tensor] | None = None
    axes: Mapping[str, str] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] | None = None
    caches: dict[str, torch.Tensor] = field(default_factory=dict)
    table: torch.Tensor | None = None
    changed_fields: list[str] = field(default_factory=list)


class Rig:
    """One lane and its memory.

    Args:
        config: The configuration of the lane.
        backend: The backend class.
        runner: The runner class.
        driver: Makes the lane's driver from a device.
        guarded: Whether a `StrictGuard` observes the lane; its driver is strict then.
        in_graph: As ``Lane(metadata_in_graph=...)``.
        provider: Kernel provider of the backend.
        device: The device of everything but the oracle.
        pact: As ``Lane(pact=...)``.
        capture: Whether the runner captures its shapes.
    """

    def __init__(
        self,
        config: Config,
        *,
        backend: type[AttentionBackend],
        runner: type[GraphRunner] = ReferenceRunner,
        driver: Callable[[torch.device], GraphDriver] = TapeDriver,
        guarded: bool = False,
        in_graph: bool | None = None,
        provider: ProviderName = "auto",
        device: torch.device = CPU,
        pact: PactMode = "off",
        capture: bool = True,
    ) -> None:
        self.config, self.device = config, device
        self.layers = [
            replace(at, sinks=None if at.sinks is None else at.sinks.to(device)) for at in config.layers
        ]
        self._make_memory()
        mode, limits = config.case.lane_mode, config.backend_limits
        self.backend = backend(
            BackendContext(*(device, config.dtype, self.layers, limits, self.table, self.kv, mode, provider))
        )
        self._slots: dict[int, BoundSlot] = {}
        self.observer = Observer()
        records = driver(device)
        self.guard = records.guard() if guarded else None
        self.runner = runner(runner_context(config, self.backend.capabilities, device, runner))
        self.declines = own_reasons(self.runner)
        self.fields = fields_of(self.runner)
        self.net = Model(config, self.layers, device, self.fields, runner)
        self._watch_passes()
        self.lane = Lane(
            mode.value,
            model=self.model,
            runner=self.runner,
            backend=self.backend,
            driver=records,
            pact=pact,
            metadata_in_graph=in_graph if self.runner.shapes() else None,
            observers=[self.observer, *([self.guard] if self.guard else [])],
        )
        if capture:
            self.capture()

    def capture(self) -> None:
        """Capture every shape of the runner."""
        self.lane.capture_all()
        self.observer.forget()

    def serve_declined(self, shape: GraphShape) -> None:
        """Let this rig replay what the runner declines in the graph of ``shape``, such as its own dummy."""
        right, declines = self.runner.fit, self.declines
        if declines:

            def fit(batch: ForwardBatch) -> GraphShape | EagerReason:
                asked = right(batch)
                return shape if asked in declines else asked

            self.runner.fit = fit  # type: ignore[method-assign]

    @property
    def registry(self) -> CudaGraphBufferRegistry:
        """The lane's registry. Only lanes that capture have one."""
        assert self.lane.registry is not None  # noqa: S101  lanes with graphs have one
        return self.lane.registry

    # -- the model -------------------------------------------------------------------------------

    def model(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs of one forward pass."""
        return self.net(batch, metadata, attend)

    def _watch_passes(self) -> None:
        """Let regions also return what each pass reads and attends to, unless the runner returns it."""
        right = self.runner.compose

        def compose(forward: Forward, step: Step) -> Region:
            passes = Passes(forward)
            region = right(passes, step)
            return passes.watching(region) if callable(region) else region

        self.runner.compose = compose  # type: ignore[method-assign]

    # -- memory ----------------------------------------------------------------------------------

    def _make_memory(self) -> None:
        config = self.config
        heads, dtype, slots = config.heads, config.dtype, config.num_pages * config.page_size

        def cache(width: int) -> list[torch.Tensor]:
            return [
                torch.full((slots, heads.num_kv_heads, width), NAN, dtype=dtype, device=self.device)
                for _ in self.layers
            ]

        k = cache(heads.head_dim)
        v = cache(heads.v_head_dim)
        if heads.kv_lora_rank is not None:
            v = [each[..., : heads.kv_lora_rank] for each in k]
        self.kv = SimpleNamespace(k=k, v=v)
        empty = Problem(config.case, [], 0)
        self.table = empty.page_table(config).to(self.device)
        self._fill_cache(empty)

    def load(self, problem: Problem) -> None:
        """Set page table and KV cache to the state before ``problem``, with poison in unowned memory."""
        self.table.copy_(problem.page_table(self.config))
        self._fill_cache(problem)

    def _fill_cache(self, problem: Problem) -> None:
        generator = torch.Generator().manual_seed(problem.seed)
        cached = [slot for r in problem.requests for slot in r.cached]
        live = torch.tensor([*range(self.config.page_size), *cached], device=self.device)
        for cache in kv_tensors(self.kv).values():
            cache.fill_(NAN)
            random = torch.randn(len(live), *cache.shape[1:], generator=generator)
            cache[live] = random.to(self.device, cache.dtype)

    def batch_of(self, problem: Problem) -> ForwardBatch:
        """Return the batch of a problem for this lane."""
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
        may_decline: bool = False,
    ) -> StepRecord:
        """Run one batch, and return its record, including an error.

        Args:
            problem: The batch, and the memory before it.
            eagerly: Whether to run without a graph.
            fill: Called before the step is prepared, with every slot that the step has to write.
            ready: Called between the hooks and the replay; see `Ready`.
            after_load: Called after memory is loaded.
            batch: A batch to run instead of the problem's own one.
            may_decline: Whether the runner may leave the batch to an eager step, with a declared reason.

        Raises:
            DeclinedError: It did, and may not.
        """
        self._clear_outputs()
        self.load(problem)
        if after_load is not None:
            after_load()
        batch = self.batch_of(problem) if batch is None else batch
        given = {name: tensor.clone() for name, tensor in batch.tensors().items()}
        self.observer.forget()
        self.observer.ready = ready
        self.observer.before = None if fill is None else _each_due(fill)
        step = StepRecord(problem)
        before, eager = self.lane.stats.replays, self.lane.stats.eager.copy()
        try:
            outputs = self.lane.run_eager(batch) if eagerly else self.lane.run(batch)
            step.rows, step.axes, step.stage = copies(outputs), outputs.axes, "done"
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            step.error = error
        finally:
            self.observer.ready = self.observer.before = None
        step.replays = self.lane.stats.replays - before
        step.reason = next((reason for _, reason in self.lane.stats.eager - eager), None)
        self._see(step)
        if self.observer.undo is not None:
            self.observer.undo()
            self.observer.undo = None
        step.caches = {n: t.clone().cpu() for n, t in kv_tensors(self.kv).items()}
        step.table = self.table.clone().cpu()
        step.changed_fields = [
            name for name, tensor in batch.tensors().items() if not bool(same(tensor, given[name]).all())
        ]
        step.declined = step.reason if step.reason in self.declines else None
        if step.declined is not None and not may_decline:
            raise DeclinedError(step.declined)
        return step

    def _clear_outputs(self) -> None:
        """Poison the outputs of all graphs, so that a graph that does not run is seen."""
        for captured in self.lane.captured.values():
            for tensor in captured.graph.outputs.values():
                if self.registry.slot_of(tensor) is None:
                    poison(tensor)

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
        step.breaches = captured.pact.breaches(**parts, **self.lane.held_by_backend(seen.shape))
        if step.stage == "done":
            step.outputs = copies(captured.graph.outputs)

    def prepared(self, problem: Problem) -> tuple[dict[str, Leaf], dict[str, Any]]:
        """Return copies of tensors and host values of the last view and metadata, by path."""
        seen = self.observer
        assert seen.shape is not None  # noqa: S101  set by the last step
        return self._snapshot({"view": seen.view, "metadata": seen.metadata}, problem, seen.shape)

    def _snapshot(
        self, parts: Mapping[str, Any], problem: Problem, shape: GraphShape
    ) -> tuple[dict[str, Leaf], dict[str, Any]]:
        leaves: dict[str, Leaf] = {}
        numbers: dict[str, Any] = {}
        seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
        raw = problem.batch_size, len(problem.tokens)
        for path, value in walk(parts):
            if not isinstance(value, torch.Tensor):
                numbers[path] = value
                continue
            key = (value.data_ptr(), value.shape, value.stride())
            alias = key in seen and value.numel() > 0
            seen.add(key)
            slot = self._slot_at(value) if value.numel() else None
            tail, dim = _tail_of(value, slot, raw, shape)
            due = slot is not None and is_due(slot)
            leaves[path] = Leaf(path, value.detach().clone().cpu(), slot, tail, dim, due, alias)
        return leaves, numbers

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

    def answer(self, problem: Problem) -> Answer:
        """Return the oracle's answer; it is valid for every lane of the same configuration and runner."""
        self.load(problem)
        padded = self.padded_tokens(problem) if self.config.counts else None
        return answer(problem, self.batch_of(problem), self.lane, self.net, padded)

    def padded_tokens(self, problem: Problem) -> int:
        """Return the tokens of the shape that a batch replays; for an eager batch its own tokens."""
        fit = self.lane.fit(self.batch_of(problem))
        return fit.num_tokens if isinstance(fit, GraphShape) else len(problem.tokens)

    def where(self, name: str, column: int) -> str:
        """Return the meaning of a column of an output, in words."""
        if name != "rows" and not name.startswith(ROWS_OF_PASS):
            return f"output {name!r}" + (f", column {column}" if column else "")
        heads = self.config.heads
        width = heads.num_q_heads * heads.v_head_dim
        part, rest = divmod(column, width)
        step, layer = divmod(part, len(self.layers))
        steps = self.net.num_steps
        prefix = f"{name}, " if name != "rows" else ""
        if step >= steps:
            own = column - steps * len(self.layers) * width < self.net.num_own
            return prefix + ("fields of the batch" if own else "work across rows")
        at = f"layer {layer}, head {rest // heads.v_head_dim}"
        return prefix + (f"step {step}, {at}" if steps > 1 else at)


def live_rows(step: StepRecord) -> dict[str, torch.Tensor]:
    """Return the live rows of the outputs of a graph; without an axis all of them."""
    problem, outputs = step.problem, step.outputs or {}
    live = {"bs": problem.batch_size, "tokens": len(problem.tokens)}
    return {name: tensor[: live.get(step.axes[name])] for name, tensor in outputs.items()}


def copies(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of outputs on the host."""
    return {name: tensor.detach().clone().cpu() for name, tensor in outputs.items()}


def runner_context(
    config: Config, capabilities: Capabilities, device: torch.device, runner: type[GraphRunner]
) -> RunnerContext:
    """Return the context of a lane's runner.

    It has the sizes to capture, except for runners of ragged modes, which choose their shapes, and for
    runners that need no graph support, which may capture nothing and refuse sizes. It does not limit padding:
    the more padding tokens a batch has, the more they can do.
    """
    mode, limits = config.case.lane_mode, config.limits
    chooses = mode.is_ragged or not declares_graphs(runner)
    return RunnerContext(
        device,
        capabilities,
        limits,
        mode=mode,
        batch_sizes=None if chooses else [s.batch_size for s in config.shapes],
        token_counts=sorted({s.num_tokens for s in config.shapes}) if mode.is_ragged else None,
        max_padding_ratio=float("inf"),
        lane=mode.value,
        num_token_non_padded=config.counts,
        require_gathered_buffer=config.counts,
        hidden_size=HIDDEN,
        dtype=config.dtype,
        layers=config.layers,
        mrope=config.case.embeds,
        input_embeds=config.case.embeds,
    )


def fields_of(runner: GraphRunner) -> tuple[GraphSlot, ...]:
    """Return the slots of a runner's own fields: of dotted names, and copied from `ForwardBatch.extra`."""
    slots = all_returned(runner.slots(), GraphSlot, runner, "slots")
    return tuple(
        slot
        for slot in slots
        if "." in slot.name and slot.enabled and slot.copy_from_fb and slot.source_fn is None
    )


def drawn_batch(
    problem: Problem, config: Config, fields: Sequence[GraphSlot], device: torch.device
) -> ForwardBatch:
    """Return the batch of a problem, with a value for each of a runner's own fields.

    Where the lane's batches carry embeddings, so does it.

    Floats are normal, but negative in fields of one number for each row, such as log probabilities; integers
    are token ids. Rows of one request that a frozen cache repeats are equal.
    """
    batch = problem.batch(counts=config.counts)
    batch.extra = {slot.name: problem.value_of(slot) for slot in fields}
    if config.case.embeds:
        batch.input_embeds, batch.mrope_positions = problem.embedded(config.dtype)
    return batch.to(device)


_OF_THE_CORE = tuple(value for value in vars(EagerReason).values() if isinstance(value, EagerReason))


def own_reasons(runner: GraphRunner) -> tuple[EagerReason, ...]:
    """Return the declared reasons with which a runner may leave a batch to an eager step.

    Reasons of the core are left out: they say that no captured shape holds a batch.

    Raises:
        EngineError: ``declines`` is no collection of reasons.
    """
    declared = all_returned(runner.declines, EagerReason, runner, "declines")
    return tuple(reason for reason in declared if reason not in _OF_THE_CORE)


def _each_due(
    fill: Callable[[BoundSlot], None],
) -> Callable[[CudaGraphBufferRegistry, GraphShape], None]:
    def before(registry: CudaGraphBufferRegistry, _: GraphShape) -> None:
        for slot in registry:
            if slot.buffer is not None and is_due(slot):
                fill(slot)

    return before


def _tail_of(
    value: torch.Tensor, slot: BoundSlot | None, raw: tuple[int, int], shape: GraphShape
) -> tuple[int | None, int]:
    """Return the first padding row of a tensor, and the axis of its rows; None if it has none.

    A tensor has a whole number of rows per request or token, and offsets have one more. Where a slot has its
    own slices, rows lie along the axis in which these grow.
    """
    if slot is None or slot.axis == "none":
        return None, 0
    by_request = slot.axis == "bs"
    raw_rows = raw[0] if by_request else raw[1]
    padded = shape.batch_size if by_request else shape.num_tokens
    if raw_rows >= padded:
        return None, 0
    fixed: set[int] = set()
    if slot.slice_fn is not None:
        fewer, whole = slot.slice_for(*raw).shape, slot.slice_for(shape.batch_size, shape.num_tokens).shape
        if len(whole) == value.dim():
            fixed = {dim for dim, size in enumerate(whole) if size == fewer[dim]}
    for dim, size in enumerate(value.shape):
        if dim in fixed:
            continue
        each, more = divmod(size, padded)
        if each and more <= 2:
            return min(each * raw_rows + min(more, 1), size), dim
    return None, 0
