"""Eager calls, which break a graph into segments."""

from typing import Any

import torch

from graphpact.errors import ReplayError
from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.requirement import expect_equal, expect_error
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


@promise("GP10", "GraphDriver.break_graph", "replay an `EagerCall` between the two segments")
def eager_calls_break_a_graph_into_segments(driver: GraphDriver) -> None:
    """In each replay an eager call reads the segment before it, and the next segment reads its result."""
    x = torch.ones(3, device=driver.device)
    seen: list[list[float]] = []

    def on_the_host(y: torch.Tensor) -> torch.Tensor:
        seen.append(y.tolist())
        return y.new_full((3,), float(len(seen)))

    def region() -> torch.Tensor:
        middle = driver.eager_call(on_the_host, x * 2)
        return middle * 10 + x

    graph = driver.capture(region, warmup=0)
    expect_equal(graph.num_segments, 2)
    expect_equal(len(seen), 1)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.outputs.fill_(float("nan"))
        graph.replay()
        expect_equal(seen[-1], [value * 2] * 3)
        expect_equal(graph.outputs.tolist(), [len(seen) * 10 + value] * 3)
    expect_equal(driver.eager_call(on_the_host, x).tolist(), [4.0] * 3)


@promise(
    "GP14",
    "GraphDriver.break_graph",
    "keep memory that a segment allocated until the last segment or eager call that reads it has run",
)
def tensors_of_a_segment_stay_for_later_ones(driver: GraphDriver) -> None:
    """Results of a segment can be read by all later segments and eager calls of the same replay."""
    x, seen = torch.ones(64, device=driver.device), []

    def region() -> torch.Tensor:
        early = x * 2
        driver.eager_call(torch.add, early, 1)
        other = early * 10  # needs other memory, because `early` is still read
        driver.eager_call(lambda y: seen.append(y.tolist()), early)
        return other + early

    graph = driver.capture(region, warmup=0)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.outputs.fill_(float("nan"))
        seen.clear()
        graph.replay()
        expect_equal([sorted({*y}) for y in seen], [[value * 2]])  # what the second eager call read
        expect_equal(graph.outputs.tolist(), [value * 22] * 64)


@promise("GP10", "GraphDriver.break_graph", "call `fn` unrecorded, outside every context of the capture")
def an_eager_call_in_an_eager_call_is_a_part_of_it(driver: GraphDriver) -> None:
    """A nested eager call adds no segment, runs once per replay, and may synchronize the device."""
    x, seen = torch.ones(2, device=driver.device), []

    def inner(y: torch.Tensor) -> torch.Tensor:
        driver.synchronize()
        seen.append((driver.is_capturing, y.tolist()))
        return y * 2

    def outer(y: torch.Tensor) -> torch.Tensor:
        return driver.eager_call(inner, y) + 1

    graph = driver.capture(lambda: driver.eager_call(outer, x * 3) * 10, warmup=0)
    expect_equal(graph.num_segments, 2)
    x.fill_(2)
    graph.replay()
    expect_equal(seen, [(False, [3, 3]), (False, [6, 6])])
    expect_equal(graph.outputs.tolist(), [130, 130])


@promise("GP07", "GraphDriver.break_graph", "replay an `EagerCall`, which compares the results")
def an_eager_call_may_not_change_its_form(driver: GraphDriver) -> None:
    """A replay raises if the result of an eager call has another shape, dtype, number or structure."""
    x = torch.ones(4, device=driver.device)
    results: list[Any] = [x[:2] * 1, 7]

    def fickle(y: torch.Tensor) -> Any:
        del y
        return tuple(results)

    graph = driver.capture(lambda: driver.eager_call(fickle, x + 1)[0] + 1)
    graph.replay()
    for other in ([x[:3] * 1, 7], [x[:2].double(), 7], [x[:2] * 1, 8], [x[:2] * 1]):
        results[:] = other
        expect_error(ReplayError, graph.replay, says="fickle between two segments returned")
