"""Reuse of memory inside a fast tape: tensors that are never needed at the same time share a storage.

Only private memory is reused. It is allocated by the region and written before it is read; no tensor with
this memory exists outside of the record when the capture ends; and the region did not request its address. So
outputs, the arguments and results of eager calls, tensors that the region passed to other code, and memory
that a kernel may access by an address keep their addresses and contents.

A tensor keeps its offset and strides in the other storage. So a kernel sees the same alignment as before, and
computes the same bits.

Does not: reuse memory between tapes, or in strict mode, which poisons the memory of each tensor.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact.graphs.segments import EagerCall
from graphpact.tensors import storage_id
from graphpact_tape.nodes import Node, RunAndCopy
from graphpact_tape.recorder import Recording
from graphpact_tape.rewrites import memory_of, memory_written_by
from graphpact_tape.trees import map_tensors, tensors_of

__tracebackhide__ = True

_LARGEST_ELEMENT = 16
"""Bytes of the largest element, which is a complex128."""


def private_memory(recording: Recording, nodes: Sequence[Node]) -> set[int]:
    """Return the storages of a recording that only its nodes read and write.

    Args:
        recording: The recording, which still holds all memory of the region.
        nodes: Its nodes and eager calls, in order.
    """
    aliases: dict[int, set[int]] = {}  # the tensors of the recording by storage; each has one reference to it
    flipped: set[int] = set()
    for call in (call for segment in recording.segments for call in segment.calls):
        for t in tensors_of((call.args, call.kwargs, call.result, call.made)):
            aliases.setdefault(storage_id(t), set()).add(id(t))
            if t.is_conj() or t.is_neg():  # a property of the tensor in addition to its layout
                flipped.add(storage_id(t))
    first: dict[int, bool] = {}  # whether the first node that uses a storage writes it
    for node in nodes:
        for storage in memory_of(node):
            first.setdefault(storage, storage in memory_written_by(node))
    # Each tensor has a reference to its storage, and so has `own`. Outputs, and the arguments and results of
    # eager calls, are additional tensors beside the aliases of the record, as are tensors that other code
    # holds.
    return {
        storage
        for storage, held in aliases.items()
        if storage in recording.own
        and first.get(storage)
        and storage not in flipped
        and storage not in recording.addressed
        and torch._C._storage_Use_Count(storage) == len(held) + 1  # noqa: SLF001  no public way
    }


def in_shared_memory(
    nodes: Sequence[Node], own: dict[int, torch.UntypedStorage], private: set[int]
) -> list[Node]:
    """Return the nodes with tensors in private memory moved to shared storages.

    Args:
        nodes: The nodes and eager calls of a tape, in order.
        own: The memory of the tape, by `storage_id`.
        private: The storages that may be replaced; see `private_memory`.
    """
    spans: dict[int, tuple[int, int]] = {}  # the first and the last node that uses a storage
    for at, node in enumerate(nodes):
        for storage in memory_of(node) & private:
            spans[storage] = spans.get(storage, (at, at))[0], at
    homes = _homes(spans, own)
    moved: dict[int, torch.Tensor] = {}

    def at_home(tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_id(tensor)
        home = homes.get(storage, storage)
        if home == storage:
            return tensor
        if id(tensor) not in moved:
            layout = tensor.storage_offset(), tensor.shape, tensor.stride()
            new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved[id(tensor)] = new.set_(own[home], *layout)
        return moved[id(tensor)]

    placed: list[Node] = []
    for op, args, kwargs in nodes:
        if isinstance(op, EagerCall):
            placed.append((op, args, kwargs))
            continue
        if isinstance(op, RunAndCopy):
            op = replace(op, outputs=map_tensors(at_home, op.outputs))  # noqa: PLW2901
        placed.append((op, *map_tensors(at_home, (args, kwargs))))
    return placed


def _homes(spans: dict[int, tuple[int, int]], own: dict[int, torch.UntypedStorage]) -> dict[int, int]:
    """Return the replacement of each storage. The largest storages are placed first."""
    homes: dict[int, int] = {}
    taken: dict[
        int, list[tuple[int, int]]
    ] = {}  # for each replacement, the disjoint spans in ascending order
    for storage in sorted(spans, key=lambda each: -own[each].nbytes()):
        span = spans[storage]
        for home, used in taken.items():
            place = bisect.bisect(used, span)
            is_free = (place == 0 or used[place - 1][1] < span[0]) and (
                place == len(used) or span[1] < used[place][0]
            )
            if is_free and _can_hold(own[home], own[storage]):
                used.insert(place, span)
                homes[storage] = home
                break
        else:
            taken[storage] = [span]
    return homes


def _can_hold(home: torch.UntypedStorage, storage: torch.UntypedStorage) -> bool:
    """Return whether tensors in ``storage`` can move to ``home``, which is at least as large.

    Operations that copy the whole storage of a tensor, such as ``slice_scatter``, need a storage that
    consists of whole elements.
    """
    element = math.gcd(storage.nbytes(), _LARGEST_ELEMENT)
    return home.device == storage.device and home.nbytes() % element == 0
