"""The driver contract as tests: `driver_contract` makes one test per promise of `graphpact.graphs.driver`.

    from graphpact_conformance.driver_contract import driver_contract

    @driver_contract(MyDriver)
    def test_keeps_the_contract(check):
        check()

The checks run regions on a driver alone, without lanes, plugins or models.

Does not: check what a strict mode refuses, or backends and runners; `graphpact check` does the latter.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from graphpact.errors import CaptureError, EngineError, ReplayError, describe_error
from graphpact.graphs import GraphDriver

CHECKS: dict[str, Callable[[GraphDriver], None]] = {}
"""A function for each promise, by name. It raises an error if the driver breaks the promise, which is the
function's docstring."""


@dataclass(frozen=True, repr=False, slots=True)
class DriverCheck:
    """The check of one promise for one driver; a test calls it.

    Args:
        name: Its name in `CHECKS`.
        make: Returns a new driver.
        device: The device that the driver records on.
    """

    name: str
    make: Callable[[torch.device], GraphDriver]
    device: torch.device

    def __call__(self) -> None:
        """Check the promise on a new driver.

        Raises:
            AssertionError: The driver breaks the promise, or raises an error. The message begins with the
                promise; then it has both values, or the error.
        """
        __tracebackhide__ = True
        promise = CHECKS[self.name]
        with torch.inference_mode():  # as lanes do for their steps
            try:
                promise(self.make(self.device))
            except (Exception, pytest.fail.Exception) as error:
                what = str(error) if isinstance(error, AssertionError) else describe_error(error)
                raise AssertionError(f"{promise.__doc__}\n{what}") from error


def driver_contract(
    make: Callable[[torch.device], GraphDriver], *, device: str = "cpu"
) -> pytest.MarkDecorator:
    """Return a decorator that parametrizes a test with ``check``: one per promise of a driver.

    Args:
        make: The driver class, or a function from a device to a driver.
        device: The device to record on.
    """
    checks = [DriverCheck(name, make, torch.device(device)) for name in CHECKS]
    return pytest.mark.parametrize("check", [pytest.param(c, id=c.name) for c in checks])


def _check(function: Callable[[GraphDriver], None]) -> Callable[[GraphDriver], None]:
    CHECKS[function.__name__] = function
    return function


def _expect(actual: object, expected: object) -> None:
    """Raise `AssertionError` with both values unless they are equal."""
    __tracebackhide__ = True
    if actual != expected:
        raise AssertionError(f"expected {expected!r}, got {actual!r}")


def _require(what: str, holds: object) -> None:
    """Raise `AssertionError` with ``what`` unless it holds."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(f"expected: {what}")


@torch.library.custom_op("graphpact_conformance::gather_into", mutates_args=("out",))
def _gather_into(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write the rows of a table into ``out``: an operator that torch does not know."""
    out.copy_(table[rows])


