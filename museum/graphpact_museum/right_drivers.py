"""Variants of graph drivers: correct ones in other styles, which the suite must pass.

Does not: contain bugs; see `graphpact_museum.drivers`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeAlias

import torch
from torch.utils import _pytree as pytree

from graphpact.graphs import DeclaredMemory, Event, Graph, GraphDriver, Line, Ownership, Stream, TaskKey
from graphpact.tensors import storage_id
from graphpact_museum.edits.drivers import edits_graphs, tensors_in
from graphpact_museum.edits.override import overrides
from graphpact_museum.exhibit import variant

__tracebackhide__ = True  # as in the modules of every driver

RecordedRegion: TypeAlias = Callable[[], Any]


class _DelegatedGraph(Graph):
    """A graph that wraps a graph of the tape instead of deriving from its class."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.num_nodes, self.num_segments = graph.num_nodes, graph.num_segments

    @property
    def outputs(self) -> Any:
        """The outputs of the wrapped graph."""
        return self._graph.outputs

    @property
    def outputs_stand(self) -> bool:  # type: ignore[override]
        """Whether the outputs are those of the last replay."""
        return self._graph.outputs_stand

    @property
    def pool_nbytes(self) -> int:  # type: ignore[override]
        """The size of the wrapped graph's memory, in bytes."""
        return self._graph.pool_nbytes

    def replay(self) -> None:
        """Replay."""
        self._graph.replay()

    def release(self) -> None:
        """Release."""
        self._graph.release()

    def external_tensors(self) -> list[torch.Tensor] | None:
        """Return the external tensors."""
        return self._graph.external_tensors()


class _Delegates(GraphDriver):
    """A driver that wraps a tape driver of the class ``base`` instead of deriving from it."""

    name: ClassVar[str] = "delegates"
    has_strict_mode: ClassVar[bool] = True
    has_tasks: ClassVar[bool] = True
    base: ClassVar[type[GraphDriver]]

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict)
        self.inner = self.base(device, strict=strict)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why the tape is unavailable, or None."""
        return cls.base.unavailable(device)

    @property
    def is_capturing(self) -> bool:
        """Whether the tape records."""
        return self.inner.is_capturing

    def declare(self, memory: DeclaredMemory) -> None:
        """Declare."""
        super().declare(memory)
        self.inner.declare(memory)

    def capture(self, fn: RecordedRegion, *, warmup: int = 1) -> Graph:
        """Capture."""
        return _DelegatedGraph(self.inner.capture(fn, warmup=warmup))

    def eager_call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn``, and break the graph there."""
        return self.inner.eager_call(fn, *args)

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Break the graph."""
        return self.inner.break_graph(fn, args)

    def task(
        self, key: TaskKey, op: Any, args: tuple[Any, ...], updated: Mapping[str, Any], **more: Any
    ) -> None:
        """Record a task."""
        self.inner.task(key, op, args, updated, **more)

    def update_task(self, key: TaskKey, updated: Mapping[str, Any], **more: Any) -> None:
        """Update it."""
        self.inner.update_task(key, updated, **more)

    def strict_observer(self, ownership: Ownership | None = None) -> object:
        """Return the strict observer of the tape."""
        return self.inner.strict_observer(ownership)

    @contextlib.contextmanager
    def preparation(
        self, host: Iterable[torch.Tensor] = (), read_only: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Return the context of the tape."""
        with self.inner.preparation(host, read_only):
            yield

    @contextlib.contextmanager
    def unprepared(self, host: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Return the context of the tape."""
        with self.inner.unprepared(host):
            yield

    def stream(self) -> Stream:
        """Return a stream."""
        return self.inner.stream()

    def current_stream(self) -> Stream:
        """Return the current stream."""
        return self.inner.current_stream()

    def event(self) -> Event:
        """Return an event."""
        return self.inner.event()

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        self.inner.copy_async(target, source)

    def copy_in_flight(self, source: torch.Tensor) -> Line | None:
        """Return the line of a copy."""
        return self.inner.copy_in_flight(source)

    def synchronize(self) -> None:
        """Wait."""
        self.inner.synchronize()


@variant(on="tape", lanes=("fast", "strict"))
def driver_by_delegation(base: type[Any]) -> type[Any]:
    """The driver wraps a tape instead of deriving from it, and passes every call on."""
    return type("Delegates", (_Delegates,), {"base": base})


@variant(on="tape", lanes="fast")
@edits_graphs
def driver_with_outputs_of_its_own(_: Any, graph: Any) -> None:
    """Every replay copies the results of the record into memory that no other graph writes."""
    recorded, replay = graph.outputs, graph.replay
    graph.outputs = pytree.tree_map_only(torch.Tensor, torch.clone, recorded)
    graph.pool_nbytes += sum(t.nbytes for t in tensors_in(graph.outputs))
    sources, targets = tensors_in(recorded), tensors_in(graph.outputs)
    release = graph.release

    def replays() -> None:
        replay()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def releases() -> None:
        sources.clear()
        targets.clear()
        release()

    del recorded
    graph.replay, graph.release = replays, releases


@variant(on="tape", lanes="fast")
@overrides("record")
def driver_that_undoes_its_captures(_: Any, right: Any, recorder: Any, fn: RecordedRegion) -> Any:
    """The memory that the recorded run wrote is restored: a capture has no effects, as on a GPU."""
    perform = recorder.perform
    before: dict[int, tuple[torch.UntypedStorage, Any]] = {}

    def keeping(func: Any, args: Any, kwargs: Any, given: Any) -> Any:
        for tensor in tensors_in((args, kwargs)):
            memory = tensor.untyped_storage()
            if storage_id(tensor) not in {*recorder.allocated, *before}:
                before[storage_id(tensor)] = memory, memory.clone()
        return perform(func, args, kwargs, given)

    recorder.perform = keeping
    recording = right(recorder, fn)
    for memory, old in before.values():
        memory.copy_(old)
    return recording


@variant(on="tape", lanes="fast")
def driver_with_a_worker_thread(base: type[Any]) -> type[Any]:
    """Another thread runs the replays."""
    worker = ThreadPoolExecutor(1)

    def in_the_thread(_: Any, graph: Any) -> None:
        replay = graph.replay
        graph.replay = lambda: worker.submit(replay).result()

    return edits_graphs(in_the_thread)(base)


@variant(on="tape", lanes="strict")
@edits_graphs
def strict_driver_with_other_poison(_: Any, graph: Any) -> None:
    """The strict mode poisons floating point memory with a number, not with NaN."""
    spoil = graph.spoil

    def spoils() -> None:
        spoil()
        for flat in graph.pool.values():
            if flat.is_floating_point():
                flat.fill_(-12345)

    graph.spoil = spoils
