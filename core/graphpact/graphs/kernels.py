"""`declare_kernel`: declares that an operator represents one kernel, although it is written in Python.

An operator with a Python implementation can be one of two things, and a driver that records dispatched
operators has to know which. An engine's custom operator is a part of the program: its Python runs at capture
and not at replay, so the operations that it calls are recorded. A Python model of a kernel represents one
kernel launch: it may read the contents of its arguments, and runs at every replay. Only the author knows.

Does not: define an operator, or decide what a driver records.
"""

from typing import Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef

_Operator = TypeVar("_Operator")

_MARK = "graphpact_stands_for_one_kernel"  # an attribute of the operator


def declare_kernel(op: _Operator) -> _Operator:
    """Declare that an operator represents one kernel, and return it; usable as a decorator.

    The implementation must depend only on its arguments, as a kernel does, because a replay runs it again and
    Python state may have changed since the capture. A compiled operator needs no declaration.

    Args:
        op: An operator of ``torch.library``: a function that ``custom_op`` returned, or one of ``torch.ops``.

    Raises:
        TypeError: ``op`` is not an operator.
    """
    setattr(_packet_of(op), _MARK, True)
    return op


def is_kernel(op: Any) -> bool:
    """Return whether `declare_kernel` was called with the operator ``op``."""
    return _MARK in vars(_packet_of(op))


def _packet_of(op: Any) -> torch._ops.OpOverloadPacket:
    """Return the object of the operator with all its overloads, of which torch makes only one."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload  # noqa: SLF001  no public way
    if isinstance(op, torch._ops.OpOverload):  # noqa: SLF001  no public name
        op = op.overloadpacket
    if isinstance(op, torch._ops.OpOverloadPacket):  # noqa: SLF001  no public name
        return op
    raise TypeError(f"{op!r} is not an operator of torch: define it with torch.library")
