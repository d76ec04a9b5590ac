"""`Job` and `Result`: what a run of SGLang's engine is given, and what it gives.

Does not: run it; `graphpact_sglang.job` does, in a process of its own.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphpact.files import read_file, write_file

LAPTOP: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "grammar_backend": "none",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "skip_server_warmup": True,
    "log_level": "warning",
}
"""Arguments of SGLang's ``Engine`` on a laptop, but for the checkpoint."""
GRAPHS: dict[str, Any] = {
    "cuda_graph_backend_decode": "full",
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "cuda_graph_backend_prefill": "breakable",
    "cuda_graph_bs_prefill": [16, 32, 64, 128],
}
"""Arguments by which it captures its steps, as it does on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Args:
        engine: Arguments of SGLang's ``Engine``.
        prompts: The prompts, which run together.
        max_new_tokens: The most tokens of an answer.
    """

    engine: dict[str, Any]
    prompts: list[str]
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Answer:
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
class Result:
    """What a run gave.

    Args:
        answers: The answers, in the order of the prompts.
        states: What graphpact counted, one for each scheduler; None without graphpact.
        stood_in: Packages that are not installed, and that were stood in for.
    """

    answers: list[Answer]
    states: list[dict[str, Any] | None]
    stood_in: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the result to ``path``."""
        write_file(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Read a result that `save` wrote."""
        values = json.loads(read_file(path))
        return cls(**values | {"answers": [Answer(**answer) for answer in values["answers"]]})
