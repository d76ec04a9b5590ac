"""Tests of `Lane`: statistics, hooks, outputs, the two halves of a step, and planted bugs."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pluggy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import (
    EagerReason,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    Lane,
    Limits,
    Pact,
    RegionContext,
    StepOutputs,
    hookimpl,
)
from graphpact.buffers import FillContext, GraphSlot, fills
from graphpact.errors import (
    CaptureError,
    ConfigError,
    EngineError,
    GraphpactError,
    PactBreach,
    SlotError,
)
from graphpact.runners import EagerRunner
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_flashinfer import FlashInferBackend, FlashInferMetadata
from rigs.lane import DTYPE, HOOKS, LAYER, SHAPE_OF, VOCAB, WIDTH, LaneRig


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Enable inference mode, in which a test may overwrite the outputs of a graph."""
    with torch.inference_mode():
        yield


# -- statistics ------------------------------------------------------------------------------------


def test_replays_and_eager_runs_are_counted_with_their_reasons() -> None:
    """Each run counts as a replay of a shape, with its live rows, or as an eager run for a reason."""
    rig = LaneRig()
    assert rig.agrees(3)
    assert rig.agrees(2, 5, 1)
    assert rig.agrees(8, 8, 8)
    assert rig.agrees(1, 2, 3, 4, 5)
    rig.lane.run(rig.batch(2, 2, mode=ForwardMode.EXTEND))
    stats = rig.lane.stats
    assert {s.batch_size: (n.replays, n.raw_rows) for s, n in stats.shapes.items()} == {
        1: (1, 1),
        2: (0, 0),
        4: (2, 6),
    }
    assert stats.replays == 3
    assert dict(stats.eager) == {
        (ForwardMode.DECODE, EagerReason.OVER_LARGEST): 1,
        (ForwardMode.EXTEND, EagerReason.WRONG_MODE): 1,
    }
    waste = {s.batch_size: n.padding_waste(s) for s, n in stats.shapes.items()}
    assert waste == {1: 0.0, 2: 0.0, 4: 0.25}
    assert all(n.capture_seconds > 0 and n.num_nodes > 0 for n in stats.shapes.values())


def test_eager_reasons_of_lanes_without_graphs() -> None:
    """The reason is NOT_CAPTURED before capture; with the eager runner it is NO_GRAPHS, and capture fails."""
    rig = LaneRig(capture=False)
    rig.lane.run(rig.batch(2))
    assert list(rig.lane.stats.eager) == [(ForwardMode.DECODE, EagerReason.NOT_CAPTURED)]
    rig = LaneRig(runner=EagerRunner)
    assert rig.lane.run(rig.batch(2)).logits.shape == (1, VOCAB)
    assert list(rig.lane.stats.eager) == [(ForwardMode.DECODE, EagerReason.NO_GRAPHS)]
    assert rig.lane.stats.replays == 0
    assert rig.lane.registry is None
    with pytest.raises(EngineError, match="has no graphs"):
        rig.lane.capture(SHAPE_OF[1])


def test_a_lane_that_may_not_capture_runs_eagerly_for_its_own_reason() -> None:
    """A lane with an `eager_reason` has no shapes and counts its eager steps under that reason."""
    reason = EagerReason("no_compiler", "no C++ compiler")
    rig = LaneRig(eager_reason=reason)
    assert rig.lane.shapes == ()
    assert rig.lane.registry is None
    assert rig.agrees(2, 3)
    assert rig.lane.stats.eager == {(ForwardMode.DECODE, reason): 1}


def test_shapes_are_captured_largest_first_and_announced() -> None:
    """`capture_all` captures the largest shape first; an observer of `capture` sees each one captured."""
    seen: list[GraphShape] = []

    class Announces:
        @hookimpl(wrapper=True)
        def capture(self, lane: Lane, shape: GraphShape, batch: ForwardBatch | None) -> Any:
            assert batch is None
            assert shape not in lane.captured
            captured = yield
            assert lane.captured[shape] is captured
            seen.append(shape)
            return captured

    rig = LaneRig(observers=[Announces()])
    assert [s.batch_size for s in seen] == [4, 2, 1]
    assert list(rig.lane.stats.shapes) == seen


def test_only_real_rows_come_back() -> None:
    """A padded replay returns only the live rows, in the output memory of the graph."""
    rig = LaneRig()
    logits = rig.lane.run(rig.batch(4, 4, 4)).logits
    assert logits.shape == (3, VOCAB)
    assert logits.data_ptr() == rig.lane.captured[SHAPE_OF[4]].graph.outputs.logits.data_ptr()


