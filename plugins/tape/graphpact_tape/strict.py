"""The strict tape: wrong use that a GPU leaves unseen is made to show.

- What a graph allocated is poisoned before each of its replays, and when another graph of the driver
  replays; its outputs too.
- Memory of others is held weakly, as a CUDA graph holds it: where it died, moved or shrank, a replay
  raises instead of reading what is left.
- A write to memory that the lane did not declare is refused at capture, and so is memory that another
  graph's capture allocated.
- What capture wrote outside is undone, since a capture on a GPU records and does not run.
- Each graph is replayed twice at capture, on the same inputs: a counter that nothing re-arms makes the
  second replay differ. Eager calls between its segments are made in both.
- Streams and asynchronous copies are held to their waits: see `graphpact_tape.order`.

Does not: look at what tensors should hold; that is verification's work.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpact.errors import CaptureError, ContractError, EngineError, PoisonError, ReplayError
from graphpact.graphs.driver import DeclaredMemory, Graph
from graphpact.graphs.lines import Line
from graphpact.graphs.segments import EagerCall
from graphpact.tensors import equal, storage_id
from graphpact_tape.host import (
    DispatchMode,
    HostMemory,
    HostReadGuard,
    Watcher,
    WeakTensor,
    followed,
    tensors_of,
    written_by,
)
from graphpact_tape.nodes import make_node
from graphpact_tape.order import Order
from graphpact_tape.poison import poison, poison_of
from graphpact_tape.recorder import (
    UNINITIALISED,
    Place,
    RecordedCall,
    Recorder,
    Recording,
    place_of,
)

__tracebackhide__ = True

_NOBODYS_SEED = 0x6772_6170_6870_6163


class _External:
    """A tensor of others: a weak hold on its storage, and what makes the tensor again."""

    def __init__(self, tensor: torch.Tensor, name: str | None, first_use: str) -> None:
        storage = tensor.untyped_storage()
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.tensor = WeakTensor(tensor)
        self.name = name or f"a tensor of {tensor.dtype} {tuple(tensor.shape)}"
        self.first_use = first_use

    def revive(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ReplayError: Its memory died, moved or changed its size.
        """
        tensor = self.tensor.revive()
        if tensor is None:
            raise self.gone("was freed")
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.nbytes:
            raise self.gone(f"shrank from {self.nbytes} to {storage.nbytes()} bytes")
        if storage.data_ptr() != self.address:
            raise self.gone(f"moved from {self.address:#x} to {storage.data_ptr():#x}")
        return tensor

    def gone(self, how: str, error: type[ContractError] = ReplayError) -> ContractError:
        """Return the error for memory that the graph still uses."""
        return error(
            f"{self.name} {how}, and the graph uses it where it was: {self.first_use}",
            hint="keep the tensor for as long as the graph, make it at its largest size before capture, and"
            " copy into it",
            rule="GP14",
        )


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """Stands in the record for a tensor of others, which is held weakly."""

    which: int  # of the external tensors


@dataclass(slots=True)
class _StrictNode:
    """A call that a replay makes, with the tensors of others left out until then."""

    op: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    borrowed: list[tuple[int, int]]  # position among the leaves, and which external tensor
    what: str
    line: Line

    @classmethod
    def of(cls, call: RecordedCall) -> "_StrictNode":
        """Return what runs ``call`` again."""
        op, args, kwargs = make_node(call)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        borrowed = [
            (at, leaf.which) for at, leaf in enumerate(leaves) if isinstance(leaf, _Borrowed)
        ]
        return cls(op, leaves, spec, borrowed, str(call.op), call.line)

    def run(self, external: list[torch.Tensor]) -> None:
        leaves = self.leaves.copy()
        for at, which in self.borrowed:
            leaves[at] = external[which]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        try:
            self.op(*args, **kwargs)
        except ContractError:
            raise
        except Exception as error:
            raise PoisonError(
                f"{self.what}, recorded at {self.line}, fails at replay: {error}",
                hint="it was recorded with other contents; poison shows as NaN or as numbers around"
                f" {poison_of(torch.int32)}",
            ) from error


