"""What a graph keeps, what it says of this, and its release."""

import gc
import weakref

import torch

from graphpact.errors import EngineError
from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.requirement import expect_equal, expect_error, require
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


@promise(
    None,
    "Graph.pool_nbytes",
    "count the memory that the region allocated and that the graph keeps, or leave the attribute at -1",
)
def it_says_how_much_it_keeps(driver: GraphDriver) -> None:
    """`pool_nbytes` is at least the size of the outputs, or -1 if unknown, and 0 after release."""
    x = torch.ones(1 << 20, device=driver.device)
    graph = driver.capture(lambda: x * 2 + 1)
    known = graph.pool_nbytes != -1
    require("`pool_nbytes` includes the outputs", not known or graph.pool_nbytes >= graph.outputs.nbytes)
    later = driver.capture(lambda: x[:8] + 1)
    require("`pool_nbytes` is a size, or -1", later.pool_nbytes >= -1)
    graph.release()
    expect_equal(graph.pool_nbytes, 0)


@promise(
    "GP14",
    "Graph.external_tensors",
    "list each tensor of recorded work that the graph did not allocate, or do not override the method",
)
def it_says_what_it_reads_or_that_it_cannot(driver: GraphDriver) -> None:
    """External tensors are those that the graph reads but did not allocate, or None if unknown."""
    x = torch.ones(8, device=driver.device)
    table = torch.ones(8, device=driver.device)
    graph = driver.capture(lambda: x[2:] * table[:6] + 1)
    external = graph.external_tensors()
    if external is None:
        return
    memory = {t.untyped_storage().data_ptr() for t in external}
    expect_equal(memory, {x.data_ptr(), table.data_ptr()})
    require("outputs are not external tensors", graph.outputs.data_ptr() not in memory)
    graph.release()
    expect_equal(graph.external_tensors(), [])


@promise(None, "Graph.release", "set `outputs` to None, and drop every reference to them")
def release_lets_go_of_outputs(driver: GraphDriver) -> None:
    """A released graph no longer holds its outputs."""
    x = torch.ones(2, device=driver.device)
    graph = driver.capture(lambda: x + 1)
    outputs = weakref.ref(graph.outputs)
    graph.release()
    gc.collect()
    expect_equal(outputs(), None)
    expect_equal(graph.outputs, None)


@promise("GP14", "Graph.release", "raise `EngineError` with a hint before any work, also before eager calls")
def a_released_graph_is_not_replayed(driver: GraphDriver) -> None:
    """The replay of a released graph raises `EngineError` and does no work; other graphs still replay."""
    x = torch.zeros(2, device=driver.device)
    kept = driver.capture(lambda: x + 1)
    regions = [lambda: x.add_(1), lambda: x.add_(driver.eager_call(torch.add, x, 1))]
    for region in regions:
        graph = driver.capture(region)
        graph.replay()
        graph.release()
        x.fill_(7)
        for _ in range(2):
            expect_error(EngineError, graph.replay, says="help: ")
        expect_equal(x.tolist(), [7, 7])
        kept.replay()
        expect_equal(kept.outputs.tolist(), [8, 8])
