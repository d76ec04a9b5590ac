"""`EngineOffer`: what an integration offers of the engine into which it puts graphpact.

Commands find an engine by the entry-point group ``graphpact.engines``, and import nothing of it:

    offer = PluginCatalog.scan().select("engine", "sglang")()
    result = offer.run("tape,guard", EngineJob(engine={...}, prompts=["The "], max_new_tokens=8))

Does not: know an engine, or import torch.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

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


class EngineOffer(ABC):
    """An engine that runs with graphpact inside. It is built without arguments, and imports no engine.

    Attributes:
        name: The engine's own name, such as ``SGLang``.
    """

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Return why the engine cannot run in this environment, with what to do; None if it can."""

    @abstractmethod
    def run(self, words: str, job: EngineJob) -> EngineResult:
        """Run a job greedily, in processes of its own.

        Args:
            words: The value of ``GRAPHPACT``; empty for the engine without graphpact.
            job: What to run.

        Raises:
            EngineError: The engine failed; the message has the end of its log.
        """
