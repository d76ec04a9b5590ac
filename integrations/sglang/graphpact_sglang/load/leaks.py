"""`leaks_of`: what SGLang's scheduler still holds after all requests ended.

Does not: free anything but the prefix cache, which is emptied to see that it can be.
"""

from collections.abc import Iterator
from typing import Any


def leaks_of(scheduler: Any) -> Iterator[str]:
    """Yield what is still allocated, in words."""
    yield from _requests(scheduler)
    yield from _rows(scheduler)
    yield from _pages(scheduler)
    checker = scheduler.invariant_checker
    has_leak, messages = checker._check_all_pools(scheduler.pool_stats_observer.get_pool_stats())  # noqa: SLF001
    if has_leak:
        yield from (f"SGLang's own check: {message}" for message in messages if message)


def _requests(scheduler: Any) -> Iterator[str]:
    waiting = {
        "waiting_queue": scheduler.waiting_queue,
        "result_queue": scheduler.result_queue,
        "grammar_queue": scheduler.grammar_manager.grammar_queue,
    }
    yield from (f"{len(queue)} in {name}" for name, queue in waiting.items() if queue)
    for name in ("running_batch", "last_batch"):
        batch = getattr(scheduler, name)
        if batch is not None and batch.reqs:
            yield f"requests in {name}: {', '.join(request.rid for request in batch.reqs)}"
    for name in ("chunked_req", "_pending_chunked_abort_req"):
        request = getattr(scheduler, name)
        if request is not None:
            yield f"{name}: {request.rid}"


def _rows(scheduler: Any) -> Iterator[str]:
    pool = scheduler.req_to_token_pool
    free = set(pool.free_slots)
    if len(free) != len(pool.free_slots):
        yield "a row of req_to_token is free twice"
    if len(free) != pool.size:
        yield f"rows of req_to_token are not free: {sorted(set(range(1, pool.size + 1)) - free)}"


def _pages(scheduler: Any) -> Iterator[str]:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415  after the plugins

    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    if held := cache.protected_size():
        yield f"{held} tokens of the prefix cache are locked"
    if kept := cache.evictable_size():
        cache.evict(EvictParams(num_tokens=kept))
    free, most = allocator.get_all_free_pages(), scheduler.max_total_num_tokens
    if len(free) != len(free.unique()):
        yield "a page of the KV cache is free twice"
    if allocator.available_size() != most:
        yield (
            f"{allocator.available_size()} of {most} tokens of the KV cache are free"
            " after the prefix cache was emptied"
        )
