"""One planned lane: its experiments one after the other, and a result for each rule: `examine_lane`.

Does not: implement experiments (see `graphpact_conformance.experiments`), or choose them.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from graphpact.errors import EngineError
from graphpact.plugin_calls import place_of
from graphpact.shapes import EagerReason
from graphpact_conformance.experiments import Experiment
from graphpact_conformance.experiments.experiment import PlannedLane
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.records.global_state import seeded
from graphpact_conformance.records.raised import CannotCaptureError, causes, message_of, need_of
from graphpact_conformance.results import Finding, Outcome, Result
from graphpact_conformance.rule import Rule
from graphpact_conformance.rules import RULES, Evidence
from graphpact_conformance.shrink import Steps, is_clear, shrunk
from graphpact_conformance.suite.plan import choices_of, experiments_of, is_wanted
from graphpact_conformance.targets import (
    Options,
    reproduce_line,
)


def examine_lane(
    plan: PlannedLane,
    options: Options,
    begins: Any = None,
    *,
    skip: Collection[str] = (),
    experiments: Sequence[Experiment] | None = None,
) -> Iterator[Result]:
    """Run all experiments in one lane, and yield a result for each rule.

    Args:
        plan: The lane.
        options: Options of the run.
        begins: Called with the name of each piece of work before it runs; may be None.
        skip: Names of work that are left out.
        experiments: The experiments to choose from; by default those of the lane.
    """
    run = LaneRun(plan, options, begins, skip=skip, experiments=experiments)
    run.all()
    yield from run.results()


@dataclass
class Done:
    """What one experiment found in one lane.

    Args:
        experiment: The experiment.
        findings: Its findings.
        examples: Sequences of batches that it tried.
        seconds: Its time.
        not_run: Why it could not run; None if it ran.
        declined: Why the runner declined the batches that it needs; None if it took them.
        steps: Steps of the lane, by the reason why they ran eagerly; None for replays.
        error: A fault of the suite itself.
        plans: Its findings about invariants of plans, which are evaluated after every preparation.
    """

    experiment: Experiment
    findings: list[Finding]
    examples: int = 0
    seconds: float = 0.0
    not_run: str | None = None
    declined: str | None = None
    steps: Counter[EagerReason | None] = field(default_factory=Counter)
    error: str | None = None
    plans: list[Finding] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether its lane can be used again."""
        return not (self.findings or self.error or self.not_run or self.declined)


class LaneRun:
    """The experiments of one lane. Some may run first, and others later.

    Args:
        plan: See `examine_lane`.
        options: See `examine_lane`.
        begins: See `examine_lane`.
        skip: See `examine_lane`.
        experiments: See `examine_lane`.

    Attributes:
        plan: The lane.
        done: What the experiments found, in the order in which they ran.
    """

    def __init__(
        self,
        plan: PlannedLane,
        options: Options,
        begins: Any = None,
        *,
        skip: Collection[str] = (),
        experiments: Sequence[Experiment] | None = None,
    ) -> None:
        self.plan, self.done = plan, list[Done]()
        self._options, self._begins, self._skip = options, begins or _ignore_work, skip
        self._among = choices_of(plan, experiments)
        self._chosen = experiments_of(plan, options, self._among)
        self._captures_nothing = plan.lane.captures_nothing
        self._used: LaneUnderTest | None = None

    def all(self) -> None:
        """Run all experiments that have not run."""
        for _ in self.each():
            pass

    def each(self, only: Collection[str] | None = None) -> Iterator[Done]:
        """Run the experiments that have not run, one by one, and yield what each found.

        Args:
            only: Names of experiments; the others run in a later call. None for all.
        """
        following = (
            e
            for e in self._among
            if e not in self._chosen and _follows(e, self.plan, self._options, self.done)
        )
        for experiment in chain(self._chosen, following):
            work = f"{self.plan} :: {experiment.name}"
            has_run = any(each.experiment == experiment for each in self.done)
            is_later = only is not None and experiment.name not in only
            if (
                has_run
                or is_later
                or work in self._skip
                or (self._captures_nothing and experiment.needs_graphs)
            ):
                continue
            self._begins(work)
            tried = f"{work} :: smaller batches"
            on_trial = None if tried in self._skip else partial(self._begins, tried)
            each, self._used = _run_beside(self._used, experiment, self.plan, self._options, on_trial)
            self.done.append(each)
            yield each

    def results(self) -> list[Result]:
        """Return a result for each rule that the experiments checked."""
        done = sorted(self.done, key=lambda each: self._among.index(each.experiment))
        results = list(_by_rule(self.plan, self._options, done))
        if self._captures_nothing:
            results = list(_without_graphs(self.plan, self._options, self._chosen, results))
        return results


