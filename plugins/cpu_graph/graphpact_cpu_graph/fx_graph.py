"""FX graphs of a recording, with a node for each recorded call, and external tensors as inputs.

If no node made a tensor that a node reads, it is an input and never a constant: a replay reads and writes the
tensor in its memory. Python numbers are constants; contents of tensors are not.

If a tensor that a segment made is read after the segment (by the next segment, an eager call, or as an
output), the segment ends with a copy of it to its recorded memory.

Does not: record (`graphpact_tape.recorder` does), or compile.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphpact.errors import CaptureError
from graphpact.tensors import extent_of, storage_id
from graphpact_cpu_graph.keys import layout_of
from graphpact_cpu_graph.opaque import OPAQUE, copied
from graphpact_cpu_graph.products import product_of
from graphpact_kernels.compiled import linear
from graphpact_tape.operators import written_by
from graphpact_tape.recorder import RecordedCall, Segment
from graphpact_tape.trees import tensors_of
from graphpact_tape.writes import repeats

Place: TypeAlias = tuple[Any, ...]
"""Address, shape, stride and dtype. Tensors with the same place are one input."""

LIST_OF_ONE = "list of one"
"""The key in a node's ``meta`` for whether the result is a list of one new tensor."""

_aten = torch.ops.aten

# These may do nothing except copy their first argument. Inductor may drop them, or write their result into
# the memory of that argument, although this memory is written later.
_COPY = frozenset(
    getattr(_aten, name)
    for name in (
        "_to_copy",
        "as_strided_scatter",
        "cat",
        "ceil",
        "clone",
        "constant_pad_nd",
        "copy",
        "copy_",
        "diagonal_scatter",
        "floor",
        "index_put",
        "index_put_",
        "pow",
        "repeat",
        "round",
        "select_scatter",
        "slice_scatter",
        "trunc",
    )
)


