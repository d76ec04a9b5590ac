"""Recording a region of work and replaying it: the driver contract and the two drivers of the core.

Does not: choose what is recorded. Drivers are found by entry point like every other plugin.
"""

from graphpact.graphs.driver import Graph, GraphDriver

__all__ = ["Graph", "GraphDriver"]