@pytest.mark.parametrize(("mode", "every", "checks"), [("always", 1, 7), ("sampled", 3, 3), ("off", 1, 0)])
def test_the_pact_is_checked_as_often_as_asked(mode: str, every: int, checks: int) -> None:
    """The pact is checked at every replay, at the first and every n-th after it, or never."""
    rig = LaneRig(pact=mode, pact_sample_every=every)
    for _ in range(7):
        assert rig.agrees(1, 2)
    assert rig.lane.stats.pact_checks == checks


def test_a_closed_lane_runs_eagerly() -> None:
    """`close` releases every graph; later batches run eagerly."""
    rig = LaneRig()
    assert rig.agrees(2, 2)
    graphs = [captured.graph for captured in rig.lane.captured.values()]
    rig.lane.close()
    assert all(graph.outputs is None for graph in graphs)
    assert not rig.lane.captured
    assert rig.agrees(3, 3)
    assert rig.lane.stats.replays == 1
    assert list(rig.lane.stats.eager) == [(ForwardMode.DECODE, EagerReason.NOT_CAPTURED)]


def test_closing_a_lane_releases_every_graph() -> None:
    """If the release of a graph raises, the other graphs are released, and later batches run eagerly."""
    rig = LaneRig()
    graphs = [captured.graph for captured in rig.lane.captured.values()]

    def refuse() -> None:
        raise OSError("busy")

    graphs[1].release = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="busy"):
        rig.lane.close()
    assert [graph.outputs is None for graph in graphs] == [at != 1 for at in range(len(graphs))]
    assert rig.agrees(3, 3)
    rig.lane.close()  # nothing is left


# -- hooks -----------------------------------------------------------------------------------------


class Watcher:
    """An observer that records every hook call and its result."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.results: list[Any] = []

    def _watch(self, name: str) -> Any:
        self.seen.append(name)
        result = yield
        self.results.append(result)
        return result

    @hookimpl(wrapper=True)
    def populate(self, batch: ForwardBatch) -> Any:
        """Record the call, with fewer arguments than the hook has."""
        return (yield from self._watch("populate"))

    @hookimpl(wrapper=True)
    def prepare_replay(self, registry: Any, batch: ForwardBatch, shape: GraphShape) -> Any:
        """Watch."""
        return (yield from self._watch("prepare_replay"))

    @hookimpl(wrapper=True)
    def init_metadata_capture(self, view: ForwardBatch) -> Any:
        """Watch."""
        return (yield from self._watch("init_metadata_capture"))

    @hookimpl(wrapper=True)
    def init_metadata_replay(self, view: ForwardBatch, captured: Any) -> Any:
        """Watch."""
        return (yield from self._watch("init_metadata_replay"))

    @hookimpl(wrapper=True)
    def run_step(self) -> Any:
        """Watch."""
        return (yield from self._watch("run_step"))


def _resolved(rig: LaneRig, name: str) -> Any:
    """Return the callable that a step of the lane uses for hook ``name``."""
    return getattr(rig.lane, f"_{name}")


def test_unobserved_hooks_are_bound_methods() -> None:
    """Without an observer a step calls the plugins' bound methods directly, without pluggy."""
    rig = LaneRig(capture=False)
    owners = {"populate": rig.runner, "prepare_replay": rig.runner}
    for name in HOOKS:
        owner = owners.get(name, rig.backend)
        assert _resolved(rig, name) == getattr(owner, name)
    assert not isinstance(_resolved(rig, "run_step"), pluggy.HookCaller)


def test_an_observer_sees_every_call() -> None:
    """A wrapped hook is a pluggy caller; the observer sees captures, replays and eager steps."""
    watcher = Watcher()
    rig = LaneRig(observers=[watcher])
    for name in (*HOOKS, "run_step"):
        assert isinstance(_resolved(rig, name), pluggy.HookCaller)
    assert watcher.seen == ["populate", "prepare_replay", "init_metadata_capture"] * 3
    watcher.seen.clear()
    watcher.results.clear()
    for _ in range(2):
        assert rig.agrees(1, 2, 3)
    step = ["run_step", "populate", "prepare_replay", "init_metadata_replay"]
    assert watcher.seen == step * 2
    captured = rig.lane.captured[SHAPE_OF[4]]
    assert watcher.results[0] is None
    assert watcher.results[1] is captured.context.view
    assert watcher.results[2] is captured.context.metadata
    assert watcher.results[3].logits.shape == (3, VOCAB)
    rig.lane.run(rig.batch(1, 1, 1, 1, 1))
    assert watcher.seen == [*step * 2, "run_step"]


