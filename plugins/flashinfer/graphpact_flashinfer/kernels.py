"""The kernel providers of the ``flashinfer`` backend: their interface, and graphpact's own.

    portable   torch only, on any device; a plan is two small tensors
    compiled   the same in C++, on a CPU
    native     FlashInfer's wrappers, on a CUDA device; see `graphpact_flashinfer.native`

Does not: fill index tensors; the backend does, in the same way for both.
"""

import abc
import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphpact import BackendContext, GraphSlot, Limits, metadata_slot
from graphpact.attention import Buffers, KernelName, KernelProvider
from graphpact.graphs import Event, GraphDriver
from graphpact_flashinfer.metadata import PagedIndices, Plan, PlanArguments
from graphpact_flashinfer.rows import Rows
from graphpact_kernels import AttendCall, paged_attention
from graphpact_kernels.compiled import CompiledProvider

_SMALLEST_CHUNK = 16
_CHUNKS_PER_REQUEST = 4


class FlashInferKernels(KernelProvider, abc.ABC):
    """A kernel provider of this backend: it plans on the host and attends on the device."""

    compiled: ClassVar[bool] = False
    """Whether graphpact's kernels of this provider are the C++ ones."""

    @abc.abstractmethod
    def declare_slots(self, prefix: str, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of the plans for the set of indices with the slot name prefix ``prefix``."""

    @abc.abstractmethod
    def make_plan(
        self,
        prefix: str,
        arguments: PlanArguments,
        buffers: Buffers,
        tensors: Mapping[str, torch.Tensor],
    ) -> Plan:
        """Return a plan for ``arguments`` in its own memory; `plan` fills it.

        Args:
            prefix: The prefix of the set's slot names.
            arguments: The host numbers of the plan.
            buffers: The memory of the declared slots.
            tensors: The other tensors that the kernels will read, by the names of the metadata's fields.
        """

    @abc.abstractmethod
    def plan(self, plan: Plan, rows: Rows, driver: GraphDriver | None) -> None:
        """Fill ``plan`` in place for ``rows``. Host work; copies go to the device's current stream.

        Args:
            plan: A plan from `make_plan`, with the arguments of this step.
            rows: Queries and keys of every row.
            driver: The lane's driver; None outside a lane.
        """

    def covers(self, plan: Plan, rows: Rows) -> bool | None:
        """Return whether ``plan`` covers the keys of every row; None if its contents are not known here.

        It waits for the device: only checks call it.
        """
        del plan, rows
        return None

    @abc.abstractmethod
    def attend(self, call: AttendCall[PagedIndices]) -> torch.Tensor:
        """Return ``[T, num_q_heads, v_head_dim]``: the attention of a layer with the plan of its indices."""


@dataclass(slots=True)
class PortablePlan(Plan):
    """A plan of the portable kernel: the chunks of keys of each request.

    Args:
        kv_chunk_size: ``[1]`` int32: keys in a chunk.
        o_indptr: ``[rows + 1]`` int32: where each request's chunks begin in the list of chunks.
    """

    kv_chunk_size: torch.Tensor
    o_indptr: torch.Tensor


class _Staged:
    """Staging memory of a graph's plan, with the event of the last copy from it.

    Numbers are first written to a separate tensor, which no asynchronous copy reads, and then copied to the
    staging memory. So a step allocates nothing, and the driver sees the write to the staging memory.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source = source
        self.target = target
        self.copied: Event | None = None
        self._made = torch.zeros(len(source), dtype=torch.int32)  # on the host
        self._numbers: Any = (ctypes.c_int32 * len(source)).from_address(self._made.data_ptr())
        self._firsts: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """The first numbers of all three tensors, by their count: that of each shape."""

    def write(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write numbers to the staging memory; return where they are copied to, and the staging memory."""
        count = len(numbers)
        firsts = self._firsts.get(count)
        if firsts is None:
            firsts = self._firsts[count] = self._made[:count], self.source[:count], self.target[:count]
        made, source, target = firsts
        self._numbers[:count] = numbers
        source.copy_(made)
        return target, source


class PortableKernels(FlashInferKernels):
    """graphpact's kernel: it reads the same tensors as FlashInfer's kernels and makes the same checks."""

    name: ClassVar[KernelName] = "portable"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._staged: dict[int, _Staged] = {}
        """Staging memory, by the address of the plan's slot."""

    def declare_slots(self, prefix: str, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slot of the plan, and the staging memory that it is copied from."""

        def rows(bs: int, _: int) -> tuple[int]:
            return (max(bs + 1, bs * limits.draft.topk) + 2,)

        return [
            metadata_slot(prefix + "plan", rows, torch.int32, role="plan"),
            metadata_slot(prefix + "plan_staging", rows, torch.int32, role="staging"),
        ]

    def make_plan(
        self,
        prefix: str,
        arguments: PlanArguments,
        buffers: Buffers,
        tensors: Mapping[str, torch.Tensor],
    ) -> PortablePlan:
        """Return a plan in the slots of ``prefix``."""
        del tensors  # `attend` reads them from the metadata
        size = arguments.num_requests + 2
        tensor = buffers(prefix + "plan")[:size]
        if buffers.in_graph:
            whole, staging = buffers(prefix + "plan"), buffers(prefix + "plan_staging")
            self._staged.setdefault(tensor.data_ptr(), _Staged(staging, whole))
        return PortablePlan(arguments, tensor[:1], tensor[1:])

    def plan(self, plan: Plan, rows: Rows, driver: GraphDriver | None) -> None:
        """Split every request's keys into chunks of the smallest size that gives at most ``max_chunks``.

        This is FlashInfer's rule under graphs: the grid is fixed, so the chunk size grows with the work.
        """
        assert isinstance(plan, PortablePlan)  # noqa: S101  make_plan returned it
        size = _SMALLEST_CHUNK
        keys, most = rows.num_kv, plan.arguments.max_chunks
        while sum(chunks := [-(-count // size) for count in keys]) > most and size < max(keys):
            size *= 2
        numbers = [size, *itertools.accumulate(chunks, initial=0)]
        staged = self._staged.get(plan.kv_chunk_size.data_ptr())
        if staged is None or driver is None:  # a plan of an eager step has its own memory
            copy = torch.Tensor.copy_ if driver is None else driver.copy_async
            made = torch.tensor(numbers, dtype=torch.int32)
            copy(plan.kv_chunk_size, made[:1])
            copy(plan.o_indptr, made[1:])
            return
        if staged.copied is None:
            staged.copied = driver.event()
        else:
            staged.copied.synchronize()  # the last step's copy may still read the staging memory
        driver.copy_async(*staged.write(numbers))
        staged.copied.record()

    def covers(self, plan: Plan, rows: Rows) -> bool:
        """Return whether the chunks of each row hold its keys, and are no more than the grid has."""
        assert isinstance(plan, PortablePlan)  # noqa: S101  make_plan returned it
        size = int(plan.kv_chunk_size)
        begins: list[int] = plan.o_indptr.tolist()
        chunks = [-(-keys // size) if size > 0 else -1 for keys in rows.num_kv]
        fits = begins[-1] <= plan.arguments.max_chunks or size >= max(rows.num_kv)
        return begins == [*itertools.accumulate(chunks, initial=0)] and fits

    def attend(self, call: AttendCall[PagedIndices]) -> torch.Tensor:
        """Call `graphpact_kernels.paged_attention`."""
        plan = call.rows.plan
        assert isinstance(plan, PortablePlan)  # noqa: S101  make_plan returned it
        return paged_attention(
            call, o_indptr=plan.o_indptr, kv_chunk_size=plan.kv_chunk_size, compiled=self.compiled
        )


class CompiledKernels(CompiledProvider, PortableKernels):
    """The portable kernels' compiled form, on a CPU."""


def max_chunks(num_requests: int) -> int:
    """Return the most chunks of a plan for ``num_requests`` rows: the fixed size of the grid."""
    return num_requests * _CHUNKS_PER_REQUEST
