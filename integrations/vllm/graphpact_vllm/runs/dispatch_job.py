"""The choices of vLLM's dispatchers on a laptop: ``python -m graphpact_vllm.runs.dispatch_job JOB RESULT``.

Does not: answer the prompts of the job, or judge the choices; `graphpact_vllm.runs.cli` does.
"""

import sys
from pathlib import Path

from graphpact.engines import EngineJob, EngineResult
from graphpact_vllm.runs import job as _  # noqa: F401  its variables, before vLLM is imported


def run(job: EngineJob) -> EngineResult:
    """Start vLLM's engine, and ask each worker for its choices: the states of the result."""
    from vllm import LLM  # noqa: PLC0415  after the variables

    return EngineResult(answers=[], states=LLM(**job.engine).collective_rpc("graphpact_dispatch"))


if __name__ == "__main__":
    run(EngineJob.load(Path(sys.argv[1]))).save(Path(sys.argv[2]))
