"""What a capture refuses, and what it leaves behind."""

import contextlib
import gc
from functools import partial

import torch

from graphpact.errors import CaptureError
from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.requirement import expect_equal, expect_error, require
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


@promise(
    None,
    "GraphDriver.unavailable",
    "set the class attribute `name`, and return None from `unavailable` for each device on which it records",
)
def it_says_where_it_is_available(driver: GraphDriver) -> None:
    """A driver is available on the device that it was created for, and has a name."""
    expect_equal(type(driver).unavailable(driver.device), None)
    require("its class sets `name`", isinstance(driver.name, str))


@promise(
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


@promise(None, "GraphDriver.is_capturing", "record inside `recorded_run`, and run warm-ups outside of it")
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


@promise("GP19", "GraphDriver.capture", "undo all changes of the capture in `finally`")
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


@promise("GP20", "GraphDriver.capture", "begin `capture` with `refuse_nested_capture()`")
def captures_do_not_nest(driver: GraphDriver) -> None:
    """A capture inside another is refused, and the next capture works."""
    x = torch.ones(2, device=driver.device)
    nested = partial(driver.capture, lambda: driver.capture(lambda: x + 1).outputs)
    expect_error(CaptureError, nested, says="inside another")
    expect_equal(driver.capture(lambda: x + 1).num_segments, 1)


@promise(None, "GraphDriver.capture", "enable the garbage collector again in `finally`")
def garbage_is_not_collected_into_a_graph(driver: GraphDriver) -> None:
    """The garbage collector is enabled after a capture, also after a refused one."""
    x = torch.ones(1, device=driver.device)
    driver.capture(lambda: x + 1)
    with contextlib.suppress(CaptureError):
        driver.capture(x.item)
    require("the garbage collector is enabled again", gc.isenabled())
