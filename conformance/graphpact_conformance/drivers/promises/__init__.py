"""The promises of the driver contract, `graphpact.graphs.driver`, as checks of any driver.

    promise       the decorator of a promise
    capture       what a capture refuses, and what it leaves behind
    replay        what a replay repeats, and where its results are
    operators     operators that are not part of torch
    eager_calls   eager calls between the segments of a graph
    streams       side streams, and copies from host memory
    tasks         tasks, whose arguments are updated for each replay
    lifetime      what a graph keeps, and its release

The checks run regions directly on a driver, without lanes, plugins or models.

Does not: check which acts a strict mode refuses (see `acts`), or check backends and runners.
"""

from graphpact_conformance.drivers.driver_requirement import DriverRequirement
from graphpact_conformance.drivers.promises import (
    capture,
    eager_calls,
    lifetime,
    operators,
    replay,
    streams,
    tasks,
)

CHECKS: dict[str, DriverRequirement] = {
    name: check
    for module in (
        capture,
        replay,
        operators,
        eager_calls,
        streams,
        tasks,
        lifetime,
    )  # the order of the results
    for name, check in module.CHECKS.items()
}
"""The checks by name, one for each promise. The promise is the sentence of the requirement."""