@_gather_into.register_fake
def _(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    del table, rows, out


# -- the promises ------------------------------------------------------------------------------------


@_check
def it_says_where_it_is_available(driver: GraphDriver) -> None:
    """A driver is available on its own device, and has a name."""
    _expect(type(driver).unavailable(driver.device), None)
    _require("its class sets `name`", isinstance(driver.name, str))


@_check
def replay_reads_tensors_and_keeps_numbers(driver: GraphDriver) -> None:
    """A replay reads the new contents of a tensor, and uses host numbers as they were at capture."""
    x, factor = torch.ones(4, device=driver.device), 3.0
    graph = driver.capture(lambda: x * factor + 1)
    factor = 50.0
    for value in (2.0, 7.0, -1.0):
        x.fill_(value)
        graph.outputs.fill_(float("nan"))
        graph.replay()
        _expect(graph.outputs.tolist(), [value * 3 + 1] * 4)


@_check
def outputs_stay_where_they_are(driver: GraphDriver) -> None:
    """Every replay writes the same output memory, which the graph keeps."""
    x = torch.ones(4, device=driver.device)
    graph = driver.capture(lambda: {"logits": x + 1, "more": (x.sum(), x[1:])})
    address = graph.outputs["logits"].data_ptr()
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        _expect(graph.outputs["logits"].data_ptr(), address)
        _expect(graph.outputs["logits"].tolist(), [value + 1] * 4)
        _expect(graph.outputs["more"][0].item(), value * 4)
        _expect(graph.outputs["more"][1].tolist(), [value] * 3)


@_check
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
    _expect(len(calls), 3)
    _expect(graph.outputs.tolist(), [4, 4])


@_check
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
    _expect(cache.sum(1).tolist(), [0, 0, 0, 4, 0, 4])


@_check
def a_model_sized_region(driver: GraphDriver) -> None:
    """Matmuls, a norm, attention, an embedding and in-place work replay to the results of eager."""
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


@_check
def graphs_of_one_driver_interleave(driver: GraphDriver) -> None:
    """Graphs of one pool, the largest captured first, replay in any order."""
    inputs = [torch.zeros(n, device=driver.device) for n in (64, 8, 1)]
    graphs = [driver.capture(partial(lambda x: (x * 2).sin() + 1, x)) for x in inputs]
    for i in (0, 2, 1, 1, 2, 0, 1):
        inputs[i].normal_()
        graphs[i].outputs.fill_(float("nan"))
        graphs[i].replay()
        torch.testing.assert_close(graphs[i].outputs, (inputs[i] * 2).sin() + 1)


@_check
def a_host_read_is_refused_and_the_driver_works_on(driver: GraphDriver) -> None:
    """A host read is refused, and the driver and the device still work."""
    x = torch.ones(3, device=driver.device)
    with pytest.raises(CaptureError, match="help: "):
        driver.capture(lambda: x * x.sum().item())
    _expect((x + 1).tolist(), [2, 2, 2])
    graph = driver.capture(lambda: x + 1)
    x.fill_(4)
    graph.replay()
    _expect(graph.outputs.tolist(), [5, 5, 5])


@_check
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
        _expect(x.tolist(), expected.tolist())
        _expect(graph.outputs.tolist(), (expected[1:].t() + 1).tolist())


@_check
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
        _expect(out.tolist(), table[rows].tolist())
        _expect(graph.outputs.tolist(), (table[rows] * 2).tolist())


@_check
def eager_calls_break_a_graph_into_segments(driver: GraphDriver) -> None:
    """In each replay an eager call reads the results of the segment before, and feeds the next one."""
    x = torch.ones(3, device=driver.device)
    seen: list[list[float]] = []

    def on_the_host(y: torch.Tensor) -> torch.Tensor:
        seen.append(y.tolist())
        return y.new_full((3,), float(len(seen)))

    def region() -> torch.Tensor:
        middle = driver.eager_call(on_the_host, x * 2)
        return middle * 10 + x

    graph = driver.capture(region, warmup=0)
    _expect(graph.num_segments, 2)
    _expect(len(seen), 1)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.outputs.fill_(float("nan"))
        graph.replay()
        _expect(seen[-1], [value * 2] * 3)
        _expect(graph.outputs.tolist(), [len(seen) * 10 + value] * 3)
    _expect(driver.eager_call(on_the_host, x).tolist(), [4.0] * 3)


@_check
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
    _expect(graph.num_segments, 2)
    x.fill_(2)
    graph.replay()
    _expect(seen, [(False, [3, 3]), (False, [6, 6])])
    _expect(graph.outputs.tolist(), [130, 130])


@_check
def an_eager_call_may_not_change_its_form(driver: GraphDriver) -> None:
    """An eager call whose result has another shape, dtype, number or structure in a replay raises."""
    x = torch.ones(4, device=driver.device)
    results: list[Any] = [x[:2] * 1, 7]

    def fickle(y: torch.Tensor) -> Any:
        del y
        return tuple(results)

    graph = driver.capture(lambda: driver.eager_call(fickle, x + 1)[0] + 1)
    graph.replay()
    for other in ([x[:3] * 1, 7], [x[:2].double(), 7], [x[:2] * 1, 8], [x[:2] * 1]):
        results[:] = other
        with pytest.raises(ReplayError, match="fickle between two segments returned"):
            graph.replay()


@_check
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


@_check
def it_says_when_it_captures(driver: GraphDriver) -> None:
    """`is_capturing` is true only while the region is recorded: not in the warm-up, before or after."""
    x, said = torch.ones(2, device=driver.device), []

    def region() -> torch.Tensor:
        said.append(driver.is_capturing)
        return x + 1

    _require("`is_capturing` is False outside of a capture", not driver.is_capturing)
    driver.capture(region, warmup=2)
    _expect(said, [False, False, True])
    _require("`is_capturing` is False outside of a capture", not driver.is_capturing)


@_check
def an_error_leaves_no_half_graph(driver: GraphDriver) -> None:
    """An error in any segment of a region passes through unchanged, and the driver can record again."""
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

    with pytest.raises(KeyError):
        driver.capture(region)
    _require("`is_capturing` is False outside of a capture", not driver.is_capturing)
    graph = driver.capture(lambda: x * 3)
    x.fill_(5)
    graph.replay()
    _expect(graph.outputs.tolist(), [15] * 3)


@_check
def captures_do_not_nest(driver: GraphDriver) -> None:
    """A capture inside another is refused, and the next capture works."""
    x = torch.ones(2, device=driver.device)
    with pytest.raises(CaptureError, match="inside another"):
        driver.capture(lambda: driver.capture(lambda: x + 1).outputs)
    _expect(driver.capture(lambda: x + 1).num_segments, 1)


@_check
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
        _expect(graph.outputs[:2].tolist(), [value * 3 + 1] * 2)


@_check
def host_memory_is_copied_in_the_streams_order(driver: GraphDriver) -> None:
    """The next replay reads what `copy_async` copied; after a wait its source may be rewritten."""
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
        _expect(graph.outputs.tolist(), [value + 1] * 8)


@_check
def random_numbers_advance(driver: GraphDriver) -> None:
    """Each replay draws different numbers."""
    graph = driver.capture(lambda: torch.rand(100, device=driver.device))
    drawn = set()
    for _ in range(3):
        graph.replay()
        drawn.add(tuple(graph.outputs.tolist()))
    _expect(len(drawn), 3)


@_check
def garbage_is_not_collected_into_a_graph(driver: GraphDriver) -> None:
    """The garbage collector is enabled after a capture and after a refused one."""
    x = torch.ones(1, device=driver.device)
    driver.capture(lambda: x + 1)
    with pytest.raises(CaptureError):
        driver.capture(x.item)
    _require("the garbage collector is enabled again", gc.isenabled())


@_check
def it_says_how_much_it_keeps(driver: GraphDriver) -> None:
    """`pool_nbytes` is at least the size of the outputs, or -1 if unknown, and 0 after release."""
    x = torch.ones(1 << 20, device=driver.device)
    graph = driver.capture(lambda: x * 2 + 1)
    known = graph.pool_nbytes != -1
    _require("`pool_nbytes` has the outputs", not known or graph.pool_nbytes >= graph.outputs.nbytes)
    later = driver.capture(lambda: x[:8] + 1)
    _require("`pool_nbytes` is a size, or -1", later.pool_nbytes >= -1)
    graph.release()
    _expect(graph.pool_nbytes, 0)


@_check
def it_says_what_it_reads_or_that_it_cannot(driver: GraphDriver) -> None:
    """External tensors are those that the graph reads and did not allocate, or None if unknown."""
    x = torch.ones(8, device=driver.device)
    table = torch.ones(8, device=driver.device)
    graph = driver.capture(lambda: x[2:] * table[:6] + 1)
    external = graph.external_tensors()
    if external is None:
        return
    memory = {t.untyped_storage().data_ptr() for t in external}
    _expect(memory, {x.data_ptr(), table.data_ptr()})
    _require("outputs are no external tensors", graph.outputs.data_ptr() not in memory)
    graph.release()
    _expect(graph.external_tensors(), [])


@_check
def release_lets_go_of_outputs(driver: GraphDriver) -> None:
    """A released graph no longer holds its outputs."""
    x = torch.ones(2, device=driver.device)
    graph = driver.capture(lambda: x + 1)
    outputs = weakref.ref(graph.outputs)
    graph.release()
    gc.collect()
    _expect(outputs(), None)
    _expect(graph.outputs, None)


@_check
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
            with pytest.raises(EngineError, match="help: "):
                graph.replay()
        _expect(x.tolist(), [7, 7])
        kept.replay()
        _expect(kept.outputs.tolist(), [8, 8])
