"""The ``cpu_graph`` runner: decode compiled for the CPU, one graph for each capture size.

Static inputs, padding and dummy batches are those of `graphpact.runners.DecodeRunner`. Two things differ: the
driver ``auto`` is `graphpact_cpu_graph.inductor.InductorDriver`, and without a C++ compiler the lane runs
eagerly, with that reason.

Does not: serve prefill, or run on a GPU unless another driver is named.
"""

from typing import ClassVar

import torch

from graphpact import EagerReason
from graphpact.runners import DecodeRunner

NO_COMPILER = EagerReason("no_compiler", "no C++ compiler to compile graphs with")


class CpuGraphRunner(DecodeRunner):
    """The decode runner with sparse capture sizes: every shape is compiled, which takes seconds."""

    driver: ClassVar[str | None] = "inductor"

    def default_batch_sizes(self) -> list[int]:
        """Return the powers of two up to the largest batch size, and that size."""
        largest = self.context.limits.max_bs
        return [*(1 << i for i in range((largest - 1).bit_length())), largest]

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return `NO_COMPILER` on a CPU, where a missing compiler is no configuration error; else None."""
        return NO_COMPILER if device.type == "cpu" else None
