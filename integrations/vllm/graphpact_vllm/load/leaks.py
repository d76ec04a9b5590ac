"""`leaks_of`: what vLLM still holds after a run in which all requests ended.

Does not: take anything away; the engine must be drained before.
"""

from collections.abc import Iterator
from typing import Any

from graphpact_vllm.load.in_process import InProcessEngine


def leaks_of(engine: InProcessEngine) -> Iterator[str]:
    """Yield what is left over, in words."""
    yield from _requests(engine)
    yield from _blocks(engine.core.scheduler.kv_cache_manager.block_pool)
    yield from _rows(engine.model_runner)


def _requests(engine: InProcessEngine) -> Iterator[str]:
    scheduler, output = engine.core.scheduler, engine.engine.output_processor
    places = {
        "the scheduler's requests": scheduler.requests,
        "the scheduler's running requests": [each.request_id for each in scheduler.running],
        "the scheduler's waiting requests": [each.request_id for each in scheduler.waiting],
        "the scheduler's ended requests, which no runner was told of": scheduler.finished_req_ids,
        "the output processor": output.request_states,
        "the output processor's names": output.external_req_ids,
        "the encoder cache": getattr(scheduler.encoder_cache_manager, "cached", {}),
        "the batch queue": [f"batch {at}" for at in range(len(engine.core.batch_queue or ()))],
    }
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        places[f"the blocks by request of {type(manager).__name__}"] = manager.req_to_blocks
        places[f"the cached blocks by request of {type(manager).__name__}"] = manager.num_cached_block
    for place, held in places.items():
        if held:
            yield f"{len(held)} left in {place}: {', '.join(map(str, sorted(held, key=str)))}"


def _blocks(pool: Any) -> Iterator[str]:
    free, most = pool.free_block_queue.num_free_blocks, pool.num_gpu_blocks - 1
    if free != most:
        yield f"{most - free} of {most} KV blocks were not returned to the pool"
    in_queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if len(set(in_queue)) != free:
        yield f"the queue of free KV blocks has {len(set(in_queue))} blocks, and says {free}"
    for block in pool.blocks:
        if block.ref_cnt and not block.is_null:
            yield f"KV block {block.block_id} has {block.ref_cnt} references"


def _rows(runner: Any) -> Iterator[str]:
    if hasattr(runner, "req_states"):  # V2
        states = runner.req_states
        places = {"rows of the request states": states.req_id_to_index}
        if len(states.free_indices) != states.max_num_reqs:
            yield f"{states.max_num_reqs - len(states.free_indices)} rows of the request states are not free"
    else:
        batch = runner.input_batch
        places = {
            "rows of the input batch": batch.req_id_to_index,
            "the model runner's requests": runner.requests,
        }
    places["the model runner's encoder cache"] = getattr(runner, "encoder_cache", None) or {}
    for place, held in places.items():
        if held:
            yield f"{len(held)} left in {place}: {', '.join(sorted(map(str, held)))}"
