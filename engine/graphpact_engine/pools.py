"""The memory that requests share: request rows, KV pages, and the KV cache itself.

A request owns one row of `RequestPool.req_to_token`, which maps its positions to KV slots, and
pages of slots from `PagePool`. Row 0, and page 0 with slot 0, are scratch: padding rows of a
graph read and write there, so neither is ever allocated.

Does not: decide which request gets memory (the scheduler does), write the KV cache (attention does), or
clear freed memory: a freed row or slot keeps its contents until its next owner writes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphpact.attention import kv_tensors
from graphpact.errors import ConfigError, EngineError


def _require_positive(**sizes: int) -> None:
    """Raise ConfigError for the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be a whole number from 1 up; got {size}")


class _Ids:
    """A pool of the ids 1 to ``count``; 0 is reserved."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free ids."""
        return len(self._free)

    @property
    def in_use(self) -> frozenset[int]:
        """The allocated ids."""
        return frozenset(self._in_use)

    def _take(self, n: int) -> list[int] | None:
        """Allocate ``n`` ids; return None, and allocate nothing, if fewer are free."""
        if n > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(n)]
        self._in_use.update(ids)
        return ids

    def _give_back(self, ids: list[int]) -> None:
        """Free ``ids``, which are known to be allocated."""
        self._in_use.difference_update(ids)
        self._free.extend(ids)


class RequestPool(_Ids):
    """A pool of request rows, with the KV slots of each request's tokens.

    Args:
        max_requests: Number of rows that can be allocated: rows 1 to ``max_requests``.
        max_context_len: Number of columns: the maximum sequence length of a row, in tokens.
        device: Device of ``req_to_token``.

    Attributes:
        req_to_token: ``[max_requests + 1, max_context_len]`` int32: KV slot of each position of
            each row. Row 0 stays zero. Columns at or past a request's length hold zeros or
            values of an earlier owner.

    Raises:
        ConfigError: A size is below 1.
    """

    def __init__(self, max_requests: int, max_context_len: int, device: torch.device | str) -> None:
        _require_positive(max_requests=max_requests, max_context_len=max_context_len)
        super().__init__(max_requests)
        self.max_requests = max_requests
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros((max_requests + 1, max_context_len), dtype=torch.int32, device=device)

    def alloc(self) -> int | None:
        """Allocate a row, from 1 up; return None if none is free."""
        rows = self._take(1)
        return None if rows is None else rows[0]

    def free(self, row: int) -> None:
        """Free a row.

        Raises:
            EngineError: The row is not allocated: freed twice, never allocated, or the reserved row 0.
        """
        if row not in self._in_use:
            raise EngineError(
                f"cannot free request row {row}: it is not allocated; rows are 1 to "
                f"{self.max_requests}, row 0 is reserved"
            )
        self._give_back([row])


class PagePool(_Ids):
    """A pool of KV pages; the slot of (page, offset) is ``page * page_size + offset``.

    Args:
        num_pages: Number of pages that can be allocated: pages 1 to ``num_pages``. Page 0 is reserved.
        page_size: Slots (tokens) per page.

    Raises:
        ConfigError: A size is below 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        _require_positive(num_pages=num_pages, page_size=page_size)
        super().__init__(num_pages)
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def num_slots(self) -> int:
        """Number of slots of a KV cache for this pool, including page 0."""
        return (self.num_pages + 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for ``num_tokens`` tokens of one request."""
        return -(-num_tokens // self.page_size)

    def alloc(self, n: int) -> list[int] | None:
        """Allocate ``n`` pages; return None, and allocate nothing, if fewer are free."""
        return self._take(n)

    def free(self, pages: Iterable[int]) -> None:
        """Free all ``pages``, or none if the call raises.

        Raises:
            EngineError: A page is not allocated (freed twice, never allocated, or the reserved page 0),
                or is listed twice.
        """
        pages = list(pages)
        unknown = [page for page in pages if page not in self._in_use]
        if unknown or len(set(pages)) != len(pages):
            raise EngineError(
                f"cannot free KV pages {pages}: not allocated: {unknown or 'none'}, listed twice: "
                f"{sorted({page for page in pages if pages.count(page) > 1}) or 'none'}; pages are "
                f"1 to {self.num_pages}, page 0 is reserved"
            )
        self._give_back(pages)


@dataclass(frozen=True, slots=True)
class KVLayerShape:
    """The KV heads of one attention layer, and the sizes of a key and a value.

    Args:
        num_kv_heads: Key and value heads.
        head_dim: Width of a key head.
        v_head_dim: Width of a value head.
        value_in_key: Whether the value is the first ``v_head_dim`` elements of the key (MLA) and needs no own
            memory.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    value_in_key: bool = False

    @property
    def width(self) -> int:
        """Number of cached elements per token."""
        return self.num_kv_heads * (self.head_dim + (0 if self.value_in_key else self.v_head_dim))


class KVCache:
    """The keys and values of every slot, one pair of tensors per layer, initially zero.

    The values of a layer with ``value_in_key`` are a view of its keys, in a clone too.

    Args:
        num_slots: Number of slots, including scratch: `PagePool.num_slots`.
        layers: The shape of each layer, first layer first.
        dtype: Dtype of keys and values.
        device: Device of keys and values.

    Attributes:
        k: Per layer ``[num_slots, num_kv_heads, head_dim]`` of ``dtype``.
        v: Per layer ``[num_slots, num_kv_heads, v_head_dim]`` of ``dtype``.
    """

    def __init__(
        self,
        num_slots: int,
        layers: Sequence[KVLayerShape],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_slots = num_slots
        self.layers = tuple(layers)
        self.dtype = dtype
        self.device = torch.device(device)
        self.k = [
            torch.zeros((num_slots, at.num_kv_heads, at.head_dim), dtype=dtype, device=device)
            for at in self.layers
        ]
        self.v = [
            k[..., : at.v_head_dim]
            if at.value_in_key
            else torch.zeros((num_slots, at.num_kv_heads, at.v_head_dim), dtype=dtype, device=device)
            for at, k in zip(self.layers, self.k, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values; values inside keys are counted once."""
        return self.num_slots * self.dtype.itemsize * sum(at.width for at in self.layers)

    def clone(self) -> "KVCache":
        """Return a cache with the same contents in new memory."""
        other = KVCache(self.num_slots, self.layers, self.dtype, self.device)
        mine, theirs = (kv_tensors(cache).values() for cache in (self, other))
        torch._foreach_copy_([*theirs], [*mine])
        return other
