"""The driver contract: `GraphDriver` records a callable once, `Graph` replays what was recorded.

What every driver promises: a replay repeats the recorded device work on the tensors, by address, that
it was recorded with, with the Python numbers that it was recorded with, and runs no Python of the
recorded callable, but for the calls that it was asked to make eagerly (`GraphDriver.eager_call`). Work
that cannot be recorded raises `CaptureError`, and no graph is kept.

What every driver asks in return: outputs are read, or copied, before another graph of the same driver
replays; memory that a graph reads stays where it is; other streams, events and copies from host memory
are had from the driver and joined as on a CUDA device.

Does not: order shapes or bind metadata; the lane and its runner do.
"""

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import torch

from graphpact.errors import CaptureError, ConfigError
from graphpact.graphs.lines import Line

__tracebackhide__ = True

T = TypeVar("T")

Externals = Literal["all", "dispatched", "unknown"]
"""How much `Graph.external_tensors` tells, the least last. ``dispatched``: the arguments of operations that
torch dispatched, and not what kernels read that were launched below its dispatcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMemory:
    """The memory around a lane's graphs, by what a graph may do with it.

    A strict driver holds graphs to it: a write to anything else, but memory that the graph itself
    allocated, is refused.

    Args:
        refreshed: Written by the preparation of every replay; the graph may write it too.
        caches: Live from replay to replay and written for live requests: the KV cache.
        workspaces: Written freely, and no replay may depend on what an earlier one left there.
        host: Host memory, free to be read at any time.
        name_of: What messages call a tensor, or None where it has no name.
    """

    refreshed: Sequence[torch.Tensor] = ()
    caches: Sequence[torch.Tensor] = ()
    workspaces: Sequence[torch.Tensor] = ()
    host: Sequence[torch.Tensor] = ()
    name_of: Callable[[torch.Tensor], str | None] = lambda _: None


class Ownership(Protocol):
    """Memory outside the lanes, of which live requests own a part: request rows and KV pages."""

    def poison_free(self) -> None:
        """Poison what no live request owns."""

    def check_free(self) -> None:
        """Raise `ReplayError` where memory that no live request owns was written."""


class Graph(abc.ABC):
    """One recorded region.

    Attributes:
        outputs: What the recorded callable returned. Its tensors belong to the graph: each replay
            overwrites them, and so may a replay of another graph of the same driver. Before the first
            replay they hold nothing.
        num_nodes: Recorded operations (kernel launches, for CUDA), or -1 where the driver cannot tell.
        num_segments: Recorded pieces: one more than the eager calls between them.
        outputs_stand: Whether outputs are those of the last replay; False where a strict driver knows that
            they are not, since another graph was replayed.
        pool_nbytes: Bytes of memory that the recorded region allocated and the graph keeps: its outputs
            and what lies between them and its inputs; 0 once released. -1 where the driver cannot tell.
    """

    sees: ClassVar[Literal["all", "dispatched"]] = "all"
    """How much `external_tensors` tells, of a graph that tells something; see `Externals`."""

    outputs: Any
    num_nodes: int
    num_segments: int = 1
    outputs_stand: bool = True
    pool_nbytes: int = -1

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the recorded work once.

        Raises:
            ReplayError: A strict driver found that the replay reads or leaves what it must not.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give up the recorded work and its memory; the graph cannot be replayed afterwards."""

    def external_tensors(self) -> list[torch.Tensor] | None:
        """Return the tensors of recorded work whose memory the graph did not allocate.

        They must stay where they are for as long as the graph is replayed. Equal views come once; once
        released there are none. None where the driver cannot tell. `externals` says how much this is.
        """
        return None

    @property
    def externals(self) -> Externals:
        """How much `external_tensors` tells: checks that need it are as complete as that."""
        return "unknown" if self.external_tensors() is None else self.sees


