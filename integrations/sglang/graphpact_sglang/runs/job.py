"""One run of SGLang's engine on a laptop: ``python -m graphpact_sglang.runs.job JOB RESULT``.

SGLang starts a process for its scheduler, which imports this module again before it imports SGLang. So the
stand-ins are installed at import.

Does not: judge; `graphpact_sglang.runs.cli` compares two runs.
"""

import os
import sys
from pathlib import Path

from graphpact.engines import EngineAnswer, EngineJob, EngineResult
from graphpact_sglang import stand_ins

if not os.environ.get("GRAPHPACT"):  # the tape is a platform of its own
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder here
STOOD_IN = stand_ins.install()


def run(job: EngineJob) -> EngineResult:
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
        EngineAnswer(
            text=output["text"],
            token_ids=output["output_ids"],
            logprobs=[value for value, *_ in output["meta_info"]["output_token_logprobs"]],
        )
        for output in outputs
    ]
    states = [state.get("graphpact") for state in info["internal_states"]]
    return EngineResult(answers=answers, states=states, stood_in=STOOD_IN)


if __name__ == "__main__":
    run(EngineJob.load(Path(sys.argv[1]))).save(Path(sys.argv[2]))
