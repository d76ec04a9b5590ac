"""Start vLLM's engine in a forked child, and run a function on it."""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import forked_child
import pytest
from engine_run import MODEL, PROMPTS, ROOT, SECONDS, EngineRun, requests
from vllm.utils.network_utils import get_open_port

from graphpact.engines import PromptRequest
from graphpact_vllm.arguments import GRAPHS, LAPTOP
from graphpact_vllm.load.in_process import InProcessEngine

__all__ = [
    "ENGINE",
    "MODEL",
    "NGRAMS",
    "PROMPTS",
    "REPEATED",
    "ROOT",
    "SECONDS",
    "Run",
    "requests",
    "run_engine",
    "run_in_child",
    "run_in_ranks",
    "sweep_but",
]

ENGINE: dict[str, Any] = LAPTOP | GRAPHS | {"model": str(MODEL)}
NGRAMS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [4, 8, 16, 32],
    },
}
"""Drafts by n-grams, and full graphs of four tokens for each request."""
REPEATED = ("x = 1\nx = 1\nx = 1\n", "ababababab", "a b a b a b a b ")
"""Prompts for which n-grams find drafts."""


def sweep_but(usual: Collection[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of ``axes`` for ``parametrize``; those that are not in ``usual`` are sweeps."""
    every = [*itertools.product(*axes)]
    assert set(usual) <= set(every), "a usual case that is none"
    return [each if each in usual else pytest.param(*each, marks=pytest.mark.sweep) for each in every]


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


def run_in_ranks(
    words: str,
    given: Sequence[Sequence[PromptRequest]],
    before: Sequence[Callable[[], None] | None] = (None, None),
    runner: int = 2,
    seconds: float = SECONDS,
    **arguments: Any,
) -> list[tuple[Run | None, str | None]]:
    """Run an engine in a child for each rank of data parallelism, as vLLM's example for offline use does.

    Args:
        words: The value of ``GRAPHPACT``.
        given: The requests of each rank.
        before: For each rank, is called before its engine starts.
        runner: The model runner, 1 or 2.
        seconds: How long all of it may take.
        arguments: Arguments of vLLM.

    Returns:
        For each rank the run, or the traceback of its error.
    """
    shared = {
        "GRAPHPACT": words,
        "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_DP_SIZE": str(len(given)),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(get_open_port()),
    }
    arguments = {"distributed_executor_backend": "uni"} | arguments
    calls = [
        (
            (its, arguments, None, 1, before[rank]),
            shared | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)},
        )
        for rank, its in enumerate(given)
    ]
    return forked_child.in_children(run_engine, calls, seconds)
