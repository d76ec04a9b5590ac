"""Smaller batches with the same findings: `shrunk`.

The search ends after a number of trials and not by the clock, so that two runs with one seed report the same
batch.

Does not: draw new batches. It drops recorded batches and requests, and shortens prefixes, as long as the same
rules are broken.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.chosen_batches import shortened
from graphpact_conformance.draws.problems import Problem, ProblemRequest
from graphpact_conformance.experiments.experiment import Experiment
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.results import Finding

TRIALS = 16
"""Number of smaller sequences of batches that are tried for one failure."""

Steps: TypeAlias = tuple[Problem, ...]
"""Drawn batches, or those of a recording."""


def shrunk(
    lane: LaneUnderTest,
    experiment: Experiment,
    steps: Steps,
    found: list[Finding],
    on_trial: Callable[[], object] = lambda: None,
) -> list[Finding]:
    """Return the findings of an experiment for the smallest batches that break the same rules.

    Args:
        lane: The lane.
        experiment: The experiment to repeat.
        steps: The batches with findings.
        found: Their findings.
        on_trial: Called before each trial.
    """
    rules = {finding.rule for finding in found}
    best, left = found, TRIALS
    if not isinstance(steps, Drawn):
        left += 4 * len(steps).bit_length()  # more trials find the few relevant batches
    tried = {repr(steps)}
    for smaller in (_fewer, _alone, _without_one, _halved, _with_one_halved):
        candidates = smaller(steps)
        while left and (candidate := next(candidates, None)) is not None:
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            left -= 1
            on_trial()
            now = _found_in(lane, experiment, candidate)
            if {finding.rule for finding in now} >= rules:
                best, steps, candidates = now, candidate, smaller(candidate)
    return best


def is_clear(finding: Finding) -> bool:
    """Return whether a smaller batch cannot say more: hook and field are known, or it has one request."""
    return (
        finding.evidence.level == 0 or finding.batch is None or _ONE_REQUEST.match(finding.batch) is not None
    )


_ONE_REQUEST = re.compile(r"[^;]*, [01] requests?;")
"""How the words of a batch of one request, or of none, begin; see `Problem.words`."""


def _found_in(lane: LaneUnderTest, experiment: Experiment, steps: Steps) -> list[Finding]:
    """Return the findings of an experiment in a new lane; empty if it raises, which is another failure."""
    found = experiment.findings(lane.anew(), steps)
    return [] if found.error else found.findings


# -- smaller sequences, the smallest first -----------------------------------------------------------


def _fewer(steps: Steps) -> Iterator[Steps]:
    """Yield a recorded sequence without a half, a quarter, and so on; yield nothing for a drawn one."""
    if isinstance(steps, Drawn):
        return
    size = len(steps) // 2
    while size:
        for first in range(0, len(steps), size):
            yield (*steps[:first], *steps[first + size :])
        size //= 2


def _alone(steps: Steps) -> Iterator[Steps]:
    """Yield batches of one request each: the first requests, then the second ones."""
    for i in range(max(len(problem.requests) for problem in steps)):
        yield _like(steps, (_of(p, [p.requests[i % len(p.requests)]] if p.requests else []) for p in steps))


def _without_one(steps: Steps) -> Iterator[Steps]:
    """Yield the sequence with one request less in one batch."""
    for at, problem in enumerate(steps):
        requests = problem.requests
        for i in range(len(requests) if len(requests) > 1 else 0):
            yield _with(steps, at, [*requests[:i], *requests[i + 1 :]])


def _halved(steps: Steps) -> Iterator[Steps]:
    """Yield the sequence with half as many cached keys in every request."""
    yield _like(steps, (_of(problem, map(_shorter, problem.requests)) for problem in steps))


def _with_one_halved(steps: Steps) -> Iterator[Steps]:
    """Yield the sequence with half as many cached keys in one request of one batch."""
    for at, problem in enumerate(steps):
        for i, request in enumerate(problem.requests):
            others = problem.requests
            yield _with(steps, at, [*others[:i], _shorter(request), *others[i + 1 :]])


def _shorter(request: ProblemRequest) -> ProblemRequest:
    """Return a request with half as many cached keys; unchanged if it has one or two."""
    few = len(request.cached) <= 2
    return request if few else shortened(request, len(request.cached) // 2)


def _of(problem: Problem, requests: Iterable[ProblemRequest]) -> Problem:
    return Problem(problem.case, list(requests), problem.seed)


def _with(steps: Steps, at: int, requests: Iterable[ProblemRequest]) -> Steps:
    batches = list(steps)
    batches[at] = _of(steps[at], requests)
    return _like(steps, batches)


def _like(steps: Steps, batches: Iterable[Problem]) -> Steps:
    return type(steps)(batches)
