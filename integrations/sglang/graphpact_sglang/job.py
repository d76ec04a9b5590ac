"""One run of SGLang's engine on a laptop: ``python -m graphpact_sglang.job JOB RESULT``.

SGLang starts a process for its scheduler, which imports this module again before it imports SGLang. So the
stand-ins are installed at import.

Does not: judge; `graphpact_sglang.cli` compares two runs.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphpact.files import read_file, write_file
from graphpact_sglang import stand_ins

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder here
STOOD_IN = stand_ins.install()


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


def run(job: Job) -> Result:
    """Start SGLang's engine, answer the prompts greedily, and stop it."""
    import sglang  # noqa: PLC0415  after the stand-ins

    engine = sglang.Engine(**job.engine)
    try:
        outputs = engine.generate(
            job.prompts,
            {"temperature": 0.0, "max_new_tokens": job.max_new_tokens},
            return_logprob=True,
        )
        info = engine.get_server_info()
    finally:
        engine.shutdown()
    answers = [
        Answer(
            text=output["text"],
            token_ids=output["output_ids"],
            logprobs=[value for value, *_ in output["meta_info"]["output_token_logprobs"]],
        )
        for output in outputs
    ]
    states = [state.get("graphpact") for state in info["internal_states"]]
    return Result(answers=answers, states=states, stood_in=STOOD_IN)


if __name__ == "__main__":
    asked = json.loads(read_file(Path(sys.argv[1])))
    run(Job(**asked)).save(Path(sys.argv[2]))