def _follows(experiment: Experiment, plan: PlannedLane, options: Options, done: Sequence[Done]) -> bool:
    """Return whether an experiment that does not run in a lane at first runs there after others."""
    explains, names = experiment.after_failed_captures, experiment.after_findings
    if explains is not None and any(each.not_run for each in done):
        return explains(plan, options.size)
    has_findings = any(each.findings for each in done)
    return names is not None and has_findings and names(plan, options.size) and is_wanted(experiment, options)


def _run_beside(
    used: LaneUnderTest | None,
    experiment: Experiment,
    plan: PlannedLane,
    options: Options,
    on_trial: Callable[[], object] | None,
) -> tuple[Done, LaneUnderTest | None]:
    """Run one experiment, and also return its lane if the next experiment may use it.

    Captures take much of the time of a run. An experiment that finds something on used captures is repeated
    on new ones, and only the second result counts. So no finding depends on earlier experiments.
    """
    if experiment.shares_captures and used is not None:
        lane = used.again(experiment.examines)
        done = run_once(experiment, plan, options, None, lane)
        if done.is_clean:
            return done, lane
    lane = plan.lane.anew(experiment.examines)
    done = run_once(experiment, plan, options, on_trial, lane)
    return done, lane if done.is_clean else None


def run_once(
    experiment: Experiment,
    plan: PlannedLane,
    options: Options,
    on_trial: Callable[[], object] | None,
    lane: LaneUnderTest,
) -> Done:
    """Run one experiment, with the requested number of sequences, until one has findings.

    Args:
        experiment: The experiment.
        plan: The planned lane.
        options: Options of the run.
        on_trial: Called before each trial of smaller batches; None for no trials.
        lane: The lane for the experiment.
    """
    start = time.perf_counter()
    done = Done(experiment, [])
    count = _examples(plan, options) if experiment.repeats else 1
    try:
        with torch.inference_mode(), seeded(options.seed, lane.device):
            for steps in _sequences(experiment, plan, lane, count, options.seed):
                done.examples += 1
                found = experiment.findings(lane, steps)
                done.declined = done.declined or found.declined
                done.findings = experiment.listed(found.findings)
                if unlisted := {str(f.rule) for f in found.findings if f not in done.findings}:
                    done.error = f"{experiment.name} reports {', '.join(unlisted)}, which it does not list"
                if found.error is not None:
                    raise found.error  # noqa: TRY301  judged below, like one of the runner's fit()
                if found.findings:
                    break
            may_shrink = options.shrink and experiment.shrinks and done.findings
            if may_shrink and on_trial is not None and not _is_clear(experiment, done.findings):
                smaller = shrunk(lane, experiment, steps, done.findings, on_trial)
                done.findings = experiment.listed(smaller)
    except CannotCaptureError as error:
        done.declined, done.not_run = _why_not(plan, error)
    except Exception as error:  # noqa: BLE001  of the plugin or of the suite
        _note_error(done, lane, error)
    done.findings += lane.of_changes()
    done.findings, done.plans = (
        [f.model_copy(update={"experiment": experiment.name}) for f in found]
        for found in (done.findings, lane.of_plans())
    )
    done.steps = lane.steps_by_reason
    done.seconds = time.perf_counter() - start
    return done


def _is_clear(experiment: Experiment, findings: Sequence[Finding]) -> bool:
    """Return whether fewer or smaller batches cannot say more; of a recording, fewer steps always do."""
    return not experiment.takes_recordings and is_clear(min(findings, key=by_evidence))


def _note_error(done: Done, lane: LaneUnderTest, error: Exception) -> None:
    """Note an error that ended an experiment: of a value that is missing, of the plugin, or of the suite."""
    if (need := need_of(error)) is not None:
        done.not_run = f"needs {need.path}"
    elif lane.raised_at(error) is not None:
        expected = "the plugin's methods return without an error"
        done.findings.append(lane.of_error(error, expected=expected))
    else:
        done.error = f"{done.experiment.name}: {message_of(error)}"
        if (place := place_of(error)) not in done.error:
            done.error += f", at {place}"


def _why_not(plan: PlannedLane, error: CannotCaptureError) -> tuple[str | None, str | None]:
    """Return why the plugin declines a lane that cannot be captured, or why the lane does not run.

    It declines a high cache by an `EngineError`, if it is captured with a low one.
    """
    not_run = f"the lane cannot be captured: {error}"
    if not plan.lane.config.high or not any(isinstance(each, EngineError) for each in causes(error.error)):
        return None, not_run
    try:
        plan.lane.like(replace(plan.lane.config, high=False)).anew().rig()
    except CannotCaptureError:
        return None, not_run
    return f"the plugin refuses a KV cache of so many pages: {error}", None


