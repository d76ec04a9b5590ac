"""The kernels of the ``flashinfer`` backend: what both providers do with its metadata.

    portable   graphpact's own, on any device; its plan is two small tensors
    native     FlashInfer's wrappers, on a CUDA device; see `graphpact_flashinfer.native`

Does not: fill index tensors; the backend does, in the same way for both.
"""

import abc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphpact import BackendContext, GraphSlot, LayerSpec, Limits, metadata_slot
from graphpact.attention import Buffers, KernelProvider
from graphpact.graphs import Event, GraphDriver
from graphpact_flashinfer.metadata import FlashInferMetadata, PagedIndices, Plan, PlanArguments
from graphpact_flashinfer.rows import Rows
from graphpact_kernels import paged_attention

_SMALLEST_CHUNK = 16
_CHUNKS_PER_REQUEST = 4


class FlashInferKernels(KernelProvider, abc.ABC):
    """What a provider of this backend's kernels does: plan on the host, attend on the device."""

    @abc.abstractmethod
    def declare_slots(self, prefix: str, limits: Limits) -> Sequence[GraphSlot]:
        """Return the memory of the plans for the set of indices whose slots begin with ``prefix``."""

    @abc.abstractmethod
    def make_plan(
        self,
        prefix: str,
        arguments: PlanArguments,
        buffers: Buffers,
        tensors: Mapping[str, torch.Tensor],
    ) -> Plan:
        """Return a plan of ``arguments``, in memory of its own, that says nothing yet.

        Args:
            prefix: With which the names of the set's slots begin.
            arguments: What it is made for.
            buffers: The declared slots' memory.
            tensors: What the kernels will read beside the plan, by the names of the metadata's fields.
        """

    @abc.abstractmethod
    def plan(self, plan: Plan, rows: Rows, driver: GraphDriver | None) -> None:
        """Make ``plan`` anew, in place, for ``rows``. Host work; copies are given to the device's stream.

        Args:
            plan: What `make_plan` returned; its arguments are those of this step already.
            rows: Queries and keys of every row.
            driver: The lane's; None outside a lane.
        """

    @abc.abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: LayerSpec,
        metadata: FlashInferMetadata,
        indices: PagedIndices,
    ) -> torch.Tensor:
        """Return ``[T, num_q_heads, v_head_dim]``."""


@dataclass(slots=True)
class PortablePlan(Plan):
    """A plan of the portable kernel: which chunks of keys of each request there are.

    Args:
        kv_chunk_size: ``[1]`` int32: keys in a chunk.
        o_indptr: ``[rows + 1]`` int32: where each request's chunks begin in the list of work.
    """

    kv_chunk_size: torch.Tensor
    o_indptr: torch.Tensor


@dataclass(slots=True)
class _Staged:
    """Host memory that a graph's plan is copied from, and what tells when the last copy is done."""

    source: torch.Tensor
    target: torch.Tensor
    copied: Event | None = None


class PortableKernels(FlashInferKernels):
    """graphpact's kernel, which reads the tensors that FlashInfer's read and makes the same checks."""

    name = "portable"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._staged: dict[int, _Staged] = {}
        """By the address of the plan in the graph's memory."""

    def declare_slots(self, prefix: str, limits: Limits) -> Sequence[GraphSlot]:
        """Return the plan's tensor, and the host memory that it is copied from."""

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
        del tensors  # the kernel is given them
        size = arguments.num_requests + 2
        tensor = buffers(prefix + "plan")[:size]
        if buffers.in_graph:
            whole, staging = buffers(prefix + "plan"), buffers(prefix + "plan_staging")
            self._staged.setdefault(tensor.data_ptr(), _Staged(staging, whole))
        return PortablePlan(arguments, tensor[:1], tensor[1:])

    def plan(self, plan: Plan, rows: Rows, driver: GraphDriver | None) -> None:
        """Divide every request's keys into chunks: the smallest that are not too many in all.

        FlashInfer's own rule under graphs: the grid is fixed, so the chunk grows with the work.
        """
        assert isinstance(plan, PortablePlan)  # noqa: S101  make_plan returned it
        size = _SMALLEST_CHUNK
        most = plan.arguments.max_chunks
        while sum(chunks := [-(-keys // size) for keys in rows.num_kv]) > most and size < max(
            rows.num_kv
        ):
            size *= 2
        numbers = [size, *itertools.accumulate(chunks, initial=0)]
        staged = self._staged.get(plan.kv_chunk_size.data_ptr())
        if staged is None or driver is None:  # an eager step's, in memory of its own
            made = torch.tensor(numbers, dtype=torch.int32, device=plan.o_indptr.device)
            plan.kv_chunk_size.copy_(made[:1])
            plan.o_indptr.copy_(made[1:])
            return
        if staged.copied is None:
            staged.copied = driver.event()
        else:
            staged.copied.synchronize()  # the last step's copy may still read the staging memory
        count = len(numbers)  # shapes share this memory
        staged.source[:count].copy_(torch.tensor(numbers, dtype=torch.int32))
        driver.copy_async(staged.target[:count], staged.source[:count])
        staged.copied.record()

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: LayerSpec,
        metadata: FlashInferMetadata,
        indices: PagedIndices,
    ) -> torch.Tensor:
        """Call `graphpact_kernels.paged_attention`."""
        plan = indices.plan
        assert isinstance(plan, PortablePlan)  # noqa: S101  make_plan returned it
        return paged_attention(
            q,
            k_cache,
            v_cache,
            qo_indptr=metadata.qo_indptr,
            kv_indptr=indices.kv_indptr,
            kv_indices=indices.kv_indices,
            kv_last_page_len=indices.kv_last_page_len,
            page_size=metadata.page_size,
            max_q_len=metadata.max_q_len,
            max_kv_len=indices.max_kv_len,
            scaling=layer.scaling,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
            sinks=layer.sinks,
            mask=indices.mask,
            mask_indptr=indices.mask_indptr,
            o_indptr=plan.o_indptr,
            kv_chunk_size=plan.kv_chunk_size,
        )


def max_chunks(num_requests: int) -> int:
    """Return the pieces of work that a grid for ``num_requests`` rows has."""
    return num_requests * _CHUNKS_PER_REQUEST
