"""Tests of comparing and locating tensors: NaN, extents, and names of a lane's tensors."""

import math

import torch

from graphpact.memory_map import MemoryMap
from graphpact.tensors import (
    address_range,
    equal,
    extent_of,
    same,
    storage_id,
)
from rigs.lane import LaneRig

NAN = float("nan")


def test_nan_is_the_same_as_nan_and_infinity_is_no_large_number() -> None:
    """NaN equals NaN, also in complex numbers, and infinity differs from the largest float."""
    a = torch.tensor([1.0, NAN, math.inf, NAN])
    b = torch.tensor([1.0, NAN, torch.finfo(torch.float32).max, 0.0])
    assert same(a, b).tolist() == [True, True, False, False]
    assert equal(a, a.clone())
    assert not equal(a, b)
    assert not equal(a, a[:2])
    assert same(torch.tensor([complex(NAN, 0)]), torch.tensor([complex(NAN, 0)])).all()
    assert same(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [True, False]


def test_extents_and_addresses_of_strided_tensors() -> None:
    """An extent includes gaps between rows; that of an empty tensor is empty; views share a storage id."""
    whole = torch.zeros(6, 4)
    column = whole[1:, 2:3]
    assert extent_of(column) == (24, 24 + 4 * 4 * 4 + 4)
    first, end = address_range(column)
    assert (first - whole.data_ptr(), end - first) == (24, 68)
    assert extent_of(whole[2:2]) == (32, 32)
    assert storage_id(column) == storage_id(whole) != storage_id(whole.clone())


def test_a_map_names_what_a_tensor_is() -> None:
    """A map names slots by label, the backend's tensors by attribute, and the engine's by kind; views too."""
    rig = LaneRig(capture=False)
    registry = rig.lane.registry
    assert registry is not None
    memory = MemoryMap(registry, rig.backend)
    rig.backend.counter = torch.zeros(3)  # type: ignore[attr-defined]
    slot = next(s for s in registry if s.buffer is not None)
    named = {
        slot.label: slot.buffer,
        "FlashInferBackend.counter": rig.backend.counter[1:],  # type: ignore[attr-defined]
        "req_to_token": rig.table[1:],
        "the keys of layer 0": rig.kv.k[0][2:],
    }
    assert {name: memory.name_of(tensor) for name, tensor in named.items()} == {n: n for n in named}
    assert memory.name_of(torch.zeros(1)) is None
    assert memory.slot_of("no tensor") is None
    assert MemoryMap(None, rig.backend).slot_of(slot.buffer) is None
    declared = [memory.is_declared(tensor) for tensor in named.values()]
    assert declared == [True, False, True, True]