def _examples(plan: PlannedLane, options: Options) -> int:
    """Return the sequences of batches of a lane: one in quick runs; fewer where a plain lane has most.

    In normal runs pairs, whose plugins have lanes of their own, and lanes with unusual values have half.
    """
    if options.size == "quick":
        return 1
    has_most = options.size == "thorough" or (plan.has_all and not plan.lane.config.unusual)
    return options.examples if has_most and not plan.is_pair else (options.examples + 1) // 2


def _sequences(
    experiment: Experiment, plan: PlannedLane, lane: LaneUnderTest, count: int, seed: int
) -> Sequence[Steps]:
    """Return the sequences of batches that an experiment gets, drawn or recorded."""
    if plan.recorded is None:
        return lane.drawn(count, seed)
    if experiment.takes_recordings:
        return [plan.recorded.steps]
    return plan.recorded.sequences(lane.config, count, seed, lane.declined)


def _ignore_work(_: str) -> None:
    """Ignore the name of the work."""


_FOLLOWS = {"GP08": ("GP06", "GP12"), "GP16": ("GP10", "GP14")}
"""Rules whose breaches follow from that of another rule, if they name no field."""


def _consequences(plan: PlannedLane, done: Sequence[Done]) -> dict[str, str]:
    """Return the rules of which a lane has only findings without a field, each with the rule of the cause.

    A cause names hook and field, or a race. The wrong graph of a runner is the cause of a number in it. A
    plan that is made from wrong offsets or lengths is wrong because of them, and padding rows of an input
    that is wrong as a whole are no wrong count.
    """
    best: dict[str | None, Evidence] = {}
    for finding in (finding for each in done for finding in each.findings):
        best[finding.rule] = min(best.get(finding.rule, Evidence()), finding.evidence)
    found = {}
    for cause, rules in _FOLLOWS.items():
        is_sure = cause in best and (best[cause].level == 0 or cause == "GP16")
        for rule in rules if is_sure else ():
            is_runners = rule == "GP12" and plan.lane.kind == "runner"
            if rule in best and best[rule].level > 0 and not is_runners:
                found[rule] = cause
    every = [finding for each in done for finding in each.findings]
    for rule, (of, explains) in _FOLLOWS_ONE_BY_ONE.items():
        others = [finding for finding in every if finding.rule in of]
        because = [next((o.rule for o in others if explains(f, o)), None) for f in every if f.rule == rule]
        if because and None not in because:
            found[rule] = str(because[0])
    return found


def _is_of_one_step(plan: Finding, other: Finding) -> bool:
    """Return whether a finding about metadata is of the experiment and the batch of one about a plan."""
    is_metadata = other.hook is not None and (other.field or "").startswith("metadata.")
    return is_metadata and (plan.experiment, plan.batch) == (other.experiment, other.batch)


def _is_of_one_input(count: Finding, other: Finding) -> bool:
    """Return whether two findings are about one tensor of the view."""
    fields = [(finding.field or "").partition("[")[0] for finding in (count, other)]
    return fields[0].startswith("view.") and fields[0] == fields[1]


_FOLLOWS_ONE_BY_ONE = {
    "GP09": (("GP07", "GP02"), _is_of_one_step),
    "GP05": (("GP11", "GP02"), _is_of_one_input),
}
"""Rules of which each finding may follow from one of other rules, and the test of it."""


