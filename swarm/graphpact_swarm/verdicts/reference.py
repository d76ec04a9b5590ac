"""`Reference`: what the model of `transformers` says about an answer, in float32, each request by itself.

One eager pass over prompt and answer gives the logits from which each token of the answer was chosen. So an
answer is judged token by token, and a token that differs only because two logits nearly tie does not make the
rest wrong.

Does not: judge; `graphpact_swarm.verdicts.judging` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpact.errors import UsageError
from graphpact.plugin_calls import describe_error


@dataclass(frozen=True)
class ScoredToken:
    """What the reference says about one token of an answer.

    Args:
        token: The token of the answer.
        best: The likeliest token there.
        behind: How far the logit of ``token`` is behind that of ``best``; 0 if it is ``best``.
        logprob: The logarithm of the probability of ``token``.
    """

    token: int
    best: int
    behind: float
    logprob: float


class Reference:
    """The model of a checkpoint, in float32 on the CPU, without a KV cache.

    Args:
        path: The folder of the checkpoint.

    Raises:
        UsageError: `transformers` cannot load it.
    """

    def __init__(self, path: Path) -> None:
        import torch  # noqa: PLC0415  seconds, and only where a run is judged
        from transformers import AutoModelForCausalLM  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            )
        except Exception as error:
            raise UsageError(
                f"--model {path}: transformers cannot load it: {describe_error(error)}",
                hint="the swarm judges answers by the model of transformers; give a model that it knows",
            ) from error
        self._model.eval()

    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> list[ScoredToken]:
        """Return what the reference says about each token of an answer, given those before it."""
        import torch  # noqa: PLC0415  loaded

        if not answer:
            return []
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
            logprobs = logits.log_softmax(-1)
            best = logits.argmax(-1)
            at = torch.arange(len(answer))
            chosen = torch.tensor(list(answer))
            behind = logits[at, best] - logits[at, chosen]
            return [
                ScoredToken(*values)
                for values in zip(
                    answer, best.tolist(), behind.tolist(), logprobs[at, chosen].tolist(), strict=True
                )
            ]
