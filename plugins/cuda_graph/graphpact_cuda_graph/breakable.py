"""The ``breakable_cuda_graph`` runner: prefill graphs that are split at run time at every attention call.

One capture of the model gives one segment more than the model has attention layers. Segments of all shapes
share the driver's memory pool.

Does not: require anything of the model. A segment contains the work between two attention calls.
"""

from graphpact import RegionContext
from graphpact.step import Forward, Region
from graphpact_cuda_graph.bridge import Bridge
from graphpact_cuda_graph.prefill import PrefillRunner


class BreakableCudaGraphRunner(PrefillRunner):
    """The runner whose graphs are split at every attention call."""

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return one forward pass, split at every attention call."""
        return lambda: forward(step.view, step.metadata, Bridge(step))
