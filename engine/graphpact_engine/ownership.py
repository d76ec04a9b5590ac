"""`EngineOwnership`: request rows and KV pages that no live request owns, held poisoned.

A replay that reads a row of a request that is gone finds slots that do not exist; one that reads a freed
KV slot finds NaN; one that writes there, as a stale ``out_cache_loc`` does, is found by what is poison no
longer. Nothing of it needs a kernel's help.

Does not: hand out or take back; the pools do.
"""

import torch

from graphpact.attention import kv_tensors
from graphpact.errors import ReplayError
from graphpact_engine.pools import KVCache, PagePool, RequestPool
from graphpact_tape.poison import is_poison, poison_of


class EngineOwnership:
    """Poisons what the pools of an engine have to give away.

    Args:
        requests: Who owns which row of ``req_to_token``. Row 0 is nobody's and stays zero.
        pages: Who owns which KV page. Page 0 is scratch and free to be written.
        kv_cache: The keys and values of all pages.
    """

    def __init__(self, requests: RequestPool, pages: PagePool, kv_cache: KVCache) -> None:
        self._requests = requests
        self._pages = pages
        self._table = requests.req_to_token
        size = pages.page_size
        self._caches = {
            name: cache.view(-1, size, *cache.shape[1:])
            for name, cache in kv_tensors(kv_cache).items()
        }
        self._poisoned_rows: frozenset[int] = frozenset()
        self._poisoned_pages: frozenset[int] = frozenset()

    @torch.inference_mode()
    def poison_free(self) -> None:
        """Poison every row and page that no live request owns.

        Those of the last call too: another lane may have had them since, and given them back.
        """
        rows = frozenset(range(1, self._requests.max_requests + 1)) - self._requests.in_use
        pages = frozenset(range(1, self._pages.num_pages + 1)) - self._pages.in_use
        for tensor, free in (
            (self._table, rows),
            *((cache, pages) for cache in self._caches.values()),
        ):
            tensor.index_fill_(
                0, torch.tensor(sorted(free), device=tensor.device).long(), poison_of(tensor.dtype)
            )
        self._poisoned_rows, self._poisoned_pages = rows, pages

    @torch.inference_mode()
    def check_free(self) -> None:
        """Look whether a step wrote what no live request owns.

        Raises:
            ReplayError: Names the row or the KV slot.
        """
        if bool(self._table[0].any()):
            raise ReplayError(
                "a step wrote row 0 of req_to_token, which padded requests read as all zeros",
                hint="only the scheduler writes the table, and never row 0",
            )
        rows = sorted(self._poisoned_rows)
        spoilt = ~is_poison(self._table[rows]).all(dim=1) if rows else torch.zeros(0)
        if bool(spoilt.any()):
            raise ReplayError(
                f"a step wrote row {rows[int(spoilt.nonzero()[0])]} of req_to_token, which no request has",
                hint="only the scheduler writes the table",
            )
        pages = sorted(self._poisoned_pages)
        for what, cache in self._caches.items():
            if not pages:
                return
            written = ~is_poison(cache[pages]).flatten(2).all(dim=2)
            if bool(written.any()):
                page, offset = (int(at) for at in written.nonzero()[0])
                slot = pages[page] * self._pages.page_size + offset
                raise ReplayError(
                    f"a step wrote {what} in KV slot {slot}, which no live request owns",
                    hint="padded tokens write slot 0, which is scratch: reset the tail of out_cache_loc",
                    rule="GP04",
                )
