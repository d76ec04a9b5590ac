"""Acts on memory: freed, moved, written and copied between capture and replay.

Does not: use more than one stream; see ``streams``.
"""

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from graphpact.graphs import DeclaredMemory
from graphpact_conformance.drivers.acts.act import (
    Act,
    ActMemory,
    Seen,
    clear_outputs,
    eager_results,
    frozen,
    legal,
    registering_in,
    replay_results,
    values_of,
)

ACTS: dict[str, Act] = {}
"""The acts by name, in order."""
act = registering_in(ACTS)


def after(w: ActMemory, change: Callable[[list[torch.Tensor]], Any]) -> Seen:
    """Replay after ``change`` has changed an input. The list passed to it holds the only reference."""
    box = [torch.ones(4, device=w.device)]
    graph = w.driver.capture(lambda: w.x + box[0])
    change(box)
    gc.collect()
    return Seen(replay_results(w, graph), eager_results(w, lambda: w.x + 1))


@act(gpu=False)
def _input_freed(w: ActMemory) -> Seen:
    return after(w, lambda box: box.clear())


@act(gpu=False)
def _input_freed_checked(w: ActMemory) -> Seen:
    return after(w, lambda box: box.clear())


@act(gpu=False)
def _input_resized(w: ActMemory) -> Seen:
    return after(w, lambda box: box[0].resize_(1 << 20))


@act(gpu=False)
def _input_set(w: ActMemory) -> Seen:
    return after(w, lambda box: box[0].set_(torch.zeros(4, device=w.device).untyped_storage()))


@act()
def _input_rebound(w: ActMemory) -> Seen:
    held = [torch.full((4,), 2.0, device=w.device)]
    return frozen(w, lambda: w.x * held[-1], lambda: held.append(torch.full((4,), 5.0, device=w.device)))


@act()
def _input_cast_anew(w: ActMemory) -> Seen:
    held = [w.x.double()]
    graph = w.driver.capture(lambda: held[-1] * 2)
    w.refresh(0)
    first, replayed, eager = held[0].cpu() * 2, [], []
    for turn in (0, 1):
        w.refresh(turn)
        w.x.add_(1)
        held.append(w.x.double())
        clear_outputs(graph, w)
        graph.replay()
        replayed.append(values_of(graph.outputs))
        eager.append(values_of(held[-1] * 2))
    return Seen(replayed, eager, [[first], [first]])


@act(gpu=False)
def _compile_in_capture(w: ActMemory) -> Seen:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    graph = w.driver.capture(lambda: compiled(w.x), warmup=0)
    return Seen(replay_results(w, graph), [])


@act()
def _compiled_code(w: ActMemory) -> Seen:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    return legal(w, lambda: compiled(w.x))


@act(gpu=False)
def _autocast_cache(w: ActMemory) -> Seen:
    @torch.inference_mode(mode=False)  # in inference mode autocast does not cache casts
    @torch.no_grad()
    def region() -> torch.Tensor:
        return functional.linear(rows, weight)

    with torch.inference_mode(mode=False):
        weight, rows = torch.nn.Parameter(torch.ones(4, 4, device=w.device)), w.x.new_ones(2, 4)
        with torch.autocast(w.device.type, torch.bfloat16):
            functional.linear(rows, weight)  # casts the weight; autocast caches the cast
            graph = w.driver.capture(region)
    return Seen(replay_results(w, graph), [])


@act(gpu=False)
def _pointer_array(w: ActMemory) -> Seen:
    pointers = torch.zeros(2, dtype=torch.int64, device=w.device)
    w.declare(workspaces=[pointers])
    return legal(
        w,
        lambda: w.driver.copy_async(pointers, torch.tensor([w.x.data_ptr(), w.y.data_ptr()])),
    )


@act(gpu=False)
def _address_of_intermediate(w: ActMemory) -> Seen:
    def read(address: int, out: torch.Tensor) -> None:
        out.copy_(torch.frombuffer((ctypes.c_float * 4).from_address(address), dtype=torch.float32))

    def region() -> torch.Tensor:
        one = w.x.abs()
        address = one.data_ptr()
        other = one.sqrt().exp().neg()
        w.driver.eager_call(read, address, w.y)
        return one * 0 + other + w.y

    return legal(w, region)


