"""Predicates that decide in which lanes of a run an experiment runs.

    Experiment(..., runs_in=any_of(unless_quick, with_optional_fields))

Each predicate takes a planned lane and the size of the run. `all_of` and `any_of` combine predicates.

A run has one full lane of each kind of step, and lanes that differ from it in sizes, fields or plugins.

Does not: choose the experiments of a run; see `graphpact_conformance.suite.plan`.
"""

from graphpact_conformance.draws.cases import composes
from graphpact_conformance.experiments.experiment import PlannedLane, RunsIn
from graphpact_conformance.lane.tested_code import KITS
from graphpact_conformance.targets import Size


def all_of(*predicates: RunsIn) -> RunsIn:
    """Return a predicate that is true if all given predicates are true."""
    return lambda plan, size: all(holds(plan, size) for holds in predicates)


def any_of(*predicates: RunsIn) -> RunsIn:
    """Return a predicate that is true if at least one of the given predicates is true."""
    return lambda plan, size: any(holds(plan, size) for holds in predicates)


def everywhere(plan: PlannedLane, size: Size) -> bool:
    """Return True, so that the experiment runs in every lane."""
    del plan, size
    return True


def in_full_lanes(plan: PlannedLane, size: Size) -> bool:
    """Return whether all experiments run in the lane."""
    del size
    return plan.has_all


def unless_quick(plan: PlannedLane, size: Size) -> bool:
    """Return whether the lane is full, or the run is not quick."""
    return plan.has_all or size != "quick"


def in_plain_lanes(plan: PlannedLane, size: Size) -> bool:
    """Return whether the lane is the plain one of its kind of step and checks one plugin."""
    del size
    config = plan.lane.config
    return not (config.unusual or plan.is_pair or config.case.embeds)


def in_long_contexts(plan: PlannedLane, size: Size) -> bool:
    """Return whether the context is long."""
    del size
    return plan.lane.config.is_long


def with_optional_fields(plan: PlannedLane, size: Size) -> bool:
    """Return whether batches carry optional fields, in a lane that checks a runner with slots for them."""
    del size
    return plan.lane.config.fields and plan.lane.kind == "runner"


def with_own_region(plan: PlannedLane, size: Size) -> bool:
    """Return whether the lane checks a runner that composes its region."""
    del size
    return plan.lane.kind == "runner" and composes(plan.lane.runner)


def without_embeddings(plan: PlannedLane, size: Size) -> bool:
    """Return whether batches carry token ids. Lanes with embeddings differ from others only in this."""
    del size
    return not plan.lane.config.case.embeds


def in_recorded_lanes(plan: PlannedLane, size: Size) -> bool:
    """Return whether the lane replays recorded steps."""
    del size
    return plan.recorded is not None


def outside_pairs(plan: PlannedLane, size: Size) -> bool:
    """Return whether only one plugin is checked, not a pair of a backend and a runner."""
    del size
    return not plan.is_pair


def of_plain_backends(plan: PlannedLane, size: Size) -> bool:
    """Return whether the lane is the plain one of its kind of step, and checks a backend alone."""
    del size
    lane = plan.lane
    alone = lane.kind == "attention_backend" and lane.runner in KITS and plan.recorded is None
    return alone and not lane.config.unusual


of_one_plugin = all_of(outside_pairs, without_embeddings)
"""All lanes of one plugin, except those with embeddings."""
in_full_lanes_of_one_plugin = all_of(in_full_lanes, of_one_plugin)
"""The full lanes among `of_one_plugin`."""
