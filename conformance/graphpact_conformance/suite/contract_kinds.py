"""The kinds of plugins that are checked by the requirements of a contract: `CONTRACTS`.

Does not: run requirements; see `graphpact_conformance.contracts.examine`.
"""

from typing import Any

from graphpact_conformance.algorithms import drafting
from graphpact_conformance.algorithms.algorithm_lanes import OF_ALGORITHMS
from graphpact_conformance.contracts.examine import Contract
from graphpact_conformance.contracts.requirement import Requirement
from graphpact_conformance.drivers.driver_lanes import OF_DRIVERS
from graphpact_conformance.observers import observing
from graphpact_conformance.observers.observer_lanes import OF_OBSERVERS
from graphpact_conformance.target_kinds import TargetKind

CONTRACTS: dict[TargetKind, Contract] = {
    "graph_driver": OF_DRIVERS,
    "speculation": OF_ALGORITHMS,
    "observer": OF_OBSERVERS,
}
"""The contract of each of these kinds."""


def checks_of_rule(rule: str) -> list[Requirement[Any]]:
    """Return the requirements on algorithms or observers with a rule."""
    every: list[Requirement[Any]] = [*drafting.CHECKS.values(), *observing.CHECKS.values()]
    return [check for check in every if check.rule == rule]
