"""Recording a region of work and replaying it: the driver contract and the two drivers of the core.

Does not: choose what is recorded. Drivers are found by entry point like every other plugin.
"""

from graphpact.graphs.driver import DeclaredMemory, Event, Graph, GraphDriver, Stream

__all__ = ["DeclaredMemory", "Event", "Graph", "GraphDriver", "Stream"]
