"""Bugs that SGLang or its kin had, each planted in the real SGLang of a child process.

They lie in its scheduler, its overlapped loop and its pools. A plant patches classes and modules; processes
fork, so a patch ends with its child. Two checks of SGLang that the swarm switches on, and production does not
have, are off in plants that keep accounts wrong: they would find them before an answer is wrong.

Does not: run anything; `test_swarm` does.
"""

import os
from typing import Any

from planted_runs import ANSWERS, Plant, patch, plants_in

PLANTS: dict[str, Plant] = {}
"""The plants by name."""
ONE_RANK = {"parallel": 1}
"""Two ranks start anew for each seed, and the faults are in each of them."""
STARVED = {"cache_tokens": 192, "conservativeness": 0.1}
"""Requests are retracted, and prefixes are evicted, only where the cache is full."""
plant = plants_in(PLANTS, models=("llama", "windows"))


def as_in_production() -> None:
    """Switch off the checks of SGLang that are off by default."""
    os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "0"
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"


# -- scheduler and the overlapped loop ---------------------------------------------------------------


@plant(*ANSWERS, fixed=ONE_RANK)
def rows_stay_in_place() -> None:
    """A request leaves a batch, and the rows of the others do not move up (sglang-omni 1743)."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    @patch(ScheduleBatch, "filter_batch")
    def _(original: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        count, rows = len(batch.reqs), batch.req_pool_indices
        original(batch, *args, **kwargs)
        if 0 < len(batch.reqs) < count:
            batch.req_pool_indices = rows[: len(batch.reqs)]


@plant("end", "raised", fixed=ONE_RANK | {"overlap": True})
def token_after_the_end() -> None:
    """The result of the step that ran while a request ended is taken too (sglang 6184).

    Only the overlapped schedule runs such a step.
    """
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    as_in_production()

    @patch(SchedulerBatchResultProcessor, "process_batch_result_decode")
    def _(original: Any, processor: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(processor, "enable_overlap", False)  # it is frozen
        try:
            original(processor, *args, **kwargs)
        finally:
            object.__setattr__(processor, "enable_overlap", True)


@plant("end", "raised", "leak", fixed=ONE_RANK)
def aborted_waits_on() -> None:
    """A request that is aborted while it waits is told of, and stays in the queue (sglang 6855)."""
    from sglang.srt.managers.scheduler import Scheduler

    @patch(Scheduler, "abort_request")
    def _(original: Any, scheduler: Any, asked: Any) -> None:
        waiting = list(scheduler.waiting_queue)
        original(scheduler, asked)
        scheduler.waiting_queue[:] = waiting


# -- pools -------------------------------------------------------------------------------------------


@plant(*ANSWERS, "raised", "leak", fixed=ONE_RANK | {"overlap": True, "page_size": 1, "drafts": None})
def freed_by_two_paths() -> None:
    """The slot of the step that ran while a request ended is freed with it, and once more (sglang 12224).

    Only the overlapped schedule has such a slot; it was freed alone with pages of one token, without drafts.
    """
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    as_in_production()

    @patch(SchedulerBatchResultProcessor, "process_batch_result_decode")
    def _(original: Any, processor: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        ended = [at for at, request in enumerate(batch.reqs) if request.finished()]
        original(processor, batch, *args, **kwargs)
        for at in ended:
            processor.token_to_kv_pool_allocator.free(batch.out_cache_loc[at : at + 1])


@plant(*ANSWERS, "raised", "leak", fixed=ONE_RANK | STARVED | {"prefix_cache": True})
def frees_the_shared_prefix() -> None:
    """A request that is retracted, or aborted in a chunk, frees pages that the tree keeps (sglang 38319)."""
    from sglang.srt.managers import schedule_batch, scheduler

    as_in_production()

    for module in (schedule_batch, scheduler):

        @patch(module, "release_kv_cache")
        def _(original: Any, request: Any, *args: Any, checkpoint: bool, **kwargs: Any) -> None:
            if not checkpoint:
                request.kv.cache_protected_len = 0
            original(request, *args, checkpoint=checkpoint, **kwargs)
