"""The ``tape`` driver: the semantics of CUDA graphs on any device that runs eager torch, such as a CPU.

A capture stores every dispatched operation, with its tensors by identity and its numbers by value. A replay
runs these operations in order on these tensors, without the Python between them. Like a CUDA graph, it does
not see a new tensor, a changed host number or another branch.

The driver has two modes. Fast mode is for fast replays on a CPU. Strict mode is slow, but detects wrong use
that a GPU would not report: see `graphpact_tape.strict`.

Does not: record operations; `graphpact_tape.recorder` does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from graphpact.errors import CaptureError, EngineError
from graphpact.graphs.driver import (
    NONE_REBOUND,
    DeclaredMemory,
    Event,
    Graph,
    Ownership,
    Stream,
    TaskKey,
)
from graphpact.graphs.lines import Line
from graphpact.graphs.segments import EagerCall
from graphpact.tensors import storage_id
from graphpact_tape.code import Code
from graphpact_tape.externals import hold_weakly
from graphpact_tape.host_guard import HostReadGuard
from graphpact_tape.host_tensors import HostMemory
from graphpact_tape.nodes import Node, repeat
from graphpact_tape.order import Order
from graphpact_tape.rearmed import check_rearmed
from graphpact_tape.recorder import EagerSection, Recorder, Recording, RecordingDriver, Region
from graphpact_tape.reuse import in_shared_memory, private_memory
from graphpact_tape.rewrites import memory_of, rewritten
from graphpact_tape.strict import StrictRecorder, StrictShared, StrictTape
from graphpact_tape.strict_observer import StrictObserver
from graphpact_tape.task_table import TaskTable
from graphpact_tape.tasks import RULE
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_WHEN = "while a graph is recorded"


def _nothing() -> None:
    """Do nothing, because in fast mode all streams are the same."""


def _replay_of_released() -> None:
    raise EngineError("a released tape was replayed", hint="capture the shape again")


def _repeat(nodes: Sequence[Node]) -> None:
    """Run nodes one after the other; tapes of few replays do without generated code."""
    with torch.inference_mode():
        for op, args, kwargs in nodes:
            op(*args, **kwargs)


class Tape(Graph):
    """A graph of recorded operations, with the outputs of the recorded region.

    Attributes:
        trace: Every operation that was dispatched during the capture; None unless the driver is ``traced``.
        tasks: The tasks of the graph; None if there are none.
    """

    def __init__(self, recording: Recording) -> None:
        self.tasks = recording.tasks
        self.outputs = recording.outputs
        self.trace = recording.trace
        self.num_segments = len(recording.segments)
        self.num_nodes = recording.num_nodes
        self._external = recording.external_tensors()
        self._lines = {} if recording.trace is None else recording.lines()
        nodes: list[Node] = []
        for part in recording.parts:
            if isinstance(part, EagerCall):
                nodes.append((part, (), {}))
            else:
                nodes += [repeat(call) for call in part.calls if call.is_work]
        self._code: Code | None = None
        self._run: Callable[[], None] = functools.partial(_repeat, nodes)
        if recording.trace is None:  # otherwise `line_of` must find by the memory which line made a tensor
            private = private_memory(recording, nodes)
            nodes = in_shared_memory(rewritten(nodes, recording.own, private), recording.own, private)
            self._code = Code(nodes)
            self._run = self._code.run
        self._nodes = nodes
        self._addressed = [recording.own[each] for each in recording.addressed]
        kept = {storage_id(t) for t in tensors_of(recording.outputs)} | recording.addressed.keys()
        for node in nodes:
            kept |= memory_of(node)
        self.pool_nbytes = sum(recording.own[each].nbytes() for each in kept & recording.own.keys())

    @property
    def source(self) -> str | None:
        """The code of a replay, see `graphpact_tape.code`; None if the driver is ``traced``."""
        return None if self._code is None else self._code.source

    def replay(self) -> None:
        """Run every recorded operation once, in order.

        Raises:
            ReplayError: A later graph uses the same key for its tasks, or the previous replay waits for an
            update.
        """
        if self.tasks is None or self.tasks.table is None:
            self._run()
        else:
            self.tasks.table.launch(self.tasks, _nothing, self._run)

    def release(self) -> None:
        """Drop the operations and all tensors that only they referenced."""
        self._nodes, self._code, self._run = [], None, _replay_of_released
        self._external, self._addressed = [], []
        self.outputs = self.tasks = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of operations and outputs in memory that the tape does not own."""
        return list(self._external)

    def line_of(self, tensor: torch.Tensor) -> Line | None:
        """Return the line of the region that first used the memory of ``tensor``; None unless ``traced``."""
        return self._lines.get(storage_id(tensor))


