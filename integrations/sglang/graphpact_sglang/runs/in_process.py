"""`InProcessEngine`: SGLang's scheduler and model in this process, driven pass by pass.

Its event loop, scheduler, caches and runners are SGLang's own. Only the two sockets are replaced: requests
come from a list, each in its pass of the loop, and answers are read from the scheduler's requests. So a run
is the same each time, which tests and generated load need.

Does not: tokenize, or serve several processes; SGLang's ``Engine`` does.
"""

import os
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins import load_plugins

from graphpact.engines import PromptRequest


class InProcessEngine:
    """SGLang's scheduler and model in this process.

    Args:
        rank: The rank of this process. The engines of all ranks run the same requests, each in a process.
        arguments: Arguments of SGLang's ``ServerArgs``; several ranks need one ``nccl_port``.
    """

    def __init__(self, *, rank: int = 0, **arguments: Any) -> None:
        load_plugins()
        from sglang.srt.managers import scheduler  # noqa: PLC0415  after the plugins
        from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: PLC0415
        from sglang.srt.utils import configure_logger  # noqa: PLC0415

        server_args = ServerArgs(**arguments)
        server_args.resolve_once()
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        ranks = scheduler.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
        scheduler.publish(server_args, role="scheduler", ranks=ranks)
        configure_logger(server_args)
        self.scheduler: Any = scheduler.Scheduler(server_args, PortArgs.init_new(server_args))
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=self._receive)
        self.scheduler.ipc_channels.send_to_detokenizer.socket = None  # then it drops what it gets
        self._requests: list[PromptRequest] = []
        self._known: dict[str, Any] = {}
        self._at = self._runs = 0

    @property
    def model_runner(self) -> Any:
        """The model runner of the target model."""
        return self.scheduler.tp_worker.model_runner

    def run(self, requests: Sequence[PromptRequest], most_passes: int = 10_000) -> int:
        """Run requests to their ends, and return the number of passes of the event loop.

        Raises:
            RuntimeError: They are not done after ``most_passes``.
        """
        self._requests, self._known, self._at = list(requests), {}, 0
        self._runs += 1
        self._most = most_passes
        add = type(self.scheduler)._add_request_to_queue  # noqa: SLF001  no other way to know a request

        def known(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._known[request.rid] = request
            return add(self.scheduler, request, *args, **kwargs)

        self.scheduler._add_request_to_queue = known  # noqa: SLF001
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        for at, request in enumerate(self._requests):
            its = self._known[self._name(at)]
            request.output_ids = list(its.output_ids)[: request.max_new_tokens]
            request.finish_reason = its.finished_reason.to_json()["type"] if its.finished_reason else None
        return self._at

    def _name(self, at: int) -> str:
        return f"{self._runs}-{at}"

    def _receive(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        """Return what arrives in this pass."""
        from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        if self._at > self._most:
            raise RuntimeError(f"the requests are not done after {self._most} passes")
        arrived: list[Any] = [*local_reqs]
        for at, request in enumerate(self._requests):
            if request.arrives_in == self._at:
                params = SamplingParams(
                    temperature=0.0, max_new_tokens=request.max_new_tokens, ignore_eos=True
                )
                params.normalize(None)
                arrived.append(
                    TokenizedGenerateReqInput(
                        rid=self._name(at),
                        input_text="",
                        input_ids=array("q", request.token_ids),
                        input_embeds=None,
                        mm_inputs=None,
                        token_type_ids=None,
                        sampling_params=params,
                        return_logprob=False,
                        logprob_start_len=-1,
                        top_logprobs_num=0,
                        token_ids_logprob=None,
                        stream=False,
                    )
                )
            if request.aborted_in == self._at:
                arrived.append(AbortReq(rid=self._name(at)))
        self._at += 1
        is_idle = self.scheduler.is_fully_idle()
        last = max((each.arrives_in for each in self._requests), default=0)
        if not arrived and is_idle and self._at > last + 1:
            self.scheduler.gracefully_exit = True
        return arrived
