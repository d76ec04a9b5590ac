"""`Recorder`: runs every dispatched operation of a region and keeps it, as a `Recording`.

A library for drivers: the tape turns a recording into calls, ``inductor`` into a graph that it compiles. The
rules are the same for both:

- Memory is recorded, not Python objects: the record holds one alias for each place (storage, offset, shape,
  stride, dtype). If a tensor object is given other memory later, the record does not change.
- Host numbers that a device operation takes are kept by value. Containers are copied.
- An operation on only host tensors is host work. A replay does not repeat it.
- A composite operation (``linear``, ``reshape``) is recorded as the operations that it calls, so that a host
  read inside it is seen. So is an operator with a Python implementation, which a replay would not repeat.
- A call counts as work unless it is known to do none, because some schemas do not declare every write.
- Collectives are work, and the recorder waits for them. Point-to-point transfers are refused.
- A constant made from Python numbers is restored in every replay, as a clone of a copy that is kept.
- Uninitialised memory (``empty``) is memory of the graph. It is recorded, with no work to repeat.
- A tensor that the region made may change its shape in place. This is no work: calls before and after the
  change hold two places in one storage. For all other tensors a change of shape in place is refused.
- An eager call ends a segment and runs unrecorded, outside every mode of the region, as in a replay. Its new
  results are memory of the graph.
- A task is one operation. Its host arguments belong to the `RecordedTask`, which is the recorded operation.
- Compiled code is refused, see `graphpact_tape.compiled`. Work of other threads is refused, see
  `graphpact_tape.threads`. Direct host access to memory is refused, see `graphpact_tape.raw`. Eager calls may
  do all of this.
- Each replay draws new random numbers. Any other change of a generator is refused, see
  `graphpact_tape.draws`.
- The garbage collector does not start while a region is recorded: what finalizers do would be recorded.
- Memory whose address the region asked for keeps its address as long as the graph exists.
- The graph's own memory is the allocations of the region, the results of its eager calls, and its constants.
  All other memory is external.

Does not: replay, compile, or check rules beyond those of recording; the strict tape does.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphpact.graphs.driver import GraphDriver, TaskKey
from graphpact.graphs.lines import Line
from graphpact.graphs.segments import EagerCall
from graphpact.tensors import storage_id
from graphpact_tape.collectives import WRITTEN, is_collective, is_repeated, run_and_wait
from graphpact_tape.compiled import compiled_code_refused
from graphpact_tape.draws import Draws
from graphpact_tape.host_guard import HostReadGuard, Watcher, modes_left
from graphpact_tape.host_tensors import plain_tensors
from graphpact_tape.operators import is_work
from graphpact_tape.raw import raw_memory_refused
from graphpact_tape.task_table import GraphTasks
from graphpact_tape.tasks import RULE, Hold, RecordedTask
from graphpact_tape.threads import other_threads_refused
from graphpact_tape.trace import TracedCall
from graphpact_tape.trees import map_tensors, tensors_of

__tracebackhide__ = True  # a message names the line of the region

Place: TypeAlias = tuple[Any, ...]

_aten = torch.ops.aten

_RESIZES = frozenset({_aten.resize_, _aten.resize_as_})


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One operation that ran while a region was recorded.

    Its tensors are aliases of the caller's tensors, one object for each place. A recorder may keep a
    placeholder instead of an external tensor: see `Recorder.held`.

    Args:
        op: The operation, an overload.
        args: Its arguments; containers are copies, host numbers are values.
        kwargs: Its arguments by name.
        result: Its result.
        made: For each tensor in the result, in order: the tensor if it has new memory, else None.
        line: The caller's line.
        is_work: Whether a replay has to repeat the call; false for views and ``empty``.
        collective: Its place among the collectives of the region, from 0; None for other operations.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    made: tuple[torch.Tensor | None, ...]
    line: Line
    is_work: bool
    collective: int | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among its arguments, and those that it made."""
        return [*tensors_of((self.args, self.kwargs)), *tensors_of(self.made)]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The recorded ``calls`` between two eager calls."""

    calls: list[RecordedCall] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """The number of operations that a replay has to repeat."""
        return sum(call.is_work for call in self.calls)


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded region.

    Args:
        parts: Segments, with an eager call between every two of them.
        outputs: The outputs that the region returned.
        own: The graph's own memory, by `storage_id`: allocations of the region, results of its eager calls,
            its constants.
        trace: Every operation that was dispatched, views too; None unless the recorder was ``traced``.
        tasks: Its tasks; None if it has none.
        addressed: The part of `own` whose addresses the region asked for, each with the line that asked.
    """

    parts: list[Segment | EagerCall]
    outputs: Any
    own: dict[int, torch.UntypedStorage]
    trace: list[TracedCall] | None = None
    tasks: GraphTasks | None = None
    addressed: dict[int, Line] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The segments, in order."""
        return [part for part in self.parts if isinstance(part, Segment)]

    @property
    def num_nodes(self) -> int:
        """The number of operations that a replay has to repeat."""
        return sum(segment.num_nodes for segment in self.segments)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of all work, and the outputs."""
        return [*(t for tensors, _ in self._used for t in tensors), *tensors_of(self.outputs)]

    @cached_property
    def _used(self) -> list[tuple[list[torch.Tensor], Line]]:
        """The tensors of each call that is work, and its line."""
        calls = [call for segment in self.segments for call in segment.calls]
        return [(call.tensors(), call.line) for call in calls if call.is_work]

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the `tensors` whose memory is external, each place once."""
        external: dict[Place, torch.Tensor] = {}
        for t in self.tensors():
            if storage_id(t) not in self.own and t.numel():
                external.setdefault((t.device, t.data_ptr(), t.shape, t.stride(), t.dtype), t)
        return list(external.values())

    def lines(self) -> dict[int, Line]:
        """Return the line of the first work with each storage, by `storage_id`."""
        found: dict[int, Line] = {}
        for tensors, line in self._used:
            for t in tensors:
                found.setdefault(storage_id(t), line)
        return found

    def used_memory(self) -> dict[int, torch.UntypedStorage]:
        """Return the part of `own` that work or outputs use, or whose address the region asked for."""
        used = {storage_id(t) for t in self.tensors()} | self.addressed.keys()
        return {storage: memory for storage, memory in self.own.items() if storage in used}


class Region:
    """A region that is recorded as a block.

    Attributes:
        outputs: What the region returns, set by the block; None if other code keeps it.
        recording: The recording, after the block.
    """

    outputs: Any = None
    recording: Recording


@dataclass(slots=True)
class EagerSection:
    """A part of a region that is not recorded. Every replay calls ``fn(*args)`` in its place.

    Args:
        fn: The function. It returns what it returned at capture.
        args: Its arguments, which the segments keep in place.
        result: What the section made and the next segment reads; replays copy the new result into it.
    """

    fn: Callable[..., Any] = lambda: None
    args: tuple[Any, ...] = ()
    result: Any = None


class Recorder(Watcher):
    """A dispatch mode that records the operations of one region, by the rules of this module.

    Args:
        guard: The function mode that is active together with it. It knows the host memory.
        traced: Whether to keep a trace of every dispatched operation.
        work_only: Whether to leave out calls that a replay need not repeat, such as views.

    Attributes:
        parts: The record so far: segments, and the eager calls between them.
        allocated: The storages that the region allocated, by `storage_id`.
        results: The storages that its eager calls returned.
        constants: The storages of host numbers and of copies of constants.
        line: The caller's line of the current operation.
        tasks: The tasks, in captured order.
    """

    def __init__(self, guard: HostReadGuard, *, traced: bool = False, work_only: bool = False) -> None:
        super().__init__(guard)
        self._work_only = work_only
        self.parts: list[Segment | EagerCall] = [Segment()]
        # Kept until the end, so that no later storage gets the id of a freed one.
        self.allocated: dict[int, torch.UntypedStorage] = {}
        self.results: dict[int, torch.UntypedStorage] = {}
        self.constants: dict[int, torch.UntypedStorage] = {}
        self.line = Line()
        self.tasks: list[RecordedTask] = []
        self._task: tuple[RecordedTask, tuple[Any, ...]] | None = None  # the task that is called now
        self._trace: list[TracedCall] | None = [] if traced else None
        self._aliases: dict[Place, torch.Tensor] = {}
        self._num_collectives = 0

    def record(self, driver: GraphDriver, fn: Callable[[], Any]) -> Recording:
        """Run ``fn`` as the region that ``driver`` captures, and return its recording.

        Raises:
            CaptureError: The region did something that a graph cannot record, even if it caught the error.
        """
        region = Region()
        with self.recording(driver, region):
            region.outputs = fn()
        return region.recording

    @contextlib.contextmanager
    def recording(self, driver: GraphDriver, region: "Region") -> Iterator[None]:
        """Record the block as the region that ``driver`` captures; ``region`` has the recording after it.

        Raises:
            CaptureError: See `record`.
        """
        self._draws = Draws(self.guard, driver.device)
        with (
            _no_garbage_collection(),
            driver.recorded_run(),
            compiled_code_refused(self.guard),
            raw_memory_refused(self.guard),
            other_threads_refused(self.guard),
            self._draws.watched(),
            self.guard,
            self,
        ):
            yield
            outputs = map_tensors(_complete, region.outputs)
        # The region caught the error, but a capture does not recover.
        if self.guard.refused is not None:
            raise self.guard.refused
        self._check_outputs(outputs)
        own = self.allocated | self.results | self.constants
        tasks = GraphTasks(self.tasks) if self.tasks else None
        addressed = {each: line for each, (_, line) in self.guard.addressed.items() if each in own}
        region.recording = Recording(self.parts, outputs, own, self._trace, tasks, addressed)

    def perform(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run ``func`` and record it."""
        self.line = Line()
        return self.recorded(func, args, kwargs, given)

    def recorded(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Run ``func``, which the caller calls at `line`, and record it."""
        if self._trace is not None:
            self._trace.append(TracedCall.of(func, args, kwargs, self.line))
        if torch.Tag.inplace_view in func.tags:
            self._check_reshape(func, args[0])
            return func(*args, **kwargs)
        if func is _aten.lift_fresh.default:
            result = func(*args, **kwargs)
            constant = self.constant(result)
            self._record(_aten.clone.default, (constant,), {}, [constant], result)
            return result
        if not all(map(torch.Tensor.dim, given)):  # there are numbers
            args, kwargs = map_tensors(self.kept, (args, kwargs))
            given = tensors_of((args, kwargs))
        self._draws.check_generator(func, args, kwargs)
        result = self.run(func, args, kwargs)
        self.check_kinds(func, "makes", tensors_of(result))
        self._record(func, args, kwargs, given, result)
        return result

    def task(
        self,
        key: TaskKey,
        op: Any,
        args: tuple[Any, ...],
        updated: Mapping[str, Any],
        *,
        rebound: Mapping[str, torch.Tensor],
        waits: bool,
    ) -> None:
        """Run ``op(*args, **updated, **rebound)`` and record it as a task.

        Raises:
            CaptureError: The task cannot be updated, or its key belongs to another graph or task.
        """
        for tensor in tensors_of(dict(updated)):
            if self.host.strict and tensor not in self.host:
                raise self.guard.host_read("an argument of a task that is updated")
        try:
            with modes_left(self.guard, self):  # copies of arguments are no work of the region
                task = RecordedTask(key, op, updated, rebound, Line(), waits=waits, hold=self.hold)
            self._require_outside(rebound)
        except TypeError as error:
            raise self.guard.refusal(
                f"the task {key.layer!r} of {key.graph}: {error}, recorded",
                "a task is a torch operator that writes into its arguments; its updated arguments are host"
                " numbers, lists of them, or host tensors, by the names of its schema; its rebound arguments"
                " are device tensors that the region did not make",
                RULE,
            ) from error
        if self.tasks and (self.tasks[0].key.graph != key.graph or key in (t.key for t in self.tasks)):
            raise self.guard.refusal(
                f"the task {key.layer!r} of {key.graph} follows {self.tasks[-1].name} and is recorded",
                "give all tasks of a capture the key of its graph, and each task a different layer",
                RULE,
            )
        self._task = task, args
        try:
            task(*args)
        finally:
            was_dispatched, self._task = self._task is None, None
        if not was_dispatched:
            raise self.guard.refusal(
                f"{task.operator} is not dispatched as one operator", "wrap it in one custom operator", RULE
            )
        with modes_left(self.guard, self):
            task.was_recorded()
        self.tasks.append(task)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._task is None or func is not self._task[0].operator:
            return super().__torch_dispatch__(func, types, args, kwargs)
        (task, args), self._task = self._task, None
        self.line = task.line
        # The rebound arguments of the capture are read only now, and are not part of the record.
        given = [value for name, value in (kwargs or {}).items() if name not in task.captured]
        return self.recorded(task, args, {}, tensors_of((args, given)))

    def eager_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run ``fn(*args)`` unrecorded, begin another segment, and return the result."""
        with self.eager_section() as section:
            section.fn, section.args, section.result = fn, args, fn(*args)
        return section.result

    @contextlib.contextmanager
    def eager_section(self) -> Iterator["EagerSection"]:
        """End a segment, run the block unrecorded, and begin the next segment.

        Returns:
            The section. The block sets what every replay calls in its place.
        """
        section = EagerSection()
        self.guard.paused = True
        try:
            with modes_left(self.guard, self):
                yield section
                self.check_kinds("an eager call", "returns", tensors_of(section.result))
                known = {storage_id(t) for t in plain_tensors(tensors_of(section.args))}
                made = {storage_id(t): t.untyped_storage() for t in tensors_of(section.result)}
        finally:
            self.guard.paused = False
        self._draws.accept()
        self.results.update((storage, made[storage]) for storage in made.keys() - known)
        self.parts += [EagerCall(section.fn, section.args, section.result), Segment()]

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``; the graph keeps the copy and does not write it."""
        value = tensor.clone()
        self.constants[storage_id(value)] = value.untyped_storage()
        return value

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in the graph's own memory."""
        storage = storage_id(tensor)
        return storage in self.allocated or storage in self.constants or storage in self.results

    # -- overridden by the strict recorder -------------------------------------------------------

    hold: Hold | None = None
    """How tasks hold rebound tensors; None to keep them alive."""

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument that the operation uses for ``tensor``: a copy if it is a host number."""
        return self.constant(tensor) if not tensor.dim() and tensor in self.host else tensor

    def held(self, tensor: torch.Tensor) -> Any:
        """Return an alias of ``tensor`` for the record; it keeps the memory alive."""
        place = place_in_memory(tensor)
        if place not in self._aliases:
            self._aliases[place] = tensor.detach()
        return self._aliases[place]

    def add(
        self,
        func: Any,
        tensors: tuple[tuple[Any, ...], dict[str, Any], Any, tuple[torch.Tensor | None, ...]],
        *,
        is_work: bool,
    ) -> None:
        """Add a call to the record, with aliases in place of the caller's tensors.

        Args:
            func: The operation.
            tensors: Its arguments, its arguments by name, its result, and what it made.
            is_work: Whether a replay has to repeat it.
        """
        number = None
        if is_work and is_collective(func):
            number, self._num_collectives = self._num_collectives, self._num_collectives + 1
        segment = self.parts[-1]
        assert isinstance(segment, Segment)  # noqa: S101  each eager call is followed by one
        args, kwargs, result, made = map_tensors(self.held, tensors)
        segment.calls.append(RecordedCall(func, args, kwargs, result, made, self.line, is_work, number))

    def allocates(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the region allocated the storages of ``tensors``."""
        self.allocated.update((storage_id(t), t.untyped_storage()) for t in tensors)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of the host or the device, wait if it is a collective, and return its result.

        Raises:
            CaptureError: It is a collective that no replay can repeat, or it draws from a changed generator.
        """
        if not is_collective(func):
            return self._draws.run(func, args, kwargs)
        if not is_repeated(func):
            raise self.guard.refusal(
                f"{func} is called",
                "a graph repeats collectives, and waits for each: move point-to-point transfers and barriers"
                " out of the region, or between its segments by driver.eager_call()",
            )
        return run_and_wait(func, *args, **kwargs) if func.name() in WRITTEN else func(*args, **kwargs)

    # -- internal --------------------------------------------------------------------------------

    def _check_outputs(self, outputs: Any) -> None:
        """Refuse outputs that are not plain tensors."""
        returned: list[Any] = tensors_of(outputs)
        for tensor in returned:
            if is_traceable_wrapper_subclass(tensor):
                raise self.guard.refusal(
                    f"the region returns {type(tensor).__name__}, a tensor made of others,",
                    "return the plain tensors inside, as by to_local() or values(): a replay writes these",
                )
        self.check_kinds("the region", "returns", returned)

    def _require_outside(self, rebound: Mapping[str, torch.Tensor]) -> None:
        """Raise `TypeError` for a rebound argument in the graph's own memory, which replays reuse."""
        if inside := [name for name, tensor in rebound.items() if self.owns(tensor)]:
            raise TypeError(f"{', '.join(inside)} is memory of the graph, which cannot be rebound")

    def _check_reshape(self, func: Any, tensor: torch.Tensor) -> None:
        """Refuse a change of shape in place that resizes memory, or of a tensor from outside the region."""
        if func.overloadpacket is _aten.set_:
            raise self.guard.refusal(
                f"{func} gives a tensor other memory",
                "use other operators: this one could also give it memory that the host reads or writes",
            )
        if func.overloadpacket in _RESIZES or storage_id(tensor) not in self.allocated:
            raise self.guard.refusal(
                f"{func} changes a tensor's shape in place",
                "use the variant that returns a view: the recorded tensor keeps its shape",
            )

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        result: Any,
    ) -> None:
        storages = {storage_id(t) for t in given}
        made = tuple(t if storage_id(t) not in storages else None for t in tensors_of(result))
        new = [t for t in made if t is not None]
        self.allocates(new)
        repeated = is_work(func, allocates=bool(new))
        if repeated or not self._work_only:
            self.add(func, (args, kwargs, result, made), is_work=repeated)


