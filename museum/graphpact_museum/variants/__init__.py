"""Variants: correct plugins in another style, which the suite must pass.

    metadata     metadata of other types
    preparation  metadata made in other ways
    memory       memory of a backend's own
    state        backends of their own with constants, staging memory and state of other engines
    styles       backends of their own with metadata of other engines
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
    state,
    styles,
    tasks,
)

__all__ = [
    "kernels",
    "ladders",
    "levels",
    "memory",
    "metadata",
    "ops",
    "preparation",
    "recorded",
    "runners",
    "state",
    "styles",
    "tasks",
]
