"""Exhibits of graph drivers, planted in the tape.

A driver has no kinds of step: the lanes of its exhibits are its modes, ``fast`` and ``strict``.

Does not: plant bugs in plugins that run on a driver.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import ReplayError
from graphpact.graphs import EagerCall, Stream, TaskKey
from graphpact.graphs.driver import NONE_REBOUND
from graphpact.tensors import storage_id
from graphpact_museum.edits.drivers import RecordedRegion, edits_graphs, tensors_in
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit

__tracebackhide__ = True  # these are drivers: errors name the line of their caller


def _eager_calls(recording: Any) -> list[EagerCall]:
    return [part for part in recording.parts if isinstance(part, EagerCall)]


# -- replays -----------------------------------------------------------------------------------------


@exhibit("GP10", "alibaba/rtp-llm#1360", on="tape", lanes="fast")
@overrides("capture")
def driver_reruns_the_region(_: Any, right: Any, fn: RecordedRegion, **more: Any) -> Any:
    """A replay runs the Python of the region too: its work and its side effects happen twice."""
    graph = right(fn, **more)
    replay = graph.replay

    def replays() -> None:
        replay()
        fn()

    graph.replay = replays
    return graph


@exhibit("GP01", "vllm-project/vllm#13353", on="tape", lanes="fast")
@edits_graphs
def driver_moves_outputs(_: Any, graph: Any) -> None:
    """Every replay returns its outputs as new tensors."""
    recorded, replay, release = [graph.outputs], graph.replay, graph.release

    def replays() -> None:
        replay()
        graph.outputs = pytree.tree_map_only(torch.Tensor, torch.clone, recorded[0])

    def releases() -> None:
        recorded[0] = None
        release()

    graph.replay, graph.release = replays, releases


@exhibit("GP08", "NVIDIA/Megatron-LM#5697", on="tape", lanes="fast")
@edits_graphs
def driver_repeats_random_numbers(_: Any, graph: Any) -> None:
    """Seed and offset of the random generator are frozen: every replay draws the same numbers."""
    replay = graph.replay

    def replays() -> None:
        if not hasattr(graph, "seeded"):
            graph.seeded = torch.get_rng_state()
        torch.set_rng_state(graph.seeded)
        replay()

    graph.replay = replays


@exhibit("GP14", "ggml-org/llama.cpp#26771", on="tape", lanes="fast")
@edits_graphs
def driver_hides_what_it_reads(_: Any, graph: Any) -> None:
    """external_tensors() returns only half of the tensors that their owners have to keep in place."""
    whole = graph.external_tensors
    graph.external_tensors = lambda: whole()[: (len(whole()) + 1) // 2]


@exhibit("GP14", "gittensor-ai-lab/sparkinfer#147", on="tape", lanes="fast")
@edits_graphs
def driver_replays_what_was_released(_: Any, graph: Any) -> None:
    """A released graph accepts a replay and does nothing: its old outputs look new."""
    release = graph.release

    def then_replays_nothing() -> None:
        release()
        graph.replay = lambda: None

    graph.release = then_replays_nothing


# -- recordings --------------------------------------------------------------------------------------


@exhibit("GP08", "Dao-AILab/flash-attention#1164", on="tape", lanes=("fast", "strict"))
@overrides("record")
def driver_rereads_host_numbers(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """A host number in a tensor is recorded by reference: each replay reads it again."""
    recorder.kept = lambda tensor: tensor
    return right(recorder, fn)


@exhibit("GP07", "vllm-project/vllm#25743", on="tape", lanes="fast")
@overrides("record")
def driver_copies_strided_inputs(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """The record holds a contiguous copy of a strided view that was taken outside of the region."""
    held = recorder.held

    def compact(tensor: torch.Tensor) -> Any:
        is_own = storage_id(tensor) in recorder.allocated
        return held(tensor if is_own or tensor.is_contiguous() else tensor.contiguous())

    recorder.held = compact
    return right(recorder, fn)


@exhibit("GP10", "sgl-project/sglang#26742", on="tape", lanes="fast")
@overrides("record")
def driver_calls_eagerly_once(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """An eager call between two segments runs only at capture; replays use that result."""
    recording = right(recorder, fn)
    for call in _eager_calls(recording):
        call.fn = lambda *_, result=call.result: result
    return recording


@exhibit("GP14", "sgl-project/sglang#22218", on="tape", lanes="fast")
@overrides("record")
def driver_reuses_eager_arguments(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """The memory of an eager call's arguments is reused after the call, although a later segment reads it."""
    recording = right(recorder, fn)
    for call in _eager_calls(recording):
        own = [t for t in tensors_in(call.args) if storage_id(t) in recorder.allocated]

        def and_reuse(*args: Any, fn: Any = call.fn, own: Sequence[torch.Tensor] = own) -> Any:
            result = fn(*args)
            for t in own:
                t.zero_()
            return result

        call.fn = and_reuse
    return recording


