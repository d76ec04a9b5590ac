"""Smaller batches with the same findings: `shrunk`.

The search ends after a number of trials and not by the clock, so that two runs with one seed report the same
batch.

Does not: draw new batches. It drops requests and shortens prefixes as long as the same rules are broken.
"""

from collections.abc import Callable, Iterable, Iterator

from graphpact_conformance.experiments.base import Experiment
from graphpact_conformance.problems import Drawn, Problem, ProblemRequest, shortened
from graphpact_conformance.results import Finding
from graphpact_conformance.subject import LaneUnderTest

TRIALS = 16
"""Number of smaller sequences of batches that are tried for one failure."""


def shrunk(
    lane: LaneUnderTest,
    experiment: Experiment,
    steps: Drawn,
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
    tried = {repr(steps)}
    for smaller in (_alone, _without_one, _halved, _with_one_halved):
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


def _found_in(lane: LaneUnderTest, experiment: Experiment, steps: Drawn) -> list[Finding]:
    """Return the findings of an experiment in a new lane; empty if it raises."""
    try:
        return experiment.findings(lane.anew(), steps)[0]
    except Exception:  # noqa: BLE001  an error of other batches is another failure
        return []


# -- smaller sequences, the smallest first -----------------------------------------------------------


def _alone(steps: Drawn) -> Iterator[Drawn]:
    """Yield batches of one request each: the first requests, then the second ones."""
    for i in range(max(len(problem.requests) for problem in steps)):
        yield Drawn(*(_of(p, [p.requests[i % len(p.requests)]] if p.requests else []) for p in steps))


def _without_one(steps: Drawn) -> Iterator[Drawn]:
    """Yield the sequence with one request less in one batch."""
    for at, problem in enumerate(steps):
        requests = problem.requests
        for i in range(len(requests) if len(requests) > 1 else 0):
            yield _with(steps, at, [*requests[:i], *requests[i + 1 :]])


def _halved(steps: Drawn) -> Iterator[Drawn]:
    """Yield the sequence with half as many cached keys in every request."""
    yield Drawn(*(_of(problem, map(_shorter, problem.requests)) for problem in steps))


def _with_one_halved(steps: Drawn) -> Iterator[Drawn]:
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


def _with(steps: Drawn, at: int, requests: Iterable[ProblemRequest]) -> Drawn:
    batches = list(steps)
    batches[at] = _of(steps[at], requests)
    return Drawn(*batches)
