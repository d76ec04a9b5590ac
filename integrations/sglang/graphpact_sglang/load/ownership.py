"""`Poison`: memory that no live request owns holds what a right step never reads.

Before each step it fills

- the KV slots that no request owns and that the prefix cache does not keep, but the padding slots of page 0,
- the rows of ``req_to_token`` that no request owns, but row 0 of padding requests: they point at a free slot.

After the step these slots must be as they were. Slots are filled when they become free, and those that a
request gets keep their poison until the step that writes them. So a read of a slot before it is written shows
too. The poison is NaN, which reaches every sum: right kernels on the tape gather the slots of their own
requests only, and their padding reads the page of slot 0, which is never filled.

Does not: see a read whose result is thrown away, or a write of the same value.
"""

from collections.abc import Iterator
from typing import Any

import torch

from graphpact.errors import ContractError


class Poison:
    """The poison of an engine's memory.

    Args:
        scheduler: SGLang's scheduler.
        value: What is filled in.
    """

    def __init__(self, scheduler: Any, value: float = float("nan")) -> None:
        self._scheduler, self._value = scheduler, value
        runners = [scheduler.tp_worker.model_runner]
        draft = getattr(scheduler.draft_worker, "draft_worker", None)
        if draft is not None:
            runners.append(draft.draft_runner)
        self._caches = dict(cache for runner in runners for cache in _caches(runner))
        slots = {len(cache) for cache in self._caches.values()}
        self._filled = torch.zeros(max(slots), dtype=torch.bool)

    def fill(self) -> None:
        """Fill what is free now and was not before."""
        free = self._free_slots()
        mask = torch.zeros_like(self._filled)
        mask[free] = True
        new = (mask & ~self._filled).nonzero().flatten()
        if len(new):
            for cache in self._caches.values():
                cache[new] = self._value
        self._filled = mask
        pool = self._scheduler.req_to_token_pool
        if len(free) and pool.free_slots:
            pool.req_to_token[sorted(pool.free_slots)] = int(free[-1])

    def check(self) -> None:
        """Require that the filled slots are as they were.

        Raises:
            ContractError: A step wrote a slot that no request owns.
        """
        slots = self._filled.nonzero().flatten()
        for name, cache in self._caches.items():
            rows = cache[slots].flatten(1)
            is_kept = rows.isnan() if self._value != self._value else rows == self._value
            if not bool(is_kept.all()):
                written = slots[~is_kept.all(1)].tolist()
                raise ContractError(
                    f"a step wrote {name} at KV slots that no request owns: {written[:8]}",
                    hint="padding rows write the page of slot 0; see out_cache_loc of the step",
                    rule="GP04",
                )

    def _free_slots(self) -> torch.Tensor:
        allocator = self._scheduler.token_to_kv_pool_allocator
        pages: torch.Tensor = allocator.get_all_free_pages()
        size: int = allocator.page_size
        return (pages[:, None] * size + torch.arange(size)).flatten()


def _caches(model_runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the KV cache of a runner by name, ``[slots, ...]`` floating point."""
    pool = model_runner.token_to_kv_pool
    role = "draft " if model_runner.is_draft_worker else ""
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for layer, cache in enumerate(getattr(pool, name, None) or ()):
            if cache.is_floating_point():
                yield f"{role}{name}[{layer}]", cache
