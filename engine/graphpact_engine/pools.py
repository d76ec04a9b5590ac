"""The memory that requests share: request rows, KV pages, and the KV cache itself.

A request owns one row of `RequestPool.req_to_token`, which maps its positions to KV slots, and
pages of slots from `PagePool`. Row 0, and page 0 with slot 0 in it, are scratch: padded rows of a
graph read and write there, so neither is ever handed out.

Does not: decide who gets memory (the scheduler does), write the KV cache (attention does), or clear
what a request leaves behind: a freed row or slot keeps its contents until its next owner writes it.
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
    """Numbers from 1 to ``count`` that are handed out and taken back; 0 is reserved."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._in_use: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many can be handed out now."""
        return len(self._free)

    @property
    def in_use(self) -> frozenset[int]:
        """Those that are handed out."""
        return frozenset(self._in_use)

    def _take(self, n: int) -> list[int] | None:
        """Hand out ``n``, or None, and none at all, where fewer are free."""
        if n > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(n)]
        self._in_use.update(ids)
        return ids

    def _give_back(self, ids: list[int]) -> None:
        """Take ``ids`` back, which are known to be handed out."""
        self._in_use.difference_update(ids)
        self._free.extend(ids)


class RequestPool(_Ids):
    """Rows for requests, and the slots of each request's tokens.

    Args:
        max_requests: Rows that can be handed out: 1 to ``max_requests``.
        max_context_len: Columns: the longest sequence, in tokens, that a row can hold.
        device: Where ``req_to_token`` lies.

    Attributes:
        req_to_token: ``[max_requests + 1, max_context_len]`` int32: KV slot of each position of
            each row. Row 0 stays zero. Columns at or past a request's length hold zeros or what
            an earlier owner left.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(self, max_requests: int, max_context_len: int, device: torch.device | str) -> None:
        _require_positive(max_requests=max_requests, max_context_len=max_context_len)
        super().__init__(max_requests)
        self.max_requests = max_requests
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros(
            (max_requests + 1, max_context_len), dtype=torch.int32, device=device
        )

    def alloc(self) -> int | None:
        """Hand out a row, from 1 up; None where all are taken."""
        rows = self._take(1)
        return None if rows is None else rows[0]

    def free(self, row: int) -> None:
        """Take a row back.

        Raises:
            EngineError: The row is not handed out: freed twice, never had, or the reserved 0.
        """
        if row not in self._in_use:
            raise EngineError(
                f"request row {row} was freed and is not handed out; rows are 1 to "
                f"{self.max_requests}, row 0 is reserved"
            )
        self._give_back([row])


class PagePool(_Ids):
    """Ids of KV pages; slot of (page, offset) is ``page * page_size + offset``.

    Args:
        num_pages: Pages that can be handed out: 1 to ``num_pages``. Page 0 is reserved whole.
        page_size: Slots, which is tokens, in a page.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        _require_positive(num_pages=num_pages, page_size=page_size)
        super().__init__(num_pages)
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def num_slots(self) -> int:
        """Slots that a KV cache for this pool needs, page 0 included."""
        return (self.num_pages + 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens`` tokens of one request."""
        return -(-num_tokens // self.page_size)

    def slots(self, pages: Sequence[int], start: int, end: int) -> list[int]:
        """Return the slots of positions ``start`` to ``end - 1`` of an owner of ``pages``."""
        size = self.page_size
        return [pages[at // size] * size + at % size for at in range(start, end)]

    def alloc(self, n: int) -> list[int] | None:
        """Hand out ``n`` pages, or None, and no page at all, where fewer are free."""
        return self._take(n)

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back: all of them, or none where the call is wrong.

        Raises:
            EngineError: A page is not handed out (freed twice, never had, or the reserved 0), or is
                named twice.
        """
        pages = list(pages)
        unknown = [page for page in pages if page not in self._in_use]
        if unknown or len(set(pages)) != len(pages):
            raise EngineError(
                f"KV pages {pages} were freed; not handed out: {unknown or 'none'}, named twice: "
                f"{sorted({page for page in pages if pages.count(page) > 1}) or 'none'}; pages are "
                f"1 to {self.num_pages}, page 0 is reserved"
            )
        self._give_back(pages)


@dataclass(frozen=True, slots=True)
class KVLayerShape:
    """What one attention layer keeps of a token: ``num_kv_heads`` heads, key and value sizes."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    value_in_key: bool = False
    """Whether the value is the first ``v_head_dim`` of the key (MLA), and no memory of its own."""

    @property
    def width(self) -> int:
        """Elements that are kept of a token."""
        return self.num_kv_heads * (self.head_dim + (0 if self.value_in_key else self.v_head_dim))


class KVCache:
    """The keys and values of every slot, one pair of tensors a layer, zeros at first.

    Where a layer's values lie in its keys, they are a view of them, also in a clone.

    Args:
        num_slots: Slots, scratch included: `PagePool.num_slots`.
        layers: What each layer keeps, first layer first.
        dtype: Of keys and values.
        device: Where they lie.

    Attributes:
        k: A layer each: ``[num_slots, num_kv_heads, head_dim]`` of ``dtype``.
        v: A layer each: ``[num_slots, num_kv_heads, v_head_dim]`` of ``dtype``.
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
            else torch.zeros(
                (num_slots, at.num_kv_heads, at.v_head_dim), dtype=dtype, device=device
            )
            for at, k in zip(self.layers, self.k, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, those that lie in keys not counted twice."""
        return self.num_slots * self.dtype.itemsize * sum(at.width for at in self.layers)

    def clone(self) -> "KVCache":
        """Return a cache with the same contents and memory of its own."""
        other = KVCache(self.num_slots, self.layers, self.dtype, self.device)
        mine, theirs = (kv_tensors(cache).values() for cache in (self, other))
        torch._foreach_copy_([*theirs], [*mine])
        return other
