"""`EngineRun`, and the requests of tests with real engines.

Does not: import an engine, or start one; each integration's ``engines.py`` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from graphpact.engines import PromptRequest

ROOT = Path(__file__).resolve().parents[1]
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
SECONDS = 240
"""How long a child may take."""


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What a run gave.

    Args:
        tokens: The tokens of each answer.
        reasons: Why each answer ended.
        state: What graphpact counted in the engine's process.
    """

    tokens: list[list[int]]
    reasons: list[str | None]
    state: dict[str, Any]

    @property
    def faults(self) -> list[tuple[str, str, str, str]]:
        """Rule, owner, field and graph of each fault."""
        found = self.state["guard"]["faults"] if self.state["guard"] else []
        return [(each["rule"], each["owner"], each["field"], each["graph"]) for each in found]

    def replays(self, runner: str = "") -> int:
        """Return how often the graphs of a runner were replayed."""
        graphs = self.state["steps"]["graphs"].items()
        return sum(counts["replays"] for name, counts in graphs if name.startswith(runner))


def requests(
    prompts: Sequence[str] = PROMPTS, max_new_tokens: int = 16, every: int = 2
) -> list[PromptRequest]:
    """Return a request for each prompt, one before every few passes of the engine's loop."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        PromptRequest(token_ids=tokenizer.encode(text), max_new_tokens=max_new_tokens, arrives_in=at * every)
        for at, text in enumerate(prompts)
    ]
