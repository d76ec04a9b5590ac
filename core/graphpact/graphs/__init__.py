"""The driver contract: recording a region of work and replaying it.

Helpers for drivers: `EagerCall` is a call between two segments, `Line` names the caller's line.

Does not: choose what is recorded, or find drivers; they are plugins with entry points.
"""

from graphpact.graphs.driver import DeclaredMemory, Event, Externals, Graph, GraphDriver, Ownership, Stream
from graphpact.graphs.lines import Line
from graphpact.graphs.segments import EagerCall

__all__ = [
    "DeclaredMemory",
    "EagerCall",
    "Event",
    "Externals",
    "Graph",
    "GraphDriver",
    "Line",
    "Ownership",
    "Stream",
]
