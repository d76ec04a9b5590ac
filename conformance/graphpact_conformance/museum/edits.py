"""Edits of an attention backend that exhibits of several rooms are made by.

Does not: plant anything by itself.
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
from graphpact_conformance.museum.exhibit import Make

Edit: TypeAlias = Callable[[Any, ForwardBatch, Any], None]
"""``(backend, view, metadata)``: what is done besides."""


def after_replay_hook(edit: Edit) -> Make:
    """Return what makes a backend whose replay hook refreshes everything, and then does ``edit``."""

    def make(base: type[Any]) -> type[Any]:
        class Edited(base):  # type: ignore[misc]
            """Metadata is made by hooks alone."""

            fill_is_device_only = False

            @hookimpl
            def init_metadata_replay(
                self, view: ForwardBatch, shape: GraphShape, captured: Any
            ) -> Any:
                """Refresh, and then do what is planted."""
                fresh = super().init_metadata_replay(view, shape, captured)
                for at, part in each_step(view, fresh):
                    edit(self, at, part)
                return fresh

        return Edited

    return make


def not_refreshed(spare: Callable[[Any], Any], *, in_graph: bool) -> Make:
    """Return what makes a backend that refreshes a spare copy of some fields after capture.

    Args:
        spare: From metadata to the same with other memory in the place of what is forgotten.
        in_graph: Whether it is the recorded body that forgets, or the replay hook.
    """

    def make(base: type[Any]) -> type[Any]:
        if in_graph:

            class Recorded(base):  # type: ignore[misc]
                """The recorded body writes less than the hook."""

                def record_metadata(self, view: ForwardBatch, metadata: Any) -> None:
                    """Write all the rest."""
                    for at, part in each_step(view, metadata) if self.records_metadata else ():
                        self.fill_metadata(at, spare(part))

            return Recorded

        class Hooked(base):  # type: ignore[misc]
            """The replay hook writes less than the capture hook."""

            fill_is_device_only = False

            @hookimpl
            def init_metadata_replay(
                self, view: ForwardBatch, shape: GraphShape, captured: Any
            ) -> Any:
                """Write all the rest."""
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
    """Return what gives metadata other memory for the tensors of that name."""

    def spare(metadata: Any) -> Any:
        others = {name: torch.zeros_like(getattr(metadata, name)) for name in names}
        return replace(metadata, **others)

    return spare


@dataclass(frozen=True, slots=True)
class Attended:
    """One call of `AttentionBackend.forward`, and what it gave: ``[tokens, q heads, v head dim]``."""

    q: torch.Tensor
    k: torch.Tensor
    layer: LayerSpec
    metadata: Any
    out: torch.Tensor


Then: TypeAlias = Callable[[Any, Attended], torch.Tensor]
"""``(backend, call) -> out``: what is given instead."""


def after_attention(then: Then, more: Callable[[Any], Sequence[GraphSlot]] | None = None) -> Make:
    """Return what does something with what attention gives.

    Args:
        then: What it does; not called for a batch without tokens.
        more: Slots that it needs besides the backend's own.
    """

    def make(base: type[Any]) -> type[Any]:
        class AfterAttention(base):  # type: ignore[misc]
            """Attends, and goes on."""

            def declare_slots(self, limits: Any) -> Sequence[GraphSlot]:
                """Return more slots."""
                slots: Sequence[GraphSlot] = super().declare_slots(limits)
                return slots if more is None else [*slots, *more(self)]

            def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                """Attend, and do it."""
                out = super().forward(q, k, v, layer, metadata)
                return then(self, Attended(q, k, layer, metadata, out)) if len(out) else out

        return AfterAttention

    return make


def workspace(
    name: str, *shape: int, value: float = 0, dtype: torch.dtype = torch.float32
) -> GraphSlot:
    """Return a slot that no step writes anew."""
    return metadata_slot(
        f"museum.{name}", lambda *_: shape, dtype, role="workspace", pad_value=value
    )


def there(backend: Any, name: str) -> torch.Tensor:
    """Return the memory of a workspace."""
    slot = backend._registry.get_slot(f"museum.{name}")  # noqa: SLF001  what its buffers() do
    memory: torch.Tensor = slot.buffer
    return memory
