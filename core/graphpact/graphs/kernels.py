"""`declare_kernel`: an operator that stands for one kernel although its implementation is Python.

A driver that records dispatched operators has to know what an operator with a Python implementation is. An
engine's custom operator is a part of the program: its Python runs at capture and not at replay, so what it
calls is recorded. A model of a kernel is one kernel launch: it may read the contents of its arguments, and
runs at every replay. Only its author knows which of the two it is.

Does not: define an operator, or decide what a driver records.
"""

from typing import Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef

_Operator = TypeVar("_Operator")

_MARK = "graphpact_stands_for_one_kernel"  # an attribute of the operator


def declare_kernel(op: _Operator) -> _Operator:
    """Declare that an operator stands for one kernel, and return it: also a decorator.

    Its implementation has to be a function of its arguments alone, as a kernel is: a replay runs it again, so
    what it would read of Python's state is that of the replay. An operator whose implementation is compiled
    needs no declaration.

    Args:
        op: An operator of ``torch.library``: a function that ``custom_op`` returned, or one of ``torch.ops``.

    Raises:
        TypeError: It is no operator.
    """
    setattr(_packet_of(op), _MARK, True)
    return op


def is_kernel(op: Any) -> bool:
    """Return whether `declare_kernel` was called with the operator ``op``."""
    return _MARK in vars(_packet_of(op))


def _packet_of(op: Any) -> torch._ops.OpOverloadPacket:
    """Return the operator with all its overloads, which torch makes once."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload  # noqa: SLF001  no public way
    if isinstance(op, torch._ops.OpOverload):  # noqa: SLF001  no public name
        op = op.overloadpacket
    if isinstance(op, torch._ops.OpOverloadPacket):  # noqa: SLF001  no public name
        return op
    raise TypeError(f"{op!r} is no operator of torch: define it with torch.library")
