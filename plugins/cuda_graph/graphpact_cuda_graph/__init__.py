"""The ``cuda_graph`` runner: one full graph for each decode bucket, on whatever driver the lane has.

The name is the field's; on a CPU the lane's driver is the tape.

Does not: serve prefill, or capture a part of a step.
"""

from graphpact.runners import DecodeRunner
from graphpact.shapes import default_decode_batch_sizes


class CudaGraphRunner(DecodeRunner):
    """Captures decode for dense sizes: a capture costs little, padding costs in every step."""

    def default_batch_sizes(self) -> list[int]:
        """Return the default capture sizes up to the largest step."""
        return default_decode_batch_sizes(self.context.limits.max_bs)
