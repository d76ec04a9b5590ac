"""Tasks, whose arguments are updated for each replay."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphpact.errors import CaptureError, ReplayError
from graphpact.graphs import GraphDriver, TaskKey, declare_kernel
from graphpact_conformance.contracts.requirement import expect_equal, expect_error
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


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


@promise(
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


@promise(
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


@promise(
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


@promise("GP21", "GraphDriver.update_task", "raise `ReplayError` for a key or a name that was not captured")
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
