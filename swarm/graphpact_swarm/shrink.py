"""`shrunk_scenario`: a smaller scenario with the same finding.

Fewer requests come first, then plainer features, then earlier arrivals, shorter answers and shorter prompts.
The search ends after a number of trials and not by the clock, so that two runs report the same scenario.

Does not: run a scenario; it is given a function that does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from graphpact_swarm.scenario import Arrival, Scenario
from graphpact_swarm.verdicts.judging import RunFinding, Verdict

TRIALS = 60
"""Scenarios that are tried for one finding."""

Run: TypeAlias = Callable[[Scenario], Verdict | None]
"""Runs a scenario; None if it cannot be run, because the engine refuses its configuration."""

_SMALLER: tuple[Callable[[int], int], ...] = (lambda n: n // 2, lambda n: n - 1)


def shrunk_scenario(
    scenario: Scenario, finding: RunFinding, run: Run, plain: Mapping[str, Any], trials: int = TRIALS
) -> tuple[Scenario, Verdict | None]:
    """Return the smallest scenario that was found with the same finding, and its verdict.

    Args:
        scenario: The scenario of ``finding``.
        finding: What is looked for: the same kind, rule and field.
        run: Runs a scenario.
        plain: The plainest value of each feature of the engine.
        trials: How many scenarios are tried.

    Returns:
        The scenario, and its verdict; None instead of the verdict if no smaller one was found.
    """
    best: Verdict | None = None
    left = trials
    tried: set[str] = {repr(scenario)}
    again = True
    while again and left:
        again = False
        for smaller in (
            _halves,
            _without_one,
            _plainer,
            _earlier,
            _simpler,
            _shorter_answers,
            _shorter_prompts,
        ):
            candidates = smaller(scenario, plain)
            while left and (candidate := next(candidates, None)) is not None:
                if repr(candidate) in tried:
                    continue
                tried.add(repr(candidate))
                left -= 1
                verdict = run(candidate)
                if verdict is not None and finding.signature in {each.signature for each in verdict.findings}:
                    scenario, best, again = candidate, verdict, True
                    candidates = smaller(candidate, plain)
    return scenario, best


def _halves(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    del plain
    arrivals = scenario.arrivals
    size = len(arrivals) // 2
    while size > 1:
        for first in range(0, len(arrivals), size):
            yield scenario.with_arrivals((*arrivals[:first], *arrivals[first + size :]))
        size //= 2


def _without_one(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    del plain
    arrivals = scenario.arrivals
    for at in range(len(arrivals) if len(arrivals) > 1 else 0):
        yield scenario.with_arrivals((*arrivals[:at], *arrivals[at + 1 :]))


def _plainer(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    """Yield scenarios with more features at their plainest values, all of them first."""
    different = [name for name, value in plain.items() if scenario.choice.get(name) != value]
    size = len(different)
    while size:
        for first in range(0, len(different), size):
            yield scenario.with_choice(**{name: plain[name] for name in different[first : first + size]})
        size //= 2


def _earlier(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    """Yield scenarios whose requests arrive together, or without waiting times between them."""
    del plain
    times = sorted({each.arrives_in for each in scenario.arrivals})
    if times and times[-1]:
        yield _moved(scenario, dict.fromkeys(times, 0))
        yield _moved(scenario, {time: at for at, time in enumerate(times)})


def _moved(scenario: Scenario, times: Mapping[int, int]) -> Scenario:
    return scenario.with_arrivals(
        [
            replace(
                each,
                arrives_in=times[each.arrives_in],
                aborted_in=each.aborted_in and each.aborted_in - each.arrives_in + times[each.arrives_in],
            )
            for each in scenario.arrivals
        ]
    )


def _simpler(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    """Yield scenarios with a request that is not aborted, has no stop tokens, or asks for no logarithms."""
    del plain
    for values in ({"aborted_in": None}, {"stop_token_ids": ()}, {"with_logprobs": False}):
        simple = [replace(each, **values) for each in scenario.arrivals]
        if simple != [*scenario.arrivals]:
            yield scenario.with_arrivals(simple)


def _shorter_answers(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    del plain
    for change in _SMALLER:
        for at, each in enumerate(scenario.arrivals):
            if (fewer := change(each.max_new_tokens)) >= 1:
                yield _with(scenario, at, replace(each, max_new_tokens=fewer))


def _shorter_prompts(scenario: Scenario, plain: Mapping[str, Any]) -> Iterator[Scenario]:
    del plain
    for change in _SMALLER:
        for at, each in enumerate(scenario.arrivals):
            if (fewer := change(len(each.prompt))) >= 1:
                yield _with(scenario, at, replace(each, prompt=each.prompt[:fewer]))


def _with(scenario: Scenario, at: int, arrival: Arrival) -> Scenario:
    arrivals = list(scenario.arrivals)
    arrivals[at] = arrival
    return scenario.with_arrivals(arrivals)
