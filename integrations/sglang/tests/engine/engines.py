"""Start SGLang's scheduler in a forked child, and run a function on it."""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import forked_child
from engine_run import MODEL, PROMPTS, ROOT, SECONDS, EngineRun, requests
from sglang.srt.plugins import load_plugins

from graphpact.engines import PromptRequest
from graphpact_sglang.arguments import GRAPHS, LAPTOP
from graphpact_sglang.load.in_process import InProcessEngine

__all__ = [
    "ENGINE",
    "MODEL",
    "PROMPTS",
    "ROOT",
    "SECONDS",
    "Run",
    "in_child",
    "requests",
    "run_engine",
    "run_in_child",
    "run_ranks",
]

Run = EngineRun
ENGINE: dict[str, Any] = LAPTOP | GRAPHS | {"model_path": str(MODEL), "log_level": "error"}


def in_child(function: Callable[..., Any], *args: Any, words: str, seconds: float = SECONDS) -> Any:
    """Return what ``function(*args)`` returns in a forked child with ``GRAPHPACT=words``."""
    return forked_child.in_child(function, *args, environment={"GRAPHPACT": words}, seconds=seconds)


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
        arguments: Arguments of SGLang.
        plant: Changes the engine before the run.
        rounds: How often all requests run.
        before: Is called before the engine starts.
    """
    from graphpact_sglang.hooks import state

    load_plugins()
    if (ranks := arguments.get("tp_size", 1)) > 1:
        cores = os.sched_getaffinity(0)
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(sorted(cores)[rank % len(cores)]) for rank in range(ranks)
        )
    if before is not None:
        before()
    engine = InProcessEngine(**ENGINE | arguments)
    if plant is not None:
        plant(engine)
    for _ in range(rounds):
        engine.run(given)
    return Run(
        tokens=[request.output_ids for request in given],
        reasons=[request.finish_reason for request in given],
        state=state(),
    )


def run_in_child(
    words: str,
    given: Sequence[PromptRequest] | None = None,
    plant: Callable[[InProcessEngine], None] | None = None,
    rounds: int = 1,
    before: Callable[[], None] | None = None,
    seconds: float = SECONDS,
    **arguments: Any,
) -> Run:
    """Run requests in an engine of a child with ``GRAPHPACT=words``."""
    given = requests() if given is None else given
    found: Run = in_child(run_engine, given, arguments, plant, rounds, before, words=words, seconds=seconds)
    return found


def run_ranks(
    words: str,
    ranks: int,
    given: Sequence[PromptRequest],
    plant: Callable[[InProcessEngine], None] | None = None,
    rounds: int = 1,
    before: Callable[[], None] | None = None,
    **arguments: Any,
) -> list[Run]:
    """Run requests in an engine for each rank of tensor parallelism, each in a child."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"tp_size": ranks, "nccl_port": port} | arguments if ranks > 1 else arguments
    with ThreadPoolExecutor(ranks) as pool:
        runs = [
            pool.submit(run_in_child, words, given, plant, rounds, before, **shared | {"rank": rank})
            for rank in range(ranks)
        ]
        return [run.result() for run in runs]
