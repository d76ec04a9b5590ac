"""Refuse work of a region that other threads do.

Modes of torch belong to a thread, so a recorder does not see what other threads dispatch, and every replay
would lack it. A region has work done elsewhere in three ways, which are watched at the functions of Python:

- It starts a thread. The thread runs under modes, which see what it dispatches.
- It gives a function to a pool of threads. The function runs under these modes, in threads of any age.
- It gives work to a thread that was there before by other means, such as a queue, and takes the result. What
  that thread did cannot be seen, so the wait for it is refused, or the taking if there is no need to wait.

Threads that the region neither starts nor gives work are not watched: an engine's own workers, progress bars.

Does not: see a result that comes by a lock, by a `queue.SimpleQueue` or by polling; or see other processes.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from torch.overrides import TorchFunctionMode

from graphpact_tape.entrances import Entrance, replaced
from graphpact_tape.host import READS, DispatchMode, HostReadGuard
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_POOL_METHODS = ("apply_async", "_map_async", "imap", "imap_unordered")
"""The methods of `multiprocessing.pool.Pool` through which all others pass; each takes a function first."""


@contextlib.contextmanager
def other_threads_refused(guard: HostReadGuard) -> Iterator[None]:
    """Refuse work that the region of this thread has other threads do, except while ``guard`` is paused."""
    elsewhere = _Elsewhere(guard)
    with replaced(elsewhere.entrances()):
        try:
            yield
        finally:
            elsewhere.is_over = True


class _Elsewhere:
    """The work that a region has other threads do.

    Attributes:
        guard: Keeps the first refusal. Work that is refused runs, and the capture fails at its end.
        is_over: Whether the region has ended. Its threads may run on.
    """

    def __init__(self, guard: HostReadGuard) -> None:
        self.guard = guard
        self.is_over = False
        self._has_given = False  # a function, to another thread
        self._has_handed = False  # something else, to a thread that waits
        self._recording = threading.get_ident()
        self._thread = threading.local()
        self._thread.is_watched = True

    def is_region(self) -> bool:
        """Return whether the calling thread runs the region, or work of it."""
        return not self.is_over and not self.guard.paused and getattr(self._thread, "is_watched", False)

    def entrances(self) -> Iterator[Entrance]:
        """Yield the functions by which a region has other threads do work."""
        yield threading.Thread, "start", self._starting
        yield ThreadPoolExecutor, "submit", self._giving
        for name in _POOL_METHODS:
            yield Pool, name, self._giving
        yield threading.Condition, "notify", self._handing
        yield threading.Condition, "wait", self._waiting
        yield threading.Event, "wait", self._taking
        yield queue.Queue, "get", self._taking
        yield Future, "result", self._taking

    def _starting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(thread: threading.Thread) -> None:
            if self.is_region():
                setattr(thread, "run", self._watched(thread.run))  # noqa: B010  mypy: it is a method
            start(thread)

        return started

    def _giving(self, give: Callable[..., Any]) -> Callable[..., Any]:
        def given(pool: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_region() and isinstance(pool, (ThreadPoolExecutor, ThreadPool)):
                if args:
                    args = self._watched(args[0]), *args[1:]
                else:
                    kwargs["func"] = self._watched(kwargs["func"])
            with self._unwatched():  # the pool may start threads, which serve others too
                return give(pool, *args, **kwargs)

        return given

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(condition: Any, timeout: float | None = None) -> Any:
            if timeout != 0:
                self._check_source()
            return wait(condition, timeout)

        return waited

    def _handing(self, notify: Callable[..., Any]) -> Callable[..., Any]:
        def notified(condition: Any, n: int = 1) -> None:
            self._has_handed |= threading.get_ident() == self._recording and self.is_region()
            notify(condition, n)

        return notified

    def _taking(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def taken(source: Any, *args: Any, **kwargs: Any) -> Any:
            if self._has_handed:  # else it is of before the region, or is waited for
                self._check_source()
            return take(source, *args, **kwargs)

        return taken

    def _check_source(self) -> None:
        """Refuse a result of another thread, unless the region gave out functions, which are watched."""
        if threading.get_ident() == self._recording and self.is_region() and not self._has_given:
            raise self.guard.refusal(
                "the region takes a result of another thread, whose work is not recorded,",
                "do the work in the thread that captures; host work for a region can be done before it",
            )

    def _watched(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn``, which refuses work of the region in the thread in which it is called."""
        self._has_given = True

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_over:
                return fn(*args, **kwargs)
            self._thread.is_watched = True
            try:
                with _Reads(self), _Work(self):
                    return fn(*args, **kwargs)
            finally:
                self._thread.is_watched = False

        return run

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Take what this thread does for no work of the region."""
        before = getattr(self._thread, "is_watched", False)
        self._thread.is_watched = False
        try:
            yield
        finally:
            self._thread.is_watched = before

    def check(self, what: str, given: list[Any]) -> None:
        """Note the refusal of ``what``, unless it is work on host tensors alone."""
        is_on_host = given and all(tensor in self.guard.host for tensor in given)
        if self.is_region() and not is_on_host:
            self.guard.refusal(
                f"{what} is called in another thread, {threading.current_thread().name!r},",
                "only work of the thread that captures is recorded: do it there; on a device, work side by"
                " side goes to driver.stream()",
            )


class _Work(DispatchMode):
    """Refuses what a thread dispatches for a region."""

    def __init__(self, elsewhere: _Elsewhere) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._elsewhere = elsewhere

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._elsewhere.check(str(func), tensors_of((args, kwargs)))
        return func(*args, **kwargs)


class _Reads(TorchFunctionMode):
    """Refuses host reads that a thread makes for a region and does not dispatch."""

    def __init__(self, elsewhere: _Elsewhere) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in READS:
            self._elsewhere.check(READS[func], [args[0]])
        return func(*args, **(kwargs or {}))
