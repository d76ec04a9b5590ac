"""`SglangLoadedEngine`: a started SGLang in this process, and one run of requests.

What the same run twice could differ by, and does not:

- arrivals are by passes of the event loop, and SGLang's policy for waiting requests is first come, first served;
- the prefix cache orders its entries by a count of accesses, not by time;
- the ratio by which SGLang reserves memory for new tokens decays by steps, and is set back when it is idle, which
  is counted in passes too;
- with the overlapped schedule there is one thread still: results are processed a pass later, in the same order;
- names of requests are counted, nothing is sampled, and hashes of strings order no batch.

SGLang reads clocks only for its metrics, for time-outs of requests (off unless ``SGLANG_REQ_WAITING_TIMEOUT`` or
``SGLANG_REQ_RUNNING_TIMEOUT`` is set), and in its watchdog, a thread that a forked child does not have.

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
from graphpact_sglang.load.ownership import Poison
from graphpact_sglang.load.steps import StepLog
from graphpact_sglang.runs.in_process import InProcessEngine


def warm_up() -> None:
    """Import what each start would import, and keep threads away: a process that has them may not fork."""
    import sglang.srt.managers.scheduler  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import tqdm  # noqa: PLC0415

    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    sglang.srt.managers.scheduler.create_scheduler_watchdog = _no_watchdog


def _no_watchdog(*args: Any, **kwargs: Any) -> None:
    """Start no thread that ends the process by the clock."""


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
        if hooks is None or hooks.guard is None:
            return []
        return [
            GraphFault(rule=each["rule"], field=f"{each['owner']}.{each['field']}", graph=each["graph"], text=each["text"])
            for each in hooks.guard.summary()["faults"]
        ]

    def leaks(self) -> list[str]:
        """Return what is still allocated."""
        return list(_leaks(self.engine.scheduler))


def _landmarks(scheduler: Any) -> Landmarks:
    runner, args = scheduler.tp_worker.model_runner, scheduler.server_args
    page, cache = scheduler.page_size, scheduler.max_total_num_tokens
    chunk = args.chunked_prefill_size if (args.chunked_prefill_size or 0) > 0 else scheduler.max_prefill_tokens
    return Landmarks(
        request_counts=tuple(sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", ()))),
        token_counts=tuple(sorted(getattr(runner.prefill_cuda_graph_runner, "capture_num_tokens", ()))),
        page_size=page,
        chunk=chunk,
        verify_width=args.speculative_num_draft_tokens or 1,
        # SGLang refuses prompts within 5 of its limit, and cuts answers for which it would have no page to spare.
        max_len=min(scheduler.max_req_len - 5, cache - 2 * page),
        max_requests=scheduler.max_running_requests,
        cache_tokens=cache,
    )


def _leaks(scheduler: Any) -> Any:
    """Yield what is still allocated, in words."""
    for name in ("waiting_queue", "result_queue"):
        if waiting := getattr(scheduler, name):
            yield f"{len(waiting)} in {name}"
    for name in ("running_batch", "last_batch"):
        batch = getattr(scheduler, name)
        if batch is not None and batch.reqs:
            yield f"requests in {name}: {', '.join(request.rid for request in batch.reqs)}"
    if scheduler.chunked_req is not None:
        yield f"chunked_req: {scheduler.chunked_req.rid}"
    if scheduler._pending_chunked_abort_req is not None:  # noqa: SLF001
        yield f"an abort waits: {scheduler._pending_chunked_abort_req.rid}"  # noqa: SLF001
    if scheduler.grammar_manager.grammar_queue:
        yield f"{len(scheduler.grammar_manager.grammar_queue)} in the queue of grammars"
    rows = scheduler.req_to_token_pool
    if len(rows.free_slots) != rows.size or len(set(rows.free_slots)) != rows.size:
        yield f"{len(rows.free_slots)} of {rows.size} rows of req_to_token are free: {sorted(rows.free_slots)}"
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    free = allocator.get_all_free_pages()
    if len(free) != len(free.unique()):
        yield "a page is free twice"
    if held := cache.protected_size():
        yield f"{held} tokens of the prefix cache are locked"
    if cache.evictable_size():
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415

        cache.evict(EvictParams(num_tokens=cache.evictable_size()))
    if allocator.available_size() != scheduler.max_total_num_tokens:
        yield (
            f"{allocator.available_size()} of {scheduler.max_total_num_tokens} tokens of the KV cache are free"
            " after the prefix cache was emptied"
        )
    checker = scheduler.invariant_checker
    has_leak, messages = checker._check_all_pools(scheduler.pool_stats_observer.get_pool_stats())  # noqa: SLF001
    if has_leak:
        yield from (f"SGLang's own check: {message}" for message in messages if message)
