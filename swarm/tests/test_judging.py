"""Verdicts: each kind of wrong answer, end, leak and error is a finding, and a right run has none."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpact.engines import EngineStep, GraphFault
from graphpact_swarm.outcome import RequestAnswer, RunError, RunOutcome
from graphpact_swarm.scenario import Arrival, Scenario
from graphpact_swarm.verdicts.judging import LEAST_TOLERANCE, MARGIN, Verdict, judge
from graphpact_swarm.verdicts.reference import Reference, ScoredToken

LOGPROB = -0.5


class Counting(Reference):
    """A model whose likeliest token is one more than the token before.

    Args:
        behind: How far the logits of other tokens are behind.
    """

    def __init__(self, behind: float = 3.0) -> None:
        self.behind = behind

    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> list[ScoredToken]:
        """Return the scores of an answer."""
        before = [*prompt[-1:], *answer]
        return [
            ScoredToken(token, last + 1, 0.0 if token == last + 1 else self.behind, LOGPROB)
            for last, token in zip(before, answer, strict=False)
        ]


ASKED = Arrival(prompt=(10, 11, 12), max_new_tokens=4)
RIGHT = RequestAnswer(tokens=(13, 14, 15, 16), reason="length", num_ends=1)
STOPS = replace(ASKED, stop_token_ids=(14, 99))
STOPPED = RequestAnswer(tokens=(13, 14), reason="stop", num_ends=1)
ABORTS = replace(ASKED, aborted_in=3)
SCORED = replace(ASKED, with_logprobs=True)
LOGPROBS = (LOGPROB,) * 4
STEPS = [
    EngineStep(at=2, kind="prefill", requests=(0,), tokens=(3,), computed=(0,), reason="none fits"),
    EngineStep(at=5, kind="decode", requests=(1, 0), tokens=(1, 1), computed=(8, 3), graph="decode[4]"),
    EngineStep(at=7, kind="decode", requests=(0,), tokens=(1,), computed=(4,), graph="decode[1]"),
]


def judged(
    arrival: Arrival, answer: RequestAnswer, *, measured: float = 0.0, behind: float = 3.0, **more: Any
) -> Verdict:
    """Return the verdict about a run of one request."""
    scenario = Scenario(engine="e", choice={}, arrivals=(arrival,))
    outcome = RunOutcome(answers={0: answer}, steps=STEPS, passes=9, **more)
    return judge(scenario, outcome, Counting(behind), measured)


@pytest.mark.parametrize(
    ("arrival", "answer"),
    [
        pytest.param(ASKED, RIGHT, id="all tokens"),
        pytest.param(STOPS, STOPPED, id="stopped"),
        pytest.param(replace(STOPS, max_new_tokens=2), STOPPED, id="stopped by its last token"),
        pytest.param(ABORTS, RequestAnswer(tokens=(13,), reason="abort", num_ends=1), id="aborted"),
        pytest.param(ABORTS, RequestAnswer(reason="abort", num_ends=1), id="aborted at once"),
        pytest.param(ABORTS, RIGHT, id="done before its abort"),
        pytest.param(SCORED, replace(RIGHT, logprobs=LOGPROBS), id="logprobs"),
        pytest.param(
            replace(SCORED, aborted_in=3),
            RequestAnswer(tokens=(13,), reason="abort", num_ends=1),
            id="aborted before its logprobs came",
        ),
    ],
)
def test_a_right_run_has_no_finding(arrival: Arrival, answer: RequestAnswer) -> None:
    """Each way to end is right, if it is the one that was asked for."""
    assert judged(arrival, answer) == Verdict(digest=judged(arrival, answer).digest, passes=9, steps=3)


@pytest.mark.parametrize(
    ("arrival", "answer", "kind", "words"),
    [
        (
            ASKED,
            replace(RIGHT, tokens=(13, 50, 51, 52)),
            "tokens",
            "token 1 of the answer is 50; alone it is 14",
        ),
        (ASKED, replace(RIGHT, tokens=(13, 14, 15)), "end", "by its length, 4, after 3 tokens"),
        (ASKED, replace(RIGHT, tokens=(13, 14, 15, 16, 17)), "end", "5 tokens, and asked for 4"),
        (ASKED, replace(RIGHT, reason=None, num_ends=0), "end", "never ended"),
        (ASKED, replace(RIGHT, num_ends=0), "end", "never ended"),
        (ASKED, replace(RIGHT, num_ends=2), "end", "ended 2 times"),
        (ASKED, replace(RIGHT, reason="stop"), "end", "ended by a stop token, and has none"),
        (ASKED, replace(RIGHT, reason="error"), "end", "ended by 'error'"),
        (ASKED, RequestAnswer(tokens=(13,), reason="abort", num_ends=1), "end", "nobody asked for it"),
        (STOPS, RIGHT, "end", "token 1 is a stop token, and 2 more followed"),
        (STOPS, replace(STOPPED, tokens=(13,)), "end", "has none"),
        (SCORED, RIGHT, "logprobs", "4 tokens have 0 logarithms"),
        (SCORED, replace(RIGHT, logprobs=LOGPROBS[1:]), "logprobs", "4 tokens have 3 logarithms"),
        (SCORED, replace(RIGHT, logprobs=(-0.5, -0.7, -0.5, -0.5)), "logprobs", "token 1 of the answer"),
        (
            SCORED,
            replace(RIGHT, logprobs=(-0.5, -0.5, -0.5, float("nan"))),
            "logprobs",
            "token 3 of the answer",
        ),
    ],
)
def test_a_wrong_answer_is_a_finding(arrival: Arrival, answer: RequestAnswer, kind: str, words: str) -> None:
    """It has the kind, the request and what is wrong."""
    findings = judged(arrival, answer).findings
    assert [(each.kind, each.request) for each in findings] == [(kind, 0)]
    assert words in findings[0].text


def test_a_wrong_token_names_its_step() -> None:
    """It is the step that computed the logits from which the token was chosen."""
    steps = [(2, "prefill of 1 requests: eager, none fits"), (5, "decode[4]"), (7, "decode[1]")]
    for at, (step, how) in enumerate(steps):
        tokens = tuple(13 + each + 30 * (each >= at) for each in range(4))
        (finding,) = judged(ASKED, replace(RIGHT, tokens=tokens)).findings
        assert finding.step == step
        assert how in finding.text


@given(behind=st.floats(0.0, 2.0), measured=st.floats(0.0, 0.05))
def test_near_ties_are_right(behind: float, measured: float) -> None:
    """A token is wrong only if its logit is further behind than so many measured errors."""
    tolerance = max(LEAST_TOLERANCE, MARGIN * measured)
    answer = replace(RIGHT, tokens=(13, 50, 51, 52))
    verdict = judged(ASKED, answer, measured=measured, behind=behind)
    assert bool(verdict.findings) == (behind > tolerance)
    assert verdict.near_ties == (0 < behind <= tolerance)


@pytest.mark.parametrize(
    ("more", "signature", "step"),
    [
        ({"leaks": ["17 KV pages are allocated"]}, ("leak", "", "KV pages are allocated"), -1),
        (
            {"faults": [(4, GraphFault(rule="GP01", field="B.kv_indptr", graph="decode[4]", text="moved"))]},
            ("graph", "GP01", "B.kv_indptr"),
            4,
        ),
        ({"error": RunError(kind="stuck", text="not done")}, ("stuck", "", ""), 9),
        ({"error": RunError(kind="raised", rule="GP03", text="poison")}, ("raised", "GP03", ""), 9),
    ],
)
def test_what_is_wrong_beside_answers_is_a_finding(
    more: dict[str, Any], signature: tuple[str, str, str], step: int
) -> None:
    """A leak, a fault of the guard and an error each are one, with their rule, field and pass."""
    verdict = judged(ASKED, RIGHT, **more)
    assert [(each.signature, each.step) for each in verdict.findings] == [(signature, step)]
    assert (verdict.name, Verdict.from_json(verdict.to_json())) == ("finding", verdict)


def test_leaks_of_other_numbers_are_the_same() -> None:
    """So that a leak of one page is the shrunk form of a leak of many."""
    signatures = {
        judged(ASKED, RIGHT, leaks=[f"{n} KV pages are allocated"]).findings[0].signature for n in (1, 17)
    }
    assert len(signatures) == 1


def test_an_injected_error_excuses_what_it_interrupts() -> None:
    """The engine may end by it: requests need not end, but their tokens must still be right."""
    injected = RunError(kind="injected", text="a step was made to raise")
    cut = RequestAnswer(tokens=(13,))
    verdict = judged(ASKED, cut, error=injected)
    assert (verdict.findings, verdict.ended_by) == ((), "raise")
    assert [each.kind for each in judged(ASKED, replace(cut, tokens=(50,)), error=injected).findings] == [
        "tokens"
    ]


def test_the_first_finding_is_the_earliest() -> None:
    """Findings are in the order of passes; those without a pass come last."""
    fault = GraphFault(rule="GP01", field="B.kv_indptr", graph="decode[4]", text="moved")
    wrong = replace(RIGHT, tokens=(13, 14, 50, 51))
    late = judged(ASKED, wrong, faults=[(8, fault)], leaks=["1 row"]).findings
    assert [(each.kind, each.step) for each in late] == [("tokens", 7), ("graph", 8), ("leak", -1)]
