"""Split a recording into pieces for a compiler, and calls between them.

Does not: compile or call anything.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from graphpact.graphs import is_kernel
from graphpact.graphs.segments import EagerCall
from graphpact.tensors import storage_id
from graphpact_cpu_graph.blocks import split_at_blocks
from graphpact_tape.collectives import is_collective
from graphpact_tape.host_tensors import plain_tensors
from graphpact_tape.operators import may_hide_writes
from graphpact_tape.recorder import RecordedCall, Segment
from graphpact_tape.trees import tensors_of
from graphpact_tape.writes import repeats

Piece: TypeAlias = Segment | RecordedCall | EagerCall
"""A segment that is compiled, a recorded call that is made unchanged, or an eager call."""

_aten = torch.ops.aten
_COPIES_STRIDES = frozenset({_aten.diagonal_scatter, _aten.select_scatter, _aten.slice_scatter})


def pieces_of(parts: Sequence[Segment | EagerCall]) -> list[Piece]:
    """Return the parts of a recording, with each segment split at calls that a compiler would change.

    These are calls whose schemas may hide writes, collectives, and copies that keep strides with which
    elements share memory. What is between them is split where blocks of calls repeat, see
    `graphpact_cpu_graph.blocks`.
    """
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, EagerCall):
            pieces.append(part)
            continue
        piece = Segment()
        for call in part.calls:
            if _is_compiled(call):
                piece.calls.append(call)
            else:
                pieces += [*split_at_blocks(piece), call]
                piece = Segment()
        pieces += split_at_blocks(piece)
    return pieces


def outliving_of(pieces: Sequence[Piece], outputs: Any) -> list[set[int]]:
    """Return for each piece the storages that it allocated and that are read after it.

    Args:
        pieces: The pieces of a recording, in order.
        outputs: The outputs of the region, which are read after all of them.
    """
    read = {storage_id(t) for t in tensors_of(outputs)}
    found: list[set[int]] = []
    for piece in reversed(pieces):
        calls = piece.calls if isinstance(piece, Segment) else []
        made = {storage_id(t) for call in calls for t in tensors_of(call.made)}
        found.append(made & read)
        read |= {storage_id(t) for t in _used_by(piece)}
    return found[::-1]


def _used_by(piece: Piece) -> list[torch.Tensor]:
    """Return the tensors that a piece reads or writes."""
    if isinstance(piece, Segment):
        return [t for call in piece.calls for t in call.tensors()]
    return piece.tensors() if isinstance(piece, RecordedCall) else plain_tensors(tensors_of(piece.args))


def _is_compiled(call: RecordedCall) -> bool:
    """Return whether a compiler may rely on the schema: it is torch's, or marks the outputs of a kernel."""
    if is_collective(call.op) or _writes_a_copy_that_repeats(call):
        return False
    schema = call.op._schema  # noqa: SLF001  no public way
    is_marked = is_kernel(call.op) and schema.is_mutable and not schema.returns
    return is_marked or not may_hide_writes(call.op)


def _writes_a_copy_that_repeats(call: RecordedCall) -> bool:
    """Return whether the call makes a copy whose elements share memory; a compiler would not do that."""
    return call.op.overloadpacket in _COPIES_STRIDES and repeats(call.args[0])
