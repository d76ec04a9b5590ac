"""`Order`: streams, events and asynchronous copies on a CPU, with checks for missing waits.

Each stream has a vector clock: the work of every stream that its next work waits for. The host also has one,
because work that it submits comes after all work that it waited for. Work on memory is compared with earlier
work on the same memory. If one of the two writes, and neither waits for the other, a device may run them in
either order, and the tape raises an error at once. The order in which the tape itself runs them does not
matter, so a missing wait is always detected.

An asynchronous copy from host memory is carried out as late as a device might do it: when work that waits for
it begins. The host memory must not change until the host has waited for the copy. A copy to host memory takes
the values of its place in the stream, and writes them when the host waits for it. Until then the host memory
keeps its old values, and must be neither read nor written.

Does not: change the order of work.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphpact.errors import CaptureError, ContractError, ReplayError
from graphpact.graphs.driver import Event, Stream
from graphpact.graphs.lines import Line
from graphpact.tensors import extent_of, storage_id
from graphpact_tape.host_tensors import WeakTensor
from graphpact_tape.tasks import Point
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_Clock = dict[int, int]
_PRUNE_ABOVE = 1024  # largest number of tracked storages; above it, freed ones are removed
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

    def __exit__(self, *exc: object) -> None:
        self._order.current = self._before.pop()

    @property
    def count(self) -> int:
        """The number of pieces of work that were submitted to the stream."""
        return self.clock[self.number]

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the work that ``event`` marks."""
        assert isinstance(event, TapeEvent)  # noqa: S101  a stream takes only events of its driver
        self._order.check_event(event)
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def wait_stream(self, stream: Stream) -> None:
        """Make later work of this stream wait for all work submitted so far to ``stream``."""
        event = self._order.event()
        event.mark(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Make the host wait for all work of this stream."""
        event = self._order.event()
        event.mark(self)
        event.synchronize()


class TapeEvent(Event):
    """An event of a strict tape."""

    def __init__(self, order: "Order") -> None:
        self.clock: _Clock = {}
        self.capture = 0
        self._order = order

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work submitted so far to ``stream``."""
        self.mark(stream)
        self._order.note_event(self.clock)

    def mark(self, stream: Stream | None = None) -> None:
        """Mark work, without a note at copies that an event was recorded after them."""
        stream = stream or self._order.current
        assert isinstance(stream, TapeStream)  # noqa: S101  as above
        self.clock, self.capture = dict(stream.clock), self._order.capture

    def synchronize(self) -> None:
        """Make the host wait for the marked work."""
        self._order.synchronize(self.clock)


@dataclass(frozen=True, slots=True)
class _Access:
    stream: int
    count: int
    begin: int
    end: int
    writes: bool
    view: torch.Tensor  # the bytes of its elements, on the meta device
    what: str
    line: Line


class _Copy:
    """A copy from host memory that the host has not waited for.

    Args:
        source: The tensor to read. It is held weakly, as on a device.
        target: The tensor to write when the copy is carried out; None if this was done already.
        stream: The stream to which the copy was submitted.
        line: The caller's line.
    """

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor | None, stream: TapeStream, line: Line
    ) -> None:
        self.place = source.data_ptr(), source.shape, stream.number
        self.line = line
        self.has_event = False  # whether an event was recorded after it
        self._source = WeakTensor(source)
        self._extent = extent_of(source)
        self._snapshot = source.clone()
        self._target = target
        self._stream, self._count = stream.number, stream.count

    def is_before(self, clock: _Clock) -> bool:
        return clock.get(self._stream, 0) >= self._count

    def reads(self, tensor: torch.Tensor) -> bool:
        """Return whether the source and ``tensor`` share memory."""
        (first, last), (begin, end) = self._extent, extent_of(tensor)
        return self._source.storage.cdata == storage_id(tensor) and first < end and begin < last

    def check(self, name_of: Callable[[torch.Tensor], str | None]) -> None:
        """Raise `ReplayError` if the contents of the source changed since the copy began."""
        source = self._source.revive()
        # Freed memory is valid: torch's allocator does not reuse pinned memory before the copy is done.
        if source is None or torch.equal(_bytes(source), _bytes(self._snapshot)):
            return
        name = name_of(source) or f"of {source.dtype} {tuple(source.shape)}"
        raise ReplayError(
            f"host memory {name} was rewritten while a copy from it was in flight; the copy began at"
            f" {self.line}",
            hint=_OTHER_EVENT if self.has_event else _NO_EVENT,
            rule="GP16",
        )

    def carry_out(self) -> None:
        if self._target is not None:
            self._target.copy_(self._snapshot)  # equal to the source, because `check` ran before
            self._target = None


