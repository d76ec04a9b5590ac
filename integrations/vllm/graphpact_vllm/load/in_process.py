"""`InProcessEngine`: vLLM's scheduler and model in this process, driven step by step.

Engine, scheduler, caches and runners are vLLM's own. Requests come from a list, each before its step, so that
a run is the same each time, which tests and generated load need.

Does not: tokenize, or serve several processes; vLLM's ``LLM`` does.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphpact.engines import NotDoneError, PromptRequest

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
        self._group = self.engine.dp_group
        if self._group is not None:
            self._step_with_all()

    @property
    def core(self) -> Any:
        """Scheduler and executor, vLLM's ``EngineCore``."""
        return self.engine.engine_core.engine_core

    @property
    def worker(self) -> Any:
        """The only worker of the engine."""
        return self.engine.model_executor.driver_worker.worker

    @property
    def model_runner(self) -> Any:
        """The model runner of the target model."""
        return self.worker.model_runner

    def run(
        self,
        requests: Sequence[PromptRequest],
        most_steps: int = 10_000,
        on_pass: Callable[[int], None] | None = None,
        known: Callable[[str, int], None] | None = None,
    ) -> int:
        """Run requests to their ends, and return the number of passes of the loop.

        With data parallelism all ranks call it, and each of its passes is one of all ranks.

        Args:
            requests: The requests, whose results are filled in.
            most_steps: The most passes.
            on_pass: Is called with the number of each pass before it.
            known: Is called with vLLM's name of a request, and its place in ``requests``, before it is added.

        Raises:
            NotDoneError: They are not done after ``most_steps``.
        """
        self._runs += 1
        places: dict[str, int] = {}
        last = self._most_of_all(max((request.arrives_in for request in requests), default=0))
        at, has_work = 0, True
        while at <= last or has_work:
            if at >= most_steps:
                raise NotDoneError(
                    f"vLLM: requests are not done after {most_steps} passes of its loop",
                    hint="allow more passes, or look for a request that makes no progress",
                )
            if on_pass is not None:
                on_pass(at)
            for place, request in enumerate(requests):
                name = f"{self._runs}-{place}"
                if request.arrives_in == at:
                    places[name] = place
                    self._add(name, place, request, known)
                if request.aborted_in == at and name in places:
                    self.engine.abort_request([name])
                    request.finish_reason = request.finish_reason or "abort"
            has_work = self.engine.has_unfinished_requests()
            for output in self.engine.step() if has_work else ():
                _take(requests[places[output.request_id]], output)
            at += 1
        return at

    def drain(self) -> None:
        """Run what is left when all requests ended.

        The model runner hears of the last ones in the next batch, which may be an empty one. With
        asynchronous scheduling a batch of ended requests may be on its way.
        """
        while self._most_of_all(bool(self.core.batch_queue) or self.core.scheduler.has_requests()):
            self.engine.engine_core.get_output()

    def _step_with_all(self) -> None:
        """Run a dummy batch in a pass without a batch, as vLLM's server does: other ranks wait for it.

        vLLM's ``LLMEngine`` does so for a rank without requests, and not for one whose requests must wait.
        """
        core, after = self.core, self.core.post_step

        def post_step(*, model_executed: bool) -> None:
            after(model_executed=model_executed)
            if not model_executed:
                core.execute_dummy_batch()

        core.post_step = post_step

    def _most_of_all(self, count: int) -> int:
        """Return the largest ``count`` of all ranks of data parallelism."""
        if self._group is None:
            return count
        most = torch.tensor([count], dtype=torch.int64)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return int(most)

    def _add(
        self, name: str, place: int, request: PromptRequest, known: Callable[[str, int], None] | None
    ) -> None:
        from vllm import SamplingParams  # noqa: PLC0415  after the plugins
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            stop_token_ids=list(request.stop_token_ids),
            logprobs=0 if request.with_logprobs else None,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        if known is not None:
            known(name, place)
        self.engine.add_request(name, {"prompt_token_ids": list(request.token_ids)}, params)


def _take(request: PromptRequest, output: Any) -> None:
    """Fill in what vLLM gave for a request in a step: all tokens so far."""
    (answer,) = output.outputs
    request.output_ids = list(answer.token_ids)
    if request.with_logprobs and answer.logprobs is not None:
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        request.output_logprobs = [chosen[token].logprob for token, chosen in pairs]
    if answer.finish_reason is not None:
        request.finish_reason = request.finish_reason or answer.finish_reason
        request.num_ends += 1
