"""`StepRecord`: the inputs and results of one step of a rig. `Leaf`: one tensor that the step read.

Does not: run a step, or compare two; see `graphpact_conformance.lane.lane_under_test` and ``experiments``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot
from graphpact.errors import Breach
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.problems import Problem

NAN = float("nan")

Undo = Callable[[], None]
Ready = Callable[[ForwardBatch, Any], Undo | None]
"""``(view, metadata) -> undo``: called between the hooks and the replay. Its result is called after the step:
it restores memory that no step writes."""


@dataclass(slots=True, eq=False)
class Leaf:
    """A copy of one tensor of view or metadata.

    Args:
        path: Its path, such as ``metadata.kv_indptr``.
        value: Its contents: of a view before the replay, whose region may write it; of metadata after it.
        slot: The slot of its memory; None outside the registry.
        tail: The first index of its padding rows along `dim`; None if it has none.
        dim: The axis of its rows.
        is_due: Whether every step has to write it.
        is_alias: Whether an earlier path has the same memory.
    """

    path: str
    value: torch.Tensor
    slot: BoundSlot | None
    tail: int | None
    dim: int
    is_due: bool
    is_alias: bool

    @property
    def is_resident(self) -> bool:
        """Whether it lies in a slot, and no earlier path has the same memory."""
        return self.slot is not None and not self.is_alias

    @property
    def is_written(self) -> bool:
        """Whether every step has to write it, and no earlier path has the same memory."""
        return self.is_due and not self.is_alias

    @property
    def name(self) -> str:
        """Path and slot, for messages."""
        return self.path if self.slot is None else f"{self.path} ({self.slot.label})"

    @property
    def in_tail(self) -> torch.Tensor:
        """Bool tensor of the shape of `value`, set for padding rows."""
        mask = torch.zeros(self.value.shape, dtype=torch.bool)
        if self.tail is not None:
            mask.narrow(self.dim, self.tail, self.value.shape[self.dim] - self.tail).fill_(1)
        return mask


@dataclass
class StepRecord:
    """The record of one run of one batch.

    Args:
        problem: The batch.
        error: The raised error; None for a step without error.
        stage: The last stage: ``prepare``, ``metadata``, ``replay`` or ``done``.
        shape: The replayed shape; None for an eager run.
        replayed: The shapes of the replays that were counted, one entry for each.
        eager_runs: Number of eager runs that were counted.
        reason: The reason of a counted eager run; None if none was counted.
        declined: The same reason, if the runner declares it in ``declines``.
        leaves: The tensors of view and metadata, by path.
        numbers: The host values of view and metadata, by path.
        tasks: The host arguments of the graph's tasks in this replay, by task and name.
        breaches: Breaches of the pact.
        rows: The outputs of the lane by name, live rows only; None for a step that failed.
        axes: The axes of the outputs.
        outputs: The outputs of the graph, including padding rows; None for an eager run.
        caches: The KV cache after the step.
        table: The page table after the step.
        changed_fields: Fields of the batch that the step changed.
    """

    problem: Problem
    error: BaseException | None = None
    stage: str = "prepare"
    shape: GraphShape | None = None
    replayed: list[GraphShape] = field(default_factory=list)
    eager_runs: int = 0
    reason: EagerReason | None = None
    declined: EagerReason | None = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    breaches: tuple[Breach, ...] = ()
    rows: dict[str, torch.Tensor] | None = None
    axes: Mapping[str, str] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] | None = None
    caches: dict[str, torch.Tensor] = field(default_factory=dict)
    table: torch.Tensor | None = None
    changed_fields: list[str] = field(default_factory=list)

    @property
    def replays(self) -> int:
        """The number of counted replays."""
        return len(self.replayed)

    @property
    def has_padding(self) -> bool:
        """Whether the graph of the step has more requests or tokens than its batch."""
        shape, problem = self.shape, self.problem
        return shape is not None and (
            shape.batch_size > problem.batch_size or shape.num_tokens > len(problem.tokens)
        )


def live_rows(step: StepRecord) -> dict[str, torch.Tensor]:
    """Return the live rows of the outputs of a graph; without an axis all of them."""
    problem, outputs = step.problem, step.outputs or {}
    live = {"bs": problem.batch_size, "tokens": len(problem.tokens)}
    return {
        name: tensor[: live[step.axes[name]]] if step.axes[name] in live else tensor
        for name, tensor in outputs.items()
    }


def copies(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of outputs on the host."""
    return {name: tensor.detach().clone().cpu() for name, tensor in outputs.items()}
