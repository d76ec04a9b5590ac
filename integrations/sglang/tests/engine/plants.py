"""Faults planted in an attention backend or a runner of the real SGLang, by changes of running objects."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact_sglang.attention.paged import PagedAttnBackend, PagedMetadata
from graphpact_sglang.load.in_process import InProcessEngine


def _replays(change: Callable[[Any, Any, Any], None]) -> Callable[[InProcessEngine], None]:
    """Return a plant: ``change(backend, batch, prepare)`` in the place of each replay's preparation."""

    def plant(engine: InProcessEngine) -> None:
        backend = engine.model_runner.attn_backend
        prepare = backend.init_forward_metadata_out_graph

        def prepared(batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002  SGLang's own
            change(backend, batch, prepare)

        backend.init_forward_metadata_out_graph = prepared

    return plant


def _rebound(backend: Any, batch: Any, prepare: Any) -> None:
    """Fill a new tensor of KV slots, and bind it."""
    memory = backend.graph_kv_indices
    backend.graph_kv_indices = torch.zeros_like(memory)
    try:
        prepare(batch)
    finally:
        backend.graph_kv_indices = memory


def _stale(backend: Any, batch: Any, prepare: Any) -> None:
    """Prepare everything but the table of KV slots."""
    before = backend.graph_kv_indices.clone()
    prepare(batch)
    backend.graph_kv_indices.copy_(before)


@dataclass
class LimitedMetadata(PagedMetadata):
    """Metadata with a host number that the kernel uses.

    Args:
        max_kv_len: The most keys of a request.
    """

    max_kv_len: int = 0


class BakedBackend(PagedAttnBackend):
    """Attends only to the first keys, as many as the longest request has: right in every eager step."""

    def _limited(self, batch: Any) -> None:
        assert self.forward_metadata is not None
        longest = int(batch.seq_lens[: batch.batch_size].max())
        self.forward_metadata = LimitedMetadata(**vars(self.forward_metadata), max_kv_len=longest)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of an eager step."""
        super().init_forward_metadata(forward_batch)
        self._limited(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        """Prepare a capture or a replay."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._limited(forward_batch)

    def forward_extend(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend, scaled by the host number."""
        assert isinstance(self.forward_metadata, LimitedMetadata)
        return super().forward_extend(q, *args, **kwargs) * (1 + 1 / self.forward_metadata.max_kv_len)

    forward_decode = forward_extend


class StaleBackend(PagedAttnBackend):
    """Leaves the table of KV slots of its graphs as the capture made it."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        """Prepare a capture, or all but the table for a replay."""
        before = self.graph_kv_indices.clone()
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if not in_capture:
            self.graph_kv_indices.copy_(before)


def use(backend: type[PagedAttnBackend]) -> Callable[[], None]:
    """Return a function that makes ``backend`` the one that SGLang makes by our name."""

    def register() -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        ATTENTION_BACKENDS["graphpact"] = backend

    return register


REBOUND, STALE = _replays(_rebound), _replays(_stale)


def swapped_metadata(engine: InProcessEngine) -> None:
    """Bind lengths of another dtype at replay."""
    backend = engine.model_runner.attn_backend
    prepare = backend.init_forward_metadata_out_graph

    def prepared(batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002
        prepare(batch)
        metadata = backend.forward_metadata
        backend.forward_metadata = replace(metadata, kv_indptr=metadata.kv_indptr.to(torch.int64))

    backend.init_forward_metadata_out_graph = prepared
