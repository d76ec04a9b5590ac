"""Nodes, which run a recorded call again and write into the memory of its recorded results.

- An operation that writes its arguments is run unchanged.
- A copy (``clone``, ``_to_copy``) is run as ``copy_``, because its out-variant copies twice.
- An operation that makes new tensors is run as its out-variant, which writes into the recorded tensors, if
  the out-variant is known to compute the same bits: see `graphpact_tape.outs`. Otherwise the operation is run
  and its results are copied into the recorded tensors.
- A collective is run, and the replay waits for it.

Does not: record, or decide which calls a replay has to run; `graphpact_tape.recorder` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from graphpact.errors import ReplayError
from graphpact.tensors import storage_id
from graphpact_tape.collectives import is_collective, repeat_collective
from graphpact_tape.outs import EQUAL_OUTS
from graphpact_tape.recorder import RecordedCall
from graphpact_tape.trees import tensors_of
from graphpact_tape.writes import write

__tracebackhide__ = True

Node: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A call that a replay makes."""

_aten = torch.ops.aten

_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})  # noqa: SLF001  no public name

# Options that an out-variant does not take, because its output already has them.
_OUTPUT_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def make_node(call: RecordedCall) -> Node:
    """Return the node that runs ``call`` again, into the tensors that it made."""
    op, args, kwargs = repeat(call)
    return getattr(op, "_op", op), args, kwargs  # without torch's Python layer


def repeat(call: RecordedCall) -> Node:
    """Return the node of `make_node`, but with an overload as operation.

    The operation is an overload, a `RecordedTask` or a `RunAndCopy`.
    """
    op, args, kwargs = call.op, call.args, call.kwargs
    if is_collective(op):
        return RunAndCopy(partial(repeat_collective, op, call.collective), call.made, str(op)), args, kwargs
    outputs = [t for t in call.made if t is not None]
    writes_arguments = op._schema.is_mutable  # noqa: SLF001
    if writes_arguments and not outputs:
        return op, args, kwargs
    if op in _COPIES:
        return _aten.copy_.default, (outputs[0], args[0]), {}
    if op not in EQUAL_OUTS:
        return RunAndCopy(op._op, call.made, str(op)), args, kwargs  # noqa: SLF001
    overload, names, taken = out_variant(op)
    kept = {name: value for name, value in kwargs.items() if name in taken}
    into = dict(zip(names, outputs, strict=True))
    return overload, args, {**kept, **into}


@cache
def out_variant(func: Any) -> tuple[Any, list[str], set[str]]:
    """Return the out-variant of ``func``, the names of its output arguments, and all argument names.

    Raises:
        LookupError: There is no out-variant.
    """
    wanted = {a.name: str(a.type) for a in func._schema.arguments}  # noqa: SLF001  no public way
    bare = {n: t for n, t in wanted.items() if n not in _OUTPUT_OPTIONS}
    packet = func.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs: list[str] = []
        rest: dict[str, str] = {}
        for a in candidate._schema.arguments:  # noqa: SLF001
            if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write:
                outs.append(a.name)
            else:
                rest[a.name] = str(a.type)
        if len(outs) == len(func._schema.returns) and outs and rest in (wanted, bare):  # noqa: SLF001
            return candidate, outs, {a.name for a in candidate._schema.arguments}  # noqa: SLF001
    raise LookupError(f"{func} has no out-variant with the same arguments")


@dataclass(frozen=True, slots=True)
class RunAndCopy:
    """A callable that runs an operation again and copies its new tensors to the recorded ``outputs``.

    Args:
        op: The operation.
        outputs: See `RecordedCall.made`; None for a result in the memory of an argument.
        name: The name of the operation, for messages.
    """

    op: Callable[..., Any]
    outputs: tuple[torch.Tensor | None, ...]
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the operation on these arguments."""
        results = tensors_of(self.op(*args, **kwargs))
        for target, new in zip(self.outputs, results, strict=True):
            if target is not None:
                write(target, new)
            elif storage_id(new) not in {storage_id(t) for t in tensors_of((args, kwargs))}:
                raise ReplayError(
                    f"{self.name} returned an argument at capture, but returns new memory now",
                    hint="an operator in a graph must always return new memory, or never",
                    rule="GP01",
                )
