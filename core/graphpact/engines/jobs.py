"""`EngineJob` and `EngineResult`: prompts for an engine in processes of its own, and its answers, as files.

Does not: run a job; `graphpact.engines.offer` does.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphpact.files import read_file, write_file


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """What to run.

    Args:
        engine: The engine's own arguments.
        prompts: The prompts, which run together.
        max_new_tokens: The most tokens of an answer.
    """

    engine: dict[str, Any]
    prompts: list[str]
    max_new_tokens: int

    def save(self, path: Path) -> None:
        """Write the job to ``path``."""
        write_file(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "EngineJob":
        """Read a job that `save` wrote."""
        return cls(**json.loads(read_file(path)))


@dataclass(frozen=True, kw_only=True)
class EngineAnswer:
    """One answer.

    Args:
        text: Its text.
        token_ids: Its tokens.
        logprobs: The logarithm of each token's probability.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """What a run gave.

    Args:
        answers: The answers, in the order of the prompts.
        states: What graphpact counted, one for each scheduler; None without graphpact.
        stood_in: Packages that are not installed, and that were stood in for.
    """

    answers: list[EngineAnswer]
    states: list[dict[str, Any] | None]
    stood_in: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the result to ``path``."""
        write_file(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "EngineResult":
        """Read a result that `save` wrote."""
        values = json.loads(read_file(path))
        return cls(**values | {"answers": [EngineAnswer(**answer) for answer in values["answers"]]})
