"""Shrinking: the result has the same finding, and nothing that the finding does not need."""

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact_swarm.scenario import Arrival, Scenario
from graphpact_swarm.shrink import shrunk_scenario
from graphpact_swarm.verdicts.judging import RunFinding, Verdict

PLAIN: Mapping[str, Any] = {"page_size": 16, "mixed": False, "backend": "a", "model": "llama"}
FOUND = RunFinding(kind="tokens", text="wrong")
OTHER = RunFinding(kind="leak", field="pages", text="3 pages")


def verdict(*findings: RunFinding) -> Verdict:
    """Return a verdict."""
    return Verdict(findings=findings)


class Runs:
    """A function that runs scenarios, by a predicate that says which are wrong."""

    def __init__(self, is_wrong: Callable[[Scenario], bool], *otherwise: RunFinding) -> None:
        self.is_wrong, self.otherwise = is_wrong, otherwise
        self.seen: list[Scenario] = []

    def __call__(self, scenario: Scenario) -> Verdict | None:
        """Return the finding, or what is found otherwise."""
        self.seen.append(scenario)
        return verdict(FOUND) if self.is_wrong(scenario) else verdict(*self.otherwise)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Draw a request."""
    arrives = draw(st.integers(0, 50))
    return Arrival(
        prompt=tuple(range(draw(st.integers(1, 40)))),
        max_new_tokens=draw(st.integers(1, 20)),
        arrives_in=arrives,
        aborted_in=draw(st.none() | st.integers(arrives, arrives + 10)),
        stop_token_ids=draw(st.just(()) | st.just((7, 9))),
        with_logprobs=draw(st.booleans()),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a scenario."""
    choice = {
        "page_size": draw(st.sampled_from([16, 1])),
        "mixed": draw(st.booleans()),
        "backend": draw(st.sampled_from(["a", "b"])),
        "model": draw(st.sampled_from(["llama", "window"])),
        "requests": 3,  # a value of the load, which is not changed
    }
    return Scenario(
        engine="e", choice=choice, arrivals=tuple(draw(st.lists(arrivals(), min_size=1, max_size=9))), seed=5
    )


@given(scenario=scenarios(), count=st.integers(1, 4), prompt=st.integers(1, 12), answer=st.integers(1, 6))
@settings(max_examples=60)
def test_only_what_the_finding_needs_is_left(
    scenario: Scenario, count: int, prompt: int, answer: int
) -> None:
    """If a finding needs requests of some length and one feature, the smallest such scenario is found."""

    def large(each: Scenario) -> int:
        return sum(len(a.prompt) >= prompt and a.max_new_tokens >= answer for a in each.arrivals)

    if not large(scenario):
        prompt = answer = 1
    count = min(count, large(scenario))

    def is_wrong(each: Scenario) -> bool:
        return large(each) >= count and each.choice["backend"] == scenario.choice["backend"]

    run = Runs(is_wrong)
    small, told = shrunk_scenario(scenario, FOUND, run, PLAIN, trials=5000)
    assert is_wrong(small)
    assert (told is None) == (small == scenario)
    assert [(len(a.prompt), a.max_new_tokens) for a in small.arrivals] == [(prompt, answer)] * count
    assert all(a.aborted_in is None and not a.stop_token_ids and not a.with_logprobs for a in small.arrivals)
    assert all(a.arrives_in == 0 for a in small.arrivals)
    assert small.choice == {**PLAIN, "backend": scenario.choice["backend"], "requests": 3}
    assert (small.seed, small.engine) == (scenario.seed, scenario.engine)


@given(scenario=scenarios(), trials=st.integers(0, 40))
def test_the_number_of_trials_is_a_bound(scenario: Scenario, trials: int) -> None:
    """No more scenarios run, none twice, and not the given one."""
    run = Runs(lambda each: len(each.arrivals) >= 2)
    shrunk_scenario(scenario, FOUND, run, PLAIN, trials=trials)
    texts = [repr(each) for each in run.seen]
    assert len(texts) <= trials
    assert len({*texts, repr(scenario)}) == len(texts) + 1


@given(scenario=scenarios())
def test_another_finding_is_not_followed(scenario: Scenario) -> None:
    """Scenarios with another finding only, or that the engine refuses, are never the result."""
    run = Runs(lambda _: False, OTHER)
    assert shrunk_scenario(scenario, FOUND, run, PLAIN) == (scenario, None)
    assert shrunk_scenario(scenario, FOUND, lambda _: None, PLAIN) == (scenario, None)


@given(scenario=scenarios())
def test_a_finding_among_others_is_followed(scenario: Scenario) -> None:
    """The finding may have another text, and another one may come before it."""
    same = RunFinding(kind=FOUND.kind, text="other numbers", step=9)
    small, told = shrunk_scenario(scenario, FOUND, lambda _: verdict(OTHER, same), PLAIN, trials=2000)
    assert len(small.arrivals) == 1
    assert told in (None, verdict(OTHER, same))


@given(scenario=scenarios())
def test_an_abort_stays_as_late_as_it_was(scenario: Scenario) -> None:
    """Requests that arrive earlier are aborted as many passes after their arrival as before."""
    delays = {a.aborted_in - a.arrives_in for a in scenario.arrivals if a.aborted_in is not None}
    run = Runs(lambda each: any(a.aborted_in is not None for a in each.arrivals))
    small, _ = shrunk_scenario(scenario, FOUND, run, PLAIN, trials=500)
    left = [a for a in small.arrivals if a.aborted_in is not None]
    if delays:
        assert len(small.arrivals) == len(left) == 1
        assert left[0].aborted_in in delays
        assert left[0].arrives_in == 0
