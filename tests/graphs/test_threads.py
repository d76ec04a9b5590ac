"""Tests that a region cannot delegate work to threads, and that unrelated threads are not affected."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphpact.errors import CaptureError
from graphpact.graphs import GraphDriver
from support import RECORDING_DRIVERS

RECORDERS = pytest.mark.parametrize("make", RECORDING_DRIVERS.values(), ids=RECORDING_DRIVERS)
TAPES = pytest.mark.parametrize("make", [*RECORDING_DRIVERS.values()][:2], ids=["tape", "strict"])

_PATCHED = (
    (threading.Thread, "start"),
    (ThreadPoolExecutor, "submit"),
    (Pool, "apply_async"),
    (Pool, "_map_async"),
    (Pool, "imap"),
    (Pool, "imap_unordered"),
    (threading.Condition, "notify"),
    (threading.Condition, "wait"),
    (threading.Event, "wait"),
    (queue.Queue, "get"),
    (Future, "result"),
)

x = torch.arange(4.0)
y = torch.zeros(4)


@pytest.fixture(autouse=True)
def _python_is_left_as_it_was() -> Iterator[None]:
    """Check that every replaced function of Python is back after a test; enable inference mode."""
    before = [getattr(*each) for each in _PATCHED]
    with torch.inference_mode():
        yield
    assert [getattr(*each) for each in _PATCHED] == before


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    """Return a pool whose thread is already running."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPool]:
    """Return a running pool of `multiprocessing.pool.ThreadPool`."""
    with ThreadPool(1) as pool:
        yield pool


def work(_: int = 0) -> torch.Tensor:
    """Write memory that the region reads, and make new memory."""
    with torch.inference_mode():
        y.copy_(x * 2)
        return x + 1


def read() -> float:
    """Read a number on the host; this dispatches no operation."""
    return float(x.tolist()[0])


def run(thread: threading.Thread) -> None:
    """Run a thread to its end."""
    thread.start()
    thread.join()


def by_thread(fn: Callable[[], object]) -> torch.Tensor:
    """Call ``fn`` in a new thread."""
    run(threading.Thread(target=fn))
    return y + 1


def by_subclass(fn: Callable[[], object]) -> torch.Tensor:
    """Call ``fn`` in a thread of a subclass."""

    class Worker(threading.Thread):
        def run(self) -> None:
            fn()

    run(Worker())
    return y + 1


def by_thread_of_thread(fn: Callable[[], object]) -> torch.Tensor:
    """Call ``fn`` in a thread that another new thread starts."""
    run(threading.Thread(target=lambda: run(threading.Thread(target=fn))))
    return y + 1


def by_timer(fn: Callable[[], object]) -> torch.Tensor:
    """Call ``fn`` in a timer."""
    run(threading.Timer(0.001, fn))
    return y + 1


