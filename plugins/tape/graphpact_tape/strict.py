"""The strict tape: detects wrong use of graphs that a GPU does not report.

- Memory that a graph allocated, including its outputs, is poisoned before each of its replays, and when
  another graph of the driver replays.
- External memory is referenced weakly, as in a CUDA graph. If it was freed, moved or shrank, a replay raises
  an error instead of reading invalid memory.
- A capture refuses writes to memory that the lane did not declare, and any use of memory that another
  graph's capture allocated.
- Writes of a capture to external memory are undone, because a capture on a GPU records work without running
  it.
- Each graph is replayed twice at capture, on the same inputs: see `graphpact_tape.rearmed`.
- Streams and asynchronous copies are checked for missing waits: see `graphpact_tape.order`.
- Each task must be updated once before a replay: see `graphpact_tape.task_table`.

Does not: know the correct contents of a tensor; verification compares contents.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from graphpact.errors import CaptureError, EngineError, ReplayError
from graphpact.graphs.driver import DeclaredMemory, Graph, GraphDriver, TaskKey
from graphpact.graphs.lines import Line
from graphpact.graphs.segments import EagerCall
from graphpact.tensors import storage_id
from graphpact_tape.draws import default_generator
from graphpact_tape.externals import Borrowed, External, Rebound, StrictNode, hold_weakly
from graphpact_tape.host_guard import DispatchMode, HostReadGuard
from graphpact_tape.host_tensors import HostMemory, WeakTensor, kind_of, plain_tensors
from graphpact_tape.late_reads import LateReads
from graphpact_tape.memories import two_memories
from graphpact_tape.operators import UNINITIALISED, Contents, may_hide_writes, whole, written_by
from graphpact_tape.order import Order
from graphpact_tape.poison import poison
from graphpact_tape.preparation import PreparationWatch
from graphpact_tape.recorder import (
    EagerSection,
    Place,
    Recorder,
    Recording,
    Region,
    place_in_memory,
)
from graphpact_tape.task_table import TaskTable
from graphpact_tape.trees import tensors_of
from graphpact_tape.writes import write

__tracebackhide__ = True


class StrictRecorder(Recorder):
    """A recorder that refers to external memory weakly and refuses writes to undeclared memory."""

    def __init__(
        self,
        guard: HostReadGuard,
        shared: "StrictShared",
        memory: DeclaredMemory,
        *,
        traced: bool = False,
    ) -> None:
        super().__init__(guard, traced=traced, work_only=True)
        self.shared = shared
        self.hold = shared.hold
        self.memory = memory
        self.external: list[External] = []
        self.changed: set[int] = set()  # indices of external tensors that the region writes
        # Indices of host tensors that `driver.copy_async` reads, and the caller's lines.
        self.copied: list[tuple[int, Line]] = []
        self.pool: dict[int, torch.Tensor] = {}  # each storage as one flat tensor
        self._known: dict[Place, int] = {}
        self._func: object = None  # the current operation
        self._pools = shared.pools()
        self._undo: dict[int, tuple[WeakTensor, torch.Tensor]] = {}
        self._writable = {storage_id(t) for t in (*memory.refreshed, *memory.caches, *memory.workspaces)}

    @contextlib.contextmanager
    def recording(self, driver: GraphDriver, region: Region) -> Iterator[None]:
        """Record the block; then check the rules for the end of a region, and undo external writes."""
        self.shared.order.begin_capture()
        try:
            with super().recording(driver, region):
                yield
            self.shared.order.check_joined()
            for external in self.external:
                if external.tensor.storage.expired():
                    raise external.gone("was freed while the graph was recorded", CaptureError)
        finally:
            self.shared.order.end_capture()
            for written, before in self._undo.values():
                tensor = written.revive()
                if tensor is not None:
                    write(tensor, before)

    def recorded(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Check the memory that ``func`` reads and writes, then run and record it."""
        self._func = func
        written = written_by(func, args, kwargs)
        for tensor in written:
            if not self.owns(tensor):
                self._check_write(f"{func} writes", tensor)
        self._check_owner(func, given)
        contents = Contents(given if may_hide_writes(func) else (), disturb=True)
        try:
            result = super().recorded(func, args, kwargs, given)
        finally:
            changed = contents.written()
        written += self._hidden_writes(func, given, written, changed)
        if self.guard.copying:
            self.copied.append((self.borrow(args[1]), self.line))
        self.shared.order.operation(func, given, written, result, self.line, CaptureError)
        return result

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument that replaces ``tensor`` in the call: a copy if a kernel takes it by value."""
        if self.owns(tensor) or not self.host.is_number(tensor):
            return tensor
        if any(storage_id(tensor) == storage for storage, *_ in self._known):
            return tensor
        return self.constant(tensor)

    def held(self, tensor: torch.Tensor) -> Any:
        """Return an alias of ``tensor`` for the record, or a placeholder if ``tensor`` is external."""
        if self.owns(tensor) or not tensor.numel():
            return super().held(tensor)
        return Borrowed(self.borrow(tensor))

    @contextlib.contextmanager
    def eager_section(self) -> Iterator[EagerSection]:
        """Run the block outside the graph. The host may wait during the block."""
        self.shared.order.is_broken = True
        try:
            with super().eager_section() as section:
                yield section
        finally:
            self.shared.order.is_broken = False

    def allocates(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add the storages of ``tensors`` to the graph's pool, which is poisoned."""
        tensors = list(tensors)
        super().allocates(tensors)
        for t in tensors:
            self.pool.setdefault(storage_id(t), whole(t.untyped_storage(), t.dtype, t.device))

    def borrow(self, tensor: torch.Tensor, first_use: str | None = None) -> int:
        """Return the index of the external tensor ``tensor``, after adding it if it is new.

        Args:
            tensor: The tensor.
            first_use: The first use of the tensor, for messages; by default the current operation.
        """
        place = place_in_memory(tensor)
        if place not in self._known:
            self._known[place] = len(self.external)
            first_use = first_use or f"{self._func} at {self.line}"
            self.external.append(External(tensor, self.memory.name_of(tensor), first_use))
        return self._known[place]

    def _hidden_writes(
        self,
        func: Any,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        changed: dict[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the arguments that ``func`` wrote without a mark in its schema, after checking these writes.

        Args:
            func: The operation, which has already run.
            given: The tensors among its arguments.
            written: The tensors that it is known to write.
            changed: The previous contents of the storages that it wrote.
        """
        known = {storage_id(t) for t in written}
        hidden = [t for t in given if storage_id(t) in changed and storage_id(t) not in known]
        for tensor in hidden:
            if not self.owns(tensor):
                self._check_write(f"{func}, whose schema does not declare it, writes", tensor, changed)
        return hidden

    def _check_write(
        self, what: str, tensor: torch.Tensor, before: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Refuse a write to undeclared external memory; for declared memory, note how to undo the write.

        Args:
            what: The operation that writes, for messages.
            tensor: The memory that is written.
            before: The contents of storages before the write, as bytes, if the write has happened already.
        """
        storage = storage_id(tensor)
        self.changed.add(self.borrow(tensor))
        if self._writable and storage not in self._writable:
            name = self.memory.name_of(tensor) or f"a tensor of {tensor.dtype} {tuple(tensor.shape)}"
            raise self.guard.refusal(
                f"{what} {name}, which is not declared as written,",
                "a graph may write slots of its registry, the KV cache, and memory that it allocates: make"
                " this memory a slot, of another role than constant",
                "GP19",
            )
        if storage not in self._undo:
            memory = whole(tensor.untyped_storage(), torch.uint8, tensor.device)
            contents = memory.clone() if before is None else before[storage]
            self._undo[storage] = WeakTensor(memory), contents

    def _check_owner(self, func: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if storage_id(tensor) in self._pools:
                raise self.guard.refusal(
                    f"{func} uses memory that another graph's capture allocated",
                    "the pool may reuse it, and every replay may overwrite it: allocate memory that graphs"
                    " share before the first capture, or copy outputs out",
                    "GP15",
                )


class StrictTape(Graph):
    """A graph of recorded operations. Every replay checks external memory and poisons the graph's memory."""

    def __init__(self, recorder: StrictRecorder, recording: Recording) -> None:
        self.outputs = recording.outputs
        self.trace = recording.trace
        self.num_segments = len(recording.segments)
        self.num_nodes = recording.num_nodes
        self._shared = recorder.shared
        self._nodes: list[StrictNode | EagerCall] = []
        for part in recording.parts:
            if isinstance(part, EagerCall):
                self._nodes.append(part)
            else:
                self._nodes += [StrictNode.of(call) for call in part.calls]
        self.external = recorder.external
        self._copied = recorder.copied
        self.changed = recorder.changed
        used = recording.used_memory()
        self.pool = {storage: flat for storage, flat in recorder.pool.items() if storage in used}
        self._results = recorder.results
        self.pool_nbytes = sum(flat.nbytes for flat in self.pool.values()) + sum(
            storage.nbytes() for storage in recorder.results.values()
        )
        for tensor in tensors_of(self.outputs):
            if not recorder.owns(tensor) and tensor.numel():
                recorder.borrow(tensor, "the function is returned")
        self.tasks = recording.tasks
        self._released = False
        self.outputs_stand = False
        self.spoil()

    def replay(self) -> None:
        """Poison the pool, then run every recorded operation once, in order.

        Raises:
            ReplayError: External memory was freed, moved or shrank, a wait is missing, or a task was not
                updated.
            PoisonError: An operation fails on its inputs.
        """
        external: list[torch.Tensor] = []

        def submit() -> None:
            found = self._submit()
            if self.tasks is None:  # the work follows at once
                external.extend(found)

        self._shared.tasks.launch(self.tasks, submit, lambda: self._run(contextlib.nullcontext(), external))

    def rehearse(self) -> None:
        """Replay with poison in uninitialised memory of the eager calls, so that replays are comparable."""
        self._run(_PoisonedEmpty(), self._submit())  # type: ignore[no-untyped-call]  # torch annotates none

    def _submit(self) -> list[torch.Tensor]:
        """Submit a replay after earlier work, and poison the memory that it may overwrite.

        Returns:
            The external tensors, which are alive.
        """
        if self._released:
            raise EngineError("a released tape was replayed", hint="capture the shape again")
        with torch.inference_mode():
            external = [e.revive() for e in self.external]
            self._shared.begin_replay(self, external)
        return external

    def _run(
        self, call_context: contextlib.AbstractContextManager[object], external: list[torch.Tensor]
    ) -> None:
        """Run every operation; ``external`` is empty if the external tensors may not be alive any more."""
        with torch.inference_mode():
            external = external or [e.revive() for e in self.external]
            if self.tasks is not None and (rebound := self.tasks.rebound()):
                self._shared.order.work("a replay", rebound, (), Line(), ReplayError)
            for node in self._nodes:
                if isinstance(node, EagerCall):
                    with call_context:
                        node()
                else:
                    node.run(external)
            self.outputs_stand = True
            for which, line in self._copied:
                self._shared.order.keep_in_flight(external[which], line)

    def spoil(self) -> None:
        """Poison all memory that the graph allocated."""
        for flat in self.pool.values():
            poison(flat)
        self.outputs_stand = False

    def given(self) -> list[torch.Tensor]:
        """Return the external tensors that are arguments of the graph's eager calls, which may write them."""
        calls = [node for node in self._nodes if isinstance(node, EagerCall)]
        own = self.pool.keys() | self._results.keys()
        return [t for t in plain_tensors(tensors_of([c.args for c in calls])) if storage_id(t) not in own]

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether the graph writes the storage of the external tensor ``tensor``."""
        changed = (self.external[at].tensor.storage.cdata for at in self.changed)
        return storage_id(tensor) in changed

    def release(self) -> None:
        """Drop the operations and the pool."""
        self._released = True
        self._nodes, self.external = [], []
        self.pool, self._results = {}, {}
        self.outputs = self.tasks = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the external tensors of operations and outputs that are still alive.

        A replay raises an error if one is not alive.
        """
        alive = []
        for external in self.external:
            with contextlib.suppress(ReplayError):
                alive.append(external.revive())
        return alive


class _PoisonedEmpty(DispatchMode):
    """A dispatch mode that poisons uninitialised memory when it is allocated."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in UNINITIALISED and kind_of(result) is None:
            poison(result)
        return result


class StrictShared:
    """The state that all strict tapes of one driver share: their pools, and the order of all work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.order = Order()
        self.order.unwatched = self.unwatched
        self.tasks = TaskTable(self.order)
        self.order.settle = self.tasks.settle
        self.generator = default_generator(device)
        self._tapes: weakref.WeakSet[StrictTape] = weakref.WeakSet()
        self._guard: HostReadGuard | None = None
        # Tensors that hooks made on the host are still host tensors in later preparations.
        self._host = HostMemory(strict=True)

    def pools(self) -> set[int]:
        """Return the storages that all captures allocated."""
        return {storage for tape in self._tapes for storage in tape.pool}

    def add(self, tape: StrictTape) -> None:
        """Add a captured tape, whose memory later replays of other tapes poison."""
        self._tapes.add(tape)

    def begin_replay(self, tape: StrictTape, external: list[torch.Tensor]) -> None:
        """Submit a replay after earlier work, and poison the pools that it may overwrite."""
        self.order.carry_out()
        self.order.work(
            "a replay",
            [t for at, t in enumerate(external) if at not in tape.changed],
            [t for at, t in enumerate(external) if at in tape.changed],
            Line(),
            ReplayError,
        )
        for other in self._tapes:
            if other is not tape and other.outputs_stand:
                other.spoil()
        tape.spoil()

    @contextlib.contextmanager
    def watching(self, guard: HostReadGuard) -> Iterator[None]:
        """Make ``guard`` the active guard during the context."""
        self._guard = guard
        try:
            yield
        finally:
            self._guard = None

    @contextlib.contextmanager
    def preparation(
        self,
        memory: DeclaredMemory,
        host: Iterable[torch.Tensor],
        read_only: Iterable[torch.Tensor],
    ) -> Iterator[None]:
        """Refuse host reads of device tensors and writes to read-only memory during a preparation.

        Read-only memory is ``read_only``, and all memory that graphs use except refreshed memory and
        workspaces.
        """
        self._learn(memory, host)
        self.tasks.preparation += 1
        self.tasks.settle()
        guard = HostReadGuard(self._host, "while a replay is prepared", ReplayError)
        guard.may_pin = True
        guard.check_use = self.order.check_use
        protected = {
            external.tensor.storage.cdata: external.name for tape in self._tapes for external in tape.external
        }
        for tensor in (*memory.refreshed, *memory.workspaces):
            protected.pop(storage_id(tensor), None)
        protected |= {storage_id(t): "a tensor of the batch" for t in read_only}
        watch = PreparationWatch(guard, self.order, protected)
        with self.watching(guard), guard, watch:
            yield
        if guard.refused is not None:  # the hook caught the error
            raise guard.refused

    @contextlib.contextmanager
    def unprepared(self, memory: DeclaredMemory, host: Iterable[torch.Tensor]) -> Iterator[None]:
        """Note which tensors are made on the host, for later preparations.

        The eager work that follows is not checked. Copies that hooks began are finished before it, as on a
        stream.
        """
        self._learn(memory, host)
        with two_memories(self._host, self._device):
            yield
        self.order.finish_copies(waits=False)

    @contextlib.contextmanager
    def step(self, memory: DeclaredMemory) -> Iterator[None]:
        """Refuse host reads while a launched replay waits for updates, and a step that ends before these."""
        if not self.tasks.may_wait:
            yield
            return

        def used() -> set[int]:
            external = {each.tensor.storage.cdata for tape in self._tapes for each in tape.external}
            declared = (*memory.refreshed, *memory.caches, *memory.workspaces)
            return external | self.pools() | {storage_id(tensor) for tensor in declared}

        reads = LateReads(self.tasks, used)
        first, second = reads.modes
        try:
            with first, second:
                yield
        finally:
            if reads.refused is not None:
                self.tasks.forget()
        if reads.refused is not None:  # the plugin caught the error
            raise reads.refused
        self.tasks.settle()

    def _learn(self, memory: DeclaredMemory, host: Iterable[torch.Tensor]) -> None:
        self._host.prune()
        self._host.add([*memory.host, *host])

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, *, capturing: bool) -> None:
        """Copy as late as a device might do it; in a capture, record the copy as a part of the graph.

        Raises:
            CaptureError: A copy to the host is recorded.
        """
        guard = self._guard
        host = self._host if guard is None else guard.host
        if target in host and source not in host:
            if capturing and guard is not None:
                raise guard.refusal(
                    "copy_async() copies to the host",
                    "copy to a slot or an output in the region, and from there to the host after the replay",
                )
            self.order.copy_to_host(target, source)
            return
        if capturing and guard is not None:
            guard.host.add([source])
            guard.copying = True
            try:
                target.copy_(source)
            finally:
                guard.copying = False
            return
        self.order.copy(target, source)

    def update_task(
        self, key: TaskKey, updated: Mapping[str, Any], rebound: Mapping[str, torch.Tensor]
    ) -> None:
        """Update a task; in a preparation, refuse device tensors as values, because the host would wait."""
        for tensor in tensors_of(dict(updated)):
            if self._guard is not None and tensor not in self._guard.host:
                raise self._guard.host_read("an update of a task")
        with self.unwatched():
            self.tasks.update(key, updated, rebound)

    def hold(self, what: str, tensor: torch.Tensor) -> "Rebound":
        """Return a weak reference to a rebound tensor of a task.

        Raises:
            ReplayError: The tensor is in memory that a graph's capture allocated.
        """
        if storage_id(tensor) in self.pools():
            raise ReplayError(
                f"{what} is rebound to memory that a graph's capture allocated, at {Line()}",
                hint="every replay may overwrite it: copy the tensor to other memory",
                rule="GP15",
            )
        return hold_weakly(what, tensor)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Allow all calls during the context."""
        guard = self._guard
        if guard is None or guard.paused:
            yield
            return
        guard.paused = True
        try:
            yield
        finally:
            guard.paused = False
