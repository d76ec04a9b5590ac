"""The memory that the graphs of a lane read, outside the slots that each step writes.

Does not: allocate or change it; see `graphpact_conformance.lane.rig` for the KV cache and the page table.
"""

import itertools
from collections.abc import Collection, Sequence

import torch

from graphpact.buffers import PaddingPolicy
from graphpact.lane import Lane
from graphpact.memory_map import MemoryMap
from graphpact.shapes import GraphShape
from graphpact.tensors import storage_id
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.lane.holders import holder_of, storages_of
from graphpact_tape.tape import Tape


def states(lane: Lane, weights: Sequence[torch.Tensor], names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Return the external memory of a lane's graphs by name, without the slots that every step writes.

    An attribute of the backend is returned whole. After the backend rebinds the attribute, the part that a
    graph reads is returned under the same name.

    Args:
        lane: The lane.
        weights: Weights of its model, which are left out.
        names: The names of earlier looks, by storage; new ones are added.
    """
    memory = MemoryMap(lane.registry, lane.backend)
    constant = {storage_id(weight) for weight in weights}
    found: dict[str, torch.Tensor] = {}
    for shape, captured in lane.captured.items():
        for tensor in captured.graph.external_tensors() or ():
            if storage_id(tensor) in constant or memory.is_engines(tensor):
                continue
            slot = memory.slot_of(tensor)
            if slot is None:
                known = memory.attribute_of(tensor) or holder_of(tensor, lane.backend, lane.runner)
                name, whole = known or (_reader_of(lane, shape, tensor), tensor)
                found[names.setdefault(storage_id(tensor), _unlike(name, {*names.values()}))] = whole
            elif slot.padding_policy is PaddingPolicy.FILL_ONCE and slot.buffer is not None:
                found[slot.label] = slot.buffer
    return found


def _unlike(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number added if it is already taken."""
    numbered = (f"{name} ({at})" if at > 1 else name for at in itertools.count(1))
    return next(each for each in numbered if each not in taken)


def held(lane: Lane, config: Config) -> dict[str, torch.Tensor]:
    """Return copies of state that outlives a step: tensors of the backend, and slots that are filled once.

    A tensor with a row per request row or per KV slot is returned without its scratch rows.
    """
    assert lane.registry is not None  # noqa: S101  lanes with graphs have one
    scratch = {config.num_rows: 1, config.num_pages * config.page_size: config.page_size}

    def owned(tensor: torch.Tensor) -> torch.Tensor:
        first = scratch.get(tensor.shape[0], 0) if tensor.dim() else None
        return (tensor if first is None else tensor[first:]).clone()

    slots = {
        slot.label: owned(slot.buffer)
        for slot in lane.registry
        if slot.buffer is not None and slot.padding_policy is PaddingPolicy.FILL_ONCE
    }
    attributes = {
        f"{type(lane.backend).__name__}.{name}": owned(value)
        for name, value in vars(lane.backend).items()
        if isinstance(value, torch.Tensor) and lane.registry.slot_of(value) is None
    }
    return slots | attributes


def external(lane: Lane, shape: GraphShape) -> list[torch.Tensor]:
    """Return the tensors that a graph reads outside KV cache and page table, in the order of use."""
    memory = MemoryMap(lane.registry, lane.backend)
    graph = lane.captured[shape].graph
    return [t for t in graph.external_tensors() or () if not memory.is_engines(t)]


def name_of(lane: Lane, shape: GraphShape, tensor: torch.Tensor) -> str:
    """Return the slot of a tensor that a graph reads, the name of its holder, or the line that reads it."""
    slot = MemoryMap(lane.registry, lane.backend).slot_of(tensor)
    if slot is not None:
        return slot.label
    known = holder_of(tensor, lane.backend, lane.runner)
    return _reader_of(lane, shape, tensor) if known is None else known[0]


def _reader_of(lane: Lane, shape: GraphShape, tensor: torch.Tensor) -> str:
    """Describe a tensor without a holder by its type and the line of a graph that reads it."""
    graph = lane.captured[shape].graph
    line = graph.line_of(tensor) if isinstance(graph, Tape) else None
    what = f"a tensor of {tensor.dtype} {tuple(tensor.shape)} that no attribute holds now"
    return what if line is None else f"{what}, used at {line}"


def holds(lane: Lane, tensor: torch.Tensor) -> bool:
    """Return whether a slot or an attribute of the backend, at any depth, has the memory of ``tensor``."""
    in_slot = MemoryMap(lane.registry, lane.backend).slot_of(tensor) is not None
    return in_slot or storage_id(tensor) in storages_of(lane.backend)
