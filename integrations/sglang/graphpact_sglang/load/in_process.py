"""`InProcessEngine`: SGLang's scheduler and model in this process, driven pass by pass.

Its event loop, scheduler, caches and runners are SGLang's own. Only the sockets are replaced: requests come
from a list, each in its pass of the loop, and answers are read from what the scheduler gives out. So a run is
the same each time, which tests and generated load need.

Does not: tokenize, or serve several processes; SGLang's ``Engine`` does.
"""

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.plugins import load_plugins

from graphpact.engines import NotDoneError, PromptRequest


class InProcessEngine:
    """SGLang's scheduler and model in this process.

    Args:
        rank: The rank of this process. The engines of all ranks of tensor parallelism run the same requests;
            ranks of data parallel attention run requests of their own, and all of them ``run`` at the same
            time.
        arguments: Arguments of SGLang's ``ServerArgs``; several ranks need one ``nccl_port``.

    Attributes:
        scheduler: SGLang's scheduler.
        at: The number of the pass of the event loop, from 0; -1 before a run.
    """

    def __init__(self, *, rank: int = 0, **arguments: Any) -> None:
        load_plugins()
        from sglang.srt.managers import scheduler  # noqa: PLC0415  after the plugins
        from sglang.srt.server_args import ServerArgs  # noqa: PLC0415
        from sglang.srt.utils import configure_logger  # noqa: PLC0415

        server_args = ServerArgs(**arguments)
        server_args.resolve_once()
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        ranks = scheduler.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
        scheduler.publish(server_args, role="scheduler", ranks=ranks)
        configure_logger(server_args)
        self.scheduler: Any = scheduler.Scheduler(server_args, _ports(server_args))
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=self._receive)
        self._without_load_snapshots()
        channels = self.scheduler.ipc_channels
        channels.send_to_detokenizer.send_output = self._take_output
        channels.send_to_tokenizer.send_output = self._take_abort
        self._requests: list[PromptRequest] = []
        self._known: dict[str, Any] = {}
        self._places: dict[str, int] = {}
        self._on_pass: Callable[[int], None] | None = None
        self._runs, self._most = 0, 0
        self.at = -1

    def _without_load_snapshots(self) -> None:
        """Write no numbers of the load for SGLang's other processes: each start would leave a file."""
        writer, self.scheduler.load_snapshot_writer = self.scheduler.load_snapshot_writer, None
        if writer is not None:
            writer.close()
            if hasattr(writer, "path"):
                Path(writer.path).unlink(missing_ok=True)

    @property
    def model_runner(self) -> Any:
        """The model runner of the target model."""
        return self.scheduler.tp_worker.model_runner

    def run(
        self,
        requests: Sequence[PromptRequest],
        most_passes: int = 10_000,
        on_pass: Callable[[int], None] | None = None,
    ) -> int:
        """Run requests to their ends, and return the number of passes of the event loop.

        Args:
            requests: The requests; their results are filled in, also if the run fails.
            most_passes: The most passes of the event loop.
            on_pass: Is called with the number of each pass before anything arrives in it.

        Raises:
            NotDoneError: They are not done after ``most_passes``.
        """
        self._requests, self._known, self.at = list(requests), {}, -1
        self._runs += 1
        self._places = {self._name(at): at for at in range(len(self._requests))}
        self._most, self._on_pass = most_passes, on_pass
        for request in self._requests:
            request.output_ids, request.output_logprobs = [], []
            request.finish_reason, request.num_ends = None, 0
        add = type(self.scheduler)._add_request_to_queue  # noqa: SLF001  no other way to know a request

        def known(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._known[request.rid] = request
            request.eos_token_ids, request.tokenizer = set(), None  # the model's own end tokens do not end it
            return add(self.scheduler, request, *args, **kwargs)

        self.scheduler._add_request_to_queue = known  # noqa: SLF001
        self.scheduler.gracefully_exit = False
        try:
            self.scheduler.run_event_loop()
        finally:
            for at, request in enumerate(self._requests):
                self._complete(request, self._known.get(self._name(at)))
        return self.at + 1

    def place_of(self, rid: str) -> int:
        """Return the place in the list of the request that SGLang knows as ``rid``."""
        return self._places[rid]

    def _name(self, at: int) -> str:
        return f"{self._runs}-{at:06}"  # SGLang aborts all requests whose names begin with that of an abort

    def _complete(self, request: PromptRequest, its: Any) -> None:
        """Fill in what a request got, if the scheduler has given out no end of it."""
        if its is None or request.num_ends:
            return
        request.output_ids = list(its.output_ids_through_stop)[: request.max_new_tokens]
        request.finish_reason = _reason(its.finished_reason.to_json()) if its.finished_reason else None

    # -- what SGLang sends -----------------------------------------------------------------------

    def _take_output(self, output: Any, recv_obj: object = None) -> None:
        """Take what the scheduler gives to the detokenizer."""
        del recv_obj
        if not hasattr(output, "finished_reasons"):  # no answers of requests
            return
        logprobs = getattr(output, "output_token_logprobs_val", None)
        for at, (rid, reason) in enumerate(zip(output.rids, output.finished_reasons, strict=True)):
            place = self._places.get(rid)
            if place is None:
                continue
            request = self._requests[place]
            if getattr(output, "output_ids", None) is not None:
                request.output_ids += list(output.output_ids[at])
            if request.with_logprobs and logprobs is not None and logprobs[at]:
                request.output_logprobs += list(logprobs[at])
            if reason is not None:
                self._end(request, _reason(reason))

    def _take_abort(self, output: Any, recv_obj: object = None) -> None:
        """Take what the scheduler gives to the tokenizer: requests that it aborted while they did not run."""
        del recv_obj
        if type(output).__name__ != "AbortReq" or (place := self._places.get(output.rid)) is None:
            return
        request = self._requests[place]
        its = self._known.get(output.rid)
        if its is not None:  # what was not given out yet
            request.output_ids += list(its.output_ids_through_stop)[len(request.output_ids) :]
        self._end(request, "abort")

    @staticmethod
    def _end(request: PromptRequest, reason: str) -> None:
        request.num_ends += 1
        request.finish_reason = request.finish_reason or reason

    # -- what SGLang receives --------------------------------------------------------------------

    def _receive(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        """Return what arrives in this pass."""
        self.at += 1
        if self.at > self._most:
            raise NotDoneError(f"the requests are not done after {self._most} passes")
        if self._on_pass is not None:
            self._on_pass(self.at)
        from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415

        arrived: list[Any] = [*local_reqs]
        for at, request in enumerate(self._requests):
            if request.arrives_in == self.at:
                arrived.append(self._arriving(at, request))
            if request.aborted_in == self.at:
                arrived.append(AbortReq(rid=self._name(at)))
        last = max((each.arrives_in for each in self._requests), default=0)
        is_done = not arrived and self.at > last and self.scheduler.is_fully_idle()
        if self._all_ranks_are(is_done):
            self.scheduler.gracefully_exit = True
        return arrived

    def _arriving(self, at: int, request: PromptRequest) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_token_ids) or None,
            ignore_eos=False,  # with it SGLang ignores stop tokens, and admits only what fits for certain
        )
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=self._name(at),
            input_text="",
            input_ids=array("q", request.token_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=request.with_logprobs,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def _all_ranks_are(self, is_done: bool) -> bool:  # noqa: FBT001
        """Return whether all ranks are done: each takes part in the steps of the others."""
        if not self.scheduler.require_mlp_sync:
            return is_done
        from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

        done = torch.tensor([int(is_done)])
        torch.distributed.all_reduce(
            done, op=torch.distributed.ReduceOp.MIN, group=get_parallel().tp_group.cpu_group
        )
        return bool(done)


def _ports(server_args: Any) -> Any:
    """Return names of sockets that leave no files.

    SGLang's own choice requires a port that another rank of data parallel attention may have taken.
    """
    from sglang.srt.server_args import PortArgs  # noqa: PLC0415
    from sglang.srt.utils.network import get_free_port_below_ephemeral  # noqa: PLC0415

    names = ("tokenizer", "scheduler_input", "detokenizer", "rpc", "metrics")
    return PortArgs(
        nccl_port=server_args.nccl_port or get_free_port_below_ephemeral(),
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        instance_id=f"graphpact-{os.getpid()}",
        **{f"{name}_ipc_name": f"ipc://@graphpact-{os.getpid()}-{name}" for name in names},
    )


def _reason(finished: Any) -> str:
    """Return why a request ended, from SGLang's own reason."""
    kind = finished["type"] if isinstance(finished, dict) else str(finished)
    return str(kind)
