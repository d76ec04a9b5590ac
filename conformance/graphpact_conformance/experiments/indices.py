"""Negative indices in padding rows and dummies, found by their use: GP04, GP11.

torch counts a negative index from the end of a tensor, without an error; a kernel reads the memory before the
tensor. The fields that the contract names are checked where they are written, see ``padding`` and
``dummies``. Fields of a plugin and numbers that a region computes are found here by their use: a step is
watched while it runs, and each negative number that reaches an operation that indexes is noted.

An index counts only if something depends on it: the step is repeated with 0 in place of the negative numbers,
and they are reported if a result changes, of a padding row too. A consumer may mask -1 before it indexes, or
discard what it read. Negative indices that a batch without padding has at the same operation are left out.

Does not: see an index inside a kernel of a library or of compiled code; or report one beyond the end, or one
of the operations that take no negative index: torch refuses these.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot
from graphpact_conformance.draws.batches import Drawn
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import same_step
from graphpact_conformance.experiments.experiment import Findings
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.records.steps import StepRecord
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.tape import Tape

_aten = torch.ops.aten
_INDEXING = frozenset(
    {
        *(_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_),  # noqa: SLF001  names of torch
        *(_aten._index_put_impl_, _aten._unsafe_index_put, _aten.take, _aten.put, _aten.put_),  # noqa: SLF001
    }
)
"""The operations of torch that count negative indices from the end. Others refuse them."""


class _Negative(NamedTuple):
    """One index that has negative numbers.

    Args:
        op: The operation that takes it.
        tensor: The index.
        values: Its negative numbers.
    """

    op: str
    tensor: torch.Tensor
    values: list[int]


class _Indices(DispatchMode):
    """A dispatch mode that notes negative indices.

    Args:
        replaces: Whether to give the operations 0 in place of negative numbers.

    Attributes:
        found: The indices with negative numbers, by the number of the operation among those that index.
    """

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self._replaces = replaces
        self._count = 0
        self.found: dict[int, _Negative] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the index of an operation that indexes, and run it."""
        del types
        if getattr(func, "overloadpacket", None) in _INDEXING:
            is_list = isinstance(args[1], (list, tuple))
            indices = [self._seen(func, each) for each in (args[1] if is_list else [args[1]])]
            args = (args[0], indices if is_list else indices[0], *args[2:])
        return func(*args, **(kwargs or {}))

    def _seen(self, func: Any, index: torch.Tensor | None) -> torch.Tensor | None:
        if index is None or index.dtype in (torch.bool, torch.uint8):
            return index
        self._count += 1
        negative = index < 0
        if not bool(negative.any()):
            return index
        values = sorted({*index[negative].tolist()})
        self.found[self._count] = _Negative(str(func.overloadpacket), index, values)
        return index.clamp(min=0) if self._replaces else index


def indices(lane: LaneUnderTest, steps: Drawn) -> Findings:
    """Watch replays of batches with padding rows, and of dummies, for negative indices that are read."""
    rig = lane.rig()
    with _Indices() as live:
        rig.step(steps.exact)
    for problem in (steps.small, steps.padded):
        found = [*_of_replay(lane, rig, problem, live.found)]
        yield from found
        if found:
            return  # a dummy has the same padding rows
    for shape in rig.config.shapes:
        rig.serve_declined(shape)
        try:
            found = [*_of_replay(lane, rig, Problem(lane.config.case, [], 0), live.found, rig.dummy(shape))]
        finally:
            rig.lane.serves = {}
        yield from found


def _of_replay(
    lane: LaneUnderTest,
    rig: Rig,
    problem: Problem,
    live: Mapping[int, _Negative],
    dummy: ForwardBatch | None = None,
) -> Findings:
    """Yield a finding if results of a replay depend on negative indices.

    Args:
        lane: The lane.
        rig: Its rig.
        problem: The batch.
        live: The negative indices of a batch without padding rows, which are left out.
        dummy: A dummy to replay in place of the batch.
    """
    with _Indices() as seen:
        step = rig.step(problem, batch=dummy)
    found = [each for at, each in seen.found.items() if at not in live]
    if step.error is not None or not found:
        return
    with _Indices(replaces=True):
        other = rig.step(problem, batch=dummy)
    if same_step(step, other, first_slot=rig.config.page_size):
        return
    first = found[0]  # later ones may be made from it
    slot = rig.registry.slot_of(first.tensor)
    hook = None if slot is None else "populate" if slot.copy_from_fb else "init_metadata_replay"
    of = "" if dummy is None else f"the dummy batch of {step.shape}: "
    yield lane.finding(
        "GP04" if dummy is None else "GP11",
        hook=hook if dummy is None else "prepare_replay",
        field=of + _name_of(rig, step, first.tensor, slot),
        expected=f"{first.op} takes indices from 0, in padding rows too",
        actual=f"{', '.join(map(str, first.values[:8]))}, which torch counts from the end: the results depend"
        f" on the rows there{_negative_inputs(step, slot)}",
        step=step,
        help="write an index of scratch, such as 0 (a slot's `pad_value`), or mask the rows before indexing",
    )


def _negative_inputs(step: StepRecord, named: BoundSlot | None) -> str:
    """Return a text with the tensors of view and metadata that hold negative integers, but for ``named``."""
    names = [
        leaf.name
        for leaf in step.leaves.values()
        if not leaf.is_alias
        and (named is None or leaf.slot != named)
        and leaf.value.dtype in (torch.int32, torch.int64)
        and bool((leaf.value < 0).any())
    ]
    return f"; inputs with negative numbers: {', '.join(names)}" if names else ""


def _name_of(rig: Rig, step: StepRecord, tensor: torch.Tensor, slot: BoundSlot | None) -> str:
    """Return the name of an index: that of its slot, or the line of the region that made it."""
    if slot is not None:
        return f"the index in {slot.label}"
    captured = None if step.shape is None else rig.lane.captured.get(step.shape)
    graph = None if captured is None else captured.graph
    line = graph.line_of(tensor) if isinstance(graph, Tape) else None
    return "an index" if line is None else f"the index made at {line}"
