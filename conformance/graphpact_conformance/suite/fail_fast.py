"""`run_lanes`: the lanes of a run one after the other; with ``--fail-fast``, to the first named rule.

The experiments of outputs run first, in every lane: they are short, and find most faults. A lane with a
finding runs its other experiments at once, because these name rule and field. The remaining experiments of
all lanes follow. A run that ends at a rule reports only what it found.

Does not: implement experiments, or judge known failures (see `graphpact_conformance.xfails`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from graphpact_conformance.experiments import OF_OUTPUTS
from graphpact_conformance.experiments.experiment import PlannedLane
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.suite.run import LaneRun, examine_lane
from graphpact_conformance.targets import IsKnown, Options, ended_early

_FIRST = frozenset(experiment.name for experiment in OF_OUTPUTS)


def run_lanes(
    plans: Sequence[PlannedLane],
    options: Options,
    begins: Callable[[str], object],
    *,
    skip: Collection[str] = (),
    is_known: IsKnown = lambda _, __: False,
) -> Iterator[tuple[PlannedLane, list[Result]]]:
    """Yield lanes with their results: all of them, or with ``fail_fast`` those up to the first named rule.

    Args:
        plans: The lanes.
        options: Options of the run.
        begins: Called with the name of each piece of work before it runs.
        skip: Names of work that are left out.
        is_known: See `IsKnown`.
    """
    if not options.fail_fast:
        for plan in plans:
            yield plan, list(examine_lane(plan, options, begins, skip=skip))
        return
    runs = [LaneRun(plan, options, begins, skip=skip) for plan in plans]
    for only in (_FIRST, None):
        for run in runs:
            if _ends(run, is_known, only):
                found = [result for result in run.results() if result.outcome is Outcome.FAIL]
                yield run.plan, [*found, ended_early()]
                return
    for run in runs:
        yield run.plan, run.results()


def _ends(run: LaneRun, is_known: IsKnown, only: Collection[str] | None) -> bool:
    """Run experiments of a lane until a finding names a rule, and return whether one does.

    A finding without a rule is explained by the other experiments of the lane. If these name no rule and the
    plugin raised the error, its line is all that a run can find.
    """

    def found(findings: Iterable[Finding]) -> bool:
        return any(f.rule is not None and not is_known(f.rule, str(run.plan)) for f in findings)

    if any(found(each.findings) for each in run.each(only)):
        return True
    if all(each.is_clean or each.declined for each in run.done):
        return False
    if any(found(each.findings) for each in run.each()):
        return True
    return any(finding.raised_at is not None for each in run.done for finding in each.findings)
