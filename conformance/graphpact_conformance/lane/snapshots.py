"""`Observer` keeps the inputs of a step between its hooks and its replay; `snapshot` copies them.

`poison_slot` and `reset_slot` write a slot before a step, to show what the step itself writes.

Does not: run a step; see `graphpact_conformance.lane.rig`.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot, CudaGraphBufferRegistry
from graphpact.graphs import Graph, TaskKey
from graphpact.hookspecs import hookimpl
from graphpact.pact import walk
from graphpact.shapes import GraphShape
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.records.steps import Leaf, Ready, Undo
from graphpact_tape.poison import poison
from graphpact_tape.strict_observer import is_due
from graphpact_tape.tape import Tape

_Around = Generator[None, Any, Any]


class Observer:
    """An observer that keeps view and metadata of each step.

    Args:
        keeps_inputs: Whether to copy the view before the replay, whose region may write it.

    Attributes:
        before: Called with registry and shape before a step is prepared; may be None.
        prepared: Called with the batch and the metadata of a replay's hook, before `ready`; may be None.
        ready: Called with view and metadata after preparation and before the replay; may be None.
        undo: The result of the last call of `ready`.
    """

    def __init__(self, *, keeps_inputs: bool) -> None:
        self._keeps_inputs = keeps_inputs
        self.before: Callable[[CudaGraphBufferRegistry, GraphShape], None] | None = None
        self.prepared: Callable[[ForwardBatch, Any], None] | None = None
        self.ready: Ready | None = None
        self.undo: Undo | None = None
        self.forget()

    def forget(self) -> None:
        """Drop shape, view and metadata of the last step."""
        self.shape: GraphShape | None = None
        self.view: ForwardBatch | None = None
        self.metadata: Any = None
        self.inputs: dict[str, torch.Tensor] = {}
        self.at_capture = False

    @hookimpl(wrapper=True, tryfirst=True)
    def populate(self, registry: CudaGraphBufferRegistry, shape: GraphShape) -> _Around:
        """Note the shape of a new step."""
        self.forget()
        self.shape = shape
        if self.before is not None:
            self.before(registry, shape)
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def prepare_replay(self) -> _Around:
        """Keep the view of a step."""
        view = yield
        self.view = view
        return view

    @hookimpl(wrapper=True, tryfirst=True)
    def init_metadata_capture(self) -> _Around:
        """Keep the metadata of a capture."""
        self.at_capture = True
        return (yield from self._see())

    @hookimpl(wrapper=True, tryfirst=True)
    def init_metadata_replay(self, view: ForwardBatch) -> _Around:
        """Keep the metadata of a replay, which was made from ``view``."""
        return (yield from self._see(view))

    def _see(self, attended: ForwardBatch | None = None) -> _Around:
        metadata = yield
        self.metadata = metadata
        if self.prepared is not None and attended is not None:
            self.prepared(attended, metadata)
        if self.ready is not None and self.view is not None:
            self.undo = self.ready(self.view, metadata)
        if self._keeps_inputs and self.view is not None:
            tensors = walk({"view": self.view})
            self.inputs = {path: t.detach().clone() for path, t in tensors if isinstance(t, torch.Tensor)}
        return metadata


def snapshot(
    parts: Mapping[str, Any],
    problem: Problem,
    shape: GraphShape,
    *,
    views: Sequence[Any],
    inputs: Mapping[str, torch.Tensor],
    slot_at: Callable[[torch.Tensor], BoundSlot | None],
) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """Return copies of the tensors, and the host values, of view and metadata, by path.

    Args:
        parts: The view, and the metadata if there is any.
        problem: The batch of the step.
        shape: The shape of the step.
        views: The views whose parts metadata may refer to.
        inputs: Copies of the view before the replay, by path.
        slot_at: Returns the slot in whose memory a tensor begins; None outside the registry.
    """
    leaves: dict[str, Leaf] = {}
    numbers: dict[str, Any] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    raw = problem.batch_size, len(problem.tokens)
    # Parts of the view in metadata are judged with the view. The engine makes the view's host numbers.
    of_view, others = {"view": parts["view"]}, {n: part for n, part in parts.items() if n != "view"}
    for path, value in itertools.chain(walk(of_view), walk(others, without=views)):
        if not isinstance(value, torch.Tensor):
            numbers[path] = value
            continue
        key = (value.data_ptr(), value.shape, value.stride())
        alias = key in seen and value.numel() > 0
        seen.add(key)
        slot = slot_at(value) if value.numel() else None
        tail, dim = _tail_of(value, slot, raw, shape)
        due = slot is not None and is_due(slot)
        before = inputs.get(path)  # a copy already
        if before is None or before.shape != value.shape:
            before = value.detach().clone()
        leaves[path] = Leaf(path, before.cpu(), slot, tail, dim, due, alias)
    return leaves, numbers


def arguments_of(graph: Graph) -> dict[str, Any]:
    """Return the host arguments of a tape's tasks in its last replay, by task and name; tensors as lists."""
    tasks = graph.tasks if isinstance(graph, Tape) else None
    return {
        f"task {task.key.layer!r}: {name}": value.tolist() if isinstance(value, torch.Tensor) else value
        for task in (() if tasks is None else tasks.tasks.values())
        for name, value in task.arguments.items()
    }


