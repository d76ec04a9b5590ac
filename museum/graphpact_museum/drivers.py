"""Exhibits of graph drivers, planted in the tape.

A driver has no kinds of step: the lanes of its exhibits are its modes, ``fast`` and ``strict``.

Does not: plant bugs in plugins that run on a driver.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import ReplayError
from graphpact.graphs import EagerCall, Event, Graph, GraphDriver, Stream, TaskKey
from graphpact.graphs.driver import NONE_REBOUND
from graphpact.tensors import storage_id
from graphpact_museum.exhibit import Exhibit, Make

__tracebackhide__ = True  # these are drivers: errors name the line of their caller

_Region: TypeAlias = Callable[[], Any]
_Replay: TypeAlias = Callable[[], None]

# -- edits -------------------------------------------------------------------------------------------


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def edits_graphs(edit: Callable[[Any, Any, _Region], None]) -> Make:
    """Return a factory of drivers whose graphs are edited: ``edit(driver, graph, region)``."""

    def make(base: type[Any]) -> type[Any]:
        class EditsGraphs(base):  # type: ignore[misc]
            """A driver that edits its graphs."""

            def capture(self, fn: _Region, *, warmup: int = 1) -> Graph:
                """Capture, and edit the graph."""
                graph: Graph = super().capture(fn, warmup=warmup)
                edit(self, graph, fn)
                return graph

        return EditsGraphs

    return make


def _replays(edit: Callable[[Any, _Replay, _Region], None]) -> Make:
    """Return a factory of drivers with an edited replay: ``edit(graph, replay, region)`` is called for it."""

    def install(_: Any, graph: Any, region: _Region) -> None:
        graph.replay = functools.partial(edit, graph, graph.replay, region)

    return edits_graphs(install)


def _recordings(
    before: Callable[[Any], object] = lambda _: None, after: Callable[[Any, Any], object] = lambda *_: None
) -> Make:
    """Return a factory of drivers that edit a recorder before it records, and the recording afterwards.

    Args:
        before: Called with the recorder.
        after: Called with the recorder and the recording.
    """

    def make(base: type[Any]) -> type[Any]:
        class EditsRecordings(base):  # type: ignore[misc]
            """A driver that edits its recordings."""

            def record(self, recorder: Any, fn: _Region) -> Any:
                """Record, with the edits."""
                before(recorder)
                recording = super().record(recorder, fn)
                after(recorder, recording)
                return recording

        return EditsRecordings

    return make


def _eager_calls(recording: Any) -> list[EagerCall]:
    return [part for part in recording.parts if isinstance(part, EagerCall)]


# -- replays -----------------------------------------------------------------------------------------


def _runs_the_region(graph: Any, replay: _Replay, region: _Region) -> None:
    del graph
    replay()
    region()


def _moves_outputs(driver: Any, graph: Any, region: _Region) -> None:
    del driver, region
    recorded, replay, release = [graph.outputs], graph.replay, graph.release

    def replays() -> None:
        replay()
        graph.outputs = pytree.tree_map_only(torch.Tensor, torch.clone, recorded[0])

    def releases() -> None:
        recorded[0] = None
        release()

    graph.replay, graph.release = replays, releases


def _rewinds_random_numbers(graph: Any, replay: _Replay, region: _Region) -> None:
    del region
    if not hasattr(graph, "seeded"):
        graph.seeded = torch.get_rng_state()
    torch.set_rng_state(graph.seeded)
    replay()


def _lists_half_of_the_externals(driver: Any, graph: Any, region: _Region) -> None:
    del driver, region
    whole = graph.external_tensors
    graph.external_tensors = lambda: whole()[: (len(whole()) + 1) // 2]


def _accepts_replays_after_release(driver: Any, graph: Any, region: _Region) -> None:
    del driver, region
    release = graph.release

    def then_replays_nothing() -> None:
        release()
        graph.replay = lambda: None

    graph.release = then_replays_nothing


# -- recordings --------------------------------------------------------------------------------------


def _keeps_host_numbers_by_reference(recorder: Any) -> None:
    recorder.kept = lambda tensor: tensor


def _copies_strided_inputs(recorder: Any) -> None:
    held = recorder.held

    def compact(tensor: torch.Tensor) -> Any:
        is_own = storage_id(tensor) in recorder.allocated
        return held(tensor if is_own or tensor.is_contiguous() else tensor.contiguous())

    recorder.held = compact


def _answers_eager_calls_from_the_capture(recorder: Any, recording: Any) -> None:
    del recorder
    for call in _eager_calls(recording):
        call.fn = lambda *_, result=call.result: result


def _reuses_arguments_of_eager_calls(recorder: Any, recording: Any) -> None:
    for call in _eager_calls(recording):
        own = [t for t in tensors_in(call.args) if storage_id(t) in recorder.allocated]

        def and_reuse(*args: Any, fn: Any = call.fn, own: Sequence[torch.Tensor] = own) -> Any:
            result = fn(*args)
            for t in own:
                t.zero_()
            return result

        call.fn = and_reuse


def _lets_the_host_read(base: type[Any]) -> type[Any]:
    class Reads(base):  # type: ignore[misc]
        """A driver that records regions which read device tensors on the host."""

        def record(self, recorder: Any, fn: _Region) -> Any:
            """Record, and refuse no host read."""
            with patch.multiple("graphpact_tape.host", READS={}, reads_on_host=lambda *_: False):
                return super().record(recorder, fn)

    return Reads


def _believes_every_schema(recorder: Any, recording: Any) -> None:
    """Drop the calls that return no new memory and whose schema marks no write."""
    del recorder
    for segment in recording.segments:
        segment.calls[:] = [
            call
            for call in segment.calls
            if call.op._schema.is_mutable or any(t is not None for t in call.made)  # noqa: SLF001
        ]


def _keeps_the_python_of_operators(base: type[Any]) -> type[Any]:
    class Keeps(base):  # type: ignore[misc]
        """A driver that takes every operator for one kernel, whatever implements it."""

        def record(self, recorder: Any, fn: _Region) -> Any:
            """Record operators without a look at their implementation."""
            with patch("graphpact_tape.host.python_implementation", lambda *_: None):
                return super().record(recorder, fn)

    return Keeps


def _leaves_its_writes(recorder: Any, recording: Any) -> None:
    del recording
    recorder._undo.clear()  # noqa: SLF001  the museum edits insides


def _keeps_the_work_of_failed_regions(base: type[Any]) -> type[Any]:
    class Keeps(base):  # type: ignore[misc]
        """A driver whose next graph begins with the work of a region that raised."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.left: list[Any] = []

        def record(self, recorder: Any, fn: _Region) -> Any:
            """Record, after what is left."""
            recorder.parts[0].calls.extend(self.left)
            self.left = []
            try:
                return super().record(recorder, fn)
            except KeyError:
                self.left = [c for part in recorder.parts if hasattr(part, "calls") for c in part.calls]
                raise

    return Keeps


