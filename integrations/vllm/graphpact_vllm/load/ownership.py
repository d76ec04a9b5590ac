"""`BlockOwnership`: poisons KV blocks that no request owns, and detects writes to blocks of others.

Before a batch, blocks that are free and that no prefix is found in are poisoned: a step that reads one has
wrong tokens. After it, every block but those of its requests must be as it was. Only the null block 0 may be
written: vLLM's padding reads and writes it.

The poison is NaN for attention of graphpact, which reads no key that no query sees. vLLM's own attention for
CPUs reads behind the last token of a request, in its last block, and before a sliding window, in blocks that
vLLM freed and left in the block table; it multiplies by 0, and the product with NaN is NaN. Then the poison
is a large number: a stale read shows in nearly every case, and a right one never.

Does not: poison recurrent states, or blocks of a prefix that may be found again.
"""

from typing import Any

import torch

from graphpact.errors import ReplayError
from graphpact_vllm import ATTENTION_BACKEND
from graphpact_vllm.load.in_process import InProcessEngine

_LARGE = 1e4


class BlockOwnership:
    """The KV blocks of an engine.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._poison = _LARGE if _masks_by_zero(engine) else float("nan")
        self._caches: dict[str, torch.Tensor] = {}
        context = engine.engine.vllm_config.compilation_config.static_forward_context
        known: set[int] = set()
        for name, layer in context.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.dim() > 1 and cache.data_ptr() not in known:
                known.add(cache.data_ptr())
                self._caches[name] = cache
        self._others: torch.Tensor | None = None
        self._before: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def poison_free(self, scheduled: Any) -> None:
        """Poison the free blocks, and note what the batch must not change."""
        manager = self._engine.core.scheduler.kv_cache_manager
        pool = manager.block_pool
        free = [
            block.block_id
            for block in pool.blocks
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
        ]
        its = {0}
        for name in scheduled.num_scheduled_tokens:
            for group in manager.get_block_ids(name):
                its.update(group)
        self._others = torch.tensor(sorted(set(range(pool.num_gpu_blocks)) - its), dtype=torch.int64)
        for name, cache in self._caches.items():
            cache[torch.tensor(free, dtype=torch.int64)] = self._poison
            self._before[name] = self._sums(cache)

    @torch.inference_mode()
    def check_unowned(self, scheduled: Any) -> None:
        """Verify that the batch changed no block but those of its requests.

        Raises:
            ReplayError: It did; the message names layer and block.
        """
        del scheduled
        for name, cache in self._caches.items():
            changed = (self._sums(cache) != self._before[name]).nonzero()
            if len(changed):
                assert self._others is not None  # noqa: S101  `poison_free` was before
                block = int(self._others[int(changed[0])])
                raise ReplayError(
                    f"a step wrote KV block {block} of {name}, which none of its requests owns",
                    hint="its slot mapping is stale, or padding tokens have slots",
                    rule="GP04",
                )

    def _sums(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the sum of the bits of each block that is not the batch's."""
        blocks = cache[self._others].flatten(1)
        return blocks.view(torch.int32).sum(1, dtype=torch.int64)


def _masks_by_zero(engine: InProcessEngine) -> bool:
    """Return whether right kernels read blocks that no request owns, and multiply by 0."""
    backend = engine.engine.vllm_config.attention_config.backend
    return backend is not None and not backend.name.startswith(ATTENTION_BACKEND)
