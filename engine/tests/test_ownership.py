"""Unowned memory is poisoned, and a write to it is detected."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.errors import ReplayError
from graphpact_engine.ownership import EngineOwnership
from graphpact_engine.pools import KVCache, KVLayerShape, PagePool, RequestPool
from graphpact_tape.poison import is_poison

ROWS, PAGES, PAGE = 3, 4, 2


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """A step runs in inference mode."""
    with torch.inference_mode():
        yield


class OwnedPools:
    """Pools, a cache of two layers, and their `EngineOwnership`."""

    def __init__(self) -> None:
        self.requests = RequestPool(ROWS, 6, "cpu")
        self.pages = PagePool(PAGES, PAGE)
        layers = [KVLayerShape(1, 3, 3), KVLayerShape(2, 3, 5)]
        self.cache = KVCache(self.pages.num_slots, layers, torch.float32, "cpu")
        self.states = [torch.zeros(ROWS + 1, 2), torch.zeros(ROWS + 1, dtype=torch.int64)]
        self.ownership = EngineOwnership(self.requests, self.pages, self.cache, self.states)

    def take(self, kind: str) -> list[int]:
        """Allocate a row or a page, if one is free, and fill it with its number."""
        row = self.requests.alloc() if kind == "row" else None
        taken = ([] if row is None else [row]) if kind == "row" else self.pages.alloc(1) or []
        for number in taken:
            for mine in self.memory(kind, number):
                mine.fill_(number)
        return taken

    def give_back(self, kind: str, number: int) -> None:
        """Free a row or a page."""
        if kind == "row":
            self.requests.free(number)
        else:
            self.pages.free([number])

    def memory(self, kind: str, number: int) -> list[torch.Tensor]:
        """Return the memory of a row or a page."""
        if kind == "row":
            return [self.requests.req_to_token[number], *(state[number] for state in self.states)]
        caches = (*self.cache.k, *self.cache.v)
        return [t.view(PAGES + 1, PAGE, *t.shape[1:])[number] for t in caches]

    def slots(self) -> dict[str, torch.Tensor]:
        """Return for every tensor of the cache which slots are entirely poison."""
        named = {f"k{i}": t for i, t in enumerate(self.cache.k)}
        named |= {f"v{i}": t for i, t in enumerate(self.cache.v)}
        return {name: is_poison(t).flatten(1).all(dim=1) for name, t in named.items()}


def test_everything_except_scratch_is_poison_at_first() -> None:
    """At first no row and no page has an owner; row 0 and page 0 are unchanged."""
    pools = OwnedPools()
    pools.ownership.poison_free()
    for poisoned in pools.slots().values():
        assert poisoned.tolist() == [False] * PAGE + [True] * (PAGES * PAGE)
    table = is_poison(pools.requests.req_to_token)
    assert not bool(table[0].any())
    assert bool(table[1:].all())
    pools.ownership.check_free()


@settings(derandomize=True, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["row", "page"]), st.booleans(), st.integers(0, 9)), max_size=14))
def test_owned_memory_is_unchanged_and_unowned_memory_is_poison(
    history: list[tuple[str, bool, int]],
) -> None:
    """After any sequence of alloc and free, owners keep what they wrote, and unowned memory is poison."""
    pools = OwnedPools()
    owned: dict[str, list[int]] = {"row": [], "page": []}
    for kind, takes, which in history:
        held = owned[kind]
        if takes:
            held += pools.take(kind)
        elif held:
            pools.give_back(kind, held.pop(which % len(held)))
        pools.ownership.poison_free()
        pools.ownership.check_free()
        for of, count in (("row", ROWS), ("page", PAGES)):
            for number in range(1, count + 1):
                for mine in pools.memory(of, number):
                    expected = (mine == number) if number in owned[of] else is_poison(mine)
                    assert bool(expected.all())


def test_a_write_to_a_free_page_is_named_by_slot() -> None:
    """A write of one element to an unowned slot is detected in any layer."""
    for kind, layer, slot in (("k", 0, 3), ("v", 1, 8), ("k", 1, 9)):
        pools = OwnedPools()
        taken = pools.pages.alloc(1)
        assert taken == [1]
        pools.ownership.poison_free()
        if slot // PAGE == 1:
            getattr(pools.cache, kind)[layer][slot].fill_(1.0)
            pools.ownership.check_free()
            continue
        getattr(pools.cache, kind)[layer][slot, 0, 1] = 0.5
        name = "keys" if kind == "k" else "values"
        with pytest.raises(ReplayError, match=f"{name} of layer {layer} in KV slot {slot},"):
            pools.ownership.check_free()


def test_scratch_may_be_written() -> None:
    """Page 0 may be written by padding tokens."""
    pools = OwnedPools()
    pools.ownership.poison_free()
    for cache in (*pools.cache.k, *pools.cache.v):
        cache[:PAGE] = 7
    pools.ownership.check_free()


@pytest.mark.parametrize("row", [0, 2])
def test_a_write_to_the_table_is_named_by_row(row: int) -> None:
    """A write to row 0 or to an unowned row is detected."""
    pools = OwnedPools()
    pools.ownership.poison_free()
    pools.requests.req_to_token[row, 3] = 5
    with pytest.raises(ReplayError, match=f"row {row} of req_to_token"):
        pools.ownership.check_free()