# -- streams -----------------------------------------------------------------------------------------


class _Side(Stream):
    """A side stream: its work is marked, and no wait has an effect."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __enter__(self) -> Self:
        self._driver.on_side = True
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.on_side = False


def _runs_side_streams_last(base: type[Any]) -> type[Any]:
    class Last(base):  # type: ignore[misc]
        """A driver whose replays do the work of side streams after that of the main stream."""

        on_side = False

        def stream(self) -> Stream:
            """Return a new stream."""
            return _Side(self)

        def record(self, recorder: Any, fn: _Region) -> Any:
            """Record, and order the work."""
            add, on_side = recorder.add, []

            def sorted_add(call: Any) -> None:
                add(call)
                if self.on_side:
                    on_side.append(recorder.parts[-1].calls.pop())

            recorder.add = sorted_add
            recording = super().record(recorder, fn)
            recording.segments[-1].calls.extend(on_side)
            return recording

    return Last


class _DelaysCopies(GraphDriver):
    """A driver with asynchronous copies that something does not wait for.

    Attributes:
        at_replay: Whether a replay does the copies, and no event waits for them. Otherwise waits of the host
            do them, and a replay does not wait.
    """

    at_replay: ClassVar[bool]

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict)
        self.delayed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy later; inside a region, record the copy."""
        if self.is_capturing:
            super().copy_async(target, source)
        else:
            self.delayed.append((target, source))

    def synchronize(self) -> None:
        """Do the delayed copies."""
        while self.delayed:
            target, source = self.delayed.pop(0)
            target.copy_(source)

    def event(self) -> Event:
        """Return an event that waits for the copies, or for nothing."""
        event = super().event()
        if not self.at_replay:
            event.synchronize = self.synchronize  # type: ignore[method-assign]
        return event

    def capture(self, fn: _Region, *, warmup: int = 1) -> Graph:
        """Capture a graph; with ``at_replay`` its replay begins with the copies."""
        graph: Any = super().capture(fn, warmup=warmup)  # type: ignore[safe-super]  # of the edited driver
        replay = graph.replay

        def after_copies() -> None:
            self.synchronize()
            replay()

        if self.at_replay:
            graph.replay = after_copies
        captured: Graph = graph
        return captured


