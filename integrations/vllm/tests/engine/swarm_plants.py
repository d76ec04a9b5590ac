"""Bugs that vLLM had, each planted in the real vLLM of a child process, and what the swarm finds of it.

They lie in its scheduler, its asynchronous loop, its batch of rows, and its choice of graphs. A plant patches
classes; processes fork, so a patch ends with its child. vLLM's own assertions and all checks stay on.

Does not: run anything; `test_swarm` does.
"""

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from planted_runs import ANSWERS, Plant, patch, plants_in

PLANTS: dict[str, Plant] = {}
"""The plants by name."""
plant = plants_in(PLANTS)

# -- scheduler and blocks ----------------------------------------------------------------------------


@plant("leak", "raised", *ANSWERS, fixed={"prefix_cache": True})
def hit_stays_free() -> None:
    """A block in which a prefix is found stays in the queue of free ones (like vllm 37076)."""

    @patch(BlockPool, "touch")
    def _(original: Any, pool: BlockPool, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1


@plant("raised", names="AssertionError", fixed={"prefix_cache": True})
def whole_prompt_is_a_hit() -> None:
    """A prompt of whole blocks is found in the cache up to its last token; none is to run (vllm 9972)."""
    for kind in _leaves(KVCacheCoordinator):

        @patch(kind, "find_longest_cache_hit")
        def _(original: Any, coordinator: Any, hashes: Any, most: int, *more: Any, **named: Any) -> Any:
            return original(coordinator, hashes, most + 1, *more, **named)


@plant("raised", "stuck", *ANSWERS, fixed={"drafts": "ngram:3"})
def rejected_stay_computed() -> None:
    """Drafts that were rejected stay counted as computed (vllm 42722)."""

    @patch(Scheduler, "update_from_output")
    def _(original: Any, scheduler: Scheduler, scheduled: Any, output: Any) -> Any:
        before = {name: each.num_computed_tokens for name, each in scheduler.requests.items()}
        got = original(scheduler, scheduled, output)
        for name, each in scheduler.requests.items():
            if name in scheduled.scheduled_spec_decode_tokens:
                each.num_computed_tokens = before[name]
        return got


# -- the asynchronous loop and the batch of rows -----------------------------------------------------


@plant(*ANSWERS, fixed={"runner": "V1", "async_scheduling": True})
def late_copy() -> None:
    """A step copies its tokens from the host when those of the next step are written there (vllm 24527).

    On a tape a copy is never late. So the tokens of a chunk that the next one overwrites are those of the
    next one, as the race gave them. Only asynchronous scheduling prepares a step while another one runs.
    """

    @patch(GPUModelRunner, "_prepare_input_ids")
    def _(original: Any, runner: Any, scheduled: Any, requests: int, total: int, ends: Any) -> None:
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids[:requests]):
            count = scheduled.num_scheduled_tokens[name]
            begin, at = int(batch.num_computed_tokens_cpu[row]) + count, int(ends[row]) - count
            overwritten = min(count, int(batch.num_prompt_tokens[row]) - begin)
            if overwritten > 0:
                runner.input_ids.np[at : at + overwritten] = batch.token_ids_cpu[
                    row, begin : begin + overwritten
                ]
        original(runner, scheduled, requests, total, ends)


# -- the choice of a graph ---------------------------------------------------------------------------


@plant("graph", "raised", *ANSWERS, fixed={"runner": "V1", "drafts": "ngram:3"})
def uniform_by_the_longest() -> None:
    """A batch where one request has 1 + K tokens replays the graph where each has (review of vllm 20059)."""

    def is_uniform(*, max_num_scheduled_tokens: int, uniform_decode_query_len: int, **more: Any) -> bool:
        forced = more.get("force_uniform_decode")
        return max_num_scheduled_tokens == uniform_decode_query_len if forced is None else bool(forced)

    GPUModelRunner._is_uniform_decode = staticmethod(is_uniform)


def _leaves(kind: type) -> list[type]:
    """Return the classes derived from one that have a search of their own."""
    below = [leaf for each in kind.__subclasses__() for leaf in _leaves(each)]
    return below + ([kind] if "find_longest_cache_hit" in vars(kind) and below == [] else [])
