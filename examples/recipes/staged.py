"""`StagedOffsets`: a backend whose replays copy offsets from host memory, without waiting for the device.

The host knows all lengths, so it writes the offsets into staging memory, and an asynchronous copy brings them
to the slot that the kernel reads. An event marks when the staging memory may be written again.

Does not: copy in captures and eager steps. There `fill_metadata` computes the offsets on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from recipes.backend import AcmeBackend, AcmeMetadata

from graphpact import ForwardBatch, GraphShape, GraphSlot, LayerSpec, Limits, metadata_slot
from graphpact.attention import Buffers
from graphpact.errors import EngineError
from graphpact.graphs import Event


@dataclass(slots=True)
class StagedMetadata(AcmeMetadata):
    """The index tensors of `AcmeBackend`, and offsets.

    Args:
        kv_indptr: ``[bs + 1]`` int32: where each request's keys would begin in a packed list.
        staging: ``[bs + 1]`` int32: host memory of the same contents.
    """

    kv_indptr: torch.Tensor
    staging: torch.Tensor


class StagedOffsets(AcmeBackend):
    """`AcmeBackend` with offsets instead of lengths."""

    capabilities = replace(AcmeBackend.capabilities, needs_host_plan=True)  # it reads seq_lens_cpu
    fill_is_device_only = False
    _copied: Event | None = None  # one for all shapes, which share the staging memory

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return the slots of `AcmeBackend`, and two with one more entry than there are requests."""

        def rows(bs: int, _: int) -> tuple[int]:
            return (bs + 1,)

        of_requests: dict[str, Any] = {"axis": "bs", "extra_rows": 1}
        return [
            *super().declare_slots(limits),
            metadata_slot("acme.kv_indptr", rows, torch.int32, role="offsets", **of_requests),
            metadata_slot("acme.kv_indptr_staging", rows, torch.int32, role="staging", **of_requests),
        ]

    def allocate_metadata(self, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> StagedMetadata:
        """Bind the slots, or in an eager step new memory."""
        base = super().allocate_metadata(view, shape, buffers)
        offsets, staging = buffers("acme.kv_indptr"), buffers("acme.kv_indptr_staging")
        return StagedMetadata(base.out_cache_loc, base.num_keys, base.table, offsets, staging)

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Compute everything on the device, for captures and eager steps."""
        super().fill_metadata(view, metadata)
        metadata.kv_indptr[0].zero_()
        metadata.kv_indptr[1:].copy_(view.seq_lens.cumsum(0))

    def refresh_metadata(self, view: ForwardBatch, metadata: StagedMetadata) -> None:
        """Write the offsets from `seq_lens_cpu`, which has the lengths of padding requests too."""
        super().fill_metadata(view, metadata)
        driver = self.driver
        if driver is None:
            raise EngineError("a replay without a driver: the lane attaches the backend to its own")
        if self._copied is None:
            self._copied = driver.event()
        self._copied.synchronize()  # the last step's copy may still read the staging memory
        metadata.staging[0] = 0
        torch.cumsum(view.seq_lens_cpu, 0, out=metadata.staging[1:])
        driver.copy_async(metadata.kv_indptr, metadata.staging)
        self._copied.record()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        metadata: Any,
    ) -> torch.Tensor:
        """Attend with the number of keys of each request, which is the difference of two offsets."""
        return super().forward(q, k, v, layer, replace(metadata, num_keys=metadata.kv_indptr.diff()))