def _copies(*, at_replay: bool) -> Make:
    """Return a factory of drivers that delay asynchronous copies; see `_DelaysCopies`."""
    return lambda base: type("Delays", (_DelaysCopies, base), {"at_replay": at_replay})


# -- strict modes ------------------------------------------------------------------------------------


def _orders_nothing(base: type[Any]) -> type[Any]:
    class Unordered(base):  # type: ignore[misc]
        """A strict driver that checks no wait between streams."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            if self._shared is not None:
                self._shared.order.operation = lambda *_: None

    return Unordered


def _holds_what_it_reads(driver: Any, graph: Any, region: _Region) -> None:
    del driver, region
    copied = {at for at, _ in graph._copied}  # noqa: SLF001  the museum edits insides
    graph.held = [t for at, t in enumerate(graph.external_tensors()) if at not in copied]


def _spoils_nothing(driver: Any, graph: Any, region: _Region) -> None:
    del driver, region
    graph.spoil = lambda: None


def _spoils_itself_alone(driver: Any, graph: Any, region: _Region) -> None:
    del region
    spoil, replay = graph.spoil, graph.replay

    def replays() -> None:
        driver.replayed = graph
        replay()

    def spoils() -> None:
        if driver.replayed is graph:
            spoil()

    graph.replay, graph.spoil = replays, spoils


# -- tasks -------------------------------------------------------------------------------------------


def _updates_nothing(base: type[Any]) -> type[Any]:
    class UpdatesNothing(base):  # type: ignore[misc]
        """A driver whose tasks keep the arguments of the capture."""

        def update_task(self, key: TaskKey, updated: Mapping[str, Any], **more: Any) -> None:
            """Check the key, and update by the captured arguments."""
            weights = {"weights": [1, 1]} if len(updated.get("weights", ())) > 1 else updated
            super().update_task(key, weights, **more)

    return UpdatesNothing


def _ignores_unknown_keys(base: type[Any]) -> type[Any]:
    class IgnoresUnknownKeys(base):  # type: ignore[misc]
        """A driver that ignores updates of tasks that it does not know."""

        def update_task(self, key: TaskKey, updated: Mapping[str, Any], **more: Any) -> None:
            """Update what is known."""
            with contextlib.suppress(ReplayError):
                super().update_task(key, updated, **more)

    return IgnoresUnknownKeys


def _keeps_tables(base: type[Any]) -> type[Any]:
    class KeepsTables(base):  # type: ignore[misc]
        """A driver that rebinds a tensor to the address of the capture."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.tables: dict[TaskKey, Mapping[str, torch.Tensor]] = {}

        def task(self, key: TaskKey, op: Any, args: Any, updated: Any, **more: Any) -> None:
            """Record, and keep the tensors."""
            self.tables[key] = more.get("rebound", {})
            super().task(key, op, args, updated, **more)

        def update_task(
            self, key: TaskKey, updated: Any, *, rebound: Mapping[str, torch.Tensor] = NONE_REBOUND
        ) -> None:
            """Update by value alone."""
            captured = self.tables.get(key, rebound)
            super().update_task(key, updated, rebound={name: captured[name] for name in rebound})

    return KeepsTables


def _waits_for_nothing(base: type[Any]) -> type[Any]:
    class WaitsForNothing(base):  # type: ignore[misc]
        """A driver whose replay runs at its launch, whatever updates are to come."""

        def task(self, *args: Any, waits: bool = False, **more: Any) -> None:
            """Record a task that does not wait."""
            del waits
            super().task(*args, **more)

    return WaitsForNothing


def _counts_no_updates(base: type[Any]) -> type[Any]:
    class CountsNoUpdates(base):  # type: ignore[misc]
        """A strict driver that replays without updates."""

        def __init__(self, device: torch.device, *, strict: bool = False) -> None:
            super().__init__(device, strict=strict)
            self._shared.tasks.begin_replay = lambda graph: graph and graph.updated.clear()

    return CountsNoUpdates


