"""Runners of CUDA graphs. The names are those that engines use; on a CPU the lane's driver is the tape.

    cuda_graph             one full graph for each capture size of decode or target verify
    breakable_cuda_graph   prefill, broken at run time where the model attends
    piecewise_cuda_graph   prefill, in the pieces into which torch.compile splits the model

Does not: record graphs; drivers do. Those of devices, such as ``cuda``, are in `graphpact_cuda_graph.driver`.
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
