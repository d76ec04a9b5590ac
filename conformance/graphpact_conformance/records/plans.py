"""`verdicts`: what the declared invariants say of a plan. `PlanWatch`: the broken ones of every preparation.

Does not: know what a plan contains, or put the plan of another batch into its memory; see
`graphpact_conformance.experiments.plan_invariants`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphpact.attention import AttentionBackend, DraftMetadata, each_step
from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.records.raised import message_of


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """What an invariant says.

    Args:
        name: The invariant.
        holds: Whether it is true; None if it cannot tell.
        why: What it returned or raised, if it is not true.
        error: The error that it raised.
    """

    name: str
    holds: bool | None
    why: str = ""
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class BrokenInvariant:
    """An invariant that is false after a preparation.

    Args:
        hook: The hook that made the metadata.
        verdict: What the invariant says.
        problem: The batch of the step; None at a capture of a dummy.
        shape: The shape of the metadata; None if it is not known.
    """

    hook: str
    verdict: PlanVerdict
    problem: Problem | None
    shape: GraphShape | None


class PlanWatch:
    """Evaluates the invariants of a backend's plans after each preparation of a lane.

    Attributes:
        broken: The broken invariants, the first of each hook and name.
        problem: The batch of the current step; None outside steps.
    """

    def __init__(self) -> None:
        self.broken: dict[tuple[str, str], BrokenInvariant] = {}
        self.problem: Problem | None = None

    def note(
        self,
        hook: str,
        backend: AttentionBackend,
        view: ForwardBatch,
        metadata: Any,
        shape: GraphShape | None,
    ) -> None:
        """Keep the invariants that are false for this metadata."""
        for each in verdicts(backend, view, metadata):
            if each.holds is False:
                at = BrokenInvariant(hook, each, self.problem, shape)
                self.broken.setdefault((hook, each.name), at)


def verdicts(backend: AttentionBackend, view: ForwardBatch, metadata: Any) -> Iterator[PlanVerdict]:
    """Yield what each invariant says of each draft step."""
    for name, holds in backend.plan_invariants.items():
        for step, (at, part) in enumerate(each_step(view, metadata)):
            where = f" in draft step {step}" if isinstance(metadata, DraftMetadata) else ""
            try:
                said = holds(backend, at, part)
            except Exception as error:  # noqa: BLE001  the plugin's code may raise anything
                yield PlanVerdict(name, holds=False, why=f"{message_of(error)}{where}", error=error)
            else:
                right = None if said is None else bool(said)
                yield PlanVerdict(name, right, why="" if right else f"false{where}")
