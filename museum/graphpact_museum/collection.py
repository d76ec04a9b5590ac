"""All exhibits and all variants: what the rooms of the museum have.

Does not: define one.
"""

from graphpact_museum import (
    bindings,
    drafts,
    drivers,
    fields,
    life,
    memory,
    padding,
    plans,
    recordings,
    requests,
    right_drivers,
    runners,
    scale,
    segments,
    tasks,
    variants,
)
from graphpact_museum.exhibit import Exhibit, Variant

_ROOMS = (
    *(bindings, recordings, plans, padding, memory, runners, drafts, drivers, life, requests, segments),
    *(scale, fields, tasks),
)

EXHIBITS: tuple[Exhibit, ...] = tuple(
    sorted(
        (exhibit for room in _ROOMS for exhibit in room.EXHIBITS),
        key=lambda exhibit: (exhibit.rule, exhibit.name),
    )
)
"""Every exhibit, by its rule."""
VARIANTS: tuple[Variant, ...] = (*variants.VARIANTS, *segments.VARIANTS, *right_drivers.VARIANTS)
"""Every variant."""
