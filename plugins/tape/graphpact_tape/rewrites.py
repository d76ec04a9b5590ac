"""Replace nodes of a tape by cheaper ones that write the same bits.

- A concatenation is replaced by copies into slices of its result. If an operation only computes an input of
  the concatenation, it writes directly into the slice.
- A Python number in an elementwise operation becomes a tensor. Otherwise torch would make one in each call.
- ``x ** 2`` becomes ``x * x``, as torch computes it.

Does not: reorder nodes, or change how an element is rounded.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from graphpact.tensors import storage_id
from graphpact_tape.nodes import Node, RunAndCopy
from graphpact_tape.operators import written_by
from graphpact_tape.trees import tensors_of

__tracebackhide__ = True

_aten = torch.ops.aten

_MOST_PARTS = 4
"""The largest number of inputs for which copies into slices are cheaper than the kernel of a
concatenation.
"""

# Each element is computed separately and rounded once, so the layout of the result makes no difference.
_SAME_IN_ANY_LAYOUT = frozenset(
    {_aten.neg.out, _aten.abs.out, _aten.mul.out, _aten.add.out, _aten.sub.out, _aten.div.out}
)

# A number and a tensor without axes, of the other operand's dtype, run the same kernel. That does not hold
# for dtypes of 16 bits, whose kernels use a number in 32 bits.
_TAKE_NUMBERS = frozenset({_aten.add.out, _aten.sub.out, _aten.mul.out, _aten.div.out})
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_FITS = 1 << 31  # both dtypes represent all integers below it


def memory_of(node: Node) -> set[int]:
    """Return the storages that a node reads or writes."""
    return {storage_id(t) for t in _tensors(node)}


def memory_written_by(node: Node) -> set[int]:
    """Return the storages that a node writes according to its schema."""
    op, args, kwargs = node
    if isinstance(op, RunAndCopy):
        return {storage_id(t) for t in op.outputs if t is not None}
    if not hasattr(op, "_schema"):
        return set()
    return {storage_id(t) for t in written_by(op, args, kwargs)}


def rewritten(nodes: Sequence[Node], own: dict[int, torch.UntypedStorage], private: set[int]) -> list[Node]:
    """Return cheaper nodes that write the same bits, except to intermediates of concatenations.

    Args:
        nodes: The nodes of a tape, whose operations are overloads.
        own: The memory of the tape, by `storage_id`. Tensors that replace numbers are added to it.
        private: Storages that only these nodes read.
    """
    numbers: dict[tuple[Any, ...], torch.Tensor] = {}
    cheaper = [_cheaper(node, numbers) for node in _in_slices(nodes, private)]
    own.update((storage_id(t), t.untyped_storage()) for t in numbers.values())
    return cheaper


def _tensors(node: Node) -> list[torch.Tensor]:
    op, args, kwargs = node
    outputs = op.outputs if isinstance(op, RunAndCopy) else ()
    return tensors_of((args, kwargs, outputs))


def _in_slices(nodes: Sequence[Node], private: set[int]) -> list[Node]:
    """Return the nodes with concatenations replaced by writes into slices of their results."""
    uses = Counter(storage for node in nodes for storage in memory_of(node))
    made: dict[int, int] = {}  # the index of the node that computes a tensor, by the tensor's identity
    replaced: dict[int, list[Node]] = {}
    seen: set[int] = set()
    for at, (op, args, kwargs) in enumerate(nodes):
        if op in _SAME_IN_ANY_LAYOUT:
            made[id(kwargs["out"])] = at
        if op is _aten.cat.out and _can_be_copied(args[0], kwargs["out"]):
            out, dim, begin = kwargs["out"], (*args, 0)[1], 0
            is_fresh = storage_id(out) in private and storage_id(out) not in seen
            parts = Counter(map(storage_id, args[0]))
            copies: list[Node] = []
            for part in args[0]:
                into = out.narrow(dim, begin, part.shape[dim])
                begin += part.shape[dim]
                producer = made.get(id(part))
                if (
                    is_fresh
                    and producer is not None
                    and parts[storage_id(part)] == 1
                    and _is_only_for(part, nodes[producer], uses, private)
                ):
                    before, given, _ = nodes[producer]
                    replaced[producer] = [(before, given, {**nodes[producer][2], "out": into})]
                else:
                    copies.append((_aten.copy_.default, (into, part), {}))
            replaced[at] = copies
        seen |= memory_of(nodes[at])
    return [new for at, node in enumerate(nodes) for new in replaced.get(at, [node])]


def _can_be_copied(parts: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Return whether copies of ``parts`` give the concatenation ``out`` and cost less."""
    overlaps = storage_id(out) in {storage_id(t) for t in parts}
    return (
        len(parts) <= _MOST_PARTS
        and not overlaps
        and all(t.dim() == out.dim() and t.dtype == out.dtype for t in parts)
    )


def _is_only_for(part: torch.Tensor, producer: Node, uses: Counter[int], private: set[int]) -> bool:
    """Return whether ``producer`` computes all of ``part``, and only one other node reads it."""
    storage = storage_id(part)
    inputs = {storage_id(t) for t in tensors_of(producer[1])}
    return storage in private and uses[storage] == 2 and storage not in inputs


def _cheaper(node: Node, numbers: dict[tuple[Any, ...], torch.Tensor]) -> Node:
    """Return a cheaper node with the same result.

    A number becomes a tensor from the cache ``numbers``, and ``x ** 2`` becomes ``x * x``.
    """
    op, args, kwargs = node
    if op in _TAKE_NUMBERS and _is_exact(args[1], args[0], is_divisor=op is _aten.div.out):
        key = args[1], str(args[1]), args[0].dtype, args[0].device  # the text, because 0.0 == -0.0
        if key not in numbers:
            numbers[key] = torch.tensor(args[1], dtype=args[0].dtype, device=args[0].device)
        return op, (args[0], numbers[key], *args[2:]), kwargs
    if op is _aten.pow.Tensor_Scalar_out and args[1] in (2, 2.0) and args[0].dtype in _FLOATS:
        return _aten.mul.out, (args[0], args[0]), kwargs
    return node


def _is_exact(number: Any, other: Any, *, is_divisor: bool) -> bool:
    """Return whether ``number`` gives the same result as a tensor of the dtype of ``other``."""
    if not isinstance(other, torch.Tensor) or not other.dim():
        return False
    if type(number) is float:
        return other.dtype in _FLOATS
    is_taken = other.dtype in _FLOATS or (other.dtype in _INTEGERS and not is_divisor)
    return type(number) is int and abs(number) < _FITS and is_taken
