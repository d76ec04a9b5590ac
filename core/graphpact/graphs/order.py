"""`Order`: which work waits for which, on streams that a CPU does not have.

Each stream has a clock: what of every stream its next work comes after. Work that touches memory
is held against earlier work on the same memory; where one of the two writes and neither waits for the
other, a device may run them in either order, and that is an error at once, whatever order they ran in
here. So a missing wait needs no luck to be seen.

An asynchronous copy from host memory is carried out as late as a device may: when work that is ordered
after it begins. Until the host has waited for it, the host memory has to stay as it was.

Does not: run work in another order than it was given.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from graphpact.errors import CaptureError, ContractError, ReplayError
from graphpact.graphs.driver import Event, Stream
from graphpact.graphs.host import Line, storage_id

_Clock = dict[int, int]
_VERB = {False: "reads", True: "writes"}


class TapeStream(Stream):
    """A stream of a strict tape."""

    def __init__(self, order: "Order", number: int) -> None:
        self.number = number
        self.clock: _Clock = {number: 0}
        self._order = order
        self._before: list[Stream] = []

    def __enter__(self) -> Self:
        self._before.append(self._order.current)
        self._order.current = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._order.current = self._before.pop()

    @property
    def count(self) -> int:
        """How much work the stream was given."""
        return self.clock[self.number]

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream come after what ``event`` marked."""
        assert isinstance(event, TapeEvent)  # noqa: S101  a driver's streams know its own events
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def wait_stream(self, stream: Stream) -> None:
        """Let later work of this stream come after all that ``stream`` was given."""
        event = self._order.event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Wait, on the host, for all work of this stream."""
        event = self._order.event()
        event.record(self)
        event.synchronize()


class TapeEvent(Event):
    """An event of a strict tape."""

    def __init__(self, order: "Order") -> None:
        self.clock: _Clock = {}
        self._order = order

    def record(self, stream: Stream | None = None) -> None:
        """Mark what ``stream`` was given so far."""
        stream = stream or self._order.current
        assert isinstance(stream, TapeStream)  # noqa: S101  as above
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        """Wait, on the host, for what was marked."""
        self._order.synchronize(self.clock)


@dataclass(frozen=True, slots=True)
class _Access:
    stream: int
    count: int
    begin: int
    end: int
    writes: bool
    what: str
    line: Line


@dataclass(slots=True)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor
    stream: int
    count: int
    line: Line
    snapshot: torch.Tensor = field(init=False)
    done: bool = False

    def __post_init__(self) -> None:
        self.snapshot = self.source.clone()

    def is_before(self, clock: _Clock) -> bool:
        return clock.get(self.stream, 0) >= self.count

    def check(self, name_of: Callable[[torch.Tensor], str | None]) -> None:
        """Raise where the source is not what it was when the copy was asked for."""
        if torch.equal(_bytes(self.source), _bytes(self.snapshot)):
            return
        name = name_of(self.source) or f"of {self.source.dtype} {tuple(self.source.shape)}"
        raise ReplayError(
            f"host memory {name} was rewritten while a copy from it was in flight, begun at {self.line}",
            hint="record an event after copy_async() and synchronize() it before writing the memory again,"
            " or take turns between two buffers",
        )

    def carry_out(self) -> None:
        if not self.done:
            self.target.copy_(self.source)
            self.done = True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Order:
    """The streams of one driver, the work that they were given, and the copies in flight.

    Attributes:
        current: The stream that work is given to.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._main = TapeStream(self, 0)
        self.current: Stream = self._main
        self._side: list[TapeStream] = []
        self._accesses: dict[int, list[_Access]] = {}
        self._copies: list[_Copy] = []
        self._begun: int | None = None  # the main stream's count at the begin of a capture
        self.name_of: Callable[[torch.Tensor], str | None] = lambda _: None

    def stream(self) -> TapeStream:
        """Return a new stream."""
        stream = TapeStream(self, next(self._numbers))
        self._side.append(stream)
        return stream

    def event(self) -> TapeEvent:
        """Return a new event."""
        return TapeEvent(self)

    # -- captures --------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Forget what is past: a capture begins with nothing pending."""
        self._accesses.clear()
        self._main.clock[0] += 1
        self._begun = self._main.count

    def end_capture(self) -> None:
        """Forget the capture, whatever became of it."""
        self._accesses.clear()
        self._begun = None

    def check_joined(self) -> None:
        """Raise where a side stream was given work that the main stream does not wait for."""
        for stream in self._side:
            if self._has_joined(stream) and self._main.clock.get(stream.number, 0) < stream.count:
                raise CaptureError(
                    "a side stream was given work and is not joined at the end of the region",
                    hint="let driver.current_stream() wait_stream(side) before the region returns",
                )

    def _has_joined(self, stream: TapeStream) -> bool:
        return self._begun is not None and stream.clock.get(0, 0) >= self._begun

    # -- work ------------------------------------------------------------------------------------

    def work(
        self,
        what: str,
        read: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
        line: Line,
        error: type[ContractError],
    ) -> None:
        """Give the current stream work on ``read`` and ``written``.

        Raises:
            ContractError: Of the class ``error``, where other work on that memory is not ordered with it.
        """
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  it is one of ours
        if self._begun is not None and stream is not self._main and not self._has_joined(stream):
            raise error(
                f"{what} runs on a stream that is no part of the capture, at {line}",
                hint="let the side stream wait_stream(driver.current_stream()) before it is given work",
            )
        stream.clock[stream.number] += 1
        if not self._side:
            return
        for writes, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if tensor.numel():
                    self._touch(stream, tensor, what, line, error, writes=writes)

    def _touch(
        self,
        stream: TapeStream,
        tensor: torch.Tensor,
        what: str,
        line: Line,
        error: type[ContractError],
        *,
        writes: bool,
    ) -> None:
        begin, end = _extent(tensor)
        earlier = self._accesses.setdefault(storage_id(tensor), [])
        for a in earlier:
            if (
                (writes or a.writes)
                and a.begin < end
                and begin < a.end
                and stream.clock.get(a.stream, 0) < a.count
            ):
                name = self.name_of(tensor) or f"{tensor.dtype} {tuple(tensor.shape)}"
                raise error(
                    f"two streams use {name} in no order: {a.what} {_VERB[a.writes]} it at {a.line},"
                    f" and {what} {_VERB[writes]} it at {line}",
                    hint="let one stream wait for the other: wait_stream(), or an event between them",
                )
        same = (stream.number, begin, end, writes)
        earlier[:] = [a for a in earlier if (a.stream, a.begin, a.end, a.writes) != same]
        earlier.append(_Access(stream.number, stream.count, begin, end, writes, what, line))

    # -- copies and waits ------------------------------------------------------------------------

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy on the current stream; it is carried out when it has to be."""
        self._check_copies()
        line = Line()
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  it is one of ours
        self.work("an asynchronous copy", (), (target,), line, ReplayError)
        self._copies.append(_Copy(target, source, stream.number, stream.count, line))

    def carry_out(self) -> None:
        """Carry out the copies that come before the current stream's next work."""
        self._check_copies()
        assert isinstance(self.current, TapeStream)  # noqa: S101  it is one of ours
        for copy in self._copies:
            if copy.is_before(self.current.clock):
                copy.carry_out()

    def synchronize(self, clock: _Clock | None = None) -> None:
        """Let the host wait for the work before ``clock``, or for all there is."""
        if self._begun is not None:
            raise CaptureError(
                f"the host waits for the device while a graph is recorded, at {Line()}",
                hint="wait before or after the replay; inside a graph, streams wait for each other",
            )
        self._check_copies()
        for copy in self._copies:
            if clock is None or copy.is_before(clock):
                copy.carry_out()
        self._copies = [c for c in self._copies if not (clock is None or c.is_before(clock))]

    def _check_copies(self) -> None:
        for copy in self._copies:
            copy.check(self.name_of)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte that ``tensor`` covers in its storage, and the byte after the last."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size
