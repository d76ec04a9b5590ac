"""`InProcessEngine`: vLLM's scheduler and model in this process, driven step by step.

Engine, scheduler, caches and runners are vLLM's own. Requests come from a list, each before its step, so that
a run is the same each time, which tests and generated load need.

Does not: tokenize, or serve several processes; vLLM's ``LLM`` does.
"""

import os
from collections.abc import Sequence
from typing import Any

from graphpact.engines import PromptRequest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process


class InProcessEngine:
    """vLLM's engine in this process.

    Args:
        arguments: Arguments of vLLM's ``EngineArgs``.
    """

    def __init__(self, **arguments: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415  after the variable
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._runs = 0

    @property
    def worker(self) -> Any:
        """The only worker of the engine."""
        return self.engine.model_executor.driver_worker.worker

    @property
    def model_runner(self) -> Any:
        """The model runner of the target model."""
        return self.worker.model_runner

    def run(self, requests: Sequence[PromptRequest], most_steps: int = 10_000) -> int:
        """Run requests to their ends, and return the number of passes of the loop.

        With data parallelism all ranks ask in each pass whether one of them has work. So the last request of
        each rank arrives in the same pass, or a rank has none.

        Raises:
            RuntimeError: They are not done after ``most_steps``.
        """
        from vllm import SamplingParams  # noqa: PLC0415  after the plugins

        self._runs += 1
        names = {f"{self._runs}-{at}": request for at, request in enumerate(requests)}
        last = max((request.arrives_in for request in requests), default=0)
        at, has_work = 0, True
        while at <= last or has_work:
            if at > most_steps:
                raise RuntimeError(f"the requests are not done after {most_steps} steps")
            for name, request in names.items():
                if request.arrives_in == at:
                    params = SamplingParams(temperature=0, max_tokens=request.max_new_tokens, ignore_eos=True)
                    prompt = {"prompt_token_ids": list(request.token_ids)}
                    self.engine.add_request(name, prompt, params)
                if request.aborted_in == at:
                    self.engine.abort_request([name])
                    request.finish_reason = "abort"
            has_work = self.engine.has_unfinished_requests()
            for output in self.engine.step() if has_work else ():
                answer, request = output.outputs[0], names[output.request_id]
                request.output_ids = list(answer.token_ids)
                request.finish_reason = answer.finish_reason or request.finish_reason
            at += 1
        return at
