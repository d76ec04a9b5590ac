"""The kernel providers of the ``fa3`` backend: their interface, and graphpact's own.

    portable   torch only, on any device
    compiled   the same in C++, on a CPU
    native     FlashAttention's kernels, on a CUDA device; see `graphpact_fa3.native`

All read the same tensors.

Does not: fill metadata; see `graphpact_fa3.backend`.
"""

import abc
from typing import ClassVar

import torch

from graphpact.attention import KernelName, KernelProvider
from graphpact_fa3.metadata import FA3Metadata, KeyRows
from graphpact_kernels import PageTableCall, page_table_attention, schedule_attention
from graphpact_kernels.compiled import CompiledProvider


class FA3Kernels(KernelProvider, abc.ABC):
    """A kernel provider of this backend."""

    compiled: ClassVar[bool] = False
    """Whether graphpact's kernels of this provider are the C++ ones."""

    @abc.abstractmethod
    def schedule(self, rows: FA3Metadata, *, causal: bool) -> int:
        """Write the schedule of a step into ``rows.scheduler_metadata``, zeros to its end, on the device.

        Args:
            rows: The metadata, with offsets and lengths filled.
            causal: Whether the calls with this schedule are causal.

        Returns:
            How many of its numbers `attend` takes; the same for all steps of a shape.
        """

    @abc.abstractmethod
    def attend(self, call: PageTableCall[KeyRows]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from the queries of each row to its keys, without sinks.

        Args:
            call: The arguments; the schedule is the one from `schedule` for these rows, or None.

        Returns:
            The same as `graphpact_kernels.page_table_attention`. For queries that belong to no row, the
            output is zero and the log-sum-exp is minus infinity.
        """


class PortableKernels(FA3Kernels):
    """graphpact's own kernels: torch only, on any device."""

    name: ClassVar[KernelName] = "portable"

    def schedule(self, rows: FA3Metadata, *, causal: bool) -> int:
        """Write the counts of query blocks and key blocks; `attend` takes the whole buffer."""
        del causal
        out = rows.scheduler_metadata
        schedule_attention(rows.cu_seqlens_q, rows.cache_seqlens, out=out, compiled=self.compiled)
        return len(out)

    def attend(self, call: PageTableCall[KeyRows]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with `graphpact_kernels.page_table_attention`."""
        return page_table_attention(call, compiled=self.compiled)


class CompiledKernels(CompiledProvider, PortableKernels):
    """The portable kernels' compiled form, on a CPU."""