_NO_EVENT = (
    "record an event after copy_async() and synchronize() it before writing the memory again; if two buffers"
    " are used in turn, each needs an event"
)
_OTHER_EVENT = (
    "an event was recorded after this copy, and nothing waited for it: synchronize() the event of the last"
    " copy from this memory before writing it again. Parts of one buffer are one memory, so an event for each"
    " shape is not enough"
)


class _CopyToHost:
    """A copy to host memory that the host has not waited for.

    Args:
        target: The host tensor to write when the host waits.
        source: The tensor to read. Its values are taken now, because later work of the stream comes after.
        stream: The stream to which the copy was submitted.
        line: The caller's line.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor, stream: TapeStream, line: Line) -> None:
        self.place = target.data_ptr(), target.shape, stream.number
        self.line = line
        self._target = target
        self._values = source.clone()
        self._stream, self._count = stream.number, stream.count
        self.look_again()

    def look_again(self) -> None:
        """Take the present contents of the target as those before the copy."""
        self._before = self._target.clone()

    def is_before(self, clock: _Clock) -> bool:
        return clock.get(self._stream, 0) >= self._count

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether the target and ``tensor`` share memory."""
        (first, last), (begin, end) = extent_of(self._target), extent_of(tensor)
        return storage_id(self._target) == storage_id(tensor) and first < end and begin < last

    def check(self, name_of: Callable[[torch.Tensor], str | None]) -> None:
        """Raise `ReplayError` if the contents of the target changed since the copy began."""
        if not torch.equal(_bytes(self._target), _bytes(self._before)):
            raise self.refusal("was rewritten", name_of)

    def refusal(self, what: str, name_of: Callable[[torch.Tensor], str | None]) -> ReplayError:
        """Return the error for a use of the target; ``what`` says which."""
        target = self._target
        name = name_of(target) or f"of {target.dtype} {tuple(target.shape)}"
        return ReplayError(
            f"host memory {name} {what} while a copy to it was in flight; the copy began at {self.line}",
            hint="record an event after copy_async() and synchronize() it before the host uses the memory; if"
            " two buffers are used in turn, each needs an event",
            rule="GP16",
        )

    def carry_out(self) -> None:
        self._target.copy_(self._values)
        self.look_again()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A clone, because torch treats a tensor of one element as contiguous whatever its stride is.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Order:
    """The streams of one driver, the work submitted to them, and the copies in flight.

    Attributes:
        capture: The number of the current capture, 0 outside a capture.
        is_broken: Whether an eager call runs between two segments of the capture.
        num_to_host: Number of copies to host memory that were begun.
        name_of: Returns the name of a tensor for messages, or None.
        unwatched: Returns a context for work of this class, in which the guard allows all calls.
        settle: Called before the host waits, with the work to wait for by stream, or None for all work.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._main = TapeStream(self, 0)
        self._of_thread = threading.local()  # each thread has its own current stream
        self._side: list[TapeStream] = []
        # The weak references keep a storage's id from being reused.
        self._accesses: dict[int, tuple[StorageWeakRef, list[_Access]]] = {}
        self._copies: list[_Copy] = []
        self._to_host: list[_CopyToHost] = []
        self.num_to_host = 0
        self._host: _Clock = {}  # the work that the host waited for, before its later work
        self._begun: int | None = None  # the main stream's count at the beginning of the capture
        self.is_broken = False
        self._captures = itertools.count(1)
        self.capture = 0
        self.name_of: Callable[[torch.Tensor], str | None] = lambda _: None
        self.unwatched: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.settle: Callable[[Mapping[int, int] | None], None] = lambda _: None

    @property
    def current(self) -> Stream:
        """The stream to which new work of this thread goes."""
        stream: Stream = getattr(self._of_thread, "stream", self._main)
        return stream

    @current.setter
    def current(self, stream: Stream) -> None:
        self._of_thread.stream = stream

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
        """Begin a capture, in which no memory has earlier work."""
        self._accesses.clear()
        self._main.clock[0] += 1
        self._begun = self._main.count
        self.capture = next(self._captures)

    def end_capture(self) -> None:
        """End the capture, whether it succeeded or not, and discard its work."""
        self._accesses.clear()
        self._begun = None
        self.capture = 0

    def check_event(self, event: "TapeEvent") -> None:
        """Raise an error if a capture waits for an event that it did not record."""
        if self.capture and event.clock and event.capture != self.capture:
            raise CaptureError(
                f"a capture waits for an event that was recorded outside it, at {Line()}",
                hint="wait for the event before the capture; inside a capture, streams wait only for events"
                " of that capture",
                rule="GP20",
            )

    def check_joined(self) -> None:
        """Raise an error if a side stream has work that the main stream does not wait for."""
        for stream in self._side:
            if self._has_joined(stream) and self._main.clock.get(stream.number, 0) < stream.count:
                raise CaptureError(
                    "a side stream has work and is not joined at the end of the region; its last"
                    f" work was at {stream.last_line}",
                    hint="call driver.current_stream().wait_stream(side) before the region returns",
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
        """Submit work to the current stream that reads ``read`` and writes ``written``.

        Raises:
            ContractError: An ``error``: the work conflicts with work of another stream on the same memory,
                and neither waits for the other.
        """
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  all streams of a tape are
        if self._begun is not None and stream is not self._main and not self._has_joined(stream):
            raise error(
                f"{what} runs on a stream that is not part of the capture, at {line}",
                hint=(
                    "call side.wait_stream(driver.current_stream()) before submitting work to the side stream"
                ),
                rule="GP10",
            )
        stream.clock[stream.number] += 1
        stream.last_line = line
        if not self._side:
            return
        if len(self._accesses) > _PRUNE_ABOVE:
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
        """Submit the work of ``func`` to the current stream, unless it only makes views."""
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
        view = _meta_bytes(tensor)
        for a in earlier:
            if (
                (writes or a.writes)
                and a.begin < end
                and begin < a.end
                and max(stream.clock.get(a.stream, 0), self._host.get(a.stream, 0)) < a.count
                and _overlap(a.view, view)
            ):
                name = self.name_of(tensor) or f"{tensor.dtype} {tuple(tensor.shape)}"
                raise error(
                    f"two streams use {name} in no order: {a.what} {_VERB[a.writes]} it at {a.line},"
                    f" and {what} {_VERB[writes]} it at {line}",
                    hint="make one stream wait for the other, with wait_stream() or an event",
                    rule="GP16",
                )
        same = (stream.number, writes, *_layout(view))
        earlier[:] = [a for a in earlier if (a.stream, a.writes, *_layout(a.view)) != same]
        earlier.append(_Access(stream.number, stream.count, begin, end, writes, view, what, line))

    def point(self, what: str) -> Point:
        """Submit work that uses no memory to the current stream, and return it."""
        stream, line = self.current, Line()
        assert isinstance(stream, TapeStream)  # noqa: S101  all streams of a tape are
        self.work(what, (), (), line, ReplayError)
        return Point(stream.number, stream.count, what, line)

    def comes_after(self, point: Point) -> bool:
        """Return whether the current stream's next work waits for ``point``."""
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  all streams of a tape are
        return max(stream.clock.get(point.stream, 0), self._host.get(point.stream, 0)) >= point.place

    # -- copies and waits ------------------------------------------------------------------------

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy on the current stream. It is carried out as late as a device might do it."""
        line = Line()
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  all streams of a tape are
        with self.unwatched():
            self._check_copies()
            self.work("an asynchronous copy", (), (target,), line, ReplayError)
            for earlier in self._to_host:
                if earlier.writes(source):
                    if not earlier.is_before(stream.clock):
                        raise earlier.refusal("is copied to the device", self.name_of)
                    earlier.carry_out()
            self._add(_Copy(source, target, stream, line))

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy to host memory on the current stream. The host gets the values when it waits."""
        line = Line()
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  all streams of a tape are
        with self.unwatched():
            self._check_copies()
            self.work("an asynchronous copy to the host", (source,), (target,), line, ReplayError)
            copy = _CopyToHost(target, source, stream, line)
            self._to_host = [c for c in self._to_host if c.place != copy.place] + [copy]
            self.num_to_host += 1

    def check_use(self, tensor: torch.Tensor, what: str = "is read or written") -> None:
        """Raise `ReplayError` if a copy to the host memory ``tensor`` is in flight."""
        for copy in self._to_host:
            if copy.writes(tensor):
                raise copy.refusal(what, self.name_of)

    def note_event(self, clock: _Clock) -> None:
        """Note which copies from host memory an event marks."""
        for copy in self._copies:
            copy.has_event = copy.has_event or copy.is_before(clock)

    def keep_in_flight(self, source: torch.Tensor, line: Line) -> None:
        """Mark ``source`` as read by the current stream's last work until the host waits for that work."""
        stream = self.current
        assert isinstance(stream, TapeStream)  # noqa: S101  all streams of a tape are
        self._add(_Copy(source, None, stream, line))

    def _add(self, copy: _Copy) -> None:
        """Add a copy. It replaces earlier copies from the same memory on its stream, which finish first."""
        for earlier in self._copies:
            if earlier.place == copy.place:
                earlier.carry_out()
        self._copies = [c for c in self._copies if c.place != copy.place] + [copy]

    def carry_out(self) -> None:
        """Carry out the copies that the current stream's next work waits for."""
        assert isinstance(self.current, TapeStream)  # noqa: S101  all streams of a tape are
        with self.unwatched():
            self._check_copies()
            for copy in self._copies:
                if copy.is_before(self.current.clock):
                    copy.carry_out()

    def synchronize(self, clock: _Clock | None = None) -> None:
        """Make the host wait for the work up to ``clock``, or for all work."""
        if self._begun is not None and not self.is_broken:
            raise CaptureError(
                f"the host waits for the device while a graph is recorded, at {Line()}",
                hint="wait before or after the replay; inside a graph, only streams may wait for each other",
                rule="GP20",
            )
        self.settle(clock)
        done = {each.number: each.count for each in (self._main, *self._side)} if clock is None else clock
        for number, count in done.items():
            self._host[number] = max(self._host.get(number, 0), count)
        self.finish_copies(clock)

    def finish_copies(self, clock: _Clock | None = None, *, waits: bool = True) -> None:
        """Finish the copies up to ``clock``, or all copies; the host need not wait for them any more.

        Args:
            clock: The work up to which copies are finished; None for all of them.
            waits: Whether the host waits. If not, copies to the host stay in flight.
        """
        with self.unwatched():
            self._check_copies()
            for copy in self._copies:
                if clock is None or copy.is_before(clock):
                    copy.carry_out()
            done = [c for c in self._to_host if waits and (clock is None or c.is_before(clock))]
            for to_host in done:
                to_host.carry_out()
            self._to_host = [c for c in self._to_host if c not in done]
            for to_host in self._to_host if done else ():
                to_host.look_again()
        self._copies = [c for c in self._copies if not (clock is None or c.is_before(clock))]

    def copy_in_flight(self, tensor: torch.Tensor) -> Line | None:
        """Return the code line of a copy from or to ``tensor`` that the host has not waited for, or None."""
        read = (copy.line for copy in self._copies if copy.reads(tensor))
        return next(read, next((copy.line for copy in self._to_host if copy.writes(tensor)), None))

    def _check_copies(self) -> None:
        copies, self._copies = self._copies, []  # each error is raised once
        to_host, self._to_host = self._to_host, []
        for copy in copies:
            copy.check(self.name_of)
        for other in to_host:
            other.check(self.name_of)
        self._copies, self._to_host = copies, to_host


def _meta_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor that covers the same bytes of the storage as ``tensor``."""
    size = tensor.element_size()
    shape = (*tensor.shape, size)
    stride = (*(s * size for s in tensor.stride()), 1)
    begin, end = extent_of(tensor)
    return torch.empty(end, dtype=torch.uint8, device="meta").as_strided(shape, stride, begin)


def _layout(view: torch.Tensor) -> tuple[object, ...]:
    return view.storage_offset(), view.shape, view.stride()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two views of one storage share a byte; exact for any strides."""
    begin = min(a.storage_offset(), b.storage_offset())
    end = max(t.untyped_storage().nbytes() for t in (a, b))
    marks = torch.zeros(end - begin, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - begin).fill_(1)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - begin).any())
