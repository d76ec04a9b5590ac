"""The ``cuda_graph`` runner: one full graph for each capture size of decode or target verify.

The name is the one that engines use. On a CPU the lane's driver is the tape.

Does not: serve prefill, or capture a part of a step.
"""

from graphpact.batch import ForwardMode
from graphpact.runners import DecodeRunner
from graphpact.shapes import default_decode_batch_sizes


class CudaGraphRunner(DecodeRunner):
    """The runner with dense capture sizes: a capture is cheap, padding rows cost in every step."""

    modes = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})

    def default_batch_sizes(self) -> list[int]:
        """Return the default capture sizes, up to the largest batch size."""
        return default_decode_batch_sizes(self.context.limits.max_bs)
