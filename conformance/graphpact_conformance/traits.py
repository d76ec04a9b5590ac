"""Traits: facts of a backend's class that the rules of the tiers ask for, as texts in the results of a run.

Does not: build a backend, or judge a trait (see `graphpact_conformance.tiers`).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphpact.attention import AttentionBackend
    from graphpact.buffers import GraphSlot

TWO_BODIES = "two bodies"
"""The trait of a backend whose replays fill metadata by other code than its captures."""
HAS_PLAN = "a plan"
"""The trait of a backend with a plan: a slot of that role, or host work after its fill."""
HAS_INVARIANTS = "invariants of its plan"
"""The trait of a backend that declares `plan_invariants`."""

_BODIES = ("refresh_metadata", "init_metadata_replay", "init_metadata_capture")
"""Methods that make the metadata of a capture or of a replay. By default both call `fill_metadata`."""


def traits_of(backend: "type[AttentionBackend]", slots: "Iterable[GraphSlot]") -> list[str]:
    """Return the traits of a backend.

    Args:
        backend: The class.
        slots: Its slots in one lane; none if it cannot declare them there.
    """
    from graphpact.attention import AttentionBackend  # noqa: PLC0415  torch, which readers of reports lack

    has = {
        TWO_BODIES: any(getattr(backend, name) is not getattr(AttentionBackend, name) for name in _BODIES),
        HAS_PLAN: backend.capabilities.needs_host_plan
        or backend.plan_metadata is not None
        or any(slot.role == "plan" for slot in slots),
        HAS_INVARIANTS: bool(backend.plan_invariants),
    }
    return [trait for trait, holds in has.items() if holds]