class StrictRecorder(Recorder):
    """Records calls that hold the memory of others weakly, and refuses what is not declared."""

    def __init__(
        self, guard: HostReadGuard, shared: "StrictShared", memory: DeclaredMemory
    ) -> None:
        super().__init__(guard)
        self.shared = shared
        self.memory = memory
        self.external: list[_External] = []
        self.changed: set[int] = set()  # which external tensors
        self.copied: list[
            tuple[int, Line]
        ] = []  # external tensors of the host, and who copies them
        self.pool: dict[int, torch.Tensor] = {}  # each storage whole, as its first tensor's dtype
        self._known: dict[Place, int] = {}
        self._func: object = None  # the operation under way
        self._pools = shared.pools()
        self._undo: dict[int, tuple[WeakTensor, torch.Tensor]] = {}
        self._writable = {
            storage_id(t) for t in (*memory.refreshed, *memory.caches, *memory.workspaces)
        }

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the region to the rules that only its whole tells, and undo what it wrote outside."""
        self.shared.order.begin_capture()
        generator = self.shared.generator
        state = generator.get_state()
        try:
            generator.manual_seed(_NOBODYS_SEED)
            yield
            self.shared.order.check_joined()
            if generator.initial_seed() != _NOBODYS_SEED:
                raise CaptureError(
                    "the region seeded the random numbers, which a replay does not repeat",
                    hint="seed before the replay",
                    rule="GP18",
                )
            for external in self.external:
                if external.tensor.storage.expired():
                    raise external.gone("was freed while the graph was recorded", CaptureError)
        finally:
            self.shared.order.end_capture()
            generator.set_state(state)
            for written, before in self._undo.values():
                tensor = written.revive()
                if tensor is not None:
                    tensor.copy_(before)

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check what ``func`` reads and writes, then run it and keep what runs it again."""
        self.line, self._func = Line(), func
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                raise self.guard.refusal(
                    f"{func} draws from a generator of its own",
                    "use the device's default generator: a graph advances no other",
                    "GP18",
                )
        written = written_by(func, args, kwargs)
        for tensor in written:
            if not self.owns(tensor):
                self._check_write(func, tensor)
        given = tensors_of((args, kwargs))
        self._check_owner(func, given)
        result = super().perform(func, args, kwargs)
        if self.guard.copying:
            self.copied.append((self.borrow(args[1]), self.line))
        self.shared.order.operation(func, given, written, result, self.line, CaptureError)
        return result

    def kept(self, leaf: Any) -> Any:
        """Return the leaf as the graph keeps it: by value what a kernel takes by value."""
        if not isinstance(leaf, torch.Tensor) or self.owns(leaf) or not self.host.is_number(leaf):
            return leaf
        if any(storage_id(leaf) == storage for storage, *_ in self._known):
            return leaf
        return self.constant(leaf)

    def held(self, tensor: torch.Tensor) -> Any:
        """Return what the record holds for ``tensor``: of others, nothing that keeps their memory."""
        if self.owns(tensor) or not tensor.numel():
            return super().held(tensor)
        return _Borrowed(self.borrow(tensor))

    def add(self, call: RecordedCall) -> None:
        """Add a call to the record, unless a replay need not repeat it."""
        if call.is_work:
            super().add(call)

    def eager_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run ``fn(*args)`` outside the graph, where the host may wait for the device."""
        self.shared.order.is_broken = True
        try:
            return super().eager_call(fn, args)
        finally:
            self.shared.order.is_broken = False

    def allocates(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors`` as the graph's, to be poisoned."""
        tensors = list(tensors)
        super().allocates(tensors)
        for t in tensors:
            self.pool.setdefault(storage_id(t), _whole(t.untyped_storage(), t.dtype, t.device))

    def borrow(self, tensor: torch.Tensor, first_use: str | None = None) -> int:
        """Return which external tensor ``tensor`` is; the operation under way uses it by default."""
        place = place_of(tensor)
        if place not in self._known:
            self._known[place] = len(self.external)
            first_use = first_use or f"{self._func} at {self.line}"
            self.external.append(_External(tensor, self.memory.name_of(tensor), first_use))
        return self._known[place]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in memory that the graph holds itself."""
        storage = storage_id(tensor)
        return storage in self.allocated or storage in self.constants or storage in self.results

    def _check_write(self, func: Any, tensor: torch.Tensor) -> None:
        storage = storage_id(tensor)
        self.changed.add(self.borrow(tensor))
        if self._writable and storage not in self._writable:
            name = (
                self.memory.name_of(tensor) or f"a tensor of {tensor.dtype} {tuple(tensor.shape)}"
            )
            raise self.guard.refusal(
                f"{func} writes {name}, which nobody declared as written,",
                "a graph writes slots of its registry, the KV cache, and what it allocates itself: make the"
                " memory a slot",
                "GP19",
            )
        if storage not in self._undo:
            memory = _whole(tensor.untyped_storage(), torch.uint8, tensor.device)
            self._undo[storage] = WeakTensor(memory), memory.clone()

    def _check_owner(self, func: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if storage_id(tensor) in self._pools:
                raise self.guard.refusal(
                    f"{func} uses memory that another graph's capture allocated",
                    "the pool may give it away and every replay may overwrite it: allocate what graphs"
                    " share before the first capture, or copy outputs out",
                    "GP15",
                )


def _whole(storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return all of ``storage`` as one flat tensor."""
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


