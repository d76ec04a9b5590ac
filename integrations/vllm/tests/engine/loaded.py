"""Start vLLM for generated load in forked children, and run requests."""

import copy
import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_child
from engine_run import MODEL, SECONDS, requests
from vllm.utils.network_utils import get_open_port

from graphpact.engines import (
    EngineStart,
    EngineStep,
    GraphFault,
    InjectedFault,
    Landmarks,
    PromptRequest,
)
from graphpact_vllm.load.engine import LoadedVllm
from graphpact_vllm.load.offer import VllmLoad

PLAIN: dict[str, Any] = {feature.name: feature.values[0] for feature in VllmLoad().features()}


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Args:
        requests: The requests with their answers.
        steps: The batches.
        faults: What the guard found.
        leaks: What was left; None after an error.
        landmarks: Numbers of the engine.
        error: The traceback of an error, or None.
    """

    requests: list[PromptRequest]
    steps: list[EngineStep]
    faults: list[GraphFault]
    leaks: list[str] | None
    landmarks: Landmarks
    error: str | None

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [request.output_ids for request in self.requests]

    def is_clean(self) -> bool:
        """Return whether each request ended once, nothing was found, and nothing is left."""
        ends = [request.num_ends == (request.finish_reason != "abort") for request in self.requests]
        return self.error is None and not self.faults and self.leaks == [] and all(ends)

    def replays(self, kind: str = "") -> int:
        """Return how many batches of a kind, or of all kinds, were replays."""
        return sum(step.graph is not None and kind in ("", step.kind) for step in self.steps)


def given(max_new_tokens: int = 10, **changed: Any) -> list[PromptRequest]:
    """Return requests, of which two have the same long beginning."""
    found = requests(max_new_tokens=max_new_tokens, every=1)
    for request in found[2:4]:
        request.token_ids = [*range(3, 37), *request.token_ids]
    return [dataclasses.replace(request, **changed) for request in found]


def _run(
    how: EngineStart,
    its: Sequence[PromptRequest],
    faults: Sequence[InjectedFault],
    before: Callable[[], None] | None,
    plant: Callable[[LoadedVllm], None] | None,
    most_passes: int,
) -> Outcome:
    if before is not None:
        before()
    engine = VllmLoad().start(how)
    assert isinstance(engine, LoadedVllm)
    if plant is not None:
        plant(engine)
    error = None
    try:
        engine.run(its, most_passes=most_passes, on_pass=lambda at: None, faults=faults)
    except Exception:  # noqa: BLE001  tests look at it
        error = traceback.format_exc()
    leaks = engine.leaks() if error is None else None
    return Outcome(list(its), engine.steps, engine.faults(), leaks, engine.landmarks, error)


def load(
    choice: Mapping[str, Any],
    its: Sequence[PromptRequest] | None = None,
    *,
    faults: Sequence[InjectedFault] = (),
    before: Callable[[], None] | None = None,
    plant: Callable[[LoadedVllm], None] | None = None,
    most_passes: int = 300,
    **how: Any,
) -> Outcome:
    """Run requests in an engine with a choice that differs from the plainest one."""
    start = EngineStart(choice=PLAIN | choice, **{"model": MODEL} | how)
    asked = copy.deepcopy(given() if its is None else its)
    found: Outcome = forked_child.in_child(
        _run,
        start,
        asked,
        faults,
        before,
        plant,
        most_passes,
        environment=VllmLoad().variables(),
        seconds=SECONDS,
    )
    return found


def load_ranks(
    choice: Mapping[str, Any], its: Sequence[Sequence[PromptRequest]], model: Path, **how: Any
) -> list[Outcome]:
    """Run requests in an engine of several ranks, each in a child."""
    port = get_open_port()
    calls = [
        (
            (
                EngineStart(choice=PLAIN | choice, model=model, rank=rank, port=port, **how),
                copy.deepcopy(list(asked)),
                (),
                None,
                None,
                300,
            ),
            VllmLoad().variables(),
        )
        for rank, asked in enumerate(its)
    ]
    outcomes = []
    for outcome, error in forked_child.in_children(_run, calls, SECONDS):
        assert error is None, error
        outcomes.append(outcome)
    return outcomes
