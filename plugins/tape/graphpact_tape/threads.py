"""Refuse work that other threads do for a region.

Torch's modes belong to one thread, so a recorder does not see operations that other threads dispatch, and
every replay would lack them. A region can give work to other threads in three ways. The Python functions for
them are replaced:

- It starts a thread. The thread runs under modes that see the operations that it dispatches.
- It gives a function to a pool of threads. The function runs under these modes, in new and old threads.
- It gives work to an existing thread by other means, such as a queue, and takes the result. The work of that
  thread cannot be seen, so waiting for the result, or taking it without a wait, is refused.

Threads that the region neither starts nor gives work are not checked, such as an engine's workers.

Does not: see a result that comes through a lock, a `queue.SimpleQueue` or polling; or see other processes.
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
from graphpact_tape.host_calls import READS
from graphpact_tape.host_guard import DispatchMode, HostReadGuard
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_POOL_METHODS = ("apply_async", "_map_async", "imap", "imap_unordered")
"""The methods of `multiprocessing.pool.Pool` that all others call. Their first argument is a function."""


@contextlib.contextmanager
def other_threads_refused(guard: HostReadGuard) -> Iterator[None]:
    """Refuse work that this thread's region gives to other threads, except while ``guard`` is paused."""
    elsewhere = _Elsewhere(guard)
    with replaced(elsewhere.entrances()):
        try:
            yield
        finally:
            elsewhere.is_over = True


class _Elsewhere:
    """The work that a region gives to other threads.

    Attributes:
        guard: Stores the first refusal. Refused work still runs, and the capture fails at its end.
        is_over: Whether the region has ended. Its threads may still run.
    """

    def __init__(self, guard: HostReadGuard) -> None:
        self.guard = guard
        self.is_over = False
        self._has_given = False  # a function was given to another thread
        self._has_handed = False  # something else was given to a thread that waits
        self._recording = threading.get_ident()
        self._thread = threading.local()
        self._thread.is_watched = True

    def is_region(self) -> bool:
        """Return whether the calling thread runs the region or work of the region."""
        return not self.is_over and not self.guard.paused and getattr(self._thread, "is_watched", False)

    def entrances(self) -> Iterator[Entrance]:
        """Yield the functions by which a region can give work to other threads."""
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
            with self._unwatched():  # the pool may start threads, which also work for others
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
            if self._has_handed:  # otherwise the result is older than the region, or the region waits for it
                self._check_source()
            return take(source, *args, **kwargs)

        return taken

    def _check_source(self) -> None:
        """Refuse a result of another thread, unless the region only gave functions, which are checked."""
        if threading.get_ident() == self._recording and self.is_region() and not self._has_given:
            raise self.guard.refusal(
                "the region takes a result of another thread, whose work is not recorded,",
                "do the work in the thread that captures; host work for a region can be done before it",
            )

    def _watched(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``fn`` that refuses work for the region in the thread that calls it."""
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
        """Treat the work of this thread as unrelated to the region during the context."""
        before = getattr(self._thread, "is_watched", False)
        self._thread.is_watched = False
        try:
            yield
        finally:
            self._thread.is_watched = before

    def check(self, what: str, given: list[Any]) -> None:
        """Note the refusal of ``what``, unless it uses only host tensors."""
        is_on_host = given and all(tensor in self.guard.host for tensor in given)
        if self.is_region() and not is_on_host:
            self.guard.refusal(
                f"{what} is called in another thread, {threading.current_thread().name!r},",
                "only work of the thread that captures is recorded: do it there; for parallel work on a "
                "device use driver.stream()",
            )


class _Work(DispatchMode):
    """Refuses operations that a thread dispatches for a region."""

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
    """Refuses host reads that a thread makes for a region without dispatching them."""

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
