"""Experiments test what is no lane: a decode loop written by hand, with buffers, attention and graphs.

It has no backend, no runner, no registry and no driver. Its "graph" is a closure over the view and the
metadata of the capture, as in an engine that drops what `build` returns at replay.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import pytest
import torch

from graphpact import Capabilities, ForwardBatch, ForwardMode, GraphShape, LayerSpec
from graphpact.attention import BackendContext, GraphSupport, HeadLayout
from graphpact.buffers import BoundSlot, GraphSlot, PaddingPolicy, metadata_slot
from graphpact.pact import Pact, Promise, walk
from graphpact.shapes import EagerReason
from graphpact.step import StepOutputs
from graphpact.tensors import same
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.model import Model
from graphpact_conformance.oracle import Answer, answer
from graphpact_conformance.results import Finding
from graphpact_conformance.subject.global_state import StateWatch
from graphpact_conformance.subject.kv_memory import KvMemory
from graphpact_conformance.subject.records import Leaf, Ready, StepRecord, copies
from graphpact_conformance.subject.under_test import Reporting, Subject, UnderTest, Way
from graphpact_conformance.world.lanes import CONTEXT, Case, Config, configs_of
from graphpact_conformance.world.problems import Problem, draw
from graphpact_tape.strict_observer import is_due
from graphpact_tape.trace import TracedCall

CPU = torch.device("cpu")
FILL = 1  # the length of a padding row


# -- a builder of attention metadata, and its kernel -------------------------------------------------


class Metadata(NamedTuple):
    """What the kernel reads: page numbers ``[bs, pages]``, key counts ``[bs]``, and their upper bound."""

    pages: torch.Tensor
    lengths: torch.Tensor
    longest: int


class Builder:
    """Persistent buffers for the largest batch, and one ``build`` for captures and replays."""

    def __init__(self, most: int, page_size: int) -> None:
        self.page_size = page_size
        width = -(-CONTEXT // page_size)
        pages = metadata_slot("hand.pages", lambda bs, _: (bs, width), torch.int32, role="table", axis="bs")
        lengths = metadata_slot("hand.lengths", lambda bs, _: (bs,), torch.int32, role="lengths", axis="bs")
        self.pages = pages.bound(torch.zeros(most, width, dtype=torch.int32))
        self.lengths = lengths.bound(torch.zeros(most, dtype=torch.int32))

    def build(self, view: ForwardBatch, table: torch.Tensor, real: int) -> Metadata:
        """Write the buffers from the padded view; ``real`` requests of it are live."""
        del real
        bs = view.batch_size
        pages, lengths = self.pages.slice_for(bs, bs), self.lengths.slice_for(bs, bs)
        firsts = table[view.req_pool_indices][:, :: self.page_size] // self.page_size
        used = torch.arange(firsts.shape[1]) * self.page_size < view.seq_lens[:, None]
        pages.copy_(torch.where(used, firsts, 0))
        lengths.copy_(view.seq_lens)
        return Metadata(pages, lengths, CONTEXT)


class KeepsPages(Builder):
    """Writes the pages of live requests only."""

    def build(self, view: ForwardBatch, table: torch.Tensor, real: int) -> Metadata:
        """Build for all rows, and put the old pages of padding rows back."""
        before = self.pages.slice_for(view.batch_size, 0).clone()
        found = super().build(view, table, real)
        found.pages[real:] = before[real:]
        return found


class NewLengths(Builder):
    """Makes the key counts anew in each step."""

    def build(self, view: ForwardBatch, table: torch.Tensor, real: int) -> Metadata:
        """Return lengths in new memory."""
        return super().build(view, table, real)._replace(lengths=view.seq_lens.int())


class LongestOfCapture(Builder):
    """Gives the kernel the longest request of the batch, a host number that the graph freezes."""

    def build(self, view: ForwardBatch, table: torch.Tensor, real: int) -> Metadata:
        """Return the bound of this batch."""
        longest = max([*view.seq_lens_cpu.tolist(), FILL])
        return super().build(view, table, real)._replace(longest=longest)


class LiveSlots(Builder):
    """Points padding rows to the page of the first request."""

    def build(self, view: ForwardBatch, table: torch.Tensor, real: int) -> Metadata:
        """Return pages of padding rows that belong to a live request."""
        found = super().build(view, table, real)
        if real:
            found.pages[real:] = found.pages[0]
        return found


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: Metadata, page_size: int, layer: LayerSpec
) -> torch.Tensor:
    """Return ``[T, heads, width]``: each query over the keys of its pages, up to its length."""
    slots = (at.pages.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)[:, : at.longest]
    seen = torch.arange(slots.shape[1]) < at.lengths[:, None]
    groups = layer.num_q_heads // layer.num_kv_heads
    keys, values = (cache[slots].repeat_interleave(groups, dim=2) for cache in (k, v))
    scores = torch.einsum("thd,tnhd->thn", q, torch.where(seen[:, :, None, None], keys, 0)) * layer.scaling
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=2)
    return torch.einsum("thn,tnhd->thd", weights, torch.where(seen[:, :, None, None], values, 0))


# -- the subject -------------------------------------------------------------------------------------

_INPUTS = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu")


@dataclass
class _Graph:
    run: Callable[[], StepOutputs]
    view: ForwardBatch
    metadata: Metadata
    pact: Pact


class _HandWritten:
    """A decode loop with graphs of its own; see `Subject`."""

    declines: Collection[EagerReason] = ()
    padded_seq_len = FILL
    writer = "`build`"
    device = CPU
    num_steps, num_shared, feeds_itself = 1, 0, False

    def __init__(self, config: Config, builder: type[Builder], *, capture: bool, copies: bool) -> None:
        self.config = config
        self.net = Model(config, config.layers, CPU)
        self.net.copies_attention = copies
        self.cache = KvMemory(config, CPU)
        self.table = torch.zeros(config.num_rows, CONTEXT, dtype=torch.int32)
        most = config.shapes[-1].batch_size
        self.builder = builder(most, config.page_size)
        inputs = [
            GraphSlot(
                name,
                lambda bs, _: (bs,),
                torch.int64,
                axis="bs",
                padding_policy=PaddingPolicy.FILL_SENTINEL,
                pad_value=FILL if name.startswith("seq_lens") else 0,
            ).bound(torch.zeros(most, dtype=torch.int64))
            for name in _INPUTS
        ]
        self.slots: list[BoundSlot] = [*inputs, self.builder.pages, self.builder.lengths]
        self._graphs: dict[GraphShape, _Graph] = {}
        if capture:
            self.capture()

    # -- capture

    @property
    def planned(self) -> Sequence[GraphShape]:
        return self.config.shapes

    @property
    def captured(self) -> Sequence[GraphShape]:
        return list(self._graphs)

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        bs = shape.batch_size
        zeros = {name: torch.zeros(bs, dtype=torch.int64) for name in _INPUTS}
        zeros |= {name: torch.full((bs,), FILL) for name in ("seq_lens", "seq_lens_cpu")}
        return ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=bs, **zeros)

    @torch.inference_mode()
    def capture(
        self,
        shape: GraphShape | None = None,
        batch: ForwardBatch | None = None,
        *,
        ready: Ready | None = None,
    ) -> None:
        for each in reversed(self.planned) if shape is None else [shape]:
            view, metadata = self._prepare(self.dummy(each) if batch is None else batch, each)
            if ready is not None:
                ready(view, metadata)

            def run(view: ForwardBatch = view, metadata: Metadata = metadata) -> StepOutputs:
                return self._forward(view, metadata)

            self._graphs[each] = _Graph(run, view, metadata, Pact.of(each, view=view, metadata=metadata))

    def close(self) -> None:
        self._graphs.clear()

    def runs_of_capture(self, problem: Problem, shape: GraphShape) -> list[list[TracedCall]]:
        del problem, shape
        return []

    def serve_declined(self, shape: GraphShape) -> None:
        del shape

    # -- a step

    def load(self, problem: Problem) -> None:
        self.table.copy_(problem.page_table(self.config))
        self.cache.load(problem)

    def batch_of(self, problem: Problem) -> ForwardBatch:
        return problem.batch()

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        if batch.forward_mode not in (ForwardMode.DECODE, ForwardMode.IDLE):
            return EagerReason.WRONG_MODE
        if batch.batch_size and batch.tokens_per_request != 1:
            return EagerReason.OTHER_WIDTH
        fits = (shape for shape in self.planned if shape.batch_size >= batch.batch_size)
        return next(fits, EagerReason.OVER_LARGEST)

    def _prepare(self, batch: ForwardBatch, shape: GraphShape) -> tuple[ForwardBatch, Metadata]:
        bs, real = shape.batch_size, batch.batch_size
        given: dict[str, torch.Tensor] = {}
        for slot in self.slots[: len(_INPUTS)]:
            given[slot.name] = value = slot.slice_for(bs, bs)
            value[:real] = getattr(batch, slot.name)
            value[real:] = slot.initial_value
        view = ForwardBatch(forward_mode=shape.mode, batch_size=bs, **given)
        return view, self.builder.build(view, self.table, real)

    def _forward(self, view: ForwardBatch, metadata: Metadata) -> StepOutputs:
        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, at: Any
        ) -> torch.Tensor:
            k_cache, v_cache = self.cache.kv.k[layer.layer_id], self.cache.kv.v[layer.layer_id]
            k_cache[view.out_cache_loc], v_cache[view.out_cache_loc] = k, v
            return paged_attention(q, k_cache, v_cache, at, self.config.page_size, layer)

        return self.net(view, metadata, attend)  # type: ignore[arg-type]  # no frozen KV here

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
        del may_decline
        self.load(problem)
        if after_load is not None:
            after_load()
        batch = self.batch_of(problem) if batch is None else batch
        given = {name: tensor.clone() for name, tensor in batch.tensors().items()}
        step = StepRecord(problem)
        try:
            self._run(step, batch, fill, ready, eagerly=eagerly)
            step.stage = "done"
        except Exception as error:  # noqa: BLE001  the builder's code may raise anything
            step.error = error
        step.caches = self.cache.contents()
        step.table = self.table.clone()
        step.changed_fields = [n for n, t in batch.tensors().items() if not bool(same(t, given[n]).all())]
        return step

    def _run(
        self,
        step: StepRecord,
        batch: ForwardBatch,
        fill: Callable[[BoundSlot], None] | None,
        ready: Ready | None,
        *,
        eagerly: bool,
    ) -> None:
        fit = EagerReason.NO_GRAPHS if eagerly else self.fit(batch)
        if isinstance(fit, EagerReason):
            step.eager_runs, step.reason = 0 if eagerly else 1, None if eagerly else fit
            outputs = self.run(batch, eagerly=True)
            step.rows, step.axes = copies(outputs), outputs.axes
            return
        step.shape, real = fit, batch.batch_size
        for slot in self.slots if fill is not None else ():
            if fill is not None and is_due(slot):
                fill(slot)
        view, metadata = self._prepare(batch, fit)
        undo = None if ready is None else ready(view, metadata)
        self._see(step, view, metadata, real)
        graph = self._graphs[fit]
        step.breaches = graph.pact.breaches(view=view, metadata=metadata)
        outputs = graph.run()
        step.replayed.append(fit)
        step.outputs, step.axes = copies(outputs), outputs.axes
        step.rows = {name: tensor[:real] for name, tensor in step.outputs.items()}
        if undo is not None:
            undo()

    def _see(self, step: StepRecord, view: ForwardBatch, metadata: Metadata, real: int) -> None:
        by_address = {slot.buffer.data_ptr(): slot for slot in self.slots if slot.buffer is not None}
        for path, value in walk({"view": view, "metadata": metadata}):
            if not isinstance(value, torch.Tensor):
                step.numbers[path] = value
                continue
            slot = by_address.get(value.data_ptr())
            tail = real if slot is not None and real < view.batch_size else None
            due = slot is not None and is_due(slot)
            step.leaves[path] = Leaf(path, value.clone(), slot, tail, 0, due, is_alias=False)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, *, eagerly: bool = False) -> StepOutputs:
        fit = EagerReason.NO_GRAPHS if eagerly else self.fit(batch)
        real = batch.batch_size
        if isinstance(fit, EagerReason):
            eager = Builder(max(real, 1), self.config.page_size)
            return self._forward(batch, eager.build(batch, self.table, real))
        self._prepare(batch, fit)
        return self._graphs[fit].run().rows(real, real)

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch) -> None:
        fit = self.fit(batch)
        assert isinstance(fit, GraphShape)
        self._prepare(batch, fit)

    def synchronize(self) -> None:
        pass

    def replay(self, problem: Problem, shape: GraphShape) -> StepRecord:
        step = StepRecord(problem, stage="done", shape=shape)
        graph = self._graphs[shape]
        outputs = graph.run()
        self._see(step, graph.view, graph.metadata, problem.batch_size)
        step.outputs, step.axes = copies(outputs), outputs.axes
        return step

    # -- what it reads

    def states(self) -> dict[str, torch.Tensor]:
        return {}

    def held(self) -> dict[str, torch.Tensor]:
        return {}

    def external(self, shape: GraphShape) -> list[torch.Tensor]:
        del shape
        return []

    def name_of(self, tensor: torch.Tensor, shape: GraphShape) -> str:
        del shape
        return next(f"builder.{name}" for name, value in vars(self.builder).items() if value is tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(tensor is value for value in vars(self.builder).values())

    def trace(self, shape: GraphShape) -> list[TracedCall]:
        del shape
        return []

    def promises(self, shape: GraphShape) -> Mapping[str, Promise]:
        return {promise.path: promise for promise in self._graphs[shape].pact.promises}

    def num_segments(self, shape: GraphShape) -> int:
        del shape
        return 1

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight for layer in self.net.weights for weight in layer]

    # -- what it answers

    def answer(self, problem: Problem) -> Answer:
        self.load(problem)
        context = BackendContext(
            CPU, torch.float32, self.config.layers, self.config.limits, self.table, self.cache.copy()
        )
        return answer(self.cache.compact(problem), self.batch_of(problem), self.net, context)

    def where(self, name: str, column: int) -> str:
        return self.net.where(name, column)

    def other_weights(self, which: Collection[int], ids: Collection[int]) -> AbstractContextManager[None]:
        return self.net.other_weights(which, ids)


@dataclass
class _HandWrittenUnderTest(Reporting):
    """The decode loop with one builder; see `UnderTest`."""

    config: Config
    builder: type[Builder]
    listed: frozenset[str] | None = None
    kind: Literal["attention_backend", "runner"] = "attention_backend"
    watch: StateWatch = field(default_factory=StateWatch)
    _made: dict[Way, _HandWritten] = field(default_factory=dict, init=False)

    device = CPU
    ways: tuple[Way, ...] = ("graph",)
    eager_attention = False
    graph_support = GraphSupport.UNIFORM_DECODE
    captures_nothing = False
    no_graphs_declared: str | None = None

    def default_shapes(self, most: int) -> Sequence[GraphShape]:
        return [GraphShape(ForwardMode.DECODE, size, size) for size in {1, most}]

    def fit_default(self, most: int, batch: ForwardBatch) -> GraphShape | EagerReason:
        fits = (shape for shape in self.default_shapes(most) if shape.batch_size >= batch.batch_size)
        return next(fits, EagerReason.OVER_LARGEST)

    def declined(self, problem: Problem) -> EagerReason | None:
        del problem
        return None

    def rig(self, way: Way = "graph") -> _HandWritten:
        if way not in self._made:
            self._made[way] = self.build(way)
        return self._made[way]

    guarded = rig  # nothing is stricter here

    def build(
        self,
        way: Way = "graph",
        *,
        guarded: bool = False,
        capture: bool = True,
        copies_attention: bool = False,
    ) -> _HandWritten:
        del way, guarded
        return _HandWritten(self.config, self.builder, capture=capture, copies=copies_attention)

    def build_sharing(self) -> tuple[_HandWritten, _HandWritten]:
        return self.build(), self.build()

    def of_another_mode(self, *, capture: bool = False) -> tuple[Subject, Problem] | None:
        del capture
        return None

    def with_sinks(self) -> "_HandWrittenUnderTest":
        return self

    def anew(self, listed: Iterable[str] | None = None) -> "_HandWrittenUnderTest":
        return replace(self, listed=self.listed if listed is None else frozenset(listed))

    def like(self, config: Config) -> "_HandWrittenUnderTest":
        return replace(self, config=config)

    def clear_caches(self) -> None:
        pass

    def answer(self, rig: Subject, problem: Problem) -> Answer:
        return rig.answer(problem)


# -- what the experiments say of it ------------------------------------------------------------------

CAPABILITIES = Capabilities(
    modes=frozenset({ForwardMode.DECODE}),
    graph_support=GraphSupport.UNIFORM_DECODE,
    page_sizes=frozenset({16}),
    dtypes=frozenset({torch.float32}),
    devices=frozenset({"cpu"}),
    head_layouts=frozenset({HeadLayout.GQA}),
    seq_len_fill_value=FILL,
)


def _under_test(builder: type[Builder]) -> _HandWrittenUnderTest:
    (config,) = configs_of(CAPABILITIES, cases=[Case(ForwardMode.DECODE)])
    return _HandWrittenUnderTest(config, builder)


def _findings(tested: UnderTest, experiment: Experiment) -> list[Finding]:
    (steps,) = draw(tested.config, 1, 0)
    with torch.inference_mode():
        found = experiment.findings(tested.anew(experiment.examines), steps)
    assert found.error is None
    return found.findings


BY_NAME = {e.name: e for e in EXPERIMENTS if e.name != "ranks_agree"}
"""The loop knows nothing of ranks."""


def test_a_right_subject_that_is_no_lane_passes() -> None:
    """Every experiment runs on a decode loop without backend, runner and registry, and accuses nothing."""
    right = _under_test(Builder)
    assert [found for experiment in BY_NAME.values() for found in _findings(right, experiment)] == []


@pytest.mark.parametrize(
    ("builder", "rule", "experiment", "field"),
    [
        (KeepsPages, "GP03", "unwritten_and_stale", "metadata.pages"),
        (NewLengths, "GP01", "replay_against_capture", "metadata.lengths"),
        (LongestOfCapture, "GP08", "replay_against_capture", "metadata.longest"),
        (LiveSlots, "GP04", "padding", "padding row"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bug_in_a_subject_that_is_no_lane_is_caught(
    builder: type[Builder], rule: str, experiment: str, field: str
) -> None:
    """A planted bug is found under its own rule, in the field where it was planted."""
    found = _findings(_under_test(builder), BY_NAME[experiment])
    assert any(f.rule == rule and field in (f.field or "") for f in found), found


def test_the_operations_of_a_capture_name_lines_of_what_is_tested() -> None:
    """Each operation of each run of a capture has a line, and none is a line of the tracer."""
    (config,) = configs_of(CAPABILITIES, cases=[Case(ForwardMode.DECODE)])
    ((exact, *_),) = draw(config, 1, 0)
    runs = LaneUnderTest(config).build(capture=False).runs_of_capture(exact, config.shapes[-1])
    assert len(runs) > 1
    lines = [str(call.line) for run in runs for call in run]
    assert lines
    assert not [line for line in lines if "tracer.py" in line or "/rig.py" in line]
