"""One run of vLLM's engine on a laptop: ``python -m graphpact_vllm.runs.job JOB RESULT``.

Does not: judge; `graphpact_cli.engine_verdict` compares two runs.
"""

import os
import sys
from pathlib import Path

from graphpact.engines import EngineAnswer, EngineJob, EngineResult

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder here
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less to start


def run(job: EngineJob) -> EngineResult:
    """Start vLLM's engine, and answer the prompts greedily."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  after the variables

    engine = LLM(**job.engine)
    outputs = engine.generate(
        job.prompts, SamplingParams(temperature=0, max_tokens=job.max_new_tokens, logprobs=0), use_tqdm=False
    )
    answers = [
        EngineAnswer(
            text=answer.text,
            token_ids=list(answer.token_ids),
            logprobs=[
                chosen[token].logprob for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
        )
        for output in outputs
        for answer in output.outputs[:1]
    ]
    states = engine.collective_rpc("graphpact_state") if os.environ.get("GRAPHPACT") else [None]
    return EngineResult(answers=answers, states=states)


if __name__ == "__main__":
    run(EngineJob.load(Path(sys.argv[1]))).save(Path(sys.argv[2]))
