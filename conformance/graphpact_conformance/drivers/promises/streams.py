"""Side streams, and copies from host memory."""

import torch

from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.requirement import expect_equal
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


@promise(
    "GP16", "GraphDriver.stream", "order work of several streams by their waits and events, in every replay"
)
def side_streams_fork_and_join(driver: GraphDriver) -> None:
    """Work on a side stream that is forked and joined is part of every replay."""
    x = torch.ones(1 << 16, device=driver.device)

    def region() -> torch.Tensor:
        main, side = driver.current_stream(), driver.stream()
        done = driver.event()
        side.wait_stream(main)
        with side:
            y = x * 2
            done.record()
        z = x + 1
        main.wait_event(done)
        return y + z

    graph = driver.capture(region)
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.outputs.fill_(float("nan"))
        graph.replay()
        expect_equal(graph.outputs[:2].tolist(), [value * 3 + 1] * 2)


@promise(
    "GP16",
    "GraphDriver.copy_async",
    "finish the copy before later work of its stream starts, and before a wait for it returns",
)
def host_memory_is_copied_in_the_streams_order(driver: GraphDriver) -> None:
    """The next replay reads the values that `copy_async` copied. After a wait the source may be rewritten."""
    pinned = torch.zeros(8, pin_memory=driver.device.type == "cuda")
    x = torch.zeros(8, device=driver.device)
    graph = driver.capture(lambda: x + 1)
    copied = driver.event()
    for value in (3.0, 4.0):
        pinned.fill_(value)
        driver.copy_async(x, pinned)
        copied.record()
        graph.outputs.fill_(float("nan"))
        graph.replay()
        copied.synchronize()
        expect_equal(graph.outputs.tolist(), [value + 1] * 8)
    driver.copy_async(x, pinned)
    copied.record()
    copied.synchronize()
    pinned.fill_(9)
    graph.replay()
    driver.synchronize()
    expect_equal(graph.outputs.tolist(), [5] * 8)