def _by_rule(plan: PlannedLane, options: Options, done: Sequence[Done]) -> Iterator[Result]:
    """Yield one result for each checked rule, and one for findings without a rule."""
    ids: list[str | None] = [rule for rule in RULES if not options.only or rule in options.only]
    if not options.only:
        ids = [None, *ids]
    asks_for_all = options.only or options.all_findings
    consequences = {} if asks_for_all else _consequences(plan, done)
    for rule in ids:
        mine = [
            d
            for d in done
            if (not d.experiment.examines if rule is None else rule in d.experiment.examines)
            or any(f.rule == rule for f in (*d.findings, *d.plans))
        ]
        if not mine:
            continue
        if rule is not None and (why := RULES[rule].not_in_force(plan.contract)):
            yield _not_in_force(RULES[rule], plan, mine, why)
            continue
        cause = consequences.get(rule or "")
        findings = [] if cause else _findings_of(rule, mine)
        own = {f.field for d in mine for f in d.findings if f.rule == rule}
        beside = {d.experiment.name for d in mine if d.plans and rule not in d.experiment.examines}
        chosen = findings if options.all_findings else _distinct(findings)
        outcome, reason = Outcome.PASS, _say_declined(done) if rule == "GP12" else None
        errors = [d.error for d in mine if d.error]
        if cause:
            outcome, reason = Outcome.NOT_RUN, f"what was found follows from {cause} in this lane"
        elif findings:
            outcome, reason = Outcome.FAIL, f"incomplete: {errors[0]}" if errors else None
        elif errors:
            outcome, reason = Outcome.ERROR, errors[0]
        elif stopped := [d.not_run for d in mine if d.not_run]:
            outcome, reason = Outcome.NOT_RUN, stopped[0]
        elif declined := [d.declined for d in mine if d.declined]:
            outcome, reason = Outcome.UNSUPPORTED, declined[0]
        yield Result(
            rule=rule,
            check=", ".join(d.experiment.name for d in mine),
            lane=str(plan),
            outcome=outcome,
            level=RULES[rule].level if rule else "MUST",
            reason=reason,
            findings=[
                _with_line(f, plan, options, of_rule=f.field in own or f.experiment not in beside)
                for f in chosen
            ],
            examples=sum(d.examples for d in mine),
            seconds=sum(d.seconds / (len(d.experiment.examines) or 1) for d in mine),
        )


def _findings_of(rule: str | None, done: Sequence[Done]) -> list[Finding]:
    """Return the different findings of a rule, those with the best evidence first."""
    found = [f for d in done for f in d.findings if f.rule == rule]
    own = {f.field for f in found}  # an experiment's own finding has smaller batches
    found += [f for d in done for f in d.plans if f.rule == rule and f.field not in own]
    return sorted({f.model_dump_json(): f for f in found}.values(), key=by_evidence)


def _say_declined(done: Sequence[Done]) -> str | None:
    """Return how many steps of a lane the runner declined, by reason; None if it declined none."""
    counted = sum((each.steps for each in done), Counter[EagerReason | None]())
    total = counted.total()
    said = [f"{n} of {total} steps declined: {reason}" for reason, n in counted.items() if reason is not None]
    return ", ".join(said) or None


def _without_graphs(
    plan: PlannedLane, options: Options, chosen: Sequence[Experiment], results: Sequence[Result]
) -> Iterator[Result]:
    """Yield the results of a lane that captures nothing, with one for each rule that needs graphs.

    A rule without a finding is unsupported if the declarations exclude graphs, otherwise not run.
    """
    reason = plan.lane.no_graphs_declared
    outcome = Outcome.UNSUPPORTED if reason else Outcome.NOT_RUN
    reason = reason or "no graphs: the runner has no shape to capture"
    found = {r.rule: r for r in results if r.rule is None or r.outcome is not Outcome.PASS}
    if None in found:
        yield found[None]
        if found[None].outcome in (Outcome.PASS, Outcome.FAIL):
            reason += "; eager steps were checked"
    for rule in RULES.values():
        names = [e.name for e in chosen if rule.id in e.examines]
        if not names or (options.only and rule.id not in options.only):
            continue
        yield found.get(rule.id) or Result(
            rule=rule.id,
            check=", ".join(names),
            lane=str(plan),
            outcome=outcome,
            level=rule.level,
            reason=reason,
        )


def _not_in_force(rule: Rule, plan: PlannedLane, done: Sequence[Done], why: str) -> Result:
    return Result(
        rule=rule.id,
        check=", ".join(d.experiment.name for d in done),
        lane=str(plan),
        outcome=Outcome.UNSUPPORTED,
        level=rule.level,
        reason=why,
    )


_MOST_FINDINGS = 8
"""Findings of one rule in one lane that a report keeps, unless all are asked for."""


def by_evidence(finding: Finding) -> tuple[bool, Evidence, bool, bool]:
    """Return the sort key of findings: errors that the plugin raised, then those with the best evidence."""
    return finding.raised_at is None, finding.evidence, finding.field is None, finding.help is None


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each rule, hook, field and raising line, in the order of `by_evidence`."""
    first: dict[tuple[str | None, ...], Finding] = {}
    for finding in findings:
        key = (finding.rule, finding.hook, (finding.field or "").partition("[")[0], finding.raised_at)
        first.setdefault(key, finding)
    return [*first.values()][:_MOST_FINDINGS]


def _with_line(finding: Finding, plan: PlannedLane, options: Options, *, of_rule: bool) -> Finding:
    """Return the finding with the command that repeats it: of its rule, if its experiment checks the rule."""
    only = [finding.rule] if of_rule and finding.rule is not None else []
    line = reproduce_line(plan.names, only, str(plan), replace(options, ranks=plan.ranks))
    return finding.model_copy(update={"reproduce": line})
