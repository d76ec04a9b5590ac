"""Start vLLM's engine in a forked child, and run a function on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked_child
from transformers import AutoTokenizer

from graphpact.engines import PromptRequest
from graphpact_vllm.in_process import InProcessEngine
from graphpact_vllm.runs import GRAPHS, LAPTOP

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "examples/models/tiny-llama"
PROMPTS = (
    "Return the number of",
    "Open a file for",
    "The ",
    "def main(",
    "Write the ",
    "a",
    "import ",
    "x = ",
)
ENGINE: dict[str, Any] = LAPTOP | GRAPHS | {"model": str(MODEL)}
SECONDS = 240
"""How long a child may take."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run gave.

    Args:
        tokens: The tokens of each answer.
        reasons: Why each answer ended.
        state: What graphpact counted; see `graphpact_vllm.hooks.state`.
        preemptions: How often the scheduler preempted a request.
    """

    tokens: list[list[int]]
    reasons: list[str | None]
    state: dict[str, Any]
    preemptions: int

    @property
    def faults(self) -> list[tuple[str, str, str, str]]:
        """Rule, owner, field and graph of each fault."""
        found = self.state["guard"]["faults"] if self.state["guard"] else []
        return [(each["rule"], each["owner"], each["field"], each["graph"]) for each in found]

    def replays(self, runner: str = "") -> int:
        """Return how often the graphs of a runner were replayed."""
        graphs = self.state["steps"]["graphs"].items()
        return sum(counts["replays"] for name, counts in graphs if name.startswith(runner))

    def verified(self) -> int:
        """Return how many replays were compared with an eager run."""
        return sum(graph["verified"] for graph in self.state["guard"]["graphs"].values())


def requests(
    prompts: Sequence[str] = PROMPTS, max_new_tokens: int = 16, every: int = 2
) -> list[PromptRequest]:
    """Return a request for each prompt, one before every few steps of the engine."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        PromptRequest(token_ids=tokenizer.encode(text), max_new_tokens=max_new_tokens, arrives_in=at * every)
        for at, text in enumerate(prompts)
    ]


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
