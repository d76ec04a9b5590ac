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
from graphpact_kernels.schedule import BLOCK, key_blocks, query_blocks


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

    def counts(self, rows: FA3Metadata, num_q: torch.Tensor, num_kv: torch.Tensor) -> bool | None:
        """Return whether the schedule has every block; None if only the library's kernels can read it.

        It waits for the device: only checks call it.

        Args:
            rows: The metadata, with its schedule.
            num_q: ``[bs]`` int: queries of each request.
            num_kv: ``[bs]`` int: keys of each request.
        """
        del rows, num_q, num_kv
        return None

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

    def counts(self, rows: FA3Metadata, num_q: torch.Tensor, num_kv: torch.Tensor) -> bool:
        """Return whether the schedule has the blocks of each request, and zeros in all other places."""
        right, bs = torch.zeros_like(rows.scheduler_metadata), len(num_kv)
        query_blocks(right, bs).copy_((num_q + (BLOCK - 1)) // BLOCK)
        key_blocks(right, bs).copy_((num_kv + (BLOCK - 1)) // BLOCK)
        return torch.equal(rows.scheduler_metadata, right)

    def attend(self, call: PageTableCall[KeyRows]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with `graphpact_kernels.page_table_attention`."""
        return page_table_attention(call, compiled=self.compiled)


class CompiledKernels(CompiledProvider, PortableKernels):
    """The portable kernels' compiled form, on a CPU."""