def test_an_observer_of_one_hook_costs_the_others_nothing() -> None:
    """Only the observed hook goes through pluggy."""

    class OnlyReplay:
        calls = 0

        @hookimpl(wrapper=True)
        def init_metadata_replay(self, shape: GraphShape) -> Any:
            OnlyReplay.calls += 1
            return (yield)

    rig = LaneRig(observers=[OnlyReplay()])
    assert isinstance(_resolved(rig, "init_metadata_replay"), pluggy.HookCaller)
    assert all(inspect.ismethod(_resolved(rig, n)) for n in HOOKS[:3])
    assert rig.agrees(3)
    assert OnlyReplay.calls == 1


def test_a_hook_with_fewer_arguments_gets_those_it_names() -> None:
    """An implementation with fewer arguments than its hook works, without pluggy's caller in the step.

    As with pluggy, an argument with a default gets the hook's value if the hook has it.
    """
    seen = []

    class Brief(FlashInferBackend):
        @hookimpl
        def init_metadata_replay(
            self, captured: Any, view: ForwardBatch, shape: Any = 0, more: int = 1
        ) -> Any:
            seen.append((type(shape), more))
            self.fill_metadata(view, captured)
            return captured

    rig = LaneRig(backend=Brief)
    assert not isinstance(_resolved(rig, "init_metadata_replay"), pluggy.HookCaller)
    assert rig.agrees(2, 7)
    watched = LaneRig(backend=Brief, observers=[Watcher()])
    assert isinstance(_resolved(watched, "init_metadata_replay"), pluggy.HookCaller)
    assert watched.agrees(2, 7)
    assert {*seen} == {(GraphShape, 1)}


def test_an_observer_that_does_nothing_changes_nothing() -> None:
    """Logits with and without observers are the same, bit for bit."""
    plain, watched = LaneRig(), LaneRig(observers=[Watcher()])
    for lengths in ((3,), (1, 8), (5, 2, 2)):
        a, b = (rig.lane.run(rig.batch(*lengths)).logits for rig in (plain, watched))
        assert torch.equal(a, b)