def awaited_updates(graph: Graph) -> list[tuple[TaskKey, dict[str, Any], dict[str, torch.Tensor]]]:
    """Return the updates for which a launched replay of a tape waits, with the arguments of its tasks."""
    tasks = graph.tasks if isinstance(graph, Tape) else None
    if tasks is None or not tasks.still_waits():
        return []
    found = []
    for task in tasks.tasks.values():
        values = {name: task.arguments[name] for name in task.captured}
        rebound = {name: value for name, value in task.arguments.items() if name not in task.captured}
        found.append((task.key, values, rebound))
    return found


def each_due(
    fill: Callable[[BoundSlot], None],
) -> Callable[[CudaGraphBufferRegistry, GraphShape], None]:
    """Return an `Observer.before` that calls ``fill`` with every slot that each step has to write."""

    def before(registry: CudaGraphBufferRegistry, _: GraphShape) -> None:
        for slot in registry:
            if slot.buffer is not None and is_due(slot):
                fill(slot)

    return before


def _tail_of(
    value: torch.Tensor, slot: BoundSlot | None, raw: tuple[int, int], shape: GraphShape
) -> tuple[int | None, int]:
    """Return the first padding row of a tensor, and the axis of its rows; None if it has none.

    A tensor has a whole number of rows per request or token, and offsets have one more. Where a slot has its
    own slices, rows lie along the axis in which these grow.
    """
    if slot is None or slot.axis == "none":
        return None, 0
    by_request = slot.axis == "bs"
    raw_rows = raw[0] if by_request else raw[1]
    padded = shape.batch_size if by_request else shape.num_tokens
    if raw_rows >= padded:
        return None, 0
    fixed: set[int] = set()
    if slot.slice_fn is not None:
        fewer, whole = slot.slice_for(*raw).shape, slot.slice_for(shape.batch_size, shape.num_tokens).shape
        if len(whole) == value.dim():
            fixed = {dim for dim, size in enumerate(whole) if size == fewer[dim]}
    for dim, size in enumerate(value.shape):
        if dim in fixed:
            continue
        each, more = divmod(size, padded)
        if each and more <= 2:
            return min(each * raw_rows + min(more, 1), size), dim
    return None, 0


def poison_slot(slot: BoundSlot) -> None:
    """Fill a slot with poison."""
    if slot.buffer is not None:
        poison(slot.buffer)


def reset_slot(slot: BoundSlot) -> None:
    """Reset a slot to its initial value, so that it holds nothing of earlier steps."""
    if slot.buffer is not None:
        slot.buffer.fill_(slot.initial_value)