class Event:
    """A point in a stream's work that others can wait for. This one is of a driver without streams."""

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark the work that ``stream`` (the current one by default) has been given so far."""

    def synchronize(self) -> None:
        """Wait, on the host, for the marked work."""


class Stream:
    """An order of work beside the current one; ``with stream:`` gives it what is done inside.

    This one is of a driver without streams: all work is done at once, in order.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for what ``event`` marked."""

    def wait_stream(self, stream: "Stream") -> None:
        """Let later work of this stream wait for all that ``stream`` was given so far."""

    def synchronize(self) -> None:
        """Wait, on the host, for all work of this stream."""


class GraphDriver(abc.ABC):
    """Records graphs on one device. One instance is one memory pool, and belongs to one lane.

    Args:
        device: Where the recorded work runs.
        strict: Look for wrong use at every replay, as far as the driver can, whatever it costs.

    Attributes:
        memory: What the lane declared; see `declare`.

    Raises:
        ConfigError: ``strict`` of a driver that has no strict mode.
    """

    name: ClassVar[str]
    _capturing: "ClassVar[GraphDriver | None]" = None
    _calling: ClassVar[bool] = False  # eagerly, between two segments of what is captured
    has_strict_mode: ClassVar[bool] = False
    repeats_eager_kernels: ClassVar[bool] = False
    """Whether a replay runs the kernels of an eager run of the same shapes, and so gives the same bits."""

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        if strict and not self.has_strict_mode:
            raise ConfigError(
                f"graph driver {self.name!r} has no strict mode",
                hint='the driver "tape" has one, on any device',
            )
        self.device = device
        self.strict = strict
        self.memory = DeclaredMemory()

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this driver cannot record on ``device`` here, or None where it can."""

    # -- recording -------------------------------------------------------------------------------

    def declare(self, memory: DeclaredMemory) -> None:
        """Say what the memory around the graphs is for; asked before the first capture."""
        self.memory = memory

    @abc.abstractmethod
    def capture(self, fn: Callable[[], Any], *, warmup: int = 1) -> Graph:
        """Run ``fn`` ``warmup`` times, then record one more run of it.

        Whether the recorded run is also carried out depends on the driver: what it computes counts from
        the first replay on.

        Args:
            fn: The region. It must do the same device work in every run, and nothing else that matters.
            warmup: Runs before the recorded one, so that lazy set-up work is not recorded.

        Raises:
            CaptureError: ``fn`` did something that a graph cannot hold; the message names the line.
        """

    @property
    def is_capturing(self) -> bool:
        """Whether this driver is recording a region now; not inside an eager call."""
        return GraphDriver._capturing is self and not GraphDriver._calling

    def refuse_nested_capture(self) -> None:
        """Refuse to capture while a region is recorded: a process records one at a time.

        For the beginning of `capture`.

        Raises:
            CaptureError: Names the line that began the second one.
        """
        if GraphDriver._capturing is not None:
            raise CaptureError(
                f"a capture was begun inside another one, at {Line()}",
                hint="capture one region after the other, or make the inner one a part of the outer",
            )

    @contextlib.contextmanager
    def recorded_run(self) -> Iterator[None]:
        """Stand around the run that `capture` records, and no warm-up: `is_capturing` in it."""
        GraphDriver._capturing = self
        try:
            yield
        finally:
            GraphDriver._capturing = None

    def eager_call(self, fn: Callable[..., T], *args: Any) -> T:
        """Call ``fn(*args)`` and return its result; inside a region, break the graph there.

        In a region the work before the call and the work after it become two segments, and every replay
        calls ``fn`` again between them, with the same ``args``: tensors that the segments keep in place.
        Tensors that it returns are copied to where they lay at capture, which is where the next segment
        reads them.

        Raises:
            ReplayError: A replayed call returned another structure, shape or dtype.
        """
        if not self.is_capturing:
            return fn(*args)
        GraphDriver._calling = True
        try:
            result: T = self.break_graph(fn, args)
        finally:
            GraphDriver._calling = False
        return result

    @abc.abstractmethod
    def break_graph(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """End a segment of the region that is recorded, call ``fn(*args)`` unrecorded, begin another.

        What `eager_call` does inside a region; a call inside such a call is a part of it.
        """

    # -- around the replay -----------------------------------------------------------------------

    def guard(self, ownership: Ownership | None = None) -> object:
        """Return an observer of the lane that looks for wrong use around its hooks and steps.

        A strict driver supplies it. One guard belongs to one lane.

        Args:
            ownership: Of the memory outside the lane; None where it is not known.

        Raises:
            ConfigError: The driver is not strict, or its strict mode has no guard.
        """
        del ownership
        raise ConfigError(
            f"graph driver {self.name!r} has no guard"
            + ("" if self.strict else " outside its strict mode"),
            hint='TapeDriver(device, strict=True), the driver "tape" of a strict lane, has one',
        )

    @contextlib.contextmanager
    def preparation(
        self, host: Iterable[torch.Tensor] = (), read_only: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Stand around the work that prepares a replay.

        A strict driver refuses host reads in it, and writes to memory that is not for it to write.

        Args:
            host: Host tensors besides those that were declared, such as those of a batch.
            read_only: What it may not write besides what graphs use and no slot is: the batch.
        """
        del host, read_only
        yield

    @contextlib.contextmanager
    def unprepared(self, host: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Stand around hooks that prepare no replay: an eager step's, a capture's.

        A strict driver refuses nothing in them, and learns what lies on the host: they may keep it for later.

        Args:
            host: As of `preparation`.
        """
        del host
        yield

    def stream(self) -> Stream:
        """Return a new stream."""
        return Stream()

    def current_stream(self) -> Stream:
        """Return the stream that work is given to now."""
        return Stream()

    def event(self) -> Event:
        """Return a new event."""
        return Event()

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy host memory to the device in the order of the current stream, without waiting.

        ``source`` may not be written before the host has waited, by `Event.synchronize` or
        `synchronize`, for the copy: the device may read it at any time until then.

        Args:
            target: On the driver's device.
            source: Host memory of the same shape and dtype, pinned where the device is a GPU.
        """
        target.copy_(source)

    def copy_in_flight(self, source: torch.Tensor) -> Line | None:
        """Return where a copy from the memory of ``source`` began that the host has not waited for.

        A strict driver knows the copies of `copy_async`. None where there is none, or the driver cannot tell.
        """
        del source
        return None

    def synchronize(self) -> None:  # noqa: B027  nothing to wait for where work is done at once
        """Wait, on the host, for all work that the device was given."""