class StrictTape(Graph):
    """A recorded region whose every replay is looked at."""

    def __init__(self, recorder: StrictRecorder, recording: Recording) -> None:
        self.outputs = recording.outputs
        self.num_segments = len(recording.segments)
        self.num_nodes = recording.num_nodes
        self._shared = recorder.shared
        self._nodes: list[_StrictNode | EagerCall] = []
        for part in recording.parts:
            if isinstance(part, EagerCall):
                self._nodes.append(part)
            else:
                self._nodes += [_StrictNode.of(call) for call in part.calls]
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
                recorder.borrow(tensor, "it is returned")
        self._released = False
        self.outputs_stand = False
        self.spoil()

    def replay(self) -> None:
        """Run every recorded operation once, in order, over poison.

        Raises:
            ReplayError: Memory of the graph's is not where it was; a copy or a stream that did not
                wait; an operation that fails on what it is given now.
        """
        self._run(contextlib.nullcontext())

    def rehearse(self) -> None:
        """Replay with uninitialised memory of the eager calls poisoned, so that it is the same every time."""
        self._run(_PoisonedEmpty())  # type: ignore[no-untyped-call]  # torch has no annotation here

    def _run(self, around_calls: contextlib.AbstractContextManager[object]) -> None:
        if self._released:
            raise EngineError("a released tape was replayed", hint="capture the shape again")
        with torch.inference_mode():
            external = [e.revive() for e in self.external]
            self._shared.begin_replay(self, external)
            for node in self._nodes:
                if isinstance(node, EagerCall):
                    with around_calls:
                        node()
                else:
                    node.run(external)
            self.outputs_stand = True
            for which, line in self._copied:
                self._shared.order.keep_in_flight(external[which], line)

    def spoil(self) -> None:
        """Poison everything that the graph allocated."""
        for flat in self.pool.values():
            poison(flat)
        self.outputs_stand = False

    def given(self) -> list[torch.Tensor]:
        """Return the tensors of others that its eager calls are given, and may write."""
        calls = [node for node in self._nodes if isinstance(node, EagerCall)]
        own = self.pool.keys() | self._results.keys()
        return [t for t in tensors_of([c.args for c in calls]) if storage_id(t) not in own]

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether the graph writes the storage of ``tensor``, which is none of its own."""
        changed = (self.external[at].tensor.storage.cdata for at in self.changed)
        return storage_id(tensor) in changed

    def release(self) -> None:
        """Drop the operations and the pool."""
        self._released = True
        self._nodes, self.external = [], []
        self.pool, self._results = {}, {}
        self.outputs = None
        self.pool_nbytes = 0

    def external_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the recorded operations, and of the outputs, that are not the tape's."""
        return [external.revive() for external in self.external]


class _PoisonedEmpty(DispatchMode):
    """Poisons memory without content where it is made."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in UNINITIALISED:
            poison(result)
        return result


class _PreparationWatch(Watcher):
    """Sees the work that prepares a replay: it may read no device tensor, and it has an order too."""

    def __init__(
        self,
        guard: HostReadGuard,
        order: Order,
        protected: dict[int, str],
    ) -> None:
        super().__init__(guard)
        self._order = order
        self._protected = protected  # storages, and what they are called

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` in the order of the current stream."""
        written = written_by(func, args, kwargs)
        for tensor in written:
            if (name := self._protected.get(storage_id(tensor))) is not None:
                raise self.guard.refusal(
                    f"{func} writes {name}, which the preparation of a replay only reads,",
                    "write slots: what graphs read besides them, and the batch, belongs to others",
                    "GP19",
                )
        given = tensors_of((args, kwargs))
        self._order.carry_out()
        result = func(*args, **kwargs)
        self._order.operation(func, given, written, result, Line(), ReplayError)
        return result


