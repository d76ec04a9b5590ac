"""Acts on the state of a driver: random numbers, shapes, and nested captures.

Does not: use more than one stream; see ``streams``.
"""

import itertools

import torch

from graphpact.errors import EngineError
from graphpact_conformance.drivers.acts.act import (
    Act,
    ActMemory,
    Seen,
    clear_outputs,
    eager_results,
    legal,
    registering_in,
    replay_results,
    values_of,
)

ACTS: dict[str, Act] = {}
"""The acts by name, in order."""
act = registering_in(ACTS)


@act()
def _default_generator(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: torch.rand(64, device=w.device))
    drawn = []
    for _ in range(3):
        clear_outputs(graph, w)
        graph.replay()
        drawn.append(tuple(values_of(graph.outputs)[0].tolist()))
    in_range = all(0 <= number < 1 for numbers in drawn for number in numbers)
    return Seen([len(set(drawn)), in_range], [3, True])


@act()
def _custom_generator(w: ActMemory) -> Seen:
    generator = torch.Generator(w.device)
    return legal(w, lambda: torch.rand(4, device=w.device, generator=generator))


@act(line=False)
def _manual_seed(w: ActMemory) -> Seen:
    seeds = itertools.count(1234)  # to CUDA, the seed of the warm-up is no change

    def region() -> torch.Tensor:
        torch.manual_seed(next(seeds))
        return w.x + torch.rand(4, device=w.device)

    return legal(w, region)


@act()
def _restored_generator(w: ActMemory) -> Seen:
    random = torch.cuda if w.device.type == "cuda" else torch.random

    def region() -> torch.Tensor:
        state = random.get_rng_state()
        noise = torch.rand_like(w.x)
        random.set_rng_state(state)
        return w.x + (noise - torch.rand_like(w.x))

    return legal(w, region)


@act()
def _forked_generator(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            return w.x + torch.rand_like(w.x)

    return legal(w, region)


@act()
def _reseed_between_replays(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: torch.rand(64, device=w.device))
    drawn = []
    for seed in (0, 7, 0):
        torch.manual_seed(seed)
        clear_outputs(graph, w)
        graph.replay()
        drawn.append(tuple(values_of(graph.outputs)[0].tolist()))
    return Seen([drawn[0] == drawn[2], drawn[0] == drawn[1]], [True, False])


@act()
def _new_generator(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        generator = torch.Generator(w.device)
        return w.x + torch.rand(4, device=w.device, generator=generator)

    return legal(w, region)


@act()
def _dynamic_shape(w: ActMemory) -> Seen:
    """Capture with two rows, and replay with four."""
    out = torch.zeros(4, device=w.device)
    w.declare(caches=[out])
    rows = [2]

    def region() -> torch.Tensor:
        n = rows[0]
        out[:n].copy_(w.x[:n] * 2)
        return out

    graph = w.driver.capture(region)
    rows[0] = 4
    replayed, eager, cuda = [], [], []
    for turn in (0, 1):
        w.refresh(turn)
        out.zero_()
        graph.replay()
        replayed.append(values_of(out))
        cuda.append(values_of(torch.cat([w.x[:2] * 2, w.x[2:] * 0])))
        eager.append(values_of(region()))
    return Seen(replayed, eager, cuda)


@act(gpu=False)
def _input_strides_changed(w: ActMemory) -> Seen:
    table = torch.zeros(2, 2, device=w.device)
    graph = w.driver.capture(lambda: table * 2)
    table.t_()
    replayed, eager = [], []
    for turn in (0, 1):
        w.refresh(turn)
        table.copy_(w.x.view(2, 2))
        clear_outputs(graph, w)
        graph.replay()
        replayed.append(values_of(graph.outputs))
        eager.append(values_of(table * 2))
    return Seen(replayed, eager)


@act(gpu=False)
def _resize_in_region(w: ActMemory) -> Seen:
    return legal(w, lambda: w.x.resize_(2) + 1)


@act(gpu=False)
def _transpose_in_region(w: ActMemory) -> Seen:
    table = torch.zeros(2, 3, device=w.device)
    return legal(w, lambda: table.t_() + 1)


@act(line=False, gpu=False)
def _semaphore_not_rearmed(w: ActMemory) -> Seen:
    arrived = torch.zeros(1, device=w.device)
    w.declare(workspaces=[arrived])

    def region() -> torch.Tensor:
        arrived.add_(1)
        return torch.where(arrived == 1, w.x, 0)

    graph = w.driver.capture(region)
    arrived.zero_()
    return Seen(replay_results(w, graph), eager_results(w, lambda: w.x + 0))


@act()
def _device_counter(w: ActMemory) -> Seen:
    counter = torch.zeros(1, device=w.device)
    w.declare(caches=[counter])
    graph = w.driver.capture(lambda: counter.add_(1))
    counter.zero_()
    counts = []
    for _ in range(3):
        graph.replay()
        counts.append(values_of(counter))
    return Seen(counts, [[torch.tensor([float(n)])] for n in (1, 2, 3)])


@act(error=(EngineError, RuntimeError), line=False)
def _replay_released(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    graph.release()
    graph.replay()
    return Seen([], [])


@act()
def _nested_capture(w: ActMemory) -> Seen:
    return legal(w, lambda: w.driver.capture(lambda: w.x + 1).outputs)


@act(gpu=False)
def _two_captures_at_once(w: ActMemory) -> Seen:
    other = w.make()
    return legal(w, lambda: other.capture(lambda: w.x + 1).outputs)
