"""Operators that are not part of torch: what they write, and when their Python runs."""

import torch

from graphpact.graphs import GraphDriver, declare_kernel
from graphpact_conformance.contracts.requirement import expect_equal
from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises.promise import promise_decorator

CHECKS: dict[str, DriverRequirement] = {}
"""The promises by name, in order."""
promise = promise_decorator(CHECKS)


@declare_kernel
@torch.library.custom_op("graphpact_conformance::gather_into", mutates_args=("out",))
def _gather_into(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write selected rows of a table into ``out``: an operator that is not part of torch."""
    out.copy_(table[rows])


@_gather_into.register_fake
def _(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    del table, rows, out


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


@promise(
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


@promise(
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


@promise(
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
