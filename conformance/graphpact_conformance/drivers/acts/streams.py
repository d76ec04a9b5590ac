"""Acts on streams and events.

Does not: free memory; see ``memory``.
"""

import torch

from graphpact_conformance.drivers.acts.act import Act, ActMemory, Seen, legal, registering_in, values_of

ACTS: dict[str, Act] = {}
"""The acts by name, in order."""
act = registering_in(ACTS)


@act()
def _side_stream_joined(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        one = w.x * 2
        side = w.fork()
        with side:
            other = one + w.y
        more = one * 3
        w.join(side)
        return other + more

    return legal(w, region)


@act()
def _side_stream_not_joined(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        with w.fork():
            w.x.mul_(2)
        return w.y + 1

    return legal(w, region)


@act()
def _side_stream_not_forked(w: ActMemory) -> Seen:
    side = w.driver.stream()

    def region() -> torch.Tensor:
        with side:
            other = w.x * 2
        w.join(side)
        return other + 1

    return legal(w, region)


@act(gpu=False)
def _side_stream_never_seen(w: ActMemory) -> Seen:
    side = w.driver.stream()

    def region() -> torch.Tensor:
        with side:
            return w.x * 2

    return legal(w, region)


@act()
def _wait_for_earlier_work(w: ActMemory) -> Seen:
    side, event = w.driver.stream(), w.driver.event()
    with side:
        w.y.add_(1)
    event.record(side)

    def region() -> torch.Tensor:
        w.driver.current_stream().wait_event(event)
        return w.x + 1

    return legal(w, region)


@act(gpu=False)
def _wait_for_other_capture(w: ActMemory) -> Seen:
    event = w.driver.event()

    def recorded() -> torch.Tensor:
        out = w.y + 1
        event.record()
        return out

    w.driver.capture(recorded)

    def region() -> torch.Tensor:
        w.driver.current_stream().wait_event(event)
        return w.x + 1

    return legal(w, region)


@act(gpu=False)
def _side_reads_later_write(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        side = w.fork()
        w.x.mul_(2)
        with side:
            other = w.x + 1
        w.join(side)
        return other

    return legal(w, region)


@act(gpu=False)
def _main_reads_side_unwaited(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        side = w.fork()
        with side:
            other = w.x + 1
        out = other * 2
        w.join(side)
        return out

    return legal(w, region)


@act(gpu=False)
def _two_streams_one_buffer(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        one, other = w.fork(), w.fork()
        with one:
            w.x.copy_(w.y)
        with other:
            w.x.zero_()
        w.join(one)
        w.join(other)
        return w.x + 1

    return legal(w, region)


@act()
def _event_recorded_and_waited(w: ActMemory) -> Seen:
    def region() -> torch.Tensor:
        side, forked, done = w.driver.stream(), w.driver.event(), w.driver.event()
        one = w.x * 2
        forked.record()
        side.wait_event(forked)
        with side:
            other = one + w.y
            done.record()
        w.driver.current_stream().wait_event(done)
        return other + one

    return legal(w, region)


@act(gpu=False)
def _pinned_rewritten_in_flight(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    eager = values_of(w.pinned + 1)
    w.driver.copy_async(w.x, w.pinned)
    w.pinned.fill_(77)
    graph.replay()
    return Seen([values_of(graph.outputs)], [eager])


@act(gpu=False)
def _one_pinned_buffer_two_steps(w: ActMemory) -> Seen:
    graph = w.driver.capture(lambda: w.x + 1)
    for step in (1, 2):
        w.pinned.fill_(step)
        w.driver.copy_async(w.x, w.pinned)
        graph.replay()
    return Seen([values_of(graph.outputs)], [[torch.full((4,), 3.0)]])


@act()
def _replay_same_graph_twice(w: ActMemory) -> Seen:
    total = torch.zeros(4, device=w.device)
    w.declare(caches=[total])
    graph = w.driver.capture(lambda: total.add_(w.x))
    replayed, eager = [], []
    for turn in (0, 1):
        w.refresh(turn)
        total.zero_()
        graph.replay()
        graph.replay()
        replayed.append(values_of(total))
        eager.append(values_of(w.x + w.x))
    return Seen(replayed, eager)