@overrides("record")
def _lets_the_host_read(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    with patch.multiple("graphpact_tape.host_guard", READS={}, reads_on_host=lambda *_: False):
        return right(recorder, fn)


@exhibit("GP20", "vllm-project/vllm#22758", on="tape", lanes="fast")
def driver_lets_the_host_read(base: type[Any]) -> type[Any]:
    """A region reads device tensors on the host, and the graph is kept."""
    return _lets_the_host_read(base)


@exhibit("GP20", "vllm-project/vllm#40807", on="tape", lanes="strict")
def strict_driver_lets_the_host_read(base: type[Any]) -> type[Any]:
    """The strict mode refuses no host read in a region."""
    return _lets_the_host_read(base)


@exhibit("GP10", "thu-ml/SageAttention#371", on="tape", lanes=("fast", "strict"))
@overrides("record")
def driver_believes_every_schema(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """A call that returns nothing, and whose schema declares no write, is not part of the graph: the data
    that it wrote at capture stays.
    """
    recording = right(recorder, fn)
    for segment in recording.segments:
        segment.calls[:] = [
            call
            for call in segment.calls
            if call.op._schema.is_mutable or any(t is not None for t in call.made)  # noqa: SLF001
        ]
    return recording


@exhibit("GP10", "vllm-project/vllm#44868", on="tape", lanes=("fast", "strict"))
@overrides("record")
def driver_keeps_the_python_of_operators(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """An operator with a Python implementation is recorded as one node: each replay runs its Python again,
    for the current step.
    """
    with patch("graphpact_tape.host_guard.python_implementation", lambda *_: None):
        return right(recorder, fn)


@exhibit("GP19", "microsoft/onnxruntime#32243", on="tape", lanes="strict")
@overrides("record")
def strict_driver_keeps_its_writes(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """The strict mode does not undo the writes of a capture, although a GPU does not run captured work."""

    class Forgetting(dict[int, Any]):
        """Keeps nothing."""

        def __setitem__(self, key: int, value: Any) -> None:
            del key, value

    recorder._undo = Forgetting()  # noqa: SLF001  the museum edits insides
    return right(recorder, fn)


@exhibit("GP19", "ROCm/ATOM#2267", on="tape", lanes="fast")
def driver_keeps_half_a_region(base: type[Any]) -> type[Any]:
    """The work of a region that raised an error is recorded into the next graph."""

    def init(self: Any, right: Any, *args: Any, **more: Any) -> None:
        right(*args, **more)
        self.left = []

    def record(self: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
        recorder.parts[0].calls.extend(self.left)
        self.left = []
        try:
            return right(recorder, fn)
        except KeyError:
            self.left = [c for part in recorder.parts if hasattr(part, "calls") for c in part.calls]
            raise

    return override(base, record, __init__=init)


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


@exhibit("GP16", "local-inference-lab/vllm#617", on="tape", lanes="fast")
def driver_runs_side_streams_last(base: type[Any]) -> type[Any]:
    """A replay does the work of side streams last; the event that the main stream waits for is ignored."""

    def stream(self: Any, _: Any) -> Stream:
        return _Side(self)

    def record(self: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
        add, on_side = recorder.add, []

        def sorted_add(call: Any) -> None:
            add(call)
            if self.on_side:
                on_side.append(recorder.parts[-1].calls.pop())

        recorder.add = sorted_add
        recording = right(recorder, fn)
        recording.segments[-1].calls.extend(on_side)
        return recording

    return override(base, stream, record, on_side=False)


def _delays_copies(base: type[Any], *, at_replay: bool) -> type[Any]:
    """Return a driver that delays asynchronous copies, and lacks one of two waits for them.

    Args:
        base: The correct class.
        at_replay: If true, a replay waits for the copies and the wait for an event does not. If false, the
            wait for an event does and a replay does not.
    """

    def init(self: Any, right: Any, device: torch.device, *, strict: bool = False) -> None:
        right(device, strict=strict)
        self.delayed = []

    def copy_async(self: Any, right: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.is_capturing:
            right(target, source)
        else:
            self.delayed.append((target, source))

    def synchronize(self: Any, _: Any) -> None:
        while self.delayed:
            target, source = self.delayed.pop(0)
            target.copy_(source)

    def event(self: Any, right: Any) -> Any:
        made = right()
        made.synchronize = self.synchronize
        return made

    def capture(self: Any, right: Any, fn: RecordedRegion, **more: Any) -> Any:
        graph = right(fn, **more)
        replay = graph.replay

        def after_copies() -> None:
            self.synchronize()
            replay()

        graph.replay = after_copies
        return graph

    return override(base, copy_async, synchronize, capture if at_replay else event, __init__=init)


@exhibit("GP16", "sgl-project/sglang#19177", on="tape", lanes="fast")
def driver_does_not_wait_for_copies(base: type[Any]) -> type[Any]:
    """A replay does not wait for an asynchronous copy of its stream: it reads the old contents."""
    return _delays_copies(base, at_replay=False)


@exhibit("GP16", "vllm-project/vllm#47644", on="tape", lanes="fast")
def driver_events_wait_for_nothing(base: type[Any]) -> type[Any]:
    """A wait for the event after an asynchronous copy returns before the copy is done."""
    return _delays_copies(base, at_replay=True)


# -- strict modes ------------------------------------------------------------------------------------


@exhibit("GP16", "vllm-project/vllm#24527", on="tape", lanes="strict")
@overrides("__init__")
def strict_driver_checks_no_waits(self: Any, right: Any, *args: Any, **more: Any) -> None:
    """The strict mode accepts work of two streams on the same memory without a wait between them."""
    right(*args, **more)
    if self._shared is not None:
        self._shared.order.operation = lambda *_: None


@exhibit("GP14", "flashinfer-ai/flashinfer#4399", on="tape", lanes="strict")
@edits_graphs
def strict_driver_holds_freed_memory(_: Any, graph: Any) -> None:
    """The strict mode keeps every input alive, so that it cannot detect that an owner freed one."""
    copied = {at for at, _ in graph._copied}  # noqa: SLF001  the museum edits insides
    graph.held = [t for at, t in enumerate(graph.external_tensors()) if at not in copied]


@exhibit("GP15", "ROCm/aiter#5393", on="tape", lanes="strict")
@edits_graphs
def strict_driver_without_poison(_: Any, graph: Any) -> None:
    """The strict mode poisons no memory of its pools."""
    graph.spoil = lambda: None


@exhibit("GP15", "pytorch/pytorch#148439", on="tape", lanes="strict")
@edits_graphs
def strict_driver_spares_other_outputs(driver: Any, graph: Any) -> None:
    """A replay of the strict mode leaves the outputs of other graphs of its pool as they are."""
    spoil, replay = graph.spoil, graph.replay

    def replays() -> None:
        driver.replayed = graph
        replay()

    def spoils() -> None:
        if driver.replayed is graph:
            spoil()

    graph.replay, graph.spoil = replays, spoils


# -- tasks -------------------------------------------------------------------------------------------


@exhibit("GP21", "vllm-project/vllm-ascend#13058", on="tape", lanes="fast")
@overrides("update_task")
def driver_updates_no_task(_: Any, right: Any, key: TaskKey, updated: Mapping[str, Any], **more: Any) -> None:
    """An update of a task leaves the arguments of the capture in place."""
    weights = {"weights": [1, 1]} if len(updated.get("weights", ())) > 1 else updated
    right(key, weights, **more)


@exhibit("GP21", "sgl-project/sglang#27371", on="tape", lanes="fast")
@overrides("update_task")
def driver_ignores_unknown_tasks(
    _: Any, right: Any, key: TaskKey, updated: Mapping[str, Any], **more: Any
) -> None:
    """An update under a key that no capture gave to a task is ignored."""
    with contextlib.suppress(ReplayError):
        right(key, updated, **more)


@exhibit("GP21", "vllm-project/vllm-ascend#16798", on="tape", lanes="fast")
def driver_keeps_rebound_tensors(base: type[Any]) -> type[Any]:
    """An update replaces the numbers of a task, but not the address of its table."""

    def init(self: Any, right: Any, *args: Any, **options: Any) -> None:
        right(*args, **options)
        self.tables = {}

    def task(self: Any, right: Any, key: TaskKey, op: Any, args: Any, updated: Any, **more: Any) -> None:
        self.tables[key] = more.get("rebound", {})
        right(key, op, args, updated, **more)

    def update_task(
        self: Any,
        right: Any,
        key: TaskKey,
        updated: Any,
        *,
        rebound: Mapping[str, torch.Tensor] = NONE_REBOUND,
    ) -> None:
        captured = self.tables.get(key, rebound)
        right(key, updated, rebound={name: captured[name] for name in rebound})

    return override(base, task, update_task, __init__=init)


@exhibit("GP21", "sgl-project/sglang#16498", on="tape", lanes="fast")
@overrides("task")
def driver_does_not_wait_for_updates(
    _: Any, right: Any, *args: Any, waits: bool = False, **more: Any
) -> None:
    """A replay runs at its launch, with the arguments of the previous step: it does not wait for the update,
    which another thread makes.
    """
    del waits
    right(*args, **more)


@exhibit("GP21", "vllm-project/vllm-ascend#11408", on="tape", lanes="strict")
@overrides("__init__")
def strict_driver_misses_no_update(
    self: Any, right: Any, device: torch.device, *, strict: bool = False
) -> None:
    """The strict mode replays a graph whose tasks were not updated."""
    right(device, strict=strict)
    self._shared.tasks.begin_replay = lambda graph: graph and graph.updated.clear()
