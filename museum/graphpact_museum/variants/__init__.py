"""Variants: correct plugins in another style, which the suite must pass.

    metadata     metadata of other types
    preparation  metadata made in other ways
    memory       memory of a backend's own
    styles       backends of their own in styles of other engines: tables, state, types of metadata
    kernels      backends of their own whose kernels do other work
    ops          backends of their own whose kernels are custom operators
    tasks        backends of their own whose kernels take lists of the host
    levels       backends of their own, one of each level of graph support
    attention    the common parts of backends of their own
    runners      runners that pad, stage and choose in other ways
    ladders      runners of their own, one of each level of graph support
    recorded     regions with other work

Does not: contain bugs; see the exhibits in the other rooms of the museum.
"""

from graphpact_museum.exhibit import Variant
from graphpact_museum.variants import (
    kernels,
    ladders,
    levels,
    memory,
    metadata,
    ops,
    preparation,
    recorded,
    runners,
    styles,
    tasks,
)

_ROOMS = (metadata, preparation, memory, styles, kernels, ops, tasks, levels, runners, recorded, ladders)

VARIANTS: tuple[Variant, ...] = tuple(variant for room in _ROOMS for variant in room.VARIANTS)
"""All variants of these rooms."""