@act()
def _output_kept_over_replay(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    w.refresh(0)
    graph.replay()
    kept, first = graph.outputs, values_of(graph.outputs)
    w.refresh(1)
    second = values_of(w.x + 1)
    graph.replay()
    return Seen([values_of(kept)], [first], [second])


@act(gpu=False)
def _output_after_other_graph(w: ActMemory) -> Seen:
    one, other = w.driver.capture(lambda: w.x + 1), w.driver.capture(lambda: w.x + 2)
    eager, replayed = eager_results(w, lambda: w.x + 1), []
    for turn in (0, 1):
        w.refresh(turn)
        one.replay()
        other.replay()
        replayed.append(values_of(one.outputs))
    return Seen(replayed, eager)


@act(gpu=False)
def _replay_order(w: ActMemory) -> Seen:
    one = w.driver.capture(lambda: w.x + 1)
    other = w.driver.capture(lambda: one.outputs * 2)
    replayed = []
    for turn in (0, 1):
        w.refresh(turn)
        other.replay()
        one.replay()
        replayed.append(values_of(other.outputs))
    return Seen(replayed, eager_results(w, lambda: (w.x + 1) * 2))


@act(gpu=False)
def _parallel_replay(w: ActMemory) -> Seen:
    one, other = w.driver.capture(lambda: w.x + 1), w.driver.capture(lambda: w.y * 2)
    eager, replayed = eager_results(w, lambda: [w.x + 1, w.y * 2]), []
    for turn in (0, 1):
        w.refresh(turn)
        sides = w.fork(), w.fork()
        for side, graph in zip(sides, (one, other), strict=True):
            with side:
                graph.replay()
        for side in sides:
            w.join(side)
        replayed.append(values_of([one.outputs, other.outputs]))
    return Seen(replayed, eager)


@act(gpu=False)
def _output_before_replay(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    return Seen([values_of(graph.outputs)], [values_of(w.x + 1)])


@act()
def _capture_does_not_run(w: ActMemory) -> Seen:
    w.refresh(0)
    graph = w.driver.capture(lambda: w.x.add_(1), warmup=0)
    after = [values_of(w.x)]
    w.refresh(0)
    before = [values_of(w.x)]
    seen = replay_results(w, graph)
    return Seen(after + seen, before + eager_results(w, lambda: w.x.add_(1)))


@act(gpu=False)
def _unwritten_empty(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: w.x + torch.empty(4, device=w.device))
    return Seen(replay_results(w, graph), eager_results(w, lambda: w.x + 0))


@act(gpu=False)
def _pool_memory_between_replays(w: ActMemory) -> Seen:
    held: list[torch.Tensor] = []

    def region() -> torch.Tensor:
        if not held:
            held.append(torch.empty(4, device=w.device))
        out = held[0] + w.x
        held[0].copy_(out)
        return out

    graph = w.driver.capture(region, warmup=0)
    held[0].zero_()
    replayed = replay_results(w, graph)
    held[0] = torch.zeros(4, device=w.device)
    return Seen(replayed, eager_results(w, region))


@act(gpu=False)
def _cached_in_capture(w: ActMemory) -> Seen:
    cache: list[torch.Tensor] = []

    def region() -> torch.Tensor:
        if not cache:
            cache.append(torch.arange(4.0, device=w.device))
        return w.x + cache[0]

    graph = w.driver.capture(region, warmup=0)
    seen = legal(w, region)
    graph.release()
    return seen


@act()
def _kept_region_tensor(w: ActMemory) -> Seen:
    held: list[torch.Tensor] = []

    def region() -> torch.Tensor:
        held[:] = [w.x * 2]
        return held[0] + 1

    graph = w.driver.capture(region)
    kept, replayed = held[0], []
    eager = eager_results(w, lambda: w.x * 2)
    for turn in (0, 1):
        w.refresh(turn)
        graph.replay()
        if turn:
            graph.release()
        replayed.append(values_of(kept))
    return Seen(replayed, eager)


@act()
def _stray_write(w: ActMemory) -> Seen:
    stray = torch.zeros(4, device=w.device)
    return legal(w, lambda: stray.copy_(w.x))


@act(gpu=False)
def _workspace_grown(w: ActMemory) -> Seen:
    box = [torch.zeros(4, device=w.device)]
    w.declare(workspaces=box)
    graph = w.driver.capture(lambda: box[0].copy_(w.x) + 1)
    w.driver.declare(DeclaredMemory())
    box[0] = torch.zeros(8, device=w.device)
    return Seen(replay_results(w, graph), eager_results(w, lambda: w.x + 1))