class RecordingDriver(GraphDriver):
    """Base class of drivers that capture with a `Recorder`: it holds the recorder of the current capture."""

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        super().__init__(device, strict=strict)
        self._recorder: Recorder | None = None

    def record(self, recorder: Recorder, fn: Callable[[], Any]) -> Recording:
        """Run ``fn`` once as the captured region, and return its recording.

        Raises:
            CaptureError: See `Recorder.record`.
        """
        with self.recording_with(recorder):
            return recorder.record(self, fn)

    @contextlib.contextmanager
    def recording_with(self, recorder: Recorder) -> Iterator[None]:
        """Make ``recorder`` the recorder of the current capture during the context."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def add_host_memory(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare ``tensors`` as host memory during a capture, in which an engine made or received them.

        Outside a capture nothing is refused, and nothing is noted; see `DeclaredMemory` for memory that is
        known before.
        """
        if self._recorder is not None:
            self._recorder.guard.host.add(tensors)

    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``fn(*args)`` now, and at every replay, between two segments."""
        assert self._recorder is not None  # noqa: S101  it is capturing
        return self._recorder.eager_call(fn, args)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Do not start the garbage collector in the context; afterwards it is enabled if it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _complete(output: Any) -> Any:
    """Return an output; wait for it if a functional collective made it and nothing has waited yet."""
    wait = getattr(output, "wait", None)
    return output if wait is None else wait()


def place_in_memory(tensor: torch.Tensor) -> Place:
    """Return the storage of ``tensor`` and its layout in it."""
    return (
        storage_id(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