class StrictShared:
    """What the strict tapes of one driver share: their pools, and the order of all work."""

    def __init__(self, device: torch.device) -> None:
        self.order = Order()
        self.order.unwatched = self.unwatched
        self.generator = torch.default_generator
        if device.type == "cuda":
            self.generator = torch.cuda.default_generators[device.index or 0]
        self._tapes: weakref.WeakSet[StrictTape] = weakref.WeakSet()
        self._guard: HostReadGuard | None = None
        # What hooks made on the host is the host's in later preparations too.
        self._host = HostMemory(strict=True)

    def pools(self) -> set[int]:
        """Return the storages of all pools."""
        return {storage for tape in self._tapes for storage in tape.pool}

    def keep(
        self, tape: StrictTape, memory: DeclaredMemory, armed: list[torch.Tensor]
    ) -> StrictTape:
        """Count ``tape`` in, once it is known to give the same result twice.

        Args:
            tape: What was captured.
            memory: What the lane declared.
            armed: What the workspaces held before the region was ever run.

        Raises:
            CaptureError: Its second replay differs from its first.
        """
        self._tapes.add(tape)
        if memory.refreshed:
            _check_rearmed(tape, memory, armed, self.generator)
        return tape

    def begin_replay(self, tape: StrictTape, external: list[torch.Tensor]) -> None:
        """Order a replay after what was done, and spoil what it may overwrite."""
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
        """Say which guard stands around the work now."""
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
        """Refuse host reads of device tensors in what prepares a replay, and stray writes."""
        self._learn(memory, host)
        guard = HostReadGuard(self._host, "while a replay is prepared", ReplayError)
        protected = {
            external.tensor.storage.cdata: external.name
            for tape in self._tapes
            for external in tape.external
        }
        for tensor in (*memory.refreshed, *memory.workspaces):
            protected.pop(storage_id(tensor), None)
        protected |= {storage_id(t): "a tensor of the batch" for t in read_only}
        watch = _PreparationWatch(guard, self.order, protected)
        with self.watching(guard), guard, watch:
            yield
        if guard.refused is not None:  # and swallowed
            raise guard.refused

    @contextlib.contextmanager
    def unprepared(self, memory: DeclaredMemory, host: Iterable[torch.Tensor]) -> Iterator[None]:
        """Learn what is made on the host, for later preparations."""
        self._learn(memory, host)
        with followed(self._host):
            yield

    def _learn(self, memory: DeclaredMemory, host: Iterable[torch.Tensor]) -> None:
        self._host.prune()
        self._host.add([*memory.host, *host])

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, *, capturing: bool) -> None:
        """Copy as late as may be; in a capture, at the copy's place in every replay."""
        guard = self._guard
        if capturing and guard is not None:
            guard.host.add([source])
            guard.copying = True
            try:
                target.copy_(source)
            finally:
                guard.copying = False
            return
        self.order.copy(target, source)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let everything pass."""
        guard = self._guard
        if guard is None or guard.paused:
            yield
            return
        guard.paused = True
        try:
            yield
        finally:
            guard.paused = False


def _check_rearmed(
    tape: StrictTape,
    memory: DeclaredMemory,
    armed: list[torch.Tensor],
    generator: torch.Generator,
) -> None:
    """Replay twice on the same inputs, from workspaces as they were at first, and undo both.

    Inputs are what the graph writes and is given anew in every step. Eager calls may write all that was
    declared, and what they are given.

    Raises:
        CaptureError: The results differ: some state is advanced by a replay and armed by none.
    """
    is_broken = tape.num_segments > 1
    inputs = [t for t in (*memory.refreshed, *memory.caches) if is_broken or tape.writes(t)]
    state = list(memory.workspaces)
    kept = {storage_id(t) for t in state}
    given = [t for t in tape.given() if storage_id(t) not in kept]
    before = [t.clone() for t in (*inputs, *given, *state)]
    random = generator.get_state()
    results = []
    try:
        for tensor, value in zip(state, armed, strict=True):
            tensor.copy_(value)
        for _ in range(2):
            for tensor, value in zip((*inputs, *given), before, strict=False):
                tensor.copy_(value)
            generator.set_state(random)
            tape.rehearse()
            results.append([t.clone() for t in (*tensors_of(tape.outputs), *inputs)])
    finally:
        moved = [
            memory.name_of(t) or "a workspace"
            for t, value in zip(state, armed, strict=True)
            if not equal(t, value)
        ]
        for tensor, value in zip((*inputs, *given, *state), before, strict=True):
            tensor.copy_(value)
        generator.set_state(random)
        tape.spoil()
    if not all(equal(a, b) for a, b in zip(*results, strict=True)):
        where = f"; what a replay leaves changed: {', '.join(moved)}" if moved else ""
        raise CaptureError(
            f"a second replay on the same inputs gives another result{where}",
            hint="reset counters and flags inside the graph, before their first use: the host set them once,"
            " a replay does not",
            rule="GP18",
        )
