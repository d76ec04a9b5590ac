"""Traces: the operations that a region dispatched, without memory, and the first difference of two traces.

Two runs of a region that dispatch the same operations on the same extents, with the same numbers, run the
same kernels. Their results are equal bit for bit if their inputs are.

Does not: record for replay; `graphpact_tape.recorder` does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from graphpact.graphs.lines import Line
from graphpact.pact import is_readable
from graphpact_tape.collectives import described
from graphpact_tape.trees import leaves_of

__tracebackhide__ = True

_CUTS = ("aten.slice.", "aten.narrow.", "aten.select.")
"""Operations that return a view of a part of a tensor. A graph does not depend on the size of the whole
tensor.
"""


class TracedCall(NamedTuple):
    """One dispatched operation, without its memory.

    Args:
        op: Its name, with the overload.
        arguments: Its arguments, flattened: dtype, shape and stride of a tensor, the name of a process group
            or reduction, otherwise the value.
        line: The caller's line.
    """

    op: str
    arguments: tuple[object, ...]
    line: Line

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: Line) -> "TracedCall":
        """Return the trace of a call at the caller's ``line``."""
        arguments = tuple(
            (str(leaf.dtype), tuple(leaf.shape), leaf.stride())
            if isinstance(leaf, torch.Tensor)
            else described(leaf)
            for leaf in leaves_of((args, kwargs))
        )
        return cls(str(func), arguments, line)


class TraceDifference(NamedTuple):
    """The first place in which two traces differ.

    Args:
        at: Index of the call.
        argument: Index of the argument that differs; None if the operations differ, or if one of the traces
            has ended.
        mine: The call of the first trace, or None if it has ended.
        theirs: The call of the second trace, or None if it has ended.
    """

    at: int
    argument: int | None
    mine: TracedCall | None
    theirs: TracedCall | None


def first_difference(first: Sequence[TracedCall], second: Sequence[TracedCall]) -> TraceDifference | None:
    """Return where two traces differ, or None.

    Arguments without a readable value are not compared. If an operation takes only a part of a tensor, the
    size of the tensor is not compared either; a wrong part is found where it is used.
    """
    for at, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        if mine.op != theirs.op:
            return TraceDifference(at, None, mine, theirs)
        for i, (a, b) in enumerate(zip(mine.arguments, theirs.arguments, strict=False)):
            is_tensor = isinstance(a, tuple) or isinstance(b, tuple)
            is_cut = is_tensor and mine.op.startswith(_CUTS)
            if a == b or is_cut or not (is_tensor or (is_readable(a) and is_readable(b))):
                continue
            if a == a:  # noqa: PLR0124  false for NaN
                return TraceDifference(at, i, mine, theirs)
    at = min(len(first), len(second))
    if len(first) != len(second):
        return TraceDifference(at, None, *(t[at] if at < len(t) else None for t in (first, second)))
    return None
