"""`Experiment`, one procedure of the suite, and `PlannedLane`, one lane of a run.

Does not: choose lanes (see `graphpact_conformance.suite.plan`), or decide in which lanes an experiment runs
(see ``when``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from graphpact.hookspecs import CONTRACT_VERSION
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.draws.scenario import RecordedLane
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.records.global_state import Call
from graphpact_conformance.records.raised import DeclinedError
from graphpact_conformance.results import Finding
from graphpact_conformance.targets import Size

Findings = Iterator[Finding]


@dataclass(frozen=True)
class Experiment:
    """One procedure of the suite on a lane.

    Args:
        name: Its name in reports.
        examines: Ids of the rules that it checks. Its findings have one of these rules, or none.
        run: ``(lane, steps) -> findings``: the procedure, for `Drawn` or a recorded sequence of batches.
        runs_in: ``(plan, size) -> bool``: the lanes in which it runs; see
            `graphpact_conformance.experiments.when`.
        after_findings: The lanes in which it also runs after a finding of another experiment. A wrong output
            does not show which rule is broken; this experiment names the rule and the field. None means no
            lanes.
        after_failed_captures: The lanes in which it also runs if they cannot be captured, and reports the
            cause. None means no lanes.
        repeats: Whether to run it again with more batches. Without `repeats` it runs once per lane.
        needs_graphs: Whether it is skipped in lanes that capture nothing.
        takes_recordings: Whether it takes the whole sequence of a recorded lane, not parts of it.
        shares_captures: Whether it reuses the captures of the experiment before, if that one had no finding.
            Its findings count only if a run with new captures repeats them.
        shrinks: Whether its findings depend on the drawn batches, so that a smaller failing one is searched.
        num_captures: About how often it captures every shape of a lane, to estimate its time.
    """

    name: str
    examines: tuple[str, ...]
    run: Callable[[LaneUnderTest, Any], Findings]
    runs_in: "RunsIn"
    after_findings: "RunsIn | None" = None
    after_failed_captures: "RunsIn | None" = None
    repeats: bool = False
    needs_graphs: bool = True
    takes_recordings: bool = False
    shares_captures: bool = False
    shrinks: bool = True
    num_captures: int = 2

    @property
    def about(self) -> str:
        """The first line of the docstring of ``run``."""
        return (self.run.__doc__ or "").strip().splitlines()[0]

    def listed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings whose rule it examines, and those without a rule."""
        return [finding for finding in findings if finding.rule in (None, *self.examines)]

    def findings(self, lane: LaneUnderTest, steps: Sequence[Problem]) -> "Found":
        """Run it, and return its findings, including those before an error."""
        found: list[Finding] = []
        try:
            with lane.watch.during(Call(f"other calls in {self.name}")):
                for finding in self.run(lane, steps):
                    found.append(finding)  # noqa: PERF402  keeps the findings before an error
        except DeclinedError as declined:
            return Found(found, declined=str(declined))
        except Exception as error:  # noqa: BLE001  the caller decides whether plugin or suite raised it
            return Found(found, error=error)
        return Found(found)


class Found(NamedTuple):
    """The result of an experiment.

    Args:
        findings: Its findings.
        declined: The runner's reason, if it declined a batch that the experiment needs and so ended it.
        error: The error that ended it early.
    """

    findings: list[Finding]
    declined: str | None = None
    error: Exception | None = None


LaneKind = Literal["attention_backend", "runner"]


@dataclass(frozen=True)
class PlannedLane:
    """One lane of a run, with its name.

    Args:
        lane: The lane to build.
        is_full: Whether all experiments may run in it, or only those of outputs; see `has_all`.
        suffix: Suffix of its name, after the configuration.
        names: Names of the plugins for the command line.
        contract: The contract version of the plugin.
        recorded: The recorded lane whose steps run in it. None means drawn steps.
        experiments: The experiments to choose from. None means all experiments of the suite.
        ranks: Number of processes that step together in it; None for lanes of one process.
    """

    lane: LaneUnderTest
    is_full: bool
    suffix: str = ""
    names: str = ""
    contract: int = CONTRACT_VERSION
    recorded: RecordedLane | None = None
    experiments: Sequence[Experiment] | None = None
    ranks: int | None = None

    def of(self, names: str, experiments: Sequence[Experiment]) -> "PlannedLane":
        """Return a copy of the lane for an adapter's target, with the target's names and experiments."""
        return replace(self, names=names, experiments=experiments)

    def __str__(self) -> str:
        return f"{self.lane.config}{self.suffix}"

    @property
    def has_all(self) -> bool:
        """Whether all experiments run in it.

        They do not run with high slot numbers: a strict driver would copy the cache, which needs too much
        memory.
        """
        return self.is_full and not self.lane.config.high

    @property
    def is_pair(self) -> bool:
        """Whether it checks a backend together with a runner plugin, on drawn steps."""
        lane = self.lane
        has_partner = lane.kind == "attention_backend" and lane.runner is not ReferenceRunner
        return has_partner and self.recorded is None


RunsIn = Callable[[PlannedLane, Size], bool]
"""``(plan, size) -> bool``: whether an experiment runs in a lane of a run of that size."""
