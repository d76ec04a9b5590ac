"""The suite: the lanes of a backend or runner, the experiments in each lane, and the results by rule.

    names     the targets that names of plugins stand for
    adapter   adapters, which check another engine's code, and how they are found by name
    contract_kinds  the kinds that are checked by the requirements of a contract
    plan      the lanes of a target, the experiments in each, and the parts of a run
    run       the experiments of one lane, and a result for each rule
    fail_fast  the lanes of a run, to the first named rule with ``--fail-fast``
    target    the whole run for one target, in this process

Does not: implement experiments, or survive a plugin that crashes (see `graphpact_conformance.isolation`).
"""

from graphpact_conformance.experiments.experiment import LaneKind, PlannedLane
from graphpact_conformance.experiments.real_ranks.messages import Classes, ClassSource
from graphpact_conformance.lane.uncalled import Uncalled
from graphpact_conformance.suite.adapter import Adapter, Needs
from graphpact_conformance.suite.names import targets
from graphpact_conformance.suite.plan import (
    checks_by_lane,
    experiments_of,
    is_asked,
    lanes_of,
    planned_lanes,
    rank_lanes,
    require_lanes,
    takes,
)
from graphpact_conformance.suite.run import examine_lane
from graphpact_conformance.suite.target import examine

__all__ = [
    "Adapter",
    "ClassSource",
    "Classes",
    "LaneKind",
    "Needs",
    "PlannedLane",
    "Uncalled",
    "checks_by_lane",
    "examine",
    "examine_lane",
    "experiments_of",
    "is_asked",
    "lanes_of",
    "planned_lanes",
    "rank_lanes",
    "require_lanes",
    "takes",
    "targets",
]