@dataclass(slots=True)
class SegmentGraph:
    """One segment as an FX graph, with the inputs that it reads and writes.

    Attributes:
        graph: The FX graph. Its nodes write their arguments in place, and it returns nothing.
        inputs: The placeholders and their tensors, by place.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[Place, tuple[fx.Node, torch.Tensor]] = field(default_factory=dict)
    _made: dict[int, fx.Node] = field(default_factory=dict)  # by the tensor's identity
    _fresh: dict[int, list[tuple[fx.Node, torch.Tensor]]] = field(default_factory=dict)
    _written: list[tuple[int, int]] = field(default_factory=list)
    _numbers: Iterator[int] = field(
        default_factory=count
    )  # of inputs, including those that were joined later

    @classmethod
    def of(cls, segment: Segment, outliving: set[int]) -> "SegmentGraph":
        """Return the graph of ``segment``.

        Args:
            segment: A segment. Its recording has to stay alive until this graph is finished.
            outliving: The storages that the segment allocated and that are read after it.
        """
        made = cls()
        for call, written in zip(segment.calls, _written_from(segment.calls), strict=True):
            made._add(call, written)
        # In the order of the calls, so that equal segments give equal graphs, which torch compiles once.
        for storage in filter(outliving.__contains__, made._fresh):
            for node, tensor in made._fresh[storage]:
                made.graph.call_function(_aten.copy_.default, (made._input(tensor), node))
                made._written.append(_addresses(tensor))
        return made

    def finish(self) -> list[torch.Tensor]:
        """End the graph and return its inputs, in the order of the placeholders.

        Raises:
            CaptureError: Inputs of two dtypes share memory that is written.
        """
        self._join_overlaps()
        self.graph.output(())
        tensors = {id(node): tensor for node, tensor in self.inputs.values()}
        return [tensors[id(node)] for node in self.graph.find_nodes(op="placeholder")]

    # -- internal --------------------------------------------------------------------------------

    def _add(self, call: RecordedCall, written: set[int]) -> None:
        """Add a call. ``written`` contains the storages that this call and later calls write."""
        given = tensors_of((call.args, call.kwargs))
        if _has_offset(call) and storage_id(given[0]) not in self._fresh:
            if call.op is not _aten.as_strided.default:
                raise CaptureError(
                    f"{call.op}, recorded at {call.line}, counts an offset from the beginning of a storage, "
                    "which compiled code does not know",
                    hint="use as_strided() and copy the result",
                )
            return  # the result is an input of the calls that read it
        own = written_by(call.op, call.args, call.kwargs)
        copies = call.op.overloadpacket in _COPY

        def node_of(tensor: torch.Tensor) -> fx.Node:
            node = self._node_of(tensor)
            is_read = copies and storage_id(tensor) in written and all(tensor is not t for t in own)
            return self.graph.call_function(copied, (node,)) if is_read else node

        args, kwargs = pytree.tree_map_only(torch.Tensor, node_of, (call.args, call.kwargs))
        product = product_of(call)
        if product is not None:
            node = self._empty_like(call.result)
            x, weight, bias = (None if t is None else self._node_of(t) for t in product)
            rows = self.graph.call_function(_aten.t.default, (weight,))
            self.graph.call_function(linear, (x, rows, bias, node))
        elif call.op in OPAQUE:
            node = self._empty_like(call.result)
            self.graph.call_function(OPAQUE[call.op], args, {**kwargs, "out": node})
        else:
            node = self.graph.call_function(call.op, args, kwargs)
            node.meta[LIST_OF_ONE] = _is_list_of_one(call)
        self._written += map(_addresses, own)
        self._bind(node, call.result, given)

    def _empty_like(self, tensor: torch.Tensor) -> fx.Node:
        layout = tensor.shape, tensor.stride()
        kind: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        return self.graph.call_function(_aten.empty_strided.default, layout, kind)

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        node = self._made.get(id(tensor))
        if node is not None:
            return node
        bases = self._fresh.get(storage_id(tensor))
        if bases is None:
            return self._input(tensor)
        # An undispatched view of a tensor in this graph, such as ``tensor.data``.
        view = tensor.shape, tensor.stride(), tensor.storage_offset()
        node = self.graph.call_function(_aten.as_strided.default, (bases[0][0], *view))
        for flip in _flips_of(tensor):
            node = self.graph.call_function(flip, (node,))
        return node

    def _input(self, tensor: torch.Tensor) -> fx.Node:
        flips = _flips_of(tensor)
        if flips:  # a compiler sees only the memory of an input, without these properties of the tensor
            return self.graph.call_function(flips[0], (self._input(flips[0](tensor)),))
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in self.inputs:
            with self.graph.inserting_before():
                node = self.graph.placeholder(f"input_{next(self._numbers)}")
            self.inputs[place] = node, tensor
        return self.inputs[place][0]

    def _bind(self, node: fx.Node, result: Any, given: list[torch.Tensor]) -> None:
        """Use ``node`` for ``result`` in later calls."""
        if isinstance(result, list | tuple):
            for i, part in enumerate(result):
                item = self.graph.call_function(operator.getitem, (node, i))
                self._bind(item, part, given)
            return
        if not isinstance(result, torch.Tensor) or any(result is t for t in given):
            return
        node.meta["layout"] = layout_of(result)
        self._made[id(result)] = node
        if storage_id(result) not in {storage_id(t) for t in given}:
            self._fresh.setdefault(storage_id(result), []).append((node, result))

    def _join_overlaps(self) -> None:
        """Join inputs that share written memory, because a compiler assumes that inputs are disjoint.

        An input whose elements share memory with each other, such as an expanded one, also becomes a view.
        """
        ranges = {place: _addresses(tensor) for place, (_, tensor) in self.inputs.items()}
        for group in _overlapping(ranges):
            begin, end = ranges[group[0]][0], max(ranges[place][1] for place in group)
            lowest = self.inputs[group[0]][1]
            is_disjoint = len(group) == 1 and not repeats(lowest)
            if is_disjoint or not any(a < end and begin < b for a, b in self._written):
                continue
            kinds = {(str(place[-1]), storage_id(self.inputs[place][1])) for place in group}
            if len(kinds) > 1:
                dtypes = " and as ".join(sorted(dtype for dtype, _ in kinds))
                raise CaptureError(
                    f"a region writes memory that it uses through several storages or dtypes: as {dtypes}",
                    hint='use the graph driver "tape", which can record it',
                )
            origin, size = int(lowest.storage_offset()), (end - begin) // lowest.itemsize
            base = self._input(lowest.as_strided((size,), (1,), origin))
            whole = next(place for place, entry in self.inputs.items() if entry[0] is base)
            for place in group:
                node, tensor = self.inputs[place]
                if place == whole:
                    continue
                with self.graph.inserting_before(self._first_call()):
                    view = self._view(base, tensor, int(tensor.storage_offset()) - origin)
                node.replace_all_uses_with(view)
                self.graph.erase_node(node)
                del self.inputs[place]

    def _first_call(self) -> fx.Node:
        first: fx.Node = next(n for n in self.graph.nodes if n.op == "call_function")
        return first

    def _view(self, base: fx.Node, tensor: torch.Tensor, offset: int) -> fx.Node:
        """Return ``tensor`` as a view of the flat ``base``, as a slice if possible.

        Compilers optimize slices best.
        """
        call = self.graph.call_function
        if not tensor.is_contiguous():
            strided: fx.Node = call(_aten.as_strided.default, (base, tensor.shape, tensor.stride(), offset))
            return strided
        part: fx.Node = call(_aten.slice.Tensor, (base, 0, offset, offset + tensor.numel()))
        view: fx.Node = call(_aten.view.default, (part, tensor.shape))
        return view


def _written_from(calls: Sequence[RecordedCall]) -> list[set[int]]:
    """Return for each call the storages that it and later calls write."""
    written: set[int] = set()
    found: list[set[int]] = []
    for call in reversed(calls):
        written = written | {storage_id(t) for t in written_by(call.op, call.args, call.kwargs)}
        found.append(written)
    return found[::-1]


def _is_list_of_one(call: RecordedCall) -> bool:
    """Return whether a call returns a list of one new tensor, or is compiled as if it did."""
    if isinstance(call.result, list):
        return len(call.result) == 1 and call.made[0] is not None  # views are not calls in compiled code
    is_written_in_place = call.op.name().startswith("aten::_foreach_")
    return is_written_in_place and len(call.args[0]) == 1


def _has_offset(call: RecordedCall) -> bool:
    """Return whether a call counts an offset from the beginning of a storage, as ``as_strided`` may."""
    names = [argument.name for argument in call.op._schema.arguments]  # noqa: SLF001  no public way
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}.get("storage_offset") is not None


def _flips_of(tensor: torch.Tensor) -> list[Any]:
    """Return the views that undo the lazy conjugation and negation of ``tensor``, or apply them again."""
    conjugate = [_aten._conj.default] if tensor.is_conj() else []  # noqa: SLF001  no public name
    return [*conjugate, *([_aten._neg_view.default] if tensor.is_neg() else [])]  # noqa: SLF001


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address that ``tensor`` covers, and the address after the last."""
    begin, end = extent_of(tensor)
    base = tensor.untyped_storage().data_ptr()
    return base + begin, base + end


def _overlapping(ranges: dict[Place, tuple[int, int]]) -> list[list[Place]]:
    """Return groups of places with overlapping addresses, each in ascending order, in the order of inputs."""
    groups: list[list[Place]] = []
    reach = 0
    for place, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin == end:
            continue  # an empty tensor has no memory
        if groups and begin < reach:
            groups[-1].append(place)
        else:
            groups.append([place])
        reach = max(reach, end)
    order = {place: at for at, place in enumerate(ranges)}
    return sorted(groups, key=lambda group: min(order[place] for place in group))
