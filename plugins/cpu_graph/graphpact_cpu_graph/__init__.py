"""The ``cpu_graph`` runner: decode compiled for the CPU, one graph for each bucket.

Inputs, padding and dummies are those of every decode runner (`graphpact.runners.DecodeRunner`); what is
its own is the driver that ``auto`` means, `graphpact_cpu_graph.inductor.InductorDriver`, and that a
lane whose machine has no C++ compiler runs eagerly, with that reason.

Does not: serve prefill, or run on a GPU unless another driver is named.
"""

from typing import ClassVar

import torch

from graphpact import EagerReason
from graphpact.runners import DecodeRunner

NO_COMPILER = EagerReason("no_compiler", "no C++ compiler that graphs could be compiled with")


class CpuGraphRunner(DecodeRunner):
    """Captures decode for sparse sizes: every shape is compiled, which takes seconds."""

    driver: ClassVar[str | None] = "inductor"

    def default_batch_sizes(self) -> list[int]:
        """Return the powers of two up to the largest step, and the largest step."""
        largest = self.context.limits.max_bs
        return [*(1 << i for i in range((largest - 1).bit_length())), largest]

    @classmethod
    def eager_reason(cls, device: torch.device) -> EagerReason | None:
        """Return that there is no compiler, which is no fault of who configured a CPU; None on others."""
        return NO_COMPILER if device.type == "cpu" else None
