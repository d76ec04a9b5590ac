"""The promises of the driver contract, `graphpact.graphs.driver`, as checks of any driver.

The checks run regions directly on a driver, without lanes, plugins or models.

Does not: check which acts a strict mode refuses (see `acts`), or check backends and runners.
"""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from graphpact.errors import CaptureError, EngineError, ReplayError
from graphpact.graphs import DeclaredMemory, GraphDriver, TaskKey, declare_kernel
from graphpact_conformance.drivers.requirement import Requirement, expect_equal, expect_error, require

_Keep: TypeAlias = Callable[[GraphDriver], None]

CHECKS: dict[str, Requirement] = {}
"""The checks by name, one for each promise. The promise is the sentence of the requirement."""


def _promise(rule: str | None, at: str, fix: str) -> Callable[[_Keep], _Keep]:
    """Return a decorator that adds a function to `CHECKS`; its docstring is the promise.

    Args:
        rule: See `Requirement`.
        at: See `Requirement`.
        fix: See `Requirement`.
    """

    def add(keep: _Keep) -> _Keep:
        requirement = " ".join((keep.__doc__ or "").split())
        name = keep.__name__
        CHECKS[name] = Requirement(name, requirement, rule, at, fix, lambda make: keep(make()))
        return keep

    return add


@declare_kernel
@torch.library.custom_op("graphpact_conformance::gather_into", mutates_args=("out",))
def _gather_into(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write selected rows of a table into ``out``: an operator that is not part of torch."""
    out.copy_(table[rows])


@_gather_into.register_fake
def _(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    del table, rows, out


@declare_kernel
@torch.library.custom_op("graphpact_conformance::weigh_rows", mutates_args=("out",))
def _weigh_rows(x: torch.Tensor, out: torch.Tensor, weights: list[int]) -> None:
    """Write each row of ``x`` times its weight into ``out``: an operator with a host list as argument."""
    for row, weight in enumerate(weights):
        torch.mul(x[row], weight, out=out[row])


@_weigh_rows.register_fake
def _(x: torch.Tensor, out: torch.Tensor, weights: list[int]) -> None:
    del x, out, weights


@declare_kernel
@torch.library.custom_op("graphpact_conformance::pick_rows", mutates_args=("out",))
def _pick_rows(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the rows of ``x`` with the given indices into ``out``: an operator with a table as argument."""
    out.copy_(x[rows])


@_pick_rows.register_fake
def _(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    del x, out, rows


def _store_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _scale_rows(x: torch.Tensor) -> torch.Tensor:
    return x * _LIVE["factor"]


_LIVE = {"factor": 1}
"""Host state that ``scale_rows`` reads, as an operator of an engine reads the current step."""

_library = torch.library.Library("graphpact_conformance", "FRAGMENT")
_library.define("store_rows(Tensor target, Tensor source) -> ()")  # the schema does not declare the write
_library.impl("store_rows", _store_rows, "CompositeExplicitAutograd")
_library.define("scale_rows(Tensor x) -> Tensor")
_library.impl("scale_rows", _scale_rows, "CompositeExplicitAutograd")
declare_kernel(torch.ops.graphpact_conformance.store_rows)


# -- the promises ------------------------------------------------------------------------------------


@_promise(
    None,
    "GraphDriver.unavailable",
    "set the class attribute `name`, and return None from `unavailable` for each device on which it records",
)
def it_says_where_it_is_available(driver: GraphDriver) -> None:
    """A driver is available on the device that it was created for, and has a name."""
    expect_equal(type(driver).unavailable(driver.device), None)
    require("its class sets `name`", isinstance(driver.name, str))


@_promise(
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


@_promise("GP01", "Graph.outputs", "write the results of every replay into the tensors of the capture")
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


@_promise("GP10", "Graph.replay", "repeat the recorded operations; call the region only in `capture`")
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


@_promise("GP10", "Graph.replay", "record operations that write their arguments, each exactly once")
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


@_promise("GP10", "Graph.replay", "record every operation that computes or writes, in order")
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


@_promise(
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


@_promise(
    "GP20", "GraphDriver.capture", "raise `CaptureError` with a hint, and exit every context of the capture"
)
def a_host_read_is_refused_and_the_driver_works_on(driver: GraphDriver) -> None:
    """A capture with a host read is refused, and the driver and the device still work."""
    x = torch.ones(3, device=driver.device)
    expect_error(CaptureError, lambda: driver.capture(lambda: x * x.sum().item()), says="help: ")
    expect_equal((x + 1).tolist(), [2, 2, 2])
    graph = driver.capture(lambda: x + 1)
    x.fill_(4)
    graph.replay()
    expect_equal(graph.outputs.tolist(), [5, 5, 5])


@_promise("GP07", "Graph.replay", "record memory as storage, offset, shape and stride, not as Python objects")
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


@_promise(
    "GP10",
    "Graph.replay",
    "record custom operators as one operation, with the arguments that their schema mutates",
)
def what_an_operator_of_ones_own_writes_is_written(driver: GraphDriver) -> None:
    """A custom operator that mutates its argument does so in each replay, from the current inputs."""
    table = torch.arange(12.0, device=driver.device).view(3, 4)
    rows = torch.tensor([1, 2], device=driver.device)
    out = torch.zeros(2, 4, device=driver.device)

    def region() -> torch.Tensor:
        _gather_into(table, rows, out)
        return out * 2

    graph = driver.capture(region)
    for values in ([2, 0], [0, 1]):
        rows.copy_(torch.tensor(values))
        out.fill_(-1)
        graph.outputs.fill_(-1)
        graph.replay()
        expect_equal(out.tolist(), table[rows].tolist())
        expect_equal(graph.outputs.tolist(), (table[rows] * 2).tolist())


@_promise(
    "GP10",
    "Graph.replay",
    "record every call that is not known to do no work: schemas do not declare every write",
)
def what_a_schema_does_not_declare_is_repeated(driver: GraphDriver) -> None:
    """An operator that writes an argument without declaring it in its schema writes it in each replay."""
    x, store = torch.zeros(4, device=driver.device), torch.zeros(4, device=driver.device)

    def region() -> torch.Tensor:
        torch.ops.graphpact_conformance.store_rows(store, x + 1)
        return store * 2

    graph = driver.capture(region)
    for value in (4.0, 9.0):
        x.fill_(value)
        store.fill_(-1)
        graph.outputs.fill_(-1)
        graph.replay()
        expect_equal(store.tolist(), [value + 1] * 4)
        expect_equal(graph.outputs.tolist(), [2 * value + 2] * 4)


@_promise(
    "GP10",
    "Graph.replay",
    "record the operations that the Python implementation of an operator calls, except for operators that are"
    " one kernel: see `graphpact.graphs.is_kernel`",
)
def the_python_of_an_operator_runs_at_capture_alone(driver: GraphDriver) -> None:
    """A replay of an operator implemented in Python does not see Python state that changed since capture."""
    x = torch.zeros(4, device=driver.device)
    _LIVE["factor"] = 2
    graph = driver.capture(lambda: torch.ops.graphpact_conformance.scale_rows(x) + 1)
    _LIVE["factor"] = 5
    for value in (4.0, 9.0):
        x.fill_(value)
        graph.outputs.fill_(-1)
        graph.replay()
        expect_equal(graph.outputs.tolist(), [2 * value + 1] * 4)


@_promise("GP10", "GraphDriver.break_graph", "replay an `EagerCall` between the two segments")
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


@_promise(
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
        require("the second eager call reads the first segment", all(y == [value * 2] * 64 for y in seen))
        expect_equal(graph.outputs.tolist(), [value * 22] * 64)


@_promise("GP10", "GraphDriver.break_graph", "call `fn` unrecorded, outside every context of the capture")
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


@_promise("GP07", "GraphDriver.break_graph", "replay an `EagerCall`, which compares the results")
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


@_promise("GP15", "Graph.outputs", "do not reuse memory of a copy of outputs for another graph")
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


@_promise(None, "GraphDriver.is_capturing", "record inside `recorded_run`, and run warm-ups outside of it")
def it_says_when_it_captures(driver: GraphDriver) -> None:
    """`is_capturing` is true only while the region is recorded, and so is false in the warm-up."""
    x, said = torch.ones(2, device=driver.device), []

    def region() -> torch.Tensor:
        said.append(driver.is_capturing)
        return x + 1

    require("`is_capturing` is False outside of a capture", not driver.is_capturing)
    driver.capture(region, warmup=2)
    expect_equal(said, [False, False, True])
    require("`is_capturing` is False outside of a capture", not driver.is_capturing)


@_promise("GP19", "GraphDriver.capture", "undo all changes of the capture in `finally`")
def an_error_leaves_no_half_graph(driver: GraphDriver) -> None:
    """An error in any segment of a region is raised unchanged, and the driver can record again."""
    for at in range(3):
        _fail_in_segment(driver, at)


def _fail_in_segment(driver: GraphDriver, at: int) -> None:
    x, y = torch.ones(3, device=driver.device), torch.zeros(3, device=driver.device)

    def region() -> torch.Tensor:
        for step in range(3):
            if step == at and driver.is_capturing:
                raise KeyError(step)
            y.add_(driver.eager_call(torch.mul, x, 2))
        return y + 1

    expect_error(KeyError, lambda: driver.capture(region), says=str(at))
    require("`is_capturing` is False outside of a capture", not driver.is_capturing)
    graph = driver.capture(lambda: x * 3)
    x.fill_(5)
    y.fill_(1)
    graph.replay()
    expect_equal(graph.outputs.tolist(), [15] * 3)
    expect_equal(y.tolist(), [1] * 3)  # the replay does no work of the failed region


@_promise("GP20", "GraphDriver.capture", "begin `capture` with `refuse_nested_capture()`")
def captures_do_not_nest(driver: GraphDriver) -> None:
    """A capture inside another is refused, and the next capture works."""
    x = torch.ones(2, device=driver.device)
    nested = partial(driver.capture, lambda: driver.capture(lambda: x + 1).outputs)
    expect_error(CaptureError, nested, says="inside another")
    expect_equal(driver.capture(lambda: x + 1).num_segments, 1)


@_promise(
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


@_promise(
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


@_promise(
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


@_promise(
    "GP21",
    "GraphDriver.task",
    "set `has_tasks`, record a task with its arguments by value, and replace them by those of `update_task`."
    " Strict modes must refuse a replay whose tasks were not updated in order. Without tasks, leave"
    " `has_tasks` False",
)
def a_task_takes_the_arguments_of_its_update(driver: GraphDriver) -> None:
    """A replay runs each task with the arguments of its update; a driver without tasks refuses one."""
    x = torch.ones(2, 3, device=driver.device)
    first, second = TaskKey("graph", 0), TaskKey("graph", 1)
    weights = [1, 1]

    def region() -> torch.Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        driver.task(first, _weigh_rows, (x * 1, y), {"weights": weights})
        driver.task(second, _weigh_rows, (y, z), {"weights": weights})
        return z

    expect_equal(region().tolist(), [[1] * 3] * 2)
    if not driver.has_tasks:
        expect_error(CaptureError, lambda: driver.capture(region), says="help: ")
        return
    graph = driver.capture(region)
    for weights in ([2, 3], [-1, 4]):
        for key in (first, second):
            driver.update_task(key, {"weights": list(weights)})
        graph.outputs.fill_(float("nan"))
        graph.replay()
        expect_equal(graph.outputs.tolist(), [[weight**2] * 3 for weight in weights])
    if driver.strict:
        expect_error(ReplayError, graph.replay, says="help: ")
        expect_error(ReplayError, lambda: driver.update_task(second, {"weights": [1, 1]}), says="help: ")


@_promise(
    "GP21",
    "GraphDriver.task",
    "read the device tensors of `rebound` at the addresses from the last `update_task`, not at those of the"
    " capture, whose memory may be freed",
)
def a_task_reads_the_tensors_of_its_update(driver: GraphDriver) -> None:
    """A replay reads each rebound tensor at the address of its update, with its contents at replay time."""
    if not driver.has_tasks:
        return
    x = torch.arange(6, device=driver.device).view(3, 2)
    out, key = torch.zeros(2, 2, dtype=x.dtype, device=driver.device), TaskKey("graph", 0)

    def region(rows: torch.Tensor) -> None:
        driver.task(key, _pick_rows, (x, out), {}, rebound={"rows": rows})

    graph = driver.capture(functools.partial(region, torch.zeros(2, dtype=torch.int64, device=driver.device)))
    for first, second in ((1, 2), (2, 0)):
        rows = torch.tensor([0, first], device=driver.device)
        driver.update_task(key, {}, rebound={"rows": rows})
        rows[0] = second
        graph.replay()
        expect_equal(out.tolist(), x[[second, first]].tolist())
    expect_error(ReplayError, lambda: driver.update_task(key, {}), says="help: ")


@_promise(
    "GP21",
    "GraphDriver.task",
    "before a task with `waits=True`, let the graph wait for its update, as for an event, and run the task"
    " with the arguments of the update",
)
def an_update_may_follow_the_launch(driver: GraphDriver) -> None:
    """A replay whose tasks wait uses the arguments of updates that come after its launch."""
    if not driver.has_tasks:
        return
    x, out = torch.ones(1, 3, device=driver.device), torch.zeros(1, 3, device=driver.device)
    key = TaskKey("graph", 0)
    graph = driver.capture(lambda: driver.task(key, _weigh_rows, (x, out), {"weights": [1]}, waits=True))
    for weight in (2, 3):
        graph.replay()
        driver.update_task(key, {"weights": [weight]})
        driver.synchronize()
        expect_equal(out.tolist(), [[weight] * 3])


@_promise("GP21", "GraphDriver.update_task", "raise `ReplayError` for a key or a name that was not captured")
def an_unknown_task_is_not_updated(driver: GraphDriver) -> None:
    """An update of an unknown or released graph, layer or argument raises `ReplayError`."""
    x, out = torch.ones(1, 3, device=driver.device), torch.zeros(1, 3, device=driver.device)
    key = TaskKey("graph", 0)

    def update(key: TaskKey, **updated: Any) -> Callable[[], None]:
        return lambda: driver.update_task(key, updated)

    expect_error(ReplayError, update(key, weights=[2]), says="help: ")
    if not driver.has_tasks:
        return
    graph = driver.capture(lambda: driver.task(key, _weigh_rows, (x, out), {"weights": [1]}))
    for wrong in (
        update(TaskKey("other", 0), weights=[2]),
        update(TaskKey("graph", 7), weights=[2]),
        update(key, lengths=[2]),
        update(key),
    ):
        expect_error(ReplayError, wrong, says="help: ")
    update(key, weights=[5])()
    graph.replay()
    expect_equal(out.tolist(), [[5] * 3])
    graph.release()
    expect_error(ReplayError, update(key, weights=[2]), says="help: ")


@_promise(None, "GraphDriver.capture", "enable the garbage collector again in `finally`")
def garbage_is_not_collected_into_a_graph(driver: GraphDriver) -> None:
    """The garbage collector is enabled after a capture, also after a refused one."""
    x = torch.ones(1, device=driver.device)
    driver.capture(lambda: x + 1)
    with contextlib.suppress(CaptureError):
        driver.capture(x.item)
    require("the garbage collector is enabled again", gc.isenabled())


@_promise(
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


@_promise(
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


@_promise(None, "Graph.release", "set `outputs` to None, and drop every reference to them")
def release_lets_go_of_outputs(driver: GraphDriver) -> None:
    """A released graph no longer holds its outputs."""
    x = torch.ones(2, device=driver.device)
    graph = driver.capture(lambda: x + 1)
    outputs = weakref.ref(graph.outputs)
    graph.release()
    gc.collect()
    expect_equal(outputs(), None)
    expect_equal(graph.outputs, None)


@_promise("GP14", "Graph.release", "raise `EngineError` with a hint before any work, also before eager calls")
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
