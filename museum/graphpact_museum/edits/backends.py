"""Edits of attention backends that several modules use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from graphpact.attention import LayerSpec, PlanInvariant, each_step
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.shapes import GraphShape
from graphpact_museum.edits.override import named_after, override
from graphpact_museum.exhibit import Make

Edit: TypeAlias = Callable[[Any, ForwardBatch, Any], None]
"""``(backend, view, metadata)``: an additional edit."""


def after_replay_hook(edit: Edit) -> Make:
    """Make an edit of backends whose replay hook refreshes everything and then runs ``edit``."""

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        fresh = right(view, shape, captured)
        for at, part in each_step(view, fresh):
            edit(self, at, part)
        return fresh

    return named_after(edit, lambda base: override(base, init_metadata_replay, fill_is_device_only=False))


def invariants_of_inner(base: type[Any]) -> dict[str, PlanInvariant]:
    """Return the invariants of ``base`` for metadata that holds the base's own as ``inner``."""

    def of_inner(holds: PlanInvariant) -> PlanInvariant:
        return lambda backend, view, metadata: holds(backend, view, metadata.inner)

    return {says: of_inner(holds) for says, holds in base.plan_invariants.items()}


def not_refreshed(base: type[Any], spare: Callable[[Any], Any], *, in_graph: bool) -> type[Any]:
    """Return a backend whose replays write a spare copy of some fields instead of the captured fields.

    Args:
        base: The correct class.
        spare: Returns metadata with new memory for the fields that are not refreshed.
        in_graph: True to plant the bug in the recorded body, false for the replay hook.
    """

    def record_metadata(self: Any, _: Any, view: ForwardBatch, metadata: Any) -> None:
        for at, part in each_step(view, metadata) if self.records_metadata else ():
            self.fill_metadata(at, spare(part))

    def init_metadata_replay(self: Any, _: Any, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        del shape
        for at, part in each_step(view, captured):
            other = spare(part)
            self.fill_metadata(at, other)
            if self.plan_metadata is not None:
                self.plan_metadata(at, other)
        return captured

    if in_graph:
        return override(base, record_metadata)
    return override(base, init_metadata_replay, fill_is_device_only=False)


def with_spare(*names: str) -> Callable[[Any], Any]:
    """Return a function that copies metadata and gives the named tensors new memory."""

    def spare(metadata: Any) -> Any:
        others = {name: torch.zeros_like(getattr(metadata, name)) for name in names}
        return replace(metadata, **others)

    return spare


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of `AttentionBackend.forward`: its arguments, and ``out``, its output.

    Args:
        q: ``[T, num_q_heads, head_dim]``.
        k: ``[T, num_kv_heads, head_dim]``, or None.
        layer: The layer.
        metadata: The metadata of the step.
        out: ``[T, num_q_heads, v_head_dim]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    layer: LayerSpec
    metadata: Any
    out: torch.Tensor


EditOutput: TypeAlias = Callable[[Any, AttentionCall], torch.Tensor]
"""``(backend, call) -> out``: returns the output that replaces ``call.out``."""


def after_attention(edit: EditOutput) -> Make:
    """Make an edit of backends that replaces the output of attention with that of ``edit``.

    A batch without tokens keeps the right output.
    """

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        out = right(q, k, v, layer, metadata)
        return edit(self, AttentionCall(q, k, layer, metadata, out)) if len(out) else out

    return named_after(edit, lambda base: override(base, forward))


def with_slots(more: Callable[[Any], Sequence[GraphSlot]]) -> Callable[[Make], Make]:
    """Return a decorator of an edit that needs additional slots."""

    def declare_slots(self: Any, right: Any, limits: Any) -> Any:
        return [*right(limits), *more(self)]

    return lambda make: named_after(make, lambda base: override(make(base), declare_slots))


def workspace(name: str, *shape: int, value: float = 0, dtype: torch.dtype = torch.float32) -> GraphSlot:
    """Return a workspace slot, filled once."""
    return metadata_slot(f"museum.{name}", lambda *_: shape, dtype, role="workspace", pad_value=value)


def workspace_memory(backend: Any, name: str) -> torch.Tensor:
    """Return the memory of a workspace."""
    slot = backend._registry.get_slot(f"museum.{name}")  # noqa: SLF001  as its buffers() do
    memory: torch.Tensor = slot.buffer
    return memory
