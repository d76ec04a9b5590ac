"""Acts of the host: Python, host values and other threads.

Does not: free or move memory; see ``memory``.
"""

import contextlib
import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from graphpact.errors import GraphpactError
from graphpact_conformance.contracts.requirement import expect_equal
from graphpact_conformance.drivers.acts.act import (
    Act,
    ActMemory,
    Seen,
    eager_results,
    frozen,
    legal,
    registering_in,
    replay_results,
)

ACTS: dict[str, Act] = {}
"""The acts by name, in order."""
act = registering_in(ACTS)


@act()
def _event_synchronize(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        event = w.driver.event()
        event.record()
        event.synchronize()
        return w.x + 1

    return legal(w, region)


@act(gpu=False)
def _pinned_source_freed(w: ActMemory) -> Seen:
    staging = [w.host(4)]
    graph = w.driver.capture(lambda: w.driver.copy_async(w.x, staging[0]))
    staging.clear()
    return Seen(replay_results(w, graph), [])


@act()
def _python_side_effect(w: ActMemory) -> Seen:
    calls: list[int] = []

    def region() -> torch.Tensor:
        calls.append(1)
        return w.x + len(calls)

    graph = w.driver.capture(region)
    w.refresh(0)
    cuda = [[w.x.cpu() + 2]]
    w.refresh(1)
    cuda.append([w.x.cpu() + 2])
    replayed = replay_results(w, graph)
    expect_equal(len(calls), 2)
    return Seen(replayed, eager_results(w, region), cuda)


@act()
def _cpu_tensor_arithmetic(w: ActMemory) -> Seen:
    return frozen(w, lambda: w.x + (w.number * 3 + 1), lambda: w.number.fill_(9))


@act()
def _cpu_scalar_tensor(w: ActMemory) -> Seen:
    return frozen(w, lambda: w.x * w.number, lambda: w.number.fill_(9))


@act()
def _python_number(w: ActMemory) -> Seen:
    box = {"factor": 2}
    return frozen(w, lambda: w.x * box["factor"], lambda: box.update(factor=9))


@act()
def _host_branch(w: ActMemory) -> Seen:
    box = {"adds": True}
    return frozen(w, lambda: w.x + 1 if box["adds"] else w.x - 1, lambda: box.update(adds=False))


@act()
def _branch_on_capture(w: ActMemory) -> Seen:
    cuda = eager_results(w, lambda: w.x + 1)
    return replace(
        legal(w, lambda: w.x + 1 if w.driver.is_capturing else w.x - 1),
        cuda=cuda,
    )


@act()
def _module_hook(w: ActMemory) -> Seen:
    box = {"factor": 2}
    module = torch.nn.ReLU()
    module.register_forward_hook(lambda _module, _args, out: out * box["factor"])
    return frozen(w, lambda: module(w.x), lambda: box.update(factor=9))


@act()
def _pinned_allocation(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        torch.empty(4, pin_memory=True)
        return w.x + 1

    graph = w.driver.capture(region, warmup=0)  # without a GPU, torch would refuse it in a warm-up
    return Seen(replay_results(w, graph), eager_results(w, lambda: w.x + 1))


@act()
def _empty_cache(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        torch.cuda.empty_cache()
        return w.x + 1

    return legal(w, region)


@act()
def _gc_of_graph(w: ActMemory) -> Seen:
    graphs = [w.driver.capture(lambda: w.y + 1)]

    def region() -> torch.Tensor:
        graphs.clear()
        gc.collect()
        return w.x + 1

    return legal(w, region)


@act(error=ZeroDivisionError, line=False)
def _exception(w: ActMemory) -> Seen:
    return legal(w, lambda: w.x + 1 // 0)


@act()
def _go_on_after_error(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        with contextlib.suppress(GraphpactError, RuntimeError):
            w.start.item()
        return w.x + 1

    return legal(w, region)


def elsewhere(w: ActMemory) -> torch.Tensor:
    """Write ``2 * x`` into ``y``. Regions run this function in another thread."""
    with torch.inference_mode():
        return w.y.copy_(w.x * 2)


@act(gpu=False)
def _work_in_another_thread(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        thread = threading.Thread(target=elsewhere, args=(w,))
        thread.start()
        thread.join()
        return w.y + 1

    return legal(w, region)


@act(gpu=False)
def _work_in_a_pool(w: ActMemory) -> Seen:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # starts the thread before the capture
        return legal(w, lambda: pool.submit(elsewhere, w).result() + 1)


@act(gpu=False)
def _work_of_a_worker(w: ActMemory) -> Seen:
    given: queue.Queue[ActMemory | None] = queue.Queue()
    done: queue.Queue[torch.Tensor] = queue.Queue()

    def work() -> None:
        while (memory := given.get()) is not None:
            done.put(elsewhere(memory))

    def region() -> torch.Tensor:
        given.put(w)
        return done.get() + 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        return legal(w, region)
    finally:
        given.put(None)
        worker.join()
