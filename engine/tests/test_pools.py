"""Rows, pages and the KV cache: allocation, free, and refusals."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from graphpact.errors import ConfigError, EngineError
from graphpact_engine.pools import KVCache, KVLayerShape, PagePool, RequestPool

MACHINE = settings(
    derandomize=True,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)


class PageMachine(RuleBasedStateMachine):
    """A page pool compared with a simple model: a list of owners and their pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=9, page_size=4)
        self.held: list[list[int]] = []

    @rule(n=st.integers(0, 6))
    def alloc(self, n: int) -> None:
        """All pages are allocated, or none if too few are free."""
        free = self.pool.num_free
        pages = self.pool.alloc(n)
        if pages is None:
            assert n > free
            assert self.pool.num_free == free
        else:
            assert len(pages) == n <= free
            self.held.append(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Allocated pages can be freed once; a second free is refused and changes nothing."""
        if not self.held:
            return
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(pages)
        free = self.pool.num_free
        if pages:
            with pytest.raises(EngineError, match="not allocated"):
                self.pool.free(pages)
        assert self.pool.num_free == free

    @invariant()
    def disjoint(self) -> None:
        """No page has two owners, page 0 has none, and none is lost."""
        held = [page for pages in self.held for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(1, 10))
        assert len(held) + self.pool.num_free == 9


PageMachine.TestCase.settings = MACHINE
TestPageMachine = PageMachine.TestCase


def test_pages_hold_their_tokens() -> None:
    """`pages_for` rounds up to whole pages; `num_slots` includes page 0."""
    pool = PagePool(num_pages=9, page_size=4)
    assert [pool.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert pool.num_slots == 40


@pytest.mark.parametrize("pages", [[0], [3], [1, 1], [1, 0], [-1]])
def test_a_wrong_free_changes_nothing(pages: list[int]) -> None:
    """Freeing page 0, a page without an owner, or a page twice frees nothing."""
    pool = PagePool(num_pages=3, page_size=1)
    assert pool.alloc(2) == [1, 2]
    with pytest.raises(EngineError, match="page 0 is reserved"):
        pool.free(pages)
    assert pool.num_free == 1
    assert pool.in_use == {1, 2}


def test_rows_are_allocated_once_and_never_row_0() -> None:
    """Rows 1 to max_requests are allocated, then None; a freed row can be allocated again."""
    pool = RequestPool(3, 8, "cpu")
    assert {pool.alloc() for _ in range(3)} == {1, 2, 3}
    assert pool.alloc() is None
    pool.free(2)
    assert pool.num_free == 1
    assert pool.alloc() == 2
    assert pool.in_use == {1, 2, 3}


@pytest.mark.parametrize("row", [0, 1, 4, -1])
def test_a_row_that_is_not_allocated_cannot_be_freed(row: int) -> None:
    """Row 0, a row freed before and rows that do not exist are refused."""
    pool = RequestPool(3, 8, "cpu")
    first = pool.alloc()
    assert first == 1
    pool.free(first)
    with pytest.raises(EngineError, match=f"row {row}: it is not allocated"):
        pool.free(row)
    assert pool.num_free == 3


def test_req_to_token_starts_at_scratch() -> None:
    """Every position of every row, the reserved one first, maps to slot 0 until it is written."""
    table = RequestPool(3, 8, "cpu").req_to_token
    assert table.shape == (4, 8)
    assert table.dtype == torch.int32
    assert not table.any()


def test_kv_cache_has_the_declared_shapes_and_size() -> None:
    """Each layer has its own head count and sizes, zeros, and nbytes counts them all."""
    layers = [KVLayerShape(2, 8, 8), KVLayerShape(1, 12, 4)]
    cache = KVCache(20, layers, torch.bfloat16, "cpu")
    assert [tuple(k.shape) for k in cache.k] == [(20, 2, 8), (20, 1, 12)]
    assert [tuple(v.shape) for v in cache.v] == [(20, 2, 8), (20, 1, 4)]
    assert all(tensor.dtype is torch.bfloat16 for tensor in (*cache.k, *cache.v))
    assert not any(tensor.any() for tensor in (*cache.k, *cache.v))
    assert cache.nbytes == 2 * 20 * (16 + 16 + 12 + 4)


def test_a_cloned_kv_cache_is_equal_and_apart() -> None:
    """A clone has the same contents; a write to one does not change the other."""
    cache = KVCache(4, [KVLayerShape(1, 2, 3)], torch.float32, "cpu")
    cache.k[0].fill_(1.5)
    cache.v[0][3] = 2
    other = cache.clone()
    assert torch.equal(other.k[0], cache.k[0])
    assert torch.equal(other.v[0], cache.v[0])
    assert other.num_slots == 4
    cache.k[0].zero_()
    cache.v[0].zero_()
    assert bool((other.k[0] == 1.5).all())
    assert bool((other.v[0][3] == 2).all())


def test_values_of_latents_are_views_of_keys() -> None:
    """Values that are inside keys are a view of them, in a clone too, and are counted once."""
    layers = [KVLayerShape(1, 6, 4, value_in_key=True), KVLayerShape(2, 3, 5)]
    cache = KVCache(8, layers, torch.float32, "cpu")
    cache.k[0].copy_(torch.arange(48).view(8, 1, 6))
    cache.v[1].fill_(2)
    other = cache.clone()
    assert other.k[0].data_ptr() != cache.k[0].data_ptr()
    for either in (cache, other):
        assert either.v[0].shape == (8, 1, 4)
        assert either.v[0].data_ptr() == either.k[0].data_ptr()
        assert torch.equal(either.v[0], torch.arange(48.0).view(8, 1, 6)[..., :4])
        assert bool((either.v[1] == 2).all())
        assert either.nbytes == 8 * 4 * (6 + 2 * 3 + 2 * 5)
    other.k[0].zero_()
    assert not other.v[0].any()
    assert cache.v[0].any()


def test_sizes_below_1_are_refused() -> None:
    """A pool without rows, columns, pages or slots is refused, the message names which."""
    with pytest.raises(ConfigError, match="max_requests"):
        RequestPool(0, 8, "cpu")
    with pytest.raises(ConfigError, match="max_context_len"):
        RequestPool(1, 0, "cpu")
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(0, 4)
    with pytest.raises(ConfigError, match="page_size"):
        PagePool(4, 0)
