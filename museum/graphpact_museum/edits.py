"""Edits of an attention backend that several rooms use.

Does not: contain an exhibit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from graphpact.attention import LayerSpec, each_step
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_museum.exhibit import Make

Edit: TypeAlias = Callable[[Any, ForwardBatch, Any], None]
"""``(backend, view, metadata)``: an additional edit."""


def after_replay_hook(edit: Edit) -> Make:
    """Return a factory of backends whose replay hook refreshes everything and then runs ``edit``."""

    def make(base: type[Any]) -> type[Any]:
        class Edited(base):  # type: ignore[misc]
            """A backend whose hooks make all metadata."""

            fill_is_device_only = False

            @hookimpl
            def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
                """Refresh, and then run the edit."""
                fresh = super().init_metadata_replay(view, shape, captured)
                for at, part in each_step(view, fresh):
                    edit(self, at, part)
                return fresh

        return Edited

    return make


def not_refreshed(spare: Callable[[Any], Any], *, in_graph: bool) -> Make:
    """Return a factory of backends that refresh a spare copy of some fields after capture.

    Args:
        spare: Returns metadata with other memory for the fields that are not refreshed.
        in_graph: Whether the recorded body has the bug, or the replay hook.
    """

    def make(base: type[Any]) -> type[Any]:
        if in_graph:

            class Recorded(base):  # type: ignore[misc]
                """A backend whose recorded body writes less than the hook."""

                def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
                    """Write all other fields."""
                    for at, part in each_step(view, metadata) if self.records_metadata else ():
                        self.fill_metadata(at, spare(part))

            return Recorded

        class Hooked(base):  # type: ignore[misc]
            """A backend whose replay hook writes less than the capture hook."""

            fill_is_device_only = False

            @hookimpl
            def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
                """Write all other fields."""
                del shape
                for at, part in each_step(view, captured):
                    other = spare(part)
                    self.fill_metadata(at, other)
                    if self.plan_metadata is not None:
                        self.plan_metadata(at, other)
                return captured

        return Hooked

    return make


def with_spare(*names: str) -> Callable[[Any], Any]:
    """Return a function that gives the named tensors of metadata other memory."""

    def spare(metadata: Any) -> Any:
        others = {name: torch.zeros_like(getattr(metadata, name)) for name in names}
        return replace(metadata, **others)

    return spare


@dataclass(frozen=True, slots=True)
class Attended:
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


Then: TypeAlias = Callable[[Any, Attended], torch.Tensor]
"""``(backend, call) -> out``: the replaced output."""


def after_attention(then: Then, more: Callable[[Any], Sequence[GraphSlot]] | None = None) -> Make:
    """Return a factory of backends that edit the output of attention.

    Args:
        then: The edit; not called for a batch without tokens.
        more: Slots that the edit needs besides the backend's own.
    """

    def make(base: type[Any]) -> type[Any]:
        class AfterAttention(base):  # type: ignore[misc]
            """A backend that edits the output of attention."""

            def declare_slots(self, limits: Any) -> Sequence[GraphSlot]:
                """Return the slots and those of the edit."""
                slots: Sequence[GraphSlot] = super().declare_slots(limits)
                return slots if more is None else [*slots, *more(self)]

            def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                """Attend, and edit the output."""
                out = super().forward(q, k, v, layer, metadata)
                return then(self, Attended(q, k, layer, metadata, out)) if len(out) else out

        return AfterAttention

    return make


def workspace(name: str, *shape: int, value: float = 0, dtype: torch.dtype = torch.float32) -> GraphSlot:
    """Return a workspace slot, filled once."""
    return metadata_slot(f"museum.{name}", lambda *_: shape, dtype, role="workspace", pad_value=value)


def there(backend: Any, name: str) -> torch.Tensor:
    """Return the memory of a workspace."""
    slot = backend._registry.get_slot(f"museum.{name}")  # noqa: SLF001  what its buffers() do
    memory: torch.Tensor = slot.buffer
    return memory
