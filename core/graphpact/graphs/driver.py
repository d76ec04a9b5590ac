"""The driver contract: `GraphDriver` records a callable once, `Graph` replays it.

What every driver promises: a replay repeats the recorded device work on the recorded addresses with the
recorded Python numbers, and runs no Python of the recorded callable except its eager calls
(`GraphDriver.eager_call`). Work that cannot be recorded raises `CaptureError`, and no graph is kept.

What every driver requires: outputs are read or copied before another graph of the same driver replays; memory
that a graph reads stays in place; streams, events and copies from host memory come from the driver and are
joined as on a CUDA device.

Does not: order shapes or bind metadata; the lane and its runner do.
"""

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import torch

from graphpact.errors import CaptureError, ConfigError, ReplayError
from graphpact.graphs.lines import Line

__tracebackhide__ = True

T = TypeVar("T")

Externals = Literal["all", "dispatched", "unknown"]
"""How complete `Graph.external_tensors` is, the least complete last. ``dispatched`` means that the list has
the arguments of operations that torch dispatched, but not memory that only kernels below the dispatcher
read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMemory:
    """The memory outside of a lane's graphs, by its use.

    A strict driver refuses writes to other memory, except memory that the graph itself allocated.

    Args:
        refreshed: Memory that the preparation of every replay writes. The graph may write it too.
        caches: The KV cache. It is kept from replay to replay and written for live requests.
        workspaces: Memory that may always be written. No replay may depend on the contents that an earlier
            one left.
        host: Host memory, which may be read at any time.
        name_of: Returns the name of a tensor for messages, or None.
    """

    refreshed: Sequence[torch.Tensor] = ()
    caches: Sequence[torch.Tensor] = ()
    workspaces: Sequence[torch.Tensor] = ()
    host: Sequence[torch.Tensor] = ()
    name_of: Callable[[torch.Tensor], str | None] = lambda _: None


class Ownership(Protocol):
    """Memory outside the lanes of which live requests own parts: request rows and KV pages."""

    def poison_free(self) -> None:
        """Poison unowned memory."""

    def check_free(self) -> None:
        """Raise `ReplayError` if unowned memory was written."""


class TaskKey(NamedTuple):
    """The name of a task: the key of its ``graph``, such as the shape, and its ``layer`` in that graph."""

    graph: Hashable
    layer: Hashable


NONE_REBOUND: Mapping[str, torch.Tensor] = MappingProxyType({})
"""The rebound arguments of a task that has none."""


class Graph(abc.ABC):
    """One recorded region.

    Attributes:
        outputs: The result of the recorded callable. Its tensors belong to the graph: undefined before the
            first replay, overwritten by each replay, possibly by one of another graph of the same driver.
        num_nodes: Recorded operations (for CUDA: kernel launches), or -1 if unknown.
        num_segments: Recorded segments: one more than the number of eager calls between them.
        outputs_stand: Whether the outputs are still those of this graph's last replay. False if a strict
            driver knows that another graph was replayed since then.
        pool_nbytes: Bytes that the recorded region allocated and the graph keeps (outputs and intermediate
            tensors); 0 once released, -1 if unknown.
    """

    sees: ClassVar[Literal["all", "dispatched"]] = "all"
    """How complete `external_tensors` is if it is not None; see `Externals`."""

    outputs: Any
    num_nodes: int
    num_segments: int = 1
    outputs_stand: bool = True
    pool_nbytes: int = -1

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the recorded work once.

        Raises:
            ReplayError: A strict driver found that the replay read, wrote or kept wrong memory.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Free the recorded work and its memory; the graph cannot be replayed afterwards."""

    def external_tensors(self) -> list[torch.Tensor] | None:
        """Return the tensors of recorded work in memory that the graph did not allocate; None if unknown.

        They must stay in place as long as the graph is replayed. Equal views are listed once; a released
        graph has none. `externals` says how complete the list is.
        """
        return None

    @property
    def externals(self) -> Externals:
        """How complete `external_tensors` is, and therefore the checks that use it."""
        return "unknown" if self.external_tensors() is None else self.sees


