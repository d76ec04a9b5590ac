"""Recording a region as FX graphs: operations with their numbers, tensors of the outside as inputs.

A region is run for real while every dispatched operation becomes a node. What a node reads and no node
made is an input, by its memory, never a constant: a replay reads it, and writes it, where it lies. So
the numbers of Python stay what they were, and the contents of tensors do not.

An eager call ends a graph and begins the next. What a graph made and somebody after it reads (the next
graph, the call, whoever gets the outputs) is copied, as the graph's last work, to where it lay when it
was recorded.

Does not: compile, or look for wrong use of memory; the tape's strict mode does the latter.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphpact.buffers.arenas import address_range
from graphpact.errors import CaptureError
from graphpact_tape.host import HostReadGuard, Watcher, storage_id, tensors_of, written_by
from graphpact_tape.recorder import EagerCall

__tracebackhide__ = True  # a message names the line of the region, and not of what records it

Place: TypeAlias = tuple[Any, ...]
"""Address, shape, stride and dtype: tensors of one place are one input."""

_aten = torch.ops.aten

# Memory without content: no operation.
_UNINITIALISED = frozenset(
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass(slots=True)
class Segment:
    """One graph, and the memory around it that it reads and writes.

    Attributes:
        graph: Its nodes write their arguments in place, and it returns nothing.
        inputs: By place, the placeholders and the tensors that they stand for.
        num_nodes: Operations that compute or write something.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[Place, tuple[fx.Node, torch.Tensor]] = field(default_factory=dict)
    num_nodes: int = 0
    _made: dict[int, fx.Node] = field(default_factory=dict)  # by the tensor's identity
    _fresh: dict[int, list[tuple[fx.Node, torch.Tensor]]] = field(default_factory=dict)
    _written: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], list[torch.Tensor]]:
        """Append the call ``func(*args, **kwargs)``, which has not been made yet.

        Returns:
            What is to be told the call's result; it returns the tensors that lie in new memory.
        """
        given = tensors_of((args, kwargs))
        call = pytree.tree_map_only(torch.Tensor, self._node_of, (args, kwargs))
        node = self.graph.call_function(func, *call)
        writes = written_by(func, args, kwargs)
        self._written += [address_range(t) for t in writes]

        def made(result: Any) -> list[torch.Tensor]:
            fresh = self._bind(node, result, given)
            self.num_nodes += bool(fresh or writes) and func.overloadpacket not in _UNINITIALISED
            return fresh

        return made

    def export(self, storages: set[int]) -> None:
        """Let the graph leave what it made in ``storages`` where it lay while it was recorded."""
        for storage in self._fresh.keys() & storages:
            for node, tensor in self._fresh[storage]:
                self.graph.call_function(_aten.copy_.default, (self._input(tensor), node))
                self._written.append(address_range(tensor))

    def finish(self) -> list[torch.Tensor]:
        """End the graph and return its inputs, in the order of the placeholders.

        Raises:
            CaptureError: Inputs of two dtypes share memory that is written.
        """
        self._join_overlaps()
        self.graph.output(())
        tensors = {id(node): tensor for node, tensor in self.inputs.values()}
        return [tensors[id(node)] for node in self.graph.find_nodes(op="placeholder")]

    # -- inside ----------------------------------------------------------------------------------

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        node = self._made.get(id(tensor))
        if node is not None:
            return node
        bases = self._fresh.get(storage_id(tensor))
        if bases is None:
            return self._input(tensor)
        # A view of what this graph made that passed no dispatcher, such as ``tensor.data``.
        view = tensor.shape, tensor.stride(), tensor.storage_offset()
        return self.graph.call_function(_aten.as_strided.default, (bases[0][0], *view))

    def _input(self, tensor: torch.Tensor) -> fx.Node:
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in self.inputs:
            with self.graph.inserting_before():
                node = self.graph.placeholder(f"input_{len(self.inputs)}")
            # Of the tensor, its memory is kept: whoever assigns to ``tensor.data`` moves no input.
            self.inputs[place] = node, tensor.detach()
        return self.inputs[place][0]

    def _bind(self, node: fx.Node, result: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Let ``node`` stand for ``result``, and return the tensors that lie in new memory."""
        if isinstance(result, list | tuple):
            fresh = []
            for i, part in enumerate(result):
                item = self.graph.call_function(operator.getitem, (node, i))
                fresh += self._bind(item, part, given)
            return fresh
        if not isinstance(result, torch.Tensor) or any(result is t for t in given):
            return []
        self._made[id(result)] = node
        if storage_id(result) in {storage_id(t) for t in given}:
            return []  # a view
        self._fresh.setdefault(storage_id(result), []).append((node, result))
        return [result]

    def _join_overlaps(self) -> None:
        """Make one input of those that share written memory: a compiler takes inputs for disjoint."""
        ranges = {place: address_range(tensor) for place, (_, tensor) in self.inputs.items()}
        for group in _overlapping(ranges):
            begin, end = ranges[group[0]][0], max(ranges[place][1] for place in group)
            if len(group) == 1 or not any(a < end and begin < b for a, b in self._written):
                continue
            lowest = self.inputs[group[0]][1]
            kinds = {(str(place[-1]), storage_id(self.inputs[place][1])) for place in group}
            if len(kinds) > 1:
                dtypes = " and as ".join(sorted(dtype for dtype, _ in kinds))
                raise CaptureError(
                    f"a region writes memory that it has in several storages or dtypes: as {dtypes}",
                    hint='the graph driver "tape" can record it',
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
        """Return ``tensor`` as a view of the flat ``base``; compilers understand slices best."""
        call = self.graph.call_function
        if not tensor.is_contiguous():
            strided: fx.Node = call(
                _aten.as_strided.default, (base, tensor.shape, tensor.stride(), offset)
            )
            return strided
        part: fx.Node = call(_aten.slice.Tensor, (base, 0, offset, offset + tensor.numel()))
        view: fx.Node = call(_aten.view.default, (part, tensor.shape))
        return view


class Recorder(Watcher):
    """Runs every dispatched operation and makes a node of it.

    Args:
        guard: The function mode that stands beside it; it knows which tensors are the host's.

    Attributes:
        parts: Segments, and between them the eager calls.
        own: By storage, memory that belongs to the graph: what the region made, and its constants.
    """

    def __init__(self, guard: HostReadGuard) -> None:
        super().__init__(guard)
        self.parts: list[Segment | EagerCall] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self._segment = Segment()
        self._handed_over: set[int] = set()  # storages that eager calls read
        # Held to the end, so that no later tensor is taken for one that is gone.
        self._held: list[torch.Tensor] = []

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and make a node of it."""
        if func is _aten.lift_fresh.default:
            return self._constant(func(*args))
        if torch.Tag.inplace_view in func.tags:
            raise self.guard.refusal(
                f"{func} changes a tensor's shape in place",
                "use the variant that returns a view: the recorded tensor keeps its shape",
            )
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._by_value, (args, kwargs))
        given = tensors_of((args, kwargs))
        made = self._segment.add(func, args, kwargs)
        result = func(*args, **kwargs)
        self._held += [*given, *tensors_of(result)]
        self._owns(made(result))
        return result

    def eager_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``fn``, unrecorded, and go on in a new segment."""
        self.guard.paused = True
        try:
            result = fn(*args)
        finally:
            self.guard.paused = False
        given = tensors_of(args)
        storages = {storage_id(t) for t in given}
        self._owns(t for t in tensors_of(result) if storage_id(t) not in storages)
        self._held += [*given, *tensors_of(result)]
        self._handed_over |= {storage_id(t) for t in given}
        self.parts += [self._segment, EagerCall(fn, args, result)]
        self._segment = Segment()
        return result

    def finish(self, outputs: Any) -> None:
        """Let every segment leave behind what is read after it, and own no memory beyond that.

        Args:
            outputs: What the region returned.
        """
        self.parts.append(self._segment)
        read = {storage_id(t) for t in tensors_of(outputs)} | self._handed_over
        for part in reversed(self.parts):
            if isinstance(part, Segment):
                part.export(read)
                read |= {storage_id(t) for _, t in part.inputs.values()}
        self.own = {storage: memory for storage, memory in self.own.items() if storage in read}
        self._held.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _by_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host number as a constant, as a kernel takes it; any other tensor as it is."""
        if tensor.dim() or tensor not in self.host:
            return tensor
        kept = tensor.clone()
        self._owns([kept])
        return kept

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a copy of a tensor made of Python numbers: later operations may overwrite it."""
        kept = tensor.clone()
        self._owns([kept])
        made = self._segment.add(_aten.clone.default, (kept,), {})
        self._owns(made(tensor))
        self._held += [kept, tensor]
        return tensor

    def _owns(self, tensors: Iterable[torch.Tensor]) -> None:
        self.own.update((storage_id(t), t.untyped_storage()) for t in tensors)


def _overlapping(ranges: dict[Place, tuple[int, int]]) -> list[list[Place]]:
    """Return the places in groups whose ranges of addresses overlap, each in rising order."""
    groups: list[list[Place]] = []
    reach = 0
    for place, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin == end:
            continue  # no element, no memory
        if groups and begin < reach:
            groups[-1].append(place)
        else:
            groups.append([place])
        reach = max(reach, end)
    return groups