def by_new_pool(fn: Callable[[], object]) -> torch.Tensor:
    """Call ``fn`` in a pool that the region makes."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: fn(), range(3)))
    return y + 1


def by_event_loop(fn: Callable[[], object]) -> torch.Tensor:
    """Call ``fn`` in a thread of asyncio."""
    asyncio.run(asyncio.to_thread(fn))
    return y + 1


WAYS = (by_thread, by_subclass, by_thread_of_thread, by_timer, by_new_pool, by_event_loop)


def _is_refused(make: Callable[[], GraphDriver], region: Callable[[], object], says: str, line: str) -> None:
    driver = make()
    with pytest.raises(CaptureError, match=says) as caught:
        driver.capture(region)
    assert caught.value.rule == "GP20"
    assert __file__ in str(caught.value)
    assert line in str(caught.value)
    assert driver.capture(lambda: x).num_nodes == 0


@RECORDERS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fn", [work, read])
def test_work_of_threads_that_a_region_starts_is_refused(
    make: Callable[[], GraphDriver], way: Callable[..., torch.Tensor], fn: Callable[[], object]
) -> None:
    """Whatever starts the thread, the capture fails with the line of its work, also for host reads."""
    line = "y.copy_(x * 2)" if fn is work else "x.tolist()"
    _is_refused(make, lambda: way(fn), "is called in another thread", line)


@RECORDERS
def test_work_that_a_region_gives_to_a_pool_is_refused(
    make: Callable[[], GraphDriver], executor: ThreadPoolExecutor, threads: ThreadPool
) -> None:
    """Every method that submits functions to running threads is watched."""
    regions: list[Callable[[], torch.Tensor]] = [
        lambda: executor.submit(work).result() + 1,
        lambda: next(executor.map(work, [0])) + 1,
        lambda: threads.apply(work) + 1,
        lambda: threads.apply_async(func=work).get() + 1,
        lambda: threads.map(work, [0])[0] + 1,
        lambda: threads.starmap_async(work, [(0,)]).get()[0] + 1,
        lambda: next(threads.imap(work, [0])) + 1,
        lambda: next(iter(threads.imap_unordered(work, [0]))) + 1,
    ]
    for region in regions:
        _is_refused(make, region, "is called in another thread", "y.copy_(x * 2)")


@RECORDERS
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_results_of_a_worker_thread_are_refused(make: Callable[[], GraphDriver], delay: float) -> None:
    """A region that hands work to a thread by a queue or an event cannot use the result, however it waits."""
    given: queue.Queue[Future[torch.Tensor] | None] = queue.Queue()
    taken: queue.Queue[torch.Tensor] = queue.Queue()
    done, turn, turns = threading.Event(), threading.Condition(), [0]

    def serve() -> None:
        while (future := given.get()) is not None:
            time.sleep(0.01 - delay / 2)
            result = work()
            taken.put(result)
            future.set_result(result)
            done.set()
            with turn:
                turns[0] += 1
                turn.notify()

    def by_queue() -> torch.Tensor:
        given.put(Future())
        time.sleep(delay)
        return taken.get() + 1

    def by_event() -> torch.Tensor:
        done.clear()
        given.put(Future())
        time.sleep(delay)
        done.wait()
        return y + 1

    def by_future() -> torch.Tensor:
        future: Future[torch.Tensor] = Future()
        given.put(future)
        time.sleep(delay)
        return future.result() + 1

    def by_condition() -> torch.Tensor:
        with turn:
            before = turns[0]
            given.put(Future())
            while turns[0] == before:
                turn.wait()
        return y + 1

    worker = threading.Thread(target=serve)
    worker.start()
    try:
        _is_refused(make, by_queue, "takes a result of another thread", "taken.get()")
        _is_refused(make, by_event, "takes a result of another thread", "done.wait()")
        _is_refused(make, by_future, "takes a result of another thread", "future.result()")
        _is_refused(make, by_condition, "takes a result of another thread", "turn.wait()")
    finally:
        given.put(None)
        worker.join()


@TAPES
def test_threads_of_others_are_left_alone(
    make: Callable[[], GraphDriver], executor: ThreadPoolExecutor
) -> None:
    """Unrelated threads may compute, start threads, wait and use pools during a capture."""
    stop, turns, failed = threading.Event(), [0], []

    def serve() -> None:
        mine = torch.zeros(4)
        while not stop.wait(0.0001):
            try:
                with torch.inference_mode():
                    mine.add_(x)
                    mine.tolist()
                    executor.submit(lambda: mine * 2).result()
                    run(threading.Thread(target=torch.inference_mode()(lambda: mine.mul_(0.5))))
            except Exception as error:  # noqa: BLE001  for the assertion
                failed.append(error)
            turns[0] += 1

    def region() -> torch.Tensor:
        begin, out = turns[0], x
        while turns[0] < begin + 3:  # the other thread runs at the same time as the region
            out = out + 1
        return out * 0 + x

    other = threading.Thread(target=serve)
    other.start()
    try:
        graph = make().capture(region)
    finally:
        stop.set()
        other.join()
    assert not failed
    graph.replay()
    assert torch.equal(graph.outputs, x)


@TAPES
def test_threads_of_a_region_may_do_work_of_the_host(
    make: Callable[[], GraphDriver], executor: ThreadPoolExecutor
) -> None:
    """Other threads may run plain Python and return results from before the region: that is host work."""
    ready, early = threading.Event(), executor.submit(lambda: 2)
    ready.set()
    early.result()

    def region() -> torch.Tensor:
        numbers: list[int] = []
        run(threading.Thread(target=lambda: numbers.append(3)))
        ready.wait()
        return x * numbers[0] * executor.submit(lambda: 5).result() * early.result()

    graph = make().capture(region)
    graph.replay()
    assert torch.equal(graph.outputs, x * 30)


@TAPES
def test_a_function_that_runs_after_its_region_is_not_watched(
    make: Callable[[], GraphDriver], executor: ThreadPoolExecutor
) -> None:
    """Functions that a pool runs after the region are not watched, even in threads of the region."""
    go = threading.Event()
    executor.submit(go.wait)
    given: list[Future[int]] = []

    def region() -> torch.Tensor:
        given.append(executor.submit(lambda: len(_get_current_dispatch_mode_stack())))
        return x + 1

    make().capture(region, warmup=0)
    go.set()
    assert given[0].result() == 0
    with ThreadPoolExecutor(1) as pool:
        make().capture(lambda: x * pool.submit(int).result(), warmup=0)
        assert pool.submit(lambda: len(_get_current_dispatch_mode_stack())).result() == 0


@TAPES
def test_a_thread_that_outlives_its_region_is_free(make: Callable[[], GraphDriver]) -> None:
    """After the region has ended, its threads may do anything; so may threads of eager calls."""
    go, results = threading.Event(), []

    def later() -> None:
        go.wait()
        results.append(work())

    def region() -> torch.Tensor:
        thread = threading.Thread(target=later)
        thread.start()
        started.append(thread)
        return x * 1

    started: list[threading.Thread] = []
    driver = make()
    driver.capture(region, warmup=0)
    go.set()
    started[0].join()
    assert torch.equal(results[0], x + 1)
    out = torch.zeros(4)
    graph = driver.capture(lambda: driver.eager_call(lambda: out.copy_(by_thread(work))) + 1)
    graph.replay()
    assert torch.equal(graph.outputs, x * 2 + 2)
