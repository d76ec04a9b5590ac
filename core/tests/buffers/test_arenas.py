"""Arenas: slots whose padding rows are reset together, and slots that need a separate reset."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpact.buffers import (
    CudaGraphBufferRegistry,
    PaddingPolicy,
    SharedBuffers,
    fills,
)
from graphpact.buffers.arenas import Arenas
from graphpact.tensors import address_range
from support import fill, make_slot

I64 = torch.int64


@pytest.fixture(params=["host", "device"], autouse=True)
def _grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with the grouping of a host and with that of a GPU."""
    monkeypatch.setattr(fills, "_takes_any_group", lambda _: request.param == "host")


def _registry(**more: Any) -> CudaGraphBufferRegistry:
    return CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4, **more)


def _content(registry: CudaGraphBufferRegistry) -> list[list[int]]:
    return [slot.buffer.tolist() for slot in registry if slot.buffer is not None]


def test_flat_memory_that_is_seen_as_rows_is_reset_row_by_row() -> None:
    """If a slice_fn views flat memory as rows, only the padding rows of its slot are reset."""
    registry = _registry()
    for name in "ab":
        registry.register_slot(
            make_slot(
                name,
                shape_fn=lambda max_bs, _: (2 * max_bs,),
                slice_fn=lambda buffer, n: buffer[: 2 * n].view(n, 2),
            )
        )
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(9)
    fill(registry, 1, 3)
    assert _content(registry) == [[9, 9, 0, 0, 0, 0, 9, 9]] * 2


def test_two_rows_in_one_element_may_have_no_tail() -> None:
    """If rows are packed, there may be nothing to reset between a raw and a padded count."""
    registry = _registry()
    registry.register_slot(make_slot(slice_fn=lambda buffer, n: buffer[: (n + 1) // 2]))
    fill(registry, 1, 2, lengths=torch.tensor([5]))
    fill(registry, 1, 4, lengths=torch.tensor([6]))
    assert _content(registry) == [[6, 0, 0, 0]]


@pytest.mark.parametrize("first", [0, 7])
def test_adopted_rows_of_an_arena_are_padded_as_declared(first: int) -> None:
    """A slot bound to a row of another slot has its own pad value, not that of the row's first owner."""
    pool = SharedBuffers()
    policy: dict[str, Any] = {"padding_policy": PaddingPolicy.FILL_SENTINEL}
    owner = _registry(share_pool=pool).register_slot(make_slot(**policy, pad_value=first))
    registry = _registry(share_pool=pool)
    registry.register_slot(make_slot(**policy, pad_value=7), bind=owner.buffer)
    fill(registry, 1, 4, lengths=torch.tensor([5]))
    assert _content(registry) == [[5, 7, 7, 7]]


def test_extents_that_differ_are_reset_each_for_itself() -> None:
    """Slots that differ in axis, dtype or width are each reset in their own padding rows only."""
    registry = _registry()
    registry.register_slot(make_slot("requests"))
    registry.register_slot(make_slot("tokens", axis="tokens"))
    registry.register_slot(make_slot("flags", dtype=torch.bool))
    registry.register_slot(make_slot("wide", shape_fn=lambda max_bs, _: (max_bs, 2)))
    for slot in registry:
        assert slot.buffer is not None
        slot.buffer.fill_(1)
    registry.fill_from(SimpleNamespace(), raw_bs=1, padded_bs=2, raw_num_tokens=2, padded_num_tokens=4)
    assert _content(registry) == [
        [1, 0, 1, 1],
        [1, 1, 0, 0],
        [True, False, True, True],
        [[1, 1], [0, 0], [1, 1], [1, 1]],
    ]


def test_more_slots_than_an_arena_has_rows() -> None:
    """Slots beyond the sixteenth are in another arena, and are filled like all others."""
    registry = _registry()
    names = [f"slot{number}" for number in range(35)]
    for number, name in enumerate(names):
        registry.register_slot(make_slot(name, padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=-number))
    fill(registry, 2, 4, **{name: torch.tensor([8, 9]) for name in names})
    assert _content(registry) == [[8, 9, -number, -number] for number in range(35)]
    assert len(list(registry._memory)) == 3


def test_a_row_begins_where_kernels_like_it() -> None:
    """For any width and dtype, each row of an arena begins at a multiple of 512 bytes."""
    for dtype in (torch.bool, torch.int32, I64):
        for width in (1, 63, 64, 65, 1000):
            arenas = Arenas()
            slots = [make_slot(name, dtype=dtype) for name in "abc"]
            rows = [arenas.allocate(slot, (width,), torch.device("cpu")) for slot in slots]
            (arena,) = arenas
            starts = [address_range(row)[0] - arena.memory.data_ptr() for row in rows]
            assert [start % 512 for start in starts] == [0, 0, 0]
            assert starts[1] - starts[0] >= width * dtype.itemsize


def test_a_huge_slot_reserves_no_rows_for_others() -> None:
    """A slot of many bytes, such as a mask for every token and key, has its own allocation and no arena."""
    registry = _registry()
    wide = 2**18
    slot = make_slot(
        "mask",
        shape_fn=lambda max_bs, _: (max_bs * wide,),
        dtype=torch.uint8,
        slice_fn=lambda buffer, n: buffer[: n * wide],
    )
    buffer = registry.register_slot(slot).buffer
    assert buffer is not None
    assert registry.allocated_nbytes == buffer.nbytes == 4 * wide
    buffer.fill_(1)
    fill(registry, 1, 2, mask=torch.ones(wide, dtype=torch.uint8))
    assert [int(part.sum()) for part in buffer.split(wide)] == [wide, 0, wide, wide]


def test_a_slot_without_rows_has_no_arena() -> None:
    """A scalar slot with axis none is copied and never padded."""
    registry = _registry()
    registry.register_slot(make_slot("count", shape_fn=lambda *_: (), axis="none"))
    fill(registry, 1, 2, count=torch.tensor(5))
    assert _content(registry) == [5]