EXHIBITS = [
    Exhibit(
        name="driver-updates-no-task",
        rule="GP21",
        thread="vllm-project/vllm-ascend#13058",
        planted="An update of a task leaves the arguments of the capture.",
        base="tape",
        lanes=("fast",),
        make=_updates_nothing,
        site="driver",
    ),
    Exhibit(
        name="driver-ignores-unknown-tasks",
        rule="GP21",
        thread="sgl-project/sglang#27371",
        planted="An update under a key that no capture gave to a task is ignored.",
        base="tape",
        lanes=("fast",),
        make=_ignores_unknown_keys,
        site="driver",
    ),
    Exhibit(
        name="driver-keeps-rebound-tensors",
        rule="GP21",
        thread="vllm-project/vllm-ascend#16798",
        planted="An update replaces the numbers of a task, and not the address of its table.",
        base="tape",
        lanes=("fast",),
        make=_keeps_tables,
        site="driver",
    ),
    Exhibit(
        name="driver-does-not-wait-for-updates",
        rule="GP21",
        thread="sgl-project/sglang#16498",
        planted="A replay runs at its launch, with the arguments of the step before: the update comes from"
        " a thread beside it.",
        base="tape",
        lanes=("fast",),
        make=_waits_for_nothing,
        site="driver",
    ),
    Exhibit(
        name="strict-driver-misses-no-update",
        rule="GP21",
        thread="vllm-project/vllm-ascend#11408",
        planted="The strict mode replays a graph whose tasks were not updated.",
        base="tape",
        lanes=("strict",),
        make=_counts_no_updates,
        site="driver",
    ),
    Exhibit(
        name="driver-reruns-the-region",
        rule="GP10",
        thread="alibaba/rtp-llm#1360",
        planted="A replay runs the Python of the region too: its work and its side effects happen twice.",
        base="tape",
        lanes=("fast",),
        make=_replays(_runs_the_region),
        site="driver",
    ),
    Exhibit(
        name="driver-believes-every-schema",
        rule="GP10",
        thread="thu-ml/SageAttention#371",
        planted="A call that returns nothing, and whose schema marks no write, is no part of the graph: what"
        " it wrote at the capture is left.",
        base="tape",
        lanes=("fast", "strict"),
        make=_recordings(after=_believes_every_schema),
        site="driver",
    ),
    Exhibit(
        name="driver-keeps-the-python-of-operators",
        rule="GP10",
        thread="vllm-project/vllm#44868",
        planted="An operator that Python implements is one node: each replay runs its Python again, on the"
        " current step.",
        base="tape",
        lanes=("fast", "strict"),
        make=_keeps_the_python_of_operators,
        site="driver",
    ),
    Exhibit(
        name="driver-calls-eagerly-once",
        rule="GP10",
        thread="sgl-project/sglang#26742",
        planted="An eager call between two segments runs at capture; replays use its result of then.",
        base="tape",
        lanes=("fast",),
        make=_recordings(after=_answers_eager_calls_from_the_capture),
        site="driver",
    ),
    Exhibit(
        name="driver-rereads-host-numbers",
        rule="GP08",
        thread="Dao-AILab/flash-attention#1164",
        planted="A host number in a tensor is recorded by reference: each replay reads it anew.",
        base="tape",
        lanes=("fast", "strict"),
        make=_recordings(before=_keeps_host_numbers_by_reference),
        site="driver",
    ),
    Exhibit(
        name="driver-repeats-random-numbers",
        rule="GP08",
        thread="NVIDIA/Megatron-LM#5697",
        planted="Seed and offset of the random generator are frozen: every replay draws the same numbers.",
        base="tape",
        lanes=("fast",),
        make=_replays(_rewinds_random_numbers),
        site="driver",
    ),
    Exhibit(
        name="driver-moves-outputs",
        rule="GP01",
        thread="vllm-project/vllm#13353",
        planted="Every replay gives its outputs as new tensors.",
        base="tape",
        lanes=("fast",),
        make=edits_graphs(_moves_outputs),
        site="driver",
    ),
    Exhibit(
        name="driver-copies-strided-inputs",
        rule="GP07",
        thread="vllm-project/vllm#25743",
        planted="The record holds a contiguous copy of a strided view that was taken outside of the region.",
        base="tape",
        lanes=("fast",),
        make=_recordings(before=_copies_strided_inputs),
        site="driver",
    ),
    Exhibit(
        name="driver-reuses-eager-arguments",
        rule="GP14",
        thread="sgl-project/sglang#22218",
        planted="The memory of an eager call's arguments is reused after the call, although a later segment"
        " reads it.",
        base="tape",
        lanes=("fast",),
        make=_recordings(after=_reuses_arguments_of_eager_calls),
        site="driver",
    ),
    Exhibit(
        name="driver-hides-what-it-reads",
        rule="GP14",
        thread="ggml-org/llama.cpp#26771",
        planted="The list of external tensors, which their owner keeps in place, has half of them.",
        base="tape",
        lanes=("fast",),
        make=edits_graphs(_lists_half_of_the_externals),
        site="driver",
    ),
    Exhibit(
        name="driver-replays-what-was-released",
        rule="GP14",
        thread="gittensor-ai-lab/sparkinfer#147",
        planted="A released graph accepts a replay and does nothing: its old outputs look new.",
        base="tape",
        lanes=("fast",),
        make=edits_graphs(_accepts_replays_after_release),
        site="driver",
    ),
    Exhibit(
        name="driver-runs-side-streams-last",
        rule="GP16",
        thread="local-inference-lab/vllm#617",
        planted="A replay does the work of side streams last; the event that the main stream waits for is"
        " ignored.",
        base="tape",
        lanes=("fast",),
        make=_runs_side_streams_last,
        site="driver",
    ),
    Exhibit(
        name="driver-does-not-wait-for-copies",
        rule="GP16",
        thread="sgl-project/sglang#19177",
        planted="A replay does not wait for an asynchronous copy of its stream: it reads the old contents.",
        base="tape",
        lanes=("fast",),
        make=_copies(at_replay=False),
        site="driver",
    ),
    Exhibit(
        name="driver-events-wait-for-nothing",
        rule="GP16",
        thread="vllm-project/vllm#47644",
        planted="A wait for the event after an asynchronous copy returns before the copy is done.",
        base="tape",
        lanes=("fast",),
        make=_copies(at_replay=True),
        site="driver",
    ),
    Exhibit(
        name="driver-keeps-half-a-region",
        rule="GP19",
        thread="ROCm/ATOM#2267",
        planted="The work of a region that raised an error is recorded into the next graph.",
        base="tape",
        lanes=("fast",),
        make=_keeps_the_work_of_failed_regions,
        site="driver",
    ),
    Exhibit(
        name="driver-lets-the-host-read",
        rule="GP20",
        thread="vllm-project/vllm#22758",
        planted="A region reads device tensors on the host, and the graph is kept.",
        base="tape",
        lanes=("fast",),
        make=_lets_the_host_read,
        site="driver",
    ),
    Exhibit(
        name="strict-driver-lets-the-host-read",
        rule="GP20",
        thread="vllm-project/vllm#40807",
        planted="The strict mode refuses no host read in a region.",
        base="tape",
        lanes=("strict",),
        make=_lets_the_host_read,
        site="driver",
    ),
    Exhibit(
        name="strict-driver-keeps-its-writes",
        rule="GP19",
        thread="microsoft/onnxruntime#32243",
        planted="The strict mode does not undo the writes of a capture, which a GPU does not run.",
        base="tape",
        lanes=("strict",),
        make=_recordings(after=_leaves_its_writes),
        site="driver",
    ),
    Exhibit(
        name="strict-driver-holds-freed-memory",
        rule="GP14",
        thread="flashinfer-ai/flashinfer#4399",
        planted="The strict mode keeps every input alive, so that it cannot see that its owner freed it.",
        base="tape",
        lanes=("strict",),
        make=edits_graphs(_holds_what_it_reads),
        site="driver",
    ),
    Exhibit(
        name="strict-driver-without-poison",
        rule="GP15",
        thread="ROCm/aiter#5393",
        planted="The strict mode poisons no memory of its pools.",
        base="tape",
        lanes=("strict",),
        make=edits_graphs(_spoils_nothing),
        site="driver",
    ),
    Exhibit(
        name="strict-driver-spares-other-outputs",
        rule="GP15",
        thread="pytorch/pytorch#148439",
        planted="A replay of the strict mode leaves the outputs of other graphs of its pool as they are.",
        base="tape",
        lanes=("strict",),
        make=edits_graphs(_spoils_itself_alone),
        site="driver",
    ),
    Exhibit(
        name="strict-driver-checks-no-waits",
        rule="GP16",
        thread="vllm-project/vllm#24527",
        planted="The strict mode accepts work of two streams on one memory without a wait between them.",
        base="tape",
        lanes=("strict",),
        make=_orders_nothing,
        site="driver",
    ),
]
