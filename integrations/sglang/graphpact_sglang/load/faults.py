"""`Injection`: faults that a run gets on purpose.

    raise    the target model raises `InjectedError` in one step. SGLang's scheduler ends by it.
    full     the KV cache has no free page: the prefix cache is emptied and all free pages are taken, for some
             passes. SGLang aborts the last request of a batch for which there is no room. So the pages are
             given back, too early, while fewer than two requests run: the fault makes requests wait and be
             retracted, and none may be lost.

Does not: change SGLang's answers to them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from graphpact.engines import InjectedError, InjectedFault


class Injection:
    """The faults of one run.

    Args:
        scheduler: SGLang's scheduler.
        faults: The faults.
    """

    def __init__(self, scheduler: Any, faults: Sequence[InjectedFault]) -> None:
        self._scheduler = scheduler
        self._raise = sorted(fault.at for fault in faults if fault.kind == "raise")
        self._full = [fault for fault in faults if fault.kind == "full"]
        self._held: list[torch.Tensor] = []
        self._at = -1
        if self._raise:
            runner = scheduler.tp_worker.model_runner
            forward = runner.forward

            def raising(*args: Any, **kwargs: Any) -> Any:
                if self._raise and self._at >= self._raise[0]:
                    at = self._raise.pop(0)
                    raise InjectedError(
                        f"the model fails on purpose in pass {self._at}, asked for in pass {at}"
                    )
                return forward(*args, **kwargs)

            runner.forward = raising

    def begin_pass(self, at: int) -> None:
        """Take all free pages, or give them back, before anything arrives in pass ``at``."""
        self._at = at
        is_full = any(fault.at <= at < fault.at + fault.passes for fault in self._full)
        if is_full and not self._has_too_few_requests():
            self._take()
        else:
            self.give_back()

    def give_back(self) -> None:
        """Give back the pages that were taken."""
        held, self._held = self._held, []
        for slots in held:
            self._scheduler.token_to_kv_pool_allocator.free(slots)
            self._scheduler.invariant_checker.max_total_num_tokens += len(slots)

    def _has_too_few_requests(self) -> bool:
        scheduler = self._scheduler
        last = scheduler.last_batch
        running = {id(request) for request in scheduler.running_batch.reqs}
        if last is not None:
            running |= {id(request) for request in last.reqs if not request.finished()}
        return len(running) < 2 or scheduler.chunked_req is not None

    def _take(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415  after the plugins

        scheduler = self._scheduler
        allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        if cache.supports_prefix_sharing() and (evictable := cache.evictable_size()):
            cache.evict(EvictParams(num_tokens=evictable))
        slots = allocator.alloc(allocator.available_size())
        if slots is not None and len(slots):
            self._held.append(slots)
            scheduler.invariant_checker.max_total_num_tokens -= len(slots)  # SGLang counts them in every pass
