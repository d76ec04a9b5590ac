"""Exhibits of declared plans (GP09), and of layers that only read a KV cache (GP02, GP08).

No output shows the wrong plans of this module: they count more work than there is. A layer that only reads a
cache gets no new keys and values.

Does not: contain plans that change outputs; see `graphpact_museum.plans`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import Buffers, Limits
from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact_kernels import schedule_attention
from graphpact_museum.edits.backends import invariants_of_inner
from graphpact_museum.edits.override import override
from graphpact_museum.exhibit import exhibit, variant
from graphpact_museum.variants.slots import own_slot


@dataclass
class _WithReaders:
    """The base's metadata, and the lengths for layers without new keys."""

    inner: Any
    lens: torch.Tensor


# -- plans that count too much work ------------------------------------------------------------------


@exhibit("GP09", "microsoft/onnxruntime#29686", on="fa3", lanes=("decode", "extend"))
def fa3_eager_schedule_of_the_longest_step(base: type[Any]) -> type[Any]:
    """An eager step schedules every request for the longest request of all eager steps before it."""

    def init_metadata_eager(self: Any, right: Any, batch: ForwardBatch, *, fill: int | None = None) -> Any:
        metadata = right(batch, fill=fill)
        parts = getattr(metadata, "steps", (metadata,))
        for part in parts:
            if len(part.cache_seqlens):
                longest = max(self.longest, int(part.cache_seqlens.max()))
                if self.longest:
                    lens = part.cache_seqlens.clamp(min=longest)
                    schedule_attention(part.cu_seqlens_q, lens, out=part.scheduler_metadata)
                self.longest = longest
        return metadata

    return override(base, init_metadata_eager, longest=0)


@exhibit("GP09", "NVIDIA/TensorRT-LLM#18002", on="flashinfer", lanes=("decode", "target_verify"))
def flashinfer_plans_by_capacity_after_a_recapture(base: type[Any]) -> type[Any]:
    """Once a shape has been captured again, replays plan every request for the longest context."""

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        self.captured = {**self.captured, shape: self.captured.get(shape, 0) + 1}
        return right(view, shape)

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        self.plans_by_capacity = self.captured.get(shape, 0) > 1
        try:
            return right(view, shape, captured)
        finally:
            self.plans_by_capacity = False

    def plan_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        if self.plans_by_capacity:
            most = self.context.limits.max_context_len - view.uncounted_keys
            view = replace(view, seq_lens_cpu=view.seq_lens_cpu.clamp(min=most))
        right(view, metadata)

    edited: dict[str, Any] = {"captured": {}, "plans_by_capacity": False}
    return override(base, init_metadata_capture, init_metadata_replay, plan_metadata, **edited)


@variant(on="flashinfer", lanes=("decode", "target_verify"))
def plan_kept_between_equal_steps(base: type[Any]) -> type[Any]:
    """A plan in its memory is kept while the next batch of this memory has the same lengths on the host."""

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        self.planned = {}
        return right(view, shape)

    def plan_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        kept, lens = self.planned.get(id(metadata)), view.seq_lens_cpu.tolist()
        parts = [metadata, *metadata.windows.values()]
        if kept is not None and kept[0] == lens and metadata is kept[2]:
            for part, (size, begins) in zip(parts, kept[1], strict=True):
                part.plan.kv_chunk_size.copy_(size)
                part.plan.o_indptr.copy_(begins)
            return
        right(view, metadata)
        if self.driver is not None:
            self.driver.synchronize()
        copies = [(part.plan.kv_chunk_size.clone(), part.plan.o_indptr.clone()) for part in parts]
        self.planned[id(metadata)] = lens, copies, metadata

    return override(base, init_metadata_capture, plan_metadata, planned={})


# -- layers without new keys -------------------------------------------------------------------------


@exhibit("GP02", "vllm-project/vllm#28537", on="fa3", lanes=("decode", "extend"))
def fa3_readers_of_a_cache_keep_lengths(base: type[Any]) -> type[Any]:
    """Layers without new keys have lengths of their own, which are written at captures and in eager steps."""

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        return [*right(limits), own_slot("reader_lens", lambda bs, _: (bs,), torch.int32, role="lengths")]

    def allocate_metadata(_: Any, right: Any, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        return _WithReaders(right(view, shape, buffers), buffers("variant.reader_lens"))

    def fill_metadata(self: Any, right: Any, view: ForwardBatch, metadata: _WithReaders) -> None:
        right(view, metadata.inner)
        if not self.replays:
            metadata.lens.copy_(metadata.inner.cache_seqlens)

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        self.replays = True
        try:
            return right(view, shape, captured)
        finally:
            self.replays = False

    def forward(_: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: _WithReaders) -> Any:
        inner = metadata.inner if k is not None else replace(metadata.inner, cache_seqlens=metadata.lens)
        return right(q, k, v, layer, inner)

    methods = (declare_slots, allocate_metadata, fill_metadata, init_metadata_replay, forward)
    edited: dict[str, Any] = {"replays": False, "fill_is_device_only": False}
    return override(base, *methods, plan_invariants=invariants_of_inner(base), **edited)


@exhibit("GP08", "ROCm/hip-ep#882", on="fa3", lanes=("decode", "target_verify"))
def fa3_readers_bounded_by_the_dummy(base: type[Any]) -> type[Any]:
    """Layers without new keys launch for the longest request of the batch, in a capture that of the dummy."""

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        self.most = max(view.seq_lens_cpu.tolist()) + view.uncounted_keys
        return right(view, shape)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        if k is None and self.driver is not None and self.driver.is_capturing:
            lens = metadata.cache_seqlens.clamp(max=self.most)
            metadata = replace(metadata, cache_seqlens=lens, max_seqlen_k=self.most)
        return right(q, k, v, layer, metadata)

    return override(base, init_metadata_capture, forward, most=0)


@variant(on="fa3", lanes=("decode", "extend", "target_verify"))
def lengths_of_layers_without_new_keys(base: type[Any]) -> type[Any]:
    """Layers without new keys have lengths of their own, which every fill writes."""

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        return [*right(limits), own_slot("reader_lens", lambda bs, _: (bs,), torch.int32, role="lengths")]

    def allocate_metadata(_: Any, right: Any, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        return _WithReaders(right(view, shape, buffers), buffers("variant.reader_lens"))

    def fill_metadata(_: Any, right: Any, view: ForwardBatch, metadata: _WithReaders) -> None:
        right(view, metadata.inner)
        metadata.lens.copy_(metadata.inner.cache_seqlens)

    def forward(_: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: _WithReaders) -> Any:
        inner = metadata.inner if k is not None else replace(metadata.inner, cache_seqlens=metadata.lens)
        return right(q, k, v, layer, inner)

    methods = (declare_slots, allocate_metadata, fill_metadata, forward)
    return override(base, *methods, plan_invariants=invariants_of_inner(base))
