"""Smaller batches that show the same: `shrunk`.

Does not: draw; it leaves out requests, and shortens what is cached, as long as the same rule is broken.
"""

import time
from collections.abc import Iterator, Sequence

from graphpact_conformance.experiments.base import Experiment
from graphpact_conformance.problems import Problem, shortened
from graphpact_conformance.results import Finding
from graphpact_conformance.subject import CannotCaptureError, LaneUnderTest

_SECONDS = 6.0
"""Of looking for smaller batches; what was found by then is told."""


def shrunk(
    lane: LaneUnderTest,
    experiment: Experiment,
    steps: Sequence[Problem],
    found: list[Finding],
) -> list[Finding]:
    """Return what an experiment finds in the smallest batches that were found to break the same rules.

    Args:
        lane: Where.
        experiment: What is done again.
        steps: The batches that showed something.
        found: What they showed.
    """
    rules = {finding.rule for finding in found}
    until = time.perf_counter() + _SECONDS
    best, steps = found, list(steps)
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(steps):
            if time.perf_counter() > until:
                return best
            lane.forget()
            try:
                now = list(experiment.run(lane, candidate))
            except CannotCaptureError:
                continue
            finally:
                lane.forget()
            if {finding.rule for finding in now} >= rules:
                best, steps, smaller = now, candidate, True
                break
    return best


def _smaller(steps: Sequence[Problem]) -> Iterator[list[Problem]]:
    """Yield the same batches with one of them smaller."""
    for at, problem in enumerate(steps):
        for less in _less(problem):
            yield [*steps[:at], less, *steps[at + 1 :]]


def _less(problem: Problem) -> Iterator[Problem]:
    for i in range(len(problem.requests)):
        if len(problem.requests) > 1:
            yield Problem(
                problem.case, problem.requests[:i] + problem.requests[i + 1 :], problem.seed
            )
    for i, request in enumerate(problem.requests):
        if len(request.cached) > 2:
            shorter = shortened(request, len(request.cached) // 2)
            yield Problem(
                problem.case,
                [*problem.requests[:i], shorter, *problem.requests[i + 1 :]],
                problem.seed,
            )