def _counted(hook: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Return a wrapper of ``hook`` with the same arguments and no marker, which records each call."""

    @functools.wraps(hook, updated=())
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(hook.__name__)
        return hook(*args, **kwargs)

    return counted


@pytest.mark.parametrize("way", ["in the class", "in a base class"])
@pytest.mark.parametrize("name", HOOKS)
def test_an_override_of_a_hook_needs_no_marker(name: str, way: str) -> None:
    """A method of a backend or a runner, or of a mixin, with the name of a hook is called in each step."""
    base: Any = CudaGraphRunner if name in ("populate", "prepare_replay") else FlashInferBackend
    calls: list[str] = []
    with_hook = {name: _counted(getattr(base, name), calls)}
    if way == "in the class":
        kind = type("Unmarked", (base,), with_hook)
    else:
        kind = type("Unmarked", (type("Mixin", (), with_hook), base), {})
    rig = LaneRig(**{"runner" if base is CudaGraphRunner else "backend": kind})
    at_capture = len(calls)
    assert rig.agrees(2, 7)
    assert len(calls) - at_capture == (name != "init_metadata_capture")
    assert calls


@pytest.mark.parametrize("name", HOOKS)
def test_a_missing_hook_is_refused_when_the_lane_is_built(name: str) -> None:
    """A method put into a class later, without `@hookimpl`, is refused; the error names the hook."""

    def unmarked(self: Any, **kwargs: Any) -> None:
        raise AssertionError("never called")

    base: Any = CudaGraphRunner if name in ("populate", "prepare_replay") else FlashInferBackend
    part = "runner" if base is CudaGraphRunner else "backend"
    kind = type("Unmarked", (base,), {})
    setattr(kind, name, unmarked)
    with pytest.raises(EngineError) as error:
        LaneRig(**{part: kind})
    assert repr(name) in str(error.value)
    assert "@graphpact.hookimpl" in str(error.value)


def test_a_misspelt_hook_is_refused_when_the_lane_is_built() -> None:
    """A method marked with `@hookimpl` that is not a hook of the contract is an error."""

    class Misspelt(FlashInferBackend):
        @hookimpl
        def init_metadata_reply(self, view: ForwardBatch) -> None:
            """Never called."""

    with pytest.raises(pluggy.PluginValidationError, match="init_metadata_reply"):
        LaneRig(backend=Misspelt)


def test_a_hook_with_an_unknown_argument_is_refused_when_the_lane_is_built() -> None:
    """A hook implementation with an argument that the hook does not have is an error."""

    class Greedy:
        @hookimpl(wrapper=True)
        def populate(self, everything: Any) -> Any:
            return (yield)

    with pytest.raises(pluggy.PluginValidationError, match="everything"):
        LaneRig(observers=[Greedy()])


# -- outputs ---------------------------------------------------------------------------------------


def _gives(outputs: Callable[[StepOutputs], Any], **lane: Any) -> LaneRig:
    """Return a captured rig whose model returns ``outputs`` applied to its usual outputs."""
    rig = LaneRig(capture=False, **lane)
    plain = rig.model
    rig.lane.model = lambda batch, metadata, attend: outputs(plain(batch, metadata, attend))
    rig.lane.capture_all()
    return rig


def test_a_shape_with_as_many_tokens_as_requests_is_captured() -> None:
    """Decode outputs are sliced by their declared axis, although batch_size == num_tokens."""

    def both(outputs: StepOutputs) -> StepOutputs:
        logits = outputs.logits
        return StepOutputs(
            logits=(logits, "bs"), hidden=(logits * 2, "tokens"), table=(logits.sum(0), "none")
        )

    rig = _gives(both)
    outputs = rig.lane.run(rig.batch(3, 2, 4))
    assert outputs.logits.shape == outputs["hidden"].shape == (3, VOCAB)
    assert torch.equal(outputs["hidden"], outputs.logits * 2)
    assert outputs["table"].shape == (VOCAB,)
    assert dict(outputs.axes) == {"logits": "bs", "hidden": "tokens", "table": "none"}


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (lambda o: o.logits, r"decode\[bs=4, tokens=4\] returned a Tensor, not StepOutputs"),
        (lambda o: None, "returned a NoneType, not StepOutputs"),
        (
            lambda o: StepOutputs(logits=(o.logits, "bs"), hidden=(o.logits[:-1], "tokens")),
            "output 'hidden' has 3 rows; its axis 'tokens' has 4",
        ),
        (lambda o: StepOutputs(hidden=(o.logits.sum(), "bs")), "output 'hidden' is .* no rows"),
        (lambda o: StepOutputs(hidden=(o.logits, "rows")), "output 'hidden' has the axis 'rows'"),
    ],
)
def test_outputs_without_clear_rows_are_refused_at_capture(
    outputs: Callable[[StepOutputs], Any], says: str
) -> None:
    """A wrong return type and an output with a wrong axis or row count are refused; no graph is kept."""
    rig = LaneRig(capture=False)
    plain = rig.model
    rig.lane.model = lambda batch, metadata, attend: outputs(plain(batch, metadata, attend))
    with pytest.raises(GraphpactError, match=says):
        rig.lane.capture_all()
    assert not rig.lane.captured
    assert not rig.lane.stats.shapes


# -- prepared and launched -------------------------------------------------------------------------


def test_there_is_one_record_of_each_captured_shape() -> None:
    """`captured` is a read-only mapping from each shape to its step, graph, pact and statistics."""
    rig = LaneRig()
    captured = rig.lane.captured
    assert [shape.batch_size for shape in captured] == [4, 2, 1]
    for shape, record in captured.items():
        assert record.context.shape == shape
        assert record.context.num_tokens == shape.num_tokens
        assert record.stats is rig.lane.stats.shapes[shape]
        assert rig.lane.registry is not None
        again = rig.lane.registry.static_inputs(rig.batch(1), shape)
        assert record.context.view is again
        outputs = rig.lane.run(rig.batch(*[3] * shape.batch_size))
        assert outputs.logits.data_ptr() == record.graph.outputs.logits.data_ptr()
        assert record.graph.outputs.logits.shape == (shape.batch_size, VOCAB)
        assert record.pact.shape == shape
        held = record.backend_state
        record.pact.check(view=record.context.view, metadata=record.metadata, **held)
        for other in captured.values():
            if other is not record:
                view, metadata = other.context.view, other.metadata
                assert record.pact.breaches(view=view, metadata=metadata, **held)
    with pytest.raises(TypeError):
        captured[SHAPE_OF[1]] = captured[SHAPE_OF[2]]  # type: ignore[index]


def test_a_shape_that_is_captured_again_has_one_record() -> None:
    """Capturing a shape again replaces its record and its statistics; replays stay correct."""
    rig = LaneRig()
    first = rig.lane.captured[SHAPE_OF[2]]
    rig.lane.capture(SHAPE_OF[2])
    second = rig.lane.captured[SHAPE_OF[2]]
    assert second is not first
    assert second.context.view is first.context.view
    assert len(rig.lane.captured) == 3
    assert rig.agrees(3, 5)
    assert second.stats.replays == 1


def test_a_run_is_a_launch_of_what_was_prepared() -> None:
    """`prepare` and `launch` give the same logits as `run`, bit for bit, for replays and eager steps."""
    one, other = LaneRig(), LaneRig()
    for lengths in ((3,), (1, 8, 2), (1, 1, 1, 1, 1)):
        whole = one.lane.run(one.batch(*lengths))
        prepared = other.lane.prepare(other.batch(*lengths))
        apart = other.lane.launch(prepared)
        assert torch.equal(whole.logits, apart.logits)
    assert one.lane.stats.eager == other.lane.stats.eager
    assert one.lane.stats.replays == other.lane.stats.replays == 2


@pytest.mark.parametrize("lengths", [(3, 2), (1, 1, 1, 1, 1)], ids=["replay", "eager"])
def test_a_prepared_step_is_launched_once_and_before_the_next(lengths: tuple[int, ...]) -> None:
    """`launch` refuses a step that was launched before, or that a later `prepare` or capture replaced."""
    rig = LaneRig()
    prepared = rig.lane.prepare(rig.batch(*lengths))
    rig.lane.launch(prepared)
    counted = rig.lane.stats.replays, rig.lane.stats.eager.total()
    for between in (
        lambda: None,
        lambda: rig.lane.prepare(rig.batch(2)),
        lambda: rig.lane.capture(SHAPE_OF[1]),
    ):
        between()
        with pytest.raises(EngineError, match="the launched step is not the one that was prepared last"):
            rig.lane.launch(prepared)
        prepared = rig.lane.prepare(rig.batch(*lengths))
    assert (rig.lane.stats.replays, rig.lane.stats.eager.total()) == counted


def test_the_order_of_a_step() -> None:
    """The order is fill, view, metadata, pact check, replay; in a capture, forward and pact come last."""
    order: list[str] = []

    class Ordered(FlashInferBackend):
        def forward(self, *args: Any) -> torch.Tensor:
            order.append("forward")
            return super().forward(*args)

    watcher = Watcher()
    watcher.seen = order
    rig = LaneRig(observers=[watcher], backend=Ordered, capture=False, metadata_in_graph=False)
    with pytest.MonkeyPatch.context() as patch:
        of, check = Pact.of, Pact.check
        patch.setattr(Pact, "of", lambda *a, **k: (order.append("pact"), of(*a, **k))[1])
        patch.setattr(Pact, "check", lambda *a, **k: (order.append("check"), check(*a, **k))[1])
        rig.lane.capture(SHAPE_OF[4])
        assert [*dict.fromkeys(order)] == [
            "populate",
            "prepare_replay",
            "init_metadata_capture",
            "forward",
            "pact",
        ]
        order.clear()
        graph = rig.lane.captured[SHAPE_OF[4]].graph
        replay = graph.replay
        graph.replay = lambda: (order.append("replay"), replay())[1]
        rig.lane.run(rig.batch(1, 2, 3))
    assert order == [
        "run_step",
        "populate",
        "prepare_replay",
        "init_metadata_replay",
        "check",
        "replay",
    ]


def test_the_step_sees_the_live_batch_and_its_metadata() -> None:
    """The context given to `compose` holds the view, the metadata and, after a replay, the live batch."""
    steps: list[RegionContext] = []

    class Composes(CudaGraphRunner):
        def compose(self, forward: Any, step: RegionContext) -> Any:
            steps.append(step)
            return super().compose(forward, step)

    rig = LaneRig(runner=Composes)
    assert [step.shape.batch_size for step in steps] == [4, 2, 1]
    batch = rig.batch(2, 3, 4)
    rig.lane.run(batch)
    captured = rig.lane.captured[SHAPE_OF[4]]
    assert steps[0] is captured.context
    assert steps[0].live is batch
    assert steps[0].view.seq_lens.tolist() == [2, 3, 4, 1]
    q, k, v = (torch.ones(4, 1, WIDTH, dtype=DTYPE) for _ in range(3))
    attended = rig.backend.forward(q, k, v, LAYER, steps[0].metadata)
    assert torch.equal(steps[0].attend(q, k, v, LAYER), attended)


# -- planted bugs ----------------------------------------------------------------------------------


class Rebuilds(FlashInferBackend):
    """A backend that builds new metadata at replay: correct contents, in memory that no graph reads."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return a new metadata object."""
        return self.init_metadata_eager(view)


class Rebinds(FlashInferBackend):
    """A backend that replaces one tensor in the captured metadata."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return the captured object with another tensor in it."""
        self.fill_metadata(view, captured)
        captured.kv_last_page_len = captured.kv_last_page_len.clone()
        return captured


class ChangesNumber(FlashInferBackend):
    """A backend that increases a host number that the graph has frozen."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return a copy whose bound is larger than the captured one."""
        self.fill_metadata(view, captured)
        return dataclasses.replace(captured, max_kv_len=captured.max_kv_len + 1)


class Forgets(FlashInferBackend):
    """A backend whose replay hook does nothing."""

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return the captured metadata without filling it."""
        return captured


class LeavesItToTheFill(FlashInferBackend):
    """A backend with a slot that a fill would write; eager steps have no fill."""

    more: ClassVar[dict[str, Any]] = {}

    def declare_slots(self, limits: Limits) -> list[GraphSlot]:
        """Return FlashInfer's slots and one more."""
        slot = GraphSlot("acme.table", lambda bs, _: (bs,), torch.int32, owner="acme", **self.more)
        return [*super().declare_slots(limits), slot]


@pytest.mark.parametrize(
    "more",
    [
        {"source_fn": lambda *_: None},
        {"copy_from_fb": False, "post_fill": lambda *_: None},
        {"copy_from_fb": False, "role": None},
        {"copy_from_fb": True, "source_fn": lambda *_: None, "optional": True},
    ],
)
def test_a_backend_fills_its_own_slots(more: dict[str, Any]) -> None:
    """A backend's slot that the registry would fill is refused, because eager steps have no fill."""
    backend = type("Acme", (LeavesItToTheFill,), {"more": more})
    with pytest.raises(
        SlotError, match=r"slot 'acme\.table' of acme: a backend's slot needs a role and must be filled by"
    ):
        LaneRig(backend=backend)


def test_a_buffer_is_not_replaced_behind_a_graph() -> None:
    """The buffer of a slot cannot be reassigned, so fills always write the memory that graphs read."""
    rig = LaneRig()
    registry = rig.lane.registry
    assert registry is not None
    slot = registry.get_slot("positions")
    assert slot.buffer is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        slot.buffer = slot.buffer.clone()  # type: ignore[misc]
    assert rig.agrees(3, 2, 5)


class ReadsHost(FlashInferBackend):
    """A backend whose kernel path reads a length on the host."""

    def forward(self, *args: Any) -> torch.Tensor:
        """Read, then attend."""
        metadata: FlashInferMetadata = args[-1]
        assert metadata.kv_last_page_len[0].item() > 0
        return super().forward(*args)


@pytest.mark.parametrize(
    ("backend", "field"),
    [
        (Rebuilds, "metadata.out_cache_loc|metadata.qo_indptr"),
        (Rebinds, r"metadata.kv_last_page_len \(slot 'flashinfer.kv_last_page_len' of flashinfer"),
        (ChangesNumber, "metadata.max_kv_len: bound captured <= 8, got 9"),
    ],
)
def test_the_pact_catches_when_planted(backend: type[FlashInferBackend], field: str) -> None:
    """A moved tensor or a changed host number is a breach that names the field; no replay is counted."""
    rig = LaneRig(backend=backend)
    with pytest.raises(PactBreach, match=field):
        rig.lane.run(rig.batch(3, 2))
    assert rig.lane.stats.replays == 0
    assert rig.lane.stats.pact_checks == 1


def test_without_a_pact_the_same_bug_is_a_wrong_answer() -> None:
    """The planted bug is real: without the pact check, replays are wrong."""
    rig = LaneRig(backend=Rebuilds, pact="off", metadata_in_graph=False)
    assert not rig.agrees(3, 2)


def test_a_replay_hook_that_does_nothing_is_wrong_in_values() -> None:
    """Stale metadata passes the pact check and gives wrong logits: the pact does not compare contents."""
    rig = LaneRig(backend=Forgets, metadata_in_graph=False)
    assert not rig.agrees(5, 3)
    assert rig.lane.stats.pact_checks == 1


def test_a_stale_request_row_is_caught_when_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale request row of a larger batch leads to poisoned table entries, and the replay raises."""
    rig = LaneRig()
    assert rig.agrees(2, 3, 4, 5)
    registry = rig.lane.registry
    assert registry is not None
    reset = fills._tail

    def forgetful(slot: GraphSlot, context: FillContext) -> torch.Tensor | None:
        return None if slot.name == "req_pool_indices" else reset(slot, context)

    monkeypatch.setattr(fills, "_tail", forgetful)
    registry._plans.clear()
    with pytest.raises(IndexError):
        rig.agrees(2, 3, 4)


def test_a_host_read_in_the_model_keeps_no_graph() -> None:
    """A kernel path that reads on the host is refused at capture; the error names the line."""
    with pytest.raises(CaptureError, match=r"test_lane\.py:\d+: .*\.item\(\)"):
        LaneRig(backend=ReadsHost)


def test_a_failed_capture_leaves_an_eager_lane() -> None:
    """After a failed capture, batches run eagerly with the reason NOT_CAPTURED."""
    rig = LaneRig(backend=ReadsHost, capture=False)
    with pytest.raises(CaptureError):
        rig.lane.capture_all()
    rig.lane.run(rig.batch(2, 2))
    assert list(rig.lane.stats.eager) == [(ForwardMode.DECODE, EagerReason.NOT_CAPTURED)]


# -- metadata work in the graph, or before it ------------------------------------------------------


@settings(derandomize=True, max_examples=30)
@given(steps=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=1, max_size=5))
def test_metadata_is_the_same_in_the_graph_as_outside(steps: list[list[int]]) -> None:
    """Metadata work in the graph or in the hook gives the same slots and logits, bit for bit."""
    with torch.inference_mode():
        rigs = [LaneRig(metadata_in_graph=in_graph) for in_graph in (True, False)]
        assert [rig.lane.backend.records_metadata for rig in rigs] == [True, False]
        for lengths in steps:
            logits = [rig.lane.run(rig.batch(*lengths)).logits for rig in rigs]
            assert torch.equal(*logits)
            slots = [
                {s.name: s.buffer for s in rig.lane.registry or () if s.owner == "flashinfer"} for rig in rigs
            ]
            assert slots[0]
            for name, buffer in slots[0].items():
                assert torch.equal(buffer, slots[1][name])


def test_metadata_in_the_graph_leaves_the_hook_nothing_to_do() -> None:
    """Recorded metadata work adds nodes to the graph, and its slots stay stale until the graph runs."""
    inside, outside = LaneRig(), LaneRig(metadata_in_graph=False)
    registry = inside.lane.registry
    assert registry is not None
    lengths = registry.get_slot("flashinfer.kv_last_page_len").buffer
    assert lengths is not None
    lengths.fill_(99)
    shape = SHAPE_OF[4]
    captured = inside.lane.captured[shape].context.metadata
    prepared = inside.lane.prepare(inside.batch(3, 2, 5))
    assert inside.lane.captured[shape].context.metadata is captured
    assert set(lengths.tolist()) == {99}
    inside.lane.launch(prepared)
    assert lengths.tolist() == [1, 2, 1, 1, 99]
    nodes = [rig.lane.stats.shapes[shape].num_nodes for rig in (inside, outside)]
    assert nodes[0] > nodes[1]


class MakesItOutside(FlashInferBackend):
    """A backend whose metadata work needs the host."""

    fill_is_device_only = False


def test_a_backend_that_cannot_is_not_asked_to() -> None:
    """By default its hook fills the metadata; `metadata_in_graph=True` is refused."""
    rig = LaneRig(backend=MakesItOutside)
    assert not rig.lane.backend.records_metadata
    assert rig.agrees(3, 2)
    with pytest.raises(ConfigError, match="metadata_in_graph=True, but MakesItOutside"):
        LaneRig(backend=MakesItOutside, metadata_in_graph=True)
