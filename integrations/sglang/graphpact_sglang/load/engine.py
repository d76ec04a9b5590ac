"""`SglangLoadedEngine`: a started SGLang in this process, and one run of requests.

The same requests give the same steps:

- requests arrive by passes of the event loop, and SGLang serves waiting ones in the order of their arrival;
- the prefix cache orders its entries by a count of accesses, not by time;
- the share of new tokens for which SGLang reserves memory decays by steps, and is set back in an idle pass;
- with the overlapped schedule results are processed a pass later, in the same thread and order;
- requests are named by their places; nothing is sampled, and no order depends on hashes.

SGLang reads clocks for metrics, and for time-outs of requests, which are off unless
``SGLANG_REQ_WAITING_TIMEOUT`` or ``SGLANG_REQ_RUNNING_TIMEOUT`` is set. Its watchdog, a thread that ends the
process by the clock, is not started.

Does not: draw requests, or judge answers.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from graphpact.engines import (
    EngineStart,
    EngineStep,
    GraphFault,
    InjectedFault,
    Landmarks,
    LoadedEngine,
    PromptRequest,
)
from graphpact_sglang.load.faults import Injection
from graphpact_sglang.load.in_process import InProcessEngine
from graphpact_sglang.load.leaks import leaks_of
from graphpact_sglang.load.ownership import Poison
from graphpact_sglang.load.steps import StepLog


def warm_up() -> None:
    """Import what each start would import, and keep threads away: a process that has them may not fork.

    Three things of SGLang are changed in this process, none of which decides what a step does:

    - its watchdog is not started: a thread that ends the process by the clock;
    - the overlapped schedule stays on with drafts: SGLang switches it off on CPUs, and the tape goes the ways
      of a GPU;
    - progress bars start no thread.
    """
    import torch  # noqa: PLC0415
    import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415
    from sglang.srt.arg_groups import speculative_hook  # noqa: PLC0415
    from sglang.srt.managers import scheduler  # noqa: PLC0415

    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    scheduler.create_scheduler_watchdog = _nothing
    speculative_hook._disable_overlap_schedule_for_cpu = _nothing  # noqa: SLF001


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


class SglangLoadedEngine(LoadedEngine):
    """SGLang, started.

    Args:
        how: How it is started.
        arguments: SGLang's arguments.
    """

    def __init__(self, how: EngineStart, arguments: dict[str, Any]) -> None:
        if (ranks := arguments.get("tp_size", 1)) > 1:
            cores = sorted(os.sched_getaffinity(0))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(ranks)
            )
        self.engine = InProcessEngine(rank=how.rank, **arguments)
        from graphpact_sglang.hooks import InProcess  # noqa: PLC0415  after the plugins

        self._in_process = InProcess
        scheduler = self.engine.scheduler
        self._log = StepLog(scheduler, InProcess.counts, lambda: self.engine.at, self.engine.place_of)
        if how.is_strict:
            poison = Poison(scheduler)
            self._log.before.append(poison.fill)
            self._log.after.append(poison.check)
        self.landmarks = _landmarks(scheduler)

    @property
    def steps(self) -> list[EngineStep]:  # type: ignore[override]
        """The batches of the run."""
        return self._log.steps

    def run(
        self,
        requests: Sequence[PromptRequest],
        *,
        most_passes: int,
        on_pass: Callable[[int], None],
        faults: Sequence[InjectedFault] = (),
    ) -> None:
        """Run requests to their ends; see `LoadedEngine.run`."""
        injection = Injection(self.engine.scheduler, faults)

        def begin(at: int) -> None:
            on_pass(at)
            injection.begin_pass(at)

        try:
            self.engine.run(requests, most_passes, begin)
        finally:
            injection.give_back()

    def faults(self) -> list[GraphFault]:
        """Return what the guard found so far."""
        hooks = self._in_process.guard
        return [] if hooks is None or hooks.guard is None else hooks.guard.log.found()

    def leaks(self) -> list[str]:
        """Return what is still allocated."""
        return list(leaks_of(self.engine.scheduler))


def _landmarks(scheduler: Any) -> Landmarks:
    runner, args = scheduler.tp_worker.model_runner, scheduler.server_args
    page, cache = scheduler.page_size, scheduler.max_total_num_tokens
    chunk = (
        args.chunked_prefill_size if (args.chunked_prefill_size or 0) > 0 else scheduler.max_prefill_tokens
    )
    return Landmarks(
        request_counts=tuple(sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", ()))),
        token_counts=tuple(sorted(getattr(runner.prefill_cuda_graph_runner, "capture_num_tokens", ()))),
        page_size=page,
        chunk=chunk,
        verify_width=args.speculative_num_draft_tokens or 1,
        # SGLang refuses prompts within 5 of its limit, and cuts answers that leave it no page to spare.
        max_len=min(scheduler.max_req_len - 5, cache - 2 * page),
        max_requests=scheduler.max_running_requests,
        cache_tokens=cache,
    )
