"""The ``cpu_graph`` runner: decode graphs compiled for the CPU, one for each capture size.

Static inputs, padding and dummy batches are those of `graphpact.runners.DecodeRunner`. Two things differ: the
driver for ``auto`` is `graphpact_cpu_graph.inductor.InductorDriver`; and if there is no C++ compiler, the
lane runs eagerly and reports this as the reason.

Does not: serve prefill, or run on a GPU unless another driver is named.
"""

from typing import ClassVar

import torch

from graphpact import EagerReason
from graphpact.runners import DecodeRunner

NO_COMPILER = EagerReason("no_compiler", "no C++ compiler to compile graphs with")


class CpuGraphRunner(DecodeRunner):
    """The decode runner with sparse capture sizes, because compiling a shape takes seconds."""

    driver: ClassVar[str | None] = "inductor"

    def default_batch_sizes(self) -> list[int]:
        """Return the powers of two up to the largest batch size, and that size itself."""
        largest = self.context.limits.max_bs
        return [*(1 << i for i in range((largest - 1).bit_length())), largest]

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return `NO_COMPILER` on a CPU, so that a missing compiler is not an error there; otherwise None."""
        return NO_COMPILER if device.type == "cpu" else None
