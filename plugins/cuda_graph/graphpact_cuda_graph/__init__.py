"""Runners of CUDA graphs. The names are those that engines use; on a CPU the lane's driver is the tape.

    cuda_graph             one full graph for each capture size of decode or target verify
    breakable_cuda_graph   prefill, split at run time at every attention call
    piecewise_cuda_graph   prefill, split into pieces by torch.compile

Does not: record graphs; drivers do. `graphpact_cuda_graph.driver` contains drivers of devices, such as
``cuda``.
"""

from graphpact.batch import ForwardMode
from graphpact.runners import DecodeRunner
from graphpact.shapes import default_decode_batch_sizes


class CudaGraphRunner(DecodeRunner):
    """The runner with dense capture sizes.

    A capture is cheap, but padding rows cost time in every step.
    """

    modes = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})

    def default_batch_sizes(self) -> list[int]:
        """Return the default capture sizes, up to the largest batch size."""
        return default_decode_batch_sizes(self.context.limits.max_bs)
