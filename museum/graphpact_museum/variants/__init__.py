"""Variants: correct plugins in another style, which the suite must pass.

Edits of graphpact's plugins:

    metadata     metadata of other types
    preparation  metadata made in other ways
    memory       backends with additional memory
    runners      runners that pad, stage and choose in other ways
    recorded     regions that do other work

Plugins that are written from scratch:

    python_state plugins that change host state in the region
    requests     backends that keep something of requests from step to step
    state        backends with constants, staging memory and state as in other engines
    styles       backends with metadata as in other engines
    kernels      backends whose kernels do other work
    ops          a backend whose kernels are custom operators
    tasks        backends whose kernels take lists in host memory
    levels       a backend for each level of graph support
    ladders      runners for each level of graph support
    attention    common parts of these backends

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
    python_state,
    recorded,
    requests,
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
    "python_state",
    "recorded",
    "requests",
    "runners",
    "state",
    "styles",
    "tasks",
]