class Event:
    """A point in a stream's work that can be waited for. This class is for drivers without streams."""

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark the work submitted so far to ``stream``, by default the current one."""

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""


class Stream:
    """A queue of device work; ``with stream:`` makes it the current one.

    This class is for drivers without streams: all work runs at once, in order.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the work before ``event``."""

    def wait_stream(self, stream: "Stream") -> None:
        """Make later work of this stream wait for all work submitted so far to ``stream``."""

    def synchronize(self) -> None:
        """Block the host until all work of this stream is done."""


class GraphDriver(abc.ABC):
    """Base class of graph drivers. One instance has one memory pool and belongs to one lane.

    Args:
        device: The device of the recorded work.
        strict: Whether to detect wrong use at every replay, as far as the driver can, at any cost.

    Raises:
        ConfigError: ``strict`` is True, but the driver has no strict mode.
    """

    name: ClassVar[str]
    _capturing: "ClassVar[GraphDriver | None]" = None
    _calling: ClassVar[bool] = False  # true inside an eager call of the region that is captured
    has_strict_mode: ClassVar[bool] = False
    has_tasks: ClassVar[bool] = False
    """Whether graphs may contain tasks, whose arguments are updated for each replay; see `task`."""
    repeats_eager_kernels: bool = False
    """Whether a replay runs the same kernels as an eager run of the same shapes, so that results are
    bit-equal. It may depend on the device.
    """

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        if strict and not self.has_strict_mode:
            hint = 'use the driver "tape", which has a strict mode on any device'
            raise ConfigError(f"graph driver {self.name!r} has no strict mode", hint=hint)
        self.device = device
        self.strict = strict
        self.memory = DeclaredMemory()

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this driver cannot record on this machine's ``device``, or None if it can."""

    # -- recording -------------------------------------------------------------------------------

    def declare(self, memory: DeclaredMemory) -> None:
        """Declare the memory outside of the graphs. The lane calls this before the first capture."""
        self.memory = memory

    @abc.abstractmethod
    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then record one more run of it.

        Some drivers execute the recorded run and some do not: results are valid after the first replay.

        Args:
            fn: The region. It must do the same device work in every run, and have no other side effects.
            warmup: Runs before the recorded one, so that lazy set-up work is not recorded.

        Raises:
            CaptureError: ``fn`` does work that a graph cannot record; the message names the line.
        """

    @property
    def is_capturing(self) -> bool:
        """Whether this driver is recording a region now; False inside an eager call."""
        return GraphDriver._capturing is self and not GraphDriver._calling

    def refuse_nested_capture(self) -> None:
        """Raise `CaptureError` if this process is recording a region already; `capture` calls this first."""
        if GraphDriver._capturing is not None:
            hint = "capture the regions one after the other, or make the inner one a part of the outer one"
            raise CaptureError(f"a capture was begun inside another one, at {Line()}", hint=hint)

    @contextlib.contextmanager
    def recorded_run(self) -> Iterator[None]:
        """Return a context that sets `is_capturing`, for the run that `capture` records, not for warm-up."""
        GraphDriver._capturing = self
        try:
            yield
        finally:
            GraphDriver._capturing = None

    def eager_call(self, fn: Callable[..., T], *args: Any) -> T:
        """Call ``fn(*args)`` and return its result; inside a region, break the graph here.

        The work before the call and the work after it become two segments. Every replay calls ``fn`` again
        between them with the same ``args``. The segments keep the tensors in ``args`` in place. Tensors that
        ``fn`` returns are copied to their captured addresses, where the next segment reads them.

        Raises:
            ReplayError: A replayed call returned another structure, shape or dtype.
        """
        if not self.is_capturing:
            return fn(*args)
        with self.calling():
            result: T = self.break_graph(fn, args)
        return result

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Return a context in which `is_capturing` is False, for an eager call of the region."""
        GraphDriver._calling = True
        try:
            yield
        finally:
            GraphDriver._calling = False

    @abc.abstractmethod
    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """End a segment, call ``fn(*args)`` unrecorded, begin the next segment; return the result.

        `eager_call` calls it inside a region. Nested eager calls are part of the outer call.
        """

    def task(
        self,
        key: TaskKey,
        op: Any,
        args: tuple[Any, ...],
        updated: Mapping[str, Any],
        *,
        rebound: Mapping[str, torch.Tensor] = NONE_REBOUND,
        waits: bool = False,  # noqa: ARG002  a plain call does not wait for anything
    ) -> None:
        """Call ``op(*args, **updated, **rebound)``; in a region, record it as a task for `update_task`.

        Args:
            key: The name of the task. All tasks of a region have the same ``key.graph``, and no other graph
                uses it.
            op: A torch operator that writes into ``args`` and returns no new memory.
            args: The first arguments of ``op``, recorded as for any operation.
            updated: Arguments by name that updates replace by value: host numbers, lists of them, or host
                tensors.
            rebound: Arguments by name that updates replace by address: device tensors that ``op`` reads. Each
                update gives the tensor for the next replay, in the same or in other memory.
            waits: Whether the graph waits for the update before it runs the task, as for an event. If so, the
                update may follow the launch of the replay.

        Raises `CaptureError` if the call breaks these rules, or if the driver does not support tasks.
        """
        if self.is_capturing:
            message = f"graph driver {self.name!r} has no tasks, but {key} must be recorded as one"
            hint = "keep values that change in tensors, or use a driver that has tasks, such as the tape"
            raise CaptureError(message, hint=hint, rule="GP21")
        op(*args, **updated, **rebound)

    # -- around the replay -----------------------------------------------------------------------

    def update_task(
        self,
        key: TaskKey,
        updated: Mapping[str, Any],  # noqa: ARG002
        *,
        rebound: Mapping[str, torch.Tensor] = NONE_REBOUND,  # noqa: ARG002
    ) -> None:
        """Set the updated and the rebound arguments of a task for the next replay.

        The update is work of the current stream. Before each replay, every task of its graph must be updated
        once, in captured order. A task that ``waits`` may also be updated after the launch, from any thread,
        if nothing uses the graph's memory in between. The current stream must wait for the previous replay.
        The next replay must wait for the current stream, or for the event of a task that waits. A rebound
        tensor must stay in place until the replay has run. Raises `ReplayError` if no graph has such a task,
        or if the task has other arguments.
        """
        hint = "do not update tasks with this driver, or use a driver that has tasks, such as the tape"
        raise ReplayError(f"graph driver {self.name!r} has no tasks: {key}", hint=hint, rule="GP21")

    def strict_observer(self, ownership: Ownership | None = None) -> object:
        """Return an observer that detects wrong use around the captures, hooks and steps of one lane.

        Args:
            ownership: Knows which memory outside the lane is owned; None if that is unknown.

        Raises:
            ConfigError: The driver is not strict, or has no observer in its strict mode.
        """
        del ownership
        where = "" if self.strict else " outside its strict mode"
        raise ConfigError(
            f"graph driver {self.name!r} has no strict observer{where}",
            hint='use the driver "tape" in a strict lane, TapeDriver(device, strict=True)',
        )

    @contextlib.contextmanager
    def preparation(
        self, host: Iterable[torch.Tensor] = (), read_only: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Return a context for the work that prepares a replay.

        In this context a strict driver refuses two things: host reads, except of ``host`` and the declared
        host memory; and writes to ``read_only``, such as the batch, and to memory outside slots that graphs
        use.
        """
        del host, read_only
        yield

    @contextlib.contextmanager
    def unprepared(self, host: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Return a context for hooks that do not prepare a replay: those of eager steps and captures.

        In this context a strict driver refuses nothing. It remembers ``host`` as readable, as `preparation`
        does, because hooks may keep these tensors.
        """
        del host
        yield

    def stream(self) -> Stream:
        """Return a new stream."""
        return Stream()

    def current_stream(self) -> Stream:
        """Return the stream to which work is submitted now."""
        return Stream()

    def event(self) -> Event:
        """Return a new event."""
        return Event()

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, in either direction, on the current stream, without waiting.

        ``source`` has the same shape and dtype, and the host memory must be pinned for a GPU. Until the host
        has waited for the copy (`Event.synchronize` or `synchronize`), do not write to host memory that is
        copied to the device, and neither read nor write host memory to which a copy goes. A strict driver may
        refuse a copy to the host in a region.
        """
        target.copy_(source)

    def copy_in_flight(self, source: torch.Tensor) -> Line | None:
        """Return the code line of an unfinished `copy_async` from or to the host memory of ``source``.

        A copy is unfinished until the host has waited for it. Return None if there is none, or if the driver
        is not strict and does not track copies.
        """
        del source
        return None

    def synchronize(self) -> None:  # noqa: B027  no asynchronous work by default
        """Block the host until the device has done all its work."""
