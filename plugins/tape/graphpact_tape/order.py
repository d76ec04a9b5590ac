"""`Order`: which work waits for which, on streams that a CPU does not have.

Each stream has a clock: what of every stream its next work comes after. Work that touches memory
is held against earlier work on the same memory; where one of the two writes and neither waits for the
other, a device may run them in either order, and that is an error at once, whatever order they ran in
here. So a missing wait needs no luck to be seen.

An asynchronous copy from host memory is carried out as late as a device may: when work that is ordered
after it begins. Until the host has waited for it, the host memory has to stay as it was.

Does not: run work in another order than it was given.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphpact.errors import CaptureError, ContractError, ReplayError
from graphpact.graphs.driver import Event, Stream
from graphpact.graphs.lines import Line
from graphpact.tensors import extent_of, storage_id
from graphpact_tape.host import WeakTensor, tensors_of

__tracebackhide__ = True

_Clock = dict[int, int]
_MANY = 1024  # storages, before those that are gone are forgotten
_VERB = {False: "reads", True: "writes"}


class TapeStream(Stream):
    """A stream of a strict tape."""

    def __init__(self, order: "Order", number: int) -> None:
        self.number = number
        self.clock: _Clock = {number: 0}
        self.last_line: Line | None = None
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
        self._order.check_event(event)
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
        self.capture = 0
        self._order = order

    def record(self, stream: Stream | None = None) -> None:
        """Mark what ``stream`` was given so far."""
        stream = stream or self._order.current
        assert isinstance(stream, TapeStream)  # noqa: S101  as above
        self.clock, self.capture = dict(stream.clock), self._order.capture

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
    view: torch.Tensor  # on no device: the elements, in bytes
    what: str
    line: Line


class _Copy:
    """A copy from host memory, until the host has waited for it.

    Args:
        source: What is read; held weakly, as a device does.
        target: What is written when the copy is carried out; None for one that was.
        stream: The stream that was given it.
        line: Where it was asked for.
    """

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor | None, stream: TapeStream, line: Line
    ) -> None:
        self.place = source.data_ptr(), source.shape, stream.number
        self.line = line
        self._source = WeakTensor(source)
        self._extent = extent_of(source)
        self._snapshot = source.clone()
        self._target = target
        self._stream, self._count = stream.number, stream.count

    def is_before(self, clock: _Clock) -> bool:
        return clock.get(self._stream, 0) >= self._count

    def reads(self, tensor: torch.Tensor) -> bool:
        """Return whether the source and ``tensor`` have memory in common."""
        (first, last), (begin, end) = self._extent, extent_of(tensor)
        return self._source.storage.cdata == storage_id(tensor) and first < end and begin < last

    def check(self, name_of: Callable[[torch.Tensor], str | None]) -> None:
        """Raise where the source is not what it was when the copy was asked for."""
        source = self._source.revive()
        # Freed pinned memory is given to nobody before the copy is done: torch's allocator waits.
        if source is None or torch.equal(_bytes(source), _bytes(self._snapshot)):
            return
        name = name_of(source) or f"of {source.dtype} {tuple(source.shape)}"
        raise ReplayError(
            f"host memory {name} was rewritten while a copy from it was in flight, begun at {self.line}",
            hint="record an event after copy_async() and synchronize() it before writing the memory again,"
            " or take turns between two buffers",
            rule="GP16",
        )

    def carry_out(self) -> None:
        if self._target is not None:
            self._target.copy_(self._snapshot)  # which the source still is: that was checked
            self._target = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Order:
    """The streams of one driver, the work that they were given, and the copies in flight.

    Attributes:
        current: The stream that work is given to.
        capture: The number of the capture under way, 0 outside.
        is_broken: Whether an eager call is made between two segments of it.
        name_of: What messages call a tensor.
        unwatched: What stands around work of this class's own, so that nobody takes it for the caller's.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._main = TapeStream(self, 0)
        self.current: Stream = self._main
        self._side: list[TapeStream] = []
        # The weak references keep a storage's identity from being taken again.
        self._accesses: dict[int, tuple[StorageWeakRef, list[_Access]]] = {}
        self._copies: list[_Copy] = []
        self._begun: int | None = None  # the main stream's count at the begin of a capture
        self.is_broken = False
        self._captures = itertools.count(1)
        self.capture = 0
        self.name_of: Callable[[torch.Tensor], str | None] = lambda _: None
        self.unwatched: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

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
        self.capture = next(self._captures)

    def end_capture(self) -> None:
        """Forget the capture, whatever became of it."""
        self._accesses.clear()
        self._begun = None
        self.capture = 0

    def check_event(self, event: "TapeEvent") -> None:
        """Raise where a capture would wait for an event that is not of its own."""
        if self.capture and event.clock and event.capture != self.capture:
            raise CaptureError(
                f"a capture waits for an event of before it, or of another one, at {Line()}",
                hint="wait before the capture; inside it, streams wait for what the capture recorded",
                rule="GP20",
            )

    def check_joined(self) -> None:
        """Raise where a side stream was given work that the main stream does not wait for."""
        for stream in self._side:
            if self._has_joined(stream) and self._main.clock.get(stream.number, 0) < stream.count:
                raise CaptureError(
                    "a side stream was given work and is not joined at the end of the region; its last"
                    f" work was at {stream.last_line}",
                    hint="let driver.current_stream() wait_stream(side) before the region returns",
                    rule="GP20",
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
                rule="GP10",
            )
        stream.clock[stream.number] += 1
        stream.last_line = line
        if not self._side:
            return
        if len(self._accesses) > _MANY:
            self._accesses = {k: a for k, a in self._accesses.items() if not a[0].expired()}
        for writes, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if tensor.numel():
                    self._touch(stream, tensor, what, line, error, writes=writes)

    def operation(
        self,
        func: Any,
        given: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        result: Any,
        line: Line,
        error: type[ContractError],
    ) -> None:
        """Give the current stream what ``func`` did; one that only made views is no work."""
        known = {storage_id(t) for t in given}
        made = [t for t in tensors_of(result) if storage_id(t) not in known]
        if written or made:
            read = [t for t in given if not any(t is w for w in written)]
            self.work(str(func), read, [*written, *made], line, error)

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
        begin, end = extent_of(tensor)
        reference = StorageWeakRef(tensor.untyped_storage())
        _, earlier = self._accesses.setdefault(storage_id(tensor), (reference, []))
        view = _bytes_on_no_device(tensor)
        for a in earlier:
            if (
                (writes or a.writes)
                and a.begin < end
                and begin < a.end
                and stream.clock.get(a.stream, 0) < a.count
                and _overlap(a.view, view)
            ):
                name = self.name_of(tensor) or f"{tensor.dtype} {tuple(tensor.shape)}"
                raise error(
                    f"two streams use {name} in no order: {a.what} {_VERB[a.writes]} it at {a.line},"
                    f" and {what} {_VERB[writes]} it at {line}",
                    hint="let one stream wait for the other: wait_stream(), or an event between them",
                    rule="GP16",
                )
        same = (stream.number, writes, *_layout(view))
        earlier[:] = [a for a in earlier if (a.stream, a.writes, *_layout(a.view)) != same]
        earlier.append(_Access(stream.number, stream.count, begin, end, writes, view, what, line))

    # -- copies and waits ------------------------------------------------------------------------

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy on the current stream; it is carried out when it has to be."""
        line = Line()
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  it is one of ours
        with self.unwatched():
            self._check_copies()
            self.work("an asynchronous copy", (), (target,), line, ReplayError)
            self._add(_Copy(source, target, stream, line))

    def keep_in_flight(self, source: torch.Tensor, line: Line) -> None:
        """Count ``source`` as read by what the current stream was given last, until the host waits."""
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  it is one of ours
        self._add(_Copy(source, None, stream, line))

    def _add(self, copy: _Copy) -> None:
        """Keep a copy, in the place of earlier ones of the same memory on its stream, which it follows."""
        for earlier in self._copies:
            if earlier.place == copy.place:
                earlier.carry_out()
        self._copies = [c for c in self._copies if c.place != copy.place] + [copy]

    def carry_out(self) -> None:
        """Carry out the copies that come before the current stream's next work."""
        assert isinstance(self.current, TapeStream)  # noqa: S101  it is one of ours
        with self.unwatched():
            self._check_copies()
            for copy in self._copies:
                if copy.is_before(self.current.clock):
                    copy.carry_out()

    def synchronize(self, clock: _Clock | None = None) -> None:
        """Let the host wait for the work before ``clock``, or for all there is."""
        if self._begun is not None and not self.is_broken:
            raise CaptureError(
                f"the host waits for the device while a graph is recorded, at {Line()}",
                hint="wait before or after the replay; inside a graph, streams wait for each other",
                rule="GP20",
            )
        with self.unwatched():
            self._check_copies()
            for copy in self._copies:
                if clock is None or copy.is_before(clock):
                    copy.carry_out()
        self._copies = [c for c in self._copies if not (clock is None or c.is_before(clock))]

    def copy_in_flight(self, source: torch.Tensor) -> Line | None:
        """Return where a copy from ``source`` began that the host has not waited for, or None."""
        return next((copy.line for copy in self._copies if copy.reads(source)), None)

    def _check_copies(self) -> None:
        copies, self._copies = self._copies, []  # an error is told once
        for copy in copies:
            copy.check(self.name_of)
        self._copies = copies


def _bytes_on_no_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that covers the bytes that ``tensor`` does."""
    size = tensor.element_size()
    shape = (*tensor.shape, size)
    stride = (*(s * size for s in tensor.stride()), 1)
    begin, end = extent_of(tensor)
    return torch.empty(end, dtype=torch.uint8, device="meta").as_strided(shape, stride, begin)


def _layout(view: torch.Tensor) -> tuple[object, ...]:
    return view.storage_offset(), view.shape, view.stride()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two views of one memory have a byte in common; exact, columns and rows alike."""
    begin = min(a.storage_offset(), b.storage_offset())
    end = max(t.untyped_storage().nbytes() for t in (a, b))
    marks = torch.zeros(end - begin, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - begin).fill_(1)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - begin).any())
