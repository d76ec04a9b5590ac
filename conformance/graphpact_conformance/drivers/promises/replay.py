"""What a replay repeats, and where its results are."""

from functools import partial

import torch

from graphpact.graphs import DeclaredMemory, GraphDriver
from graphpact_conformance.contracts.requirement import expect_equal
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


@promise(
    "GP08", "Graph.replay", "record each operation with its tensors, and with a copy of its host numbers"
)
def replay_reads_tensors_and_keeps_numbers(driver: GraphDriver) -> None:
    """A replay reads the new contents of a tensor, and uses host numbers as they were at capture."""
    x, factor, on_host = torch.ones(4, device=driver.device), 3.0, torch.tensor(0.5)
    driver.declare(DeclaredMemory(refreshed=[x], host=[on_host]))
    graph = driver.capture(lambda: x * factor + on_host)
    factor = 50.0
    on_host.fill_(70)
    for value in (2.0, 7.0, -1.0):
        x.fill_(value)
        graph.outputs.fill_(float("nan"))
        graph.replay()
        expect_equal(graph.outputs.tolist(), [value * 3 + 0.5] * 4)


@promise("GP01", "Graph.outputs", "write the results of every replay into the tensors of the capture")
def outputs_stay_where_they_are(driver: GraphDriver) -> None:
    """Every replay writes the same output memory, which the graph keeps."""
    x = torch.ones(4, device=driver.device)
    graph = driver.capture(lambda: {"logits": x + 1, "more": (x.sum(), x[1:])})
    address = graph.outputs["logits"].data_ptr()
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        expect_equal(graph.outputs["logits"].data_ptr(), address)
        expect_equal(graph.outputs["logits"].tolist(), [value + 1] * 4)
        expect_equal(graph.outputs["more"][0].item(), value * 4)
        expect_equal(graph.outputs["more"][1].tolist(), [value] * 3)


@promise("GP10", "Graph.replay", "repeat the recorded operations; call the region only in `capture`")
def replay_runs_no_python(driver: GraphDriver) -> None:
    """The region's Python runs once per warm-up and once for the recording, and in no replay."""
    x = torch.ones(2, device=driver.device)
    calls: list[None] = []

    def region() -> torch.Tensor:
        calls.append(None)
        return torch.add(x, len(calls))

    graph = driver.capture(region, warmup=2)
    for _ in range(3):
        graph.replay()
    expect_equal(len(calls), 3)
    expect_equal(graph.outputs.tolist(), [4, 4])


@promise("GP10", "Graph.replay", "record operations that write their arguments, each exactly once")
def writes_to_outside_tensors_are_repeated(driver: GraphDriver) -> None:
    """In-place work on a tensor of the caller happens once per replay."""
    cache = torch.zeros(6, 2, device=driver.device)
    where = torch.tensor([1, 2], device=driver.device)
    rows = torch.ones(2, 2, device=driver.device)
    graph = driver.capture(lambda: cache.index_add_(0, where, rows))
    cache.zero_()
    where.copy_(torch.tensor([3, 5]))
    graph.replay()
    graph.replay()
    expect_equal(cache.sum(1).tolist(), [0, 0, 0, 4, 0, 4])


@promise("GP10", "Graph.replay", "record every operation that computes or writes, in order")
def a_model_sized_region(driver: GraphDriver) -> None:
    """Replays of matmuls, a norm, attention, an embedding and in-place work give the eager results."""
    device = driver.device
    weight = torch.randn(16, 16, device=device)
    ids = torch.zeros(3, dtype=torch.int64, device=device)

    def region() -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, weight)
        x = torch.nn.functional.layer_norm(x, (16,)) @ weight
        heads = x.view(1, 3, 2, 8).transpose(1, 2)
        x = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x.transpose(1, 2).reshape(3, 16).relu_().cumsum(0)

    graph = driver.capture(region)
    for values in ([1, 2, 3], [15, 0, 7]):
        ids.copy_(torch.tensor(values))
        graph.outputs.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(graph.outputs, region())


@promise(
    "GP15", "Graph.replay", "do not keep state of a graph between replays in memory that another graph writes"
)
def graphs_of_one_driver_interleave(driver: GraphDriver) -> None:
    """Graphs of one pool, captured from the largest to the smallest, can be replayed in any order."""
    inputs = [torch.zeros(n, device=driver.device) for n in (64, 8, 1)]
    graphs = [driver.capture(partial(lambda x: (x * 2).sin() + 1, x)) for x in inputs]
    for i in (0, 2, 1, 1, 2, 0, 1):
        inputs[i].normal_()
        graphs[i].outputs.fill_(float("nan"))
        graphs[i].replay()
        torch.testing.assert_close(graphs[i].outputs, (inputs[i] * 2).sin() + 1)


@promise("GP07", "Graph.replay", "record memory as storage, offset, shape and stride, not as Python objects")
def views_follow_their_base(driver: GraphDriver) -> None:
    """Views taken inside and outside the region read and write the memory of their base."""
    x = torch.zeros(4, 6, device=driver.device)
    column = x[:, 1]

    def region() -> torch.Tensor:
        x.view(2, 2, 6)[1, :, 2:4].mul_(2)
        column.copy_(x.t()[0])
        return x[1:].transpose(0, 1) + 1

    graph = driver.capture(region, warmup=0)
    for seed in (1, 2):
        x.copy_(torch.arange(24.0).view(4, 6) * seed)
        expected = x.clone()
        expected[2:, 2:4] *= 2
        expected[:, 1] = expected[:, 0]
        graph.outputs.fill_(float("nan"))
        graph.replay()
        expect_equal(x.tolist(), expected.tolist())
        expect_equal(graph.outputs.tolist(), (expected[1:].t() + 1).tolist())


@promise("GP15", "Graph.outputs", "do not reuse memory of a copy of outputs for another graph")
def outputs_that_are_kept_are_copied(driver: GraphDriver) -> None:
    """A copy of a graph's outputs does not change when other graphs of the pool replay."""
    x = torch.ones(64, device=driver.device)
    graphs = [driver.capture(partial(lambda n: (x[:n] * 2 + n).sin(), n)) for n in (64, 16, 4)]
    x.fill_(0.5)
    kept = []
    for graph in graphs:
        graph.replay()
        kept.append(graph.outputs.clone())
    for n, copy in zip((64, 16, 4), kept, strict=True):
        torch.testing.assert_close(copy, (x[:n] * 2 + n).sin())


@promise(
    "GP08",
    "Graph.replay",
    "draw from the device's default generator at every replay, not from a recorded seed and offset",
)
def random_numbers_advance(driver: GraphDriver) -> None:
    """Each replay draws different numbers."""
    graph = driver.capture(lambda: torch.rand(100, device=driver.device))
    drawn = set()
    for _ in range(3):
        graph.replay()
        drawn.add(tuple(graph.outputs.tolist()))
    expect_equal(len(drawn), 3)