class Capture(Region):
    """A capture in a block; see `TapeDriver.capturing`.

    Attributes:
        graph: The graph, after the block.
    """

    graph: Graph


class TapeDriver(RecordingDriver):
    """A driver that records tapes.

    In fast mode each tape has separate memory, and all streams are the same: work is done at once, in order.
    In strict mode the replay of a tape poisons the memory of the driver's other tapes, and a missing wait
    between streams is an error.

    Args:
        device: See `GraphDriver`.
        strict: See `GraphDriver`.
        traced: Whether tapes keep a `trace`: every operation that their capture dispatched. They generate no
            code, so captures are shorter, and replays longer.
        strict_tasks: Whether fast mode checks updates of tasks as strict mode does.
    """

    name: ClassVar[str] = "tape"
    has_strict_mode: ClassVar[bool] = True
    has_tasks: ClassVar[bool] = True

    def __init__(
        self,
        device: torch.device,
        *,
        strict: bool = False,
        traced: bool = False,
        strict_tasks: bool = False,
    ) -> None:
        super().__init__(device, strict=strict)
        # A kernel of a GPU may depend on the alignment of its inputs: one bit differed there.
        self.repeats_eager_kernels = device.type == "cpu"
        self.traced = traced
        self._shared = StrictShared(device) if strict else None
        self._hold = hold_weakly if strict_tasks else None  # the next two are used in fast mode
        self._tasks = TaskTable(Order() if strict_tasks else None)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:  # noqa: ARG003  it runs on any device
        """Return None, because a tape only needs eager torch."""
        return None

    def declare(self, memory: DeclaredMemory) -> None:
        """Declare the lane's memory, before the first capture."""
        super().declare(memory)
        if self._shared is not None:
            self._shared.order.name_of = memory.name_of

    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then once more and record every operation."""
        self.refuse_nested_capture()
        with torch.inference_mode():
            armed = self._armed()
            for _ in range(warmup):
                fn()
            recorder = self._new_recorder()
            with self._watching(recorder):
                recording = self.record(recorder, fn)
            return self._tape_of(recorder, recording, armed)

    @contextlib.contextmanager
    def capturing(self) -> Iterator["Capture"]:
        """Record the block, for engines that capture in a block, as by ``with torch.cuda.graph(graph)``.

        The caller warms up before. Memory of the graph that the caller holds at the end of the block keeps
        its address. The block may break the graph by `eager_call` or `eager_section`; a strict driver does
        not replay such a graph twice (GP18), because its eager calls need what the engine sets for a step.

        Returns:
            The capture; its graph is there after the block.

        Raises:
            CaptureError: The block does work that a graph cannot record.
        """
        self.refuse_nested_capture()
        capture = Capture()
        with torch.inference_mode():
            armed, recorder = self._armed(), self._new_recorder()
            with (
                self._watching(recorder),
                self.recording_with(recorder),
                recorder.recording(self, capture),
            ):
                yield capture
            is_broken = len(capture.recording.segments) > 1
            capture.graph = self._tape_of(recorder, capture.recording, None if is_broken else armed)

    @contextlib.contextmanager
    def eager_section(self) -> Iterator[EagerSection]:
        """End a segment of the current capture, run the block unrecorded, and begin the next segment.

        Returns:
            The section. The block sets the function that every replay calls in its place.
        """
        assert self._recorder is not None  # noqa: S101  it is capturing
        with self.calling(), self._recorder.eager_section() as section:
            yield section

    def _armed(self) -> list[torch.Tensor]:
        """Return copies of the workspaces before a warm-up, which a strict capture needs."""
        return [t.clone() for t in self.memory.workspaces] if self.strict else []

    def _new_recorder(self) -> Recorder:
        host = HostMemory(self.memory.host, strict=self.strict)
        guard = HostReadGuard(host, _WHEN, CaptureError)
        if self._shared is not None:
            self._shared.order.finish_copies(waits=False)
            return StrictRecorder(guard, self._shared, self.memory, traced=self.traced)
        recorder = Recorder(guard, traced=self.traced, work_only=True)
        recorder.hold = self._hold
        return recorder

    def _watching(self, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._shared is None else self._shared.watching(recorder.guard)

    def _tape_of(self, recorder: Recorder, recording: Recording, armed: list[torch.Tensor] | None) -> Graph:
        """Return the tape of a recording; a strict one is checked, and other replays will poison it.

        A strict tape is not replayed twice if ``armed``, the workspaces before the capture, is None.
        """
        if not isinstance(recorder, StrictRecorder):
            fast = Tape(recording)
            self._tasks.add(fast.tasks)
            return fast
        tape = StrictTape(recorder, recording)
        shared = recorder.shared
        shared.add(tape)
        if armed is not None and self.memory.refreshed:
            check_rearmed(tape, self.memory, armed, shared.generator)
        shared.tasks.add(tape.tasks)
        return tape

    def task(
        self,
        key: TaskKey,
        op: Any,
        args: tuple[Any, ...],
        updated: Mapping[str, Any],
        *,
        rebound: Mapping[str, torch.Tensor] = NONE_REBOUND,
        waits: bool = False,
    ) -> None:
        """Call ``op``; in a region, record it as one node whose arguments are updated before each replay."""
        if not self.is_capturing or self._recorder is None:
            op(*args, **updated, **rebound)
        else:
            self._recorder.task(key, op, args, updated, rebound=rebound, waits=waits)

    # -- around the replay -----------------------------------------------------------------------

    def update_task(
        self,
        key: TaskKey,
        updated: Mapping[str, Any],
        *,
        rebound: Mapping[str, torch.Tensor] = NONE_REBOUND,
    ) -> None:
        """Set the arguments of a task for the next replay; see `graphpact_tape.task_table`."""
        if self.is_capturing and self._recorder is not None:
            raise self._recorder.guard.refusal(
                f"the task {key.layer!r} of {key.graph} is updated",
                "update tasks while preparing a replay: a graph does not record updates",
                RULE,
            )
        update = self._tasks.update if self._shared is None else self._shared.update_task
        update(key, updated, rebound)

    def strict_observer(self, ownership: Ownership | None = None) -> object:
        """Return a `StrictObserver`.

        Raises:
            ConfigError: The driver is in fast mode.
        """
        if not self.strict:
            return super().strict_observer(ownership)
        return StrictObserver(self, ownership, self.step)

    @contextlib.contextmanager
    def preparation(
        self, host: Iterable[torch.Tensor] = (), read_only: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """In strict mode, refuse host reads of device tensors, and writes to the batch and other inputs."""
        if self._shared is None:
            self._tasks.settle()
            self._tasks.preparation += 1
            yield
            return
        with self._shared.preparation(self.memory, host, read_only):
            yield

    @contextlib.contextmanager
    def unprepared(self, host: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """In strict mode, note which tensors are made on the host. Nothing is refused."""
        if self._shared is None:
            yield
            return
        with self._shared.unprepared(self.memory, host):
            yield

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """In strict mode, refuse host reads while a replay waits for an update, and a step that ends so."""
        if self._shared is None:
            yield
            return
        with self._shared.step(self.memory):
            yield

    def stream(self) -> Stream:
        """Return a new stream. In strict mode its work is checked for missing waits."""
        return super().stream() if self._shared is None else self._shared.order.stream()

    def current_stream(self) -> Stream:
        """Return the stream to which new work goes."""
        return super().current_stream() if self._shared is None else self._shared.order.current

    def event(self) -> Event:
        """Return a new event."""
        return super().event() if self._shared is None else self._shared.order.event()

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from or to host memory, at once, or in strict mode as late as a device might do it."""
        if self._shared is None:
            target.copy_(source)
        else:
            self._shared.copy_async(target, source, capturing=self.is_capturing)

    def copy_in_flight(self, source: torch.Tensor) -> Line | None:
        """Return the line of a copy from or to ``source`` that the host has not waited for.

        None in fast mode.
        """
        return None if self._shared is None else self._shared.order.copy_in_flight(source)

    @property
    def num_copies_to_host(self) -> int:
        """The number of copies to the host that were delayed; 0 in fast mode, which copies at once."""
        return 0 if self._shared is None else self._shared.order.num_to_host

    def synchronize(self) -> None:
        """Wait for every copy in flight. In fast mode there are none.

        Raises:
            ReplayError: A launched replay still waits for the update of a task.
        """
        if self._shared is None:
            self._tasks.settle()
        else:
            self._shared.order.synchronize()
