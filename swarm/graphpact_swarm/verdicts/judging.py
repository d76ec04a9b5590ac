"""`judge`: what is wrong with a run.

    answers     each token is the likeliest one for its request alone, by the reference, or nearly ties
    ends        each request ends once, with its reason and its number of tokens
    replays     the guard and the strict tape found nothing
    memory      nothing is allocated at the end
    progress    the requests are done within a bound of passes, and nothing raised

Does not: run anything.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from graphpact.engines import EngineStep
from graphpact_swarm.outcome import RequestAnswer, RunOutcome
from graphpact_swarm.records import CLOSED, record_of
from graphpact_swarm.scenario import Arrival, Scenario
from graphpact_swarm.verdicts.reference import Reference, ScoredToken

LEAST_TOLERANCE = 1e-4
"""The least difference of two logits, in float32, that decides which token is right."""
MARGIN = 20.0
"""So many measured errors are tolerated, since those of other prompts and batches may be larger."""
_LONGEST = 300  # characters of a text that are printed: torch lists all devices of an operator


@dataclass(frozen=True, kw_only=True)
class RunFinding:
    """One thing that is wrong with a run.

    Args:
        kind: ``tokens``, ``logprobs``, ``end``, ``graph``, ``leak``, ``stuck``, ``raised``, ``process`` or
            ``start``.
        rule: The id of the broken rule of the contract, such as ``GP03``; empty if there is none.
        field: Owner and field of a graph's fault, or what leaked; empty for others.
        step: The pass; -1 if it is not known.
        request: The place of the request; -1 for none.
        text: What was expected and what is there.
        known: What is known about it; empty for a new finding.
    """

    __pydantic_config__: ClassVar = CLOSED

    kind: str
    rule: str = ""
    field: str = ""
    step: int = -1
    request: int = -1
    text: str
    known: str = ""

    @property
    def signature(self) -> tuple[str, str, str]:
        """What makes two findings the same, for shrinking and for the report."""
        return self.kind, self.rule, self.field

    def __str__(self) -> str:
        where = [self.rule, self.field]
        where.append(f"pass {self.step}" if self.step >= 0 else "")
        where.append(f"request {self.request}" if self.request >= 0 else "")
        said = ", ".join(part for part in where if part)
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}..."
        return f"{self.kind}{f' ({said})' if said else ''}: {text}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said about a run.

    Args:
        findings: What is wrong, the first one first; empty if nothing is.
        near_ties: Tokens that are right because two logits nearly tie.
        worst_error: The largest difference of a logarithm of probability from the reference.
        ended_by: The injected fault that the engine ended by; empty if it went on.
        digest: The same for two runs with the same steps, graphs and answers.
        coverage: What was seen, and how often; see `graphpact_swarm.verdicts.coverage`.
        passes: Passes of the engine's loop.
        steps: Batches.
        seconds: How long the run took.
        trace: The end of the traceback of an error.
    """

    __pydantic_config__: ClassVar = CLOSED

    findings: tuple[RunFinding, ...] = ()
    near_ties: int = 0
    worst_error: float = 0.0
    ended_by: str = ""
    digest: str = ""
    coverage: Mapping[str, int] = field(default_factory=dict)
    passes: int = 0
    steps: int = 0
    seconds: float = 0.0
    trace: str = ""

    @property
    def name(self) -> str:
        """``clean``, ``known`` if all findings are known, or ``finding``."""
        if not self.findings:
            return "clean"
        return "known" if all(each.known for each in self.findings) else "finding"

    @property
    def first(self) -> RunFinding | None:
        """The first finding that is new, or else the first one; None for a clean run."""
        return next((each for each in self.findings if not each.known), next(iter(self.findings), None))

    def to_json(self) -> dict[str, Any]:
        """Return it, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Verdict":
        """Return what `to_json` returned.

        Raises:
            UsageError: It is something else.
        """
        return record_of(cls, values)


def judge(scenario: Scenario, outcome: RunOutcome, reference: Reference, measured_error: float) -> Verdict:
    """Return what is wrong with a run.

    Args:
        scenario: What was asked for.
        outcome: What came of it.
        reference: The model.
        measured_error: The largest difference of a logarithm of probability between the engine, which runs
            each request alone and eagerly, and the reference.
    """
    tolerance = max(LEAST_TOLERANCE, MARGIN * measured_error)
    findings = [
        RunFinding(
            kind="graph", rule=fault.rule, field=fault.field, step=at, text=f"{fault.graph}: {fault.text}"
        )
        for at, fault in outcome.faults
    ]
    near_ties, worst = 0, 0.0
    for place, answer in sorted(outcome.answers.items()):
        arrival = scenario.arrivals[place]
        scores = reference.scores(arrival.prompt, answer.tokens)
        near_ties += sum(0 < each.behind <= tolerance for each in scores)
        findings.extend(_wrong_tokens(outcome, place, arrival, scores, tolerance))
        differences = [abs(a - each.logprob) for a, each in zip(answer.logprobs, scores, strict=False)]
        worst = max([worst, *differences])
        findings.extend(_wrong_logprobs(outcome, place, arrival, differences, answer, scores, tolerance))
        if outcome.error is None:
            findings.extend(_wrong_end(place, arrival, answer))
    error = outcome.error
    if error is not None and error.kind != "injected":
        findings.append(
            RunFinding(kind=error.kind, rule=error.rule, step=outcome.passes, text=error.text or error.kind)
        )
    findings.extend(RunFinding(kind="leak", field=_what(leak), text=leak) for leak in outcome.leaks)
    findings.sort(key=lambda each: (each.step < 0, each.step))
    return Verdict(
        findings=tuple(findings),
        near_ties=near_ties,
        worst_error=worst,
        ended_by="raise" if error is not None and error.kind == "injected" else "",
        digest=outcome.digest,
        passes=outcome.passes,
        steps=len(outcome.steps),
        seconds=outcome.seconds,
        trace="" if error is None else error.trace,
    )


def _wrong_tokens(
    outcome: RunOutcome, place: int, arrival: Arrival, scores: list[ScoredToken], tolerance: float
) -> Iterator[RunFinding]:
    """Yield the first token of an answer that is wrong."""
    for at, each in enumerate(scores):
        if each.behind > tolerance:
            step = _step_of(outcome.steps, place, len(arrival.prompt) + at)
            yield RunFinding(
                kind="tokens",
                step=-1 if step is None else step.at,
                request=place,
                text=(
                    f"token {at} of the answer is {each.token}; alone it is {each.best}, whose logit is"
                    f" {each.behind:.3g} higher{_in_step(step)}"
                ),
            )
            return


def _wrong_logprobs(
    outcome: RunOutcome,
    place: int,
    arrival: Arrival,
    differences: list[float],
    answer: RequestAnswer,
    scores: list[ScoredToken],
    tolerance: float,
) -> Iterator[RunFinding]:
    """Yield a wrong number of logarithms of probability, or the first wrong one."""
    is_whole = outcome.error is None and answer.reason in ("length", "stop")
    is_asked = bool(answer.logprobs) or (arrival.with_logprobs and is_whole)
    if is_asked and len(answer.logprobs) != len(answer.tokens):
        yield RunFinding(
            kind="logprobs",
            request=place,
            text=f"{len(answer.tokens)} tokens have {len(answer.logprobs)} logarithms of probabilities",
        )
    for at, difference in enumerate(differences):
        if not difference <= tolerance:  # NaN is wrong too
            step = _step_of(outcome.steps, place, len(arrival.prompt) + at)
            yield RunFinding(
                kind="logprobs",
                step=-1 if step is None else step.at,
                request=place,
                text=(
                    f"token {at} of the answer has the logarithm of probability {answer.logprobs[at]:.6g};"
                    f" alone it is {scores[at].logprob:.6g}{_in_step(step)}"
                ),
            )
            return


def _wrong_end(place: int, arrival: Arrival, answer: RequestAnswer) -> Iterator[RunFinding]:
    """Yield what is wrong with the end of a request, in a run that came to its own end."""
    tokens, stops = answer.tokens, set(arrival.stop_token_ids)
    stopped = next((at for at, token in enumerate(tokens) if token in stops), None)
    count = len(tokens)
    wrong = ""
    if answer.reason is None or (answer.num_ends == 0 and answer.reason != "abort"):
        wrong = "it never ended"
    elif answer.num_ends > 1:
        wrong = f"it ended {answer.num_ends} times"
    elif stopped is not None and stopped < count - 1:
        wrong = f"token {stopped} is a stop token, and {count - 1 - stopped} more followed"
    elif count > arrival.max_new_tokens:
        wrong = f"it has {count} tokens, and asked for {arrival.max_new_tokens} at most"
    elif answer.reason == "abort":
        wrong = "" if arrival.aborted_in is not None else "it was aborted, and nobody asked for it"
    elif answer.reason == "stop":
        wrong = "" if stopped is not None else "it ended by a stop token, and has none"
    elif answer.reason == "length":
        wrong = (
            ""
            if count == arrival.max_new_tokens
            else f"it ended by its length, {arrival.max_new_tokens}, after {count} tokens"
        )
    else:
        wrong = f"it ended by {answer.reason!r}"
    if wrong and answer.reason == "abort" and arrival.aborted_in is not None:
        wrong += ", though it was aborted"
    if wrong:
        yield RunFinding(kind="end", request=place, text=wrong)


def _step_of(steps: list[EngineStep], place: int, position: int) -> EngineStep | None:
    """Return the step that computed the logits at ``position - 1`` of a request; the last one that did."""
    found = None
    for step in steps:
        if step.kind in ("draft", "draft_extend"):
            continue
        for request, tokens, computed in zip(step.requests, step.tokens, step.computed, strict=True):
            if request == place and computed < position <= computed + tokens:
                found = step
    return found


def _in_step(step: EngineStep | None) -> str:
    if step is None:
        return ""
    how = step.graph if step.graph is not None else f"eager, {step.reason}"
    return f" ({step.kind} of {len(step.requests)} requests: {how})"


def _what(leak: str) -> str:
    """Return what leaked, without numbers: the first words."""
    return " ".join(word for word in leak.split() if not any(c.isdigit() for c in word))[:60]
