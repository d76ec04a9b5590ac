"""`EngineOwnership`: poisons unowned memory (request rows and KV pages) and detects writes to it.

A replay that reads a freed request row finds invalid slot numbers. A replay that reads a freed KV slot
finds NaN. A replay that writes to one, for example through a stale ``out_cache_loc``, overwrites the poison
and is detected. Kernels need no change for this.

Does not: allocate or free; the pools do.
"""

from collections.abc import Sequence

import torch

from graphpact.attention import kv_tensors
from graphpact.errors import ReplayError
from graphpact_engine.pools import KVCache, PagePool, RequestPool
from graphpact_tape.poison import is_poison, poison_of


class EngineOwnership:
    """The unowned request rows and KV pages of an engine.

    Args:
        requests: The pool of request rows. Row 0 of ``req_to_token`` has no owner and stays zero.
        pages: The pool of KV pages. Page 0 is scratch and may be written.
        kv_cache: The keys and values of all pages.
        states: The request state of a speculation algorithm: tensors indexed by request row.
    """

    def __init__(
        self,
        requests: RequestPool,
        pages: PagePool,
        kv_cache: KVCache,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        self._requests = requests
        self._pages = pages
        self._table = requests.req_to_token
        self._states = states
        size = pages.page_size
        self._caches = {
            name: cache.view(-1, size, *cache.shape[1:]) for name, cache in kv_tensors(kv_cache).items()
        }
        self._poisoned_rows: frozenset[int] = frozenset()
        self._poisoned_pages: frozenset[int] = frozenset()

    @torch.inference_mode()
    def poison_free(self) -> None:
        """Poison every row and page that no live request owns.

        Rows and pages of the last call are poisoned again: another lane may have used and freed them since.
        """
        rows = frozenset(range(1, self._requests.max_requests + 1)) - self._requests.in_use
        pages = frozenset(range(1, self._pages.num_pages + 1)) - self._pages.in_use
        for tensor, free in (
            *((tensor, rows) for tensor in (self._table, *self._states)),
            *((cache, pages) for cache in self._caches.values()),
        ):
            tensor.index_fill_(
                0, torch.tensor(sorted(free), device=tensor.device).long(), poison_of(tensor.dtype)
            )
        self._poisoned_rows, self._poisoned_pages = rows, pages

    @torch.inference_mode()
    def check_free(self) -> None:
        """Verify that a step did not write to unowned memory.

        Raises:
            ReplayError: A step wrote to an unowned row or KV slot; names it.
        """
        if bool(self._table[0].any()):
            raise ReplayError(
                "a step wrote row 0 of req_to_token, which padding rows read and which must stay zero",
                hint="only the scheduler writes the table, and never row 0",
            )
        rows = sorted(self._poisoned_rows)
        written = ~is_poison(self._table[rows]).all(dim=1) if rows else torch.zeros(0)
        if bool(written.any()):
            row = rows[int(written.nonzero()[0])]
            raise ReplayError(
                f"a step wrote row {row} of req_to_token, which no live request owns",
                hint="only the scheduler writes the table",
            )
        pages = sorted(self._poisoned_pages)
        for name, cache in self._caches.items():
            if not pages:
                return
            written = ~is_poison(cache[pages]).flatten(2).all(dim=2)
            if bool(written.any()):
                page, offset = (int(at) for at in written.nonzero()[0])
                slot = pages[page] * self._pages.page_size + offset
                raise ReplayError(
                    f"a step wrote {name} in KV slot {slot}, which no live request owns",
                    hint="padding tokens write slot 0 (scratch): reset the padding rows of out_cache_loc",
                    rule="GP04",
                )
