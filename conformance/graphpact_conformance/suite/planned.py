"""`PlannedLane`: one lane of a run, with its name and its experiments.

Does not: choose lanes or experiments; see `graphpact_conformance.suite.plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphpact.hookspecs import CONTRACT_VERSION
from graphpact_conformance.experiments import EXPERIMENTS, Experiment
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference import ReferenceRunner
from graphpact_conformance.world.scenario import RecordedLane

LaneKind = Literal["attention_backend", "runner"]


@dataclass(frozen=True)
class PlannedLane:
    """One lane of a run.

    Args:
        lane: The lane to build.
        is_full: Whether all experiments may run in it, or only those of outputs; see `has_all`.
        suffix: Suffix of its name, after the configuration.
        names: Names of the plugins for the command line.
        contract: The contract version of the plugin.
        recorded: The recorded lane whose steps run in it; None for drawn steps.
        experiments: The experiments to choose from.
    """

    lane: LaneUnderTest
    is_full: bool
    suffix: str = ""
    names: str = ""
    contract: int = CONTRACT_VERSION
    recorded: RecordedLane | None = None
    experiments: Sequence[Experiment] = EXPERIMENTS

    def of(self, names: str, experiments: Sequence[Experiment]) -> "PlannedLane":
        """Return the same lane of an adapter's target, with its experiments."""
        return replace(self, names=names, experiments=experiments)

    def __str__(self) -> str:
        return f"{self.lane.config}{self.suffix}"

    @property
    def has_all(self) -> bool:
        """Whether all experiments run in it. A strict driver would copy a high cache: too much memory."""
        return self.is_full and not self.lane.config.high

    @property
    def is_pair(self) -> bool:
        """Whether a backend is checked with a runner that is not the suite's own, on drawn steps."""
        lane = self.lane
        has_partner = lane.kind == "attention_backend" and lane.runner is not ReferenceRunner
        return has_partner and self.recorded is None
