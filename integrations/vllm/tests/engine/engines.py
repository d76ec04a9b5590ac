"""Start vLLM's engine in a forked child, and run a function on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import forked_child
from engine_run import MODEL, PROMPTS, ROOT, SECONDS, EngineRun, requests

from graphpact.engines import PromptRequest
from graphpact_vllm.in_process import InProcessEngine
from graphpact_vllm.runs import GRAPHS, LAPTOP

__all__ = ["ENGINE", "MODEL", "PROMPTS", "ROOT", "SECONDS", "Run", "requests", "run_engine", "run_in_child"]

ENGINE: dict[str, Any] = LAPTOP | GRAPHS | {"model": str(MODEL)}


@dataclass(frozen=True, kw_only=True)
class Run(EngineRun):
    """What a run gave.

    Args:
        preemptions: How often the scheduler preempted a request.
    """

    preemptions: int

    def verified(self) -> int:
        """Return how many replays were compared with an eager run."""
        return sum(graph["verified"] for graph in self.state["guard"]["graphs"].values())


def run_engine(
    given: Sequence[PromptRequest],
    arguments: dict[str, Any],
    plant: Callable[[InProcessEngine], None] | None = None,
    rounds: int = 1,
    before: Callable[[], None] | None = None,
) -> Run:
    """Start an engine in this process, run ``given``, and return what came.

    Args:
        given: The requests.
        arguments: Arguments of vLLM.
        plant: Changes the engine before the run.
        rounds: How often all requests run.
        before: Is called before the engine starts.
    """
    from graphpact_vllm.hooks import state

    if before is not None:
        before()
    engine = InProcessEngine(**ENGINE | arguments)
    if plant is not None:
        plant(engine)
    scheduler = engine.engine.engine_core.engine_core.scheduler
    scheduler._preempt_request = preempt = Mock(wraps=scheduler._preempt_request)
    for _ in range(rounds):
        engine.run(given)
    return Run(
        tokens=[request.output_ids for request in given],
        reasons=[request.finish_reason for request in given],
        state=state(),
        preemptions=preempt.call_count,
    )


def run_in_child(
    words: str,
    given: Sequence[PromptRequest] | None = None,
    plant: Callable[[InProcessEngine], None] | None = None,
    rounds: int = 1,
    before: Callable[[], None] | None = None,
    runner: int = 2,
    environment: dict[str, str] | None = None,
    seconds: float = SECONDS,
    **arguments: Any,
) -> Run:
    """Run requests in an engine of a child with ``GRAPHPACT=words`` and the model runner V1 or V2."""
    variables = {"GRAPHPACT": words, "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)} | (environment or {})
    found: Run = forked_child.in_child(
        run_engine,
        requests() if given is None else given,
        arguments,
        plant,
        rounds,
        before,
        environment=variables,
        seconds=seconds,
    )
    return found
