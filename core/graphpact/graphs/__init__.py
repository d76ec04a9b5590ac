"""The driver contract: recording a region of work and replaying it.

Helpers for drivers: `EagerCall` is a call between two segments, `Line` is the caller's line, and `is_kernel`
returns whether an operator represents one kernel.

Does not: choose what is recorded, or find drivers; they are plugins with entry points.
"""

from graphpact.graphs.driver import DeclaredMemory, Event, Graph, GraphDriver, Ownership, Stream, TaskKey
from graphpact.graphs.kernels import declare_kernel, is_kernel
from graphpact.graphs.lines import Line
from graphpact.graphs.segments import EagerCall

__all__ = [
    "DeclaredMemory",
    "EagerCall",
    "Event",
    "Graph",
    "GraphDriver",
    "Line",
    "Ownership",
    "Stream",
    "TaskKey",
    "declare_kernel",
    "is_kernel",
]
