"""`RunOutcome`: everything that came of a run.

Does not: say what is wrong with it; `graphpact_swarm.verdicts` does.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field

from graphpact.engines import EngineStep, GraphFault


@dataclass(frozen=True, kw_only=True)
class RunError:
    """Why a run ended early.

    Args:
        kind: ``raised``, ``stuck`` for requests that were not done in time, ``injected`` for a fault that was
            injected and that the engine ended by, or ``process`` for a process that ended or hung.
        rule: The id of the broken rule, if the error is one of the contract.
        text: The error.
        trace: The end of its traceback.
    """

    kind: str
    rule: str = ""
    text: str = ""
    trace: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestAnswer:
    """What a request got.

    Args:
        tokens: Its tokens.
        logprobs: Their logarithms of probability; empty if it did not ask.
        reason: Why it ended; None if it did not.
        num_ends: How often the engine said so.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: str | None = None
    num_ends: int = 0


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What came of a run.

    Args:
        answers: Those of the requests, by their places in the scenario.
        steps: The batches that ran.
        faults: What the guard found, each with the pass in which it was there first.
        leaks: What was still allocated at the end.
        passes: Passes of the engine's loop.
        seconds: How long it took.
        error: Why it ended early; None if it did not.
    """

    answers: dict[int, RequestAnswer]
    steps: list[EngineStep] = field(default_factory=list)
    faults: list[tuple[int, GraphFault]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    passes: int = 0
    seconds: float = 0.0
    error: RunError | None = None

    @property
    def digest(self) -> str:
        """A text that is the same for two runs with the same steps, graphs and answers."""
        values = [
            {at: asdict(answer) | {"logprobs": ()} for at, answer in sorted(self.answers.items())},
            [asdict(step) for step in self.steps],
            self.error and (self.error.kind, self.error.rule),
        ]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
