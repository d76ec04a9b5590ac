"""Exhibits of what plugins declare of themselves: invariants of plans (GP09).

No output shows the wrong plans of this module: they count more work than there is.

Does not: contain plans that change outputs; see `graphpact_museum.plans`.
"""

from dataclasses import replace
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.shapes import GraphShape
from graphpact_kernels import schedule_attention
from graphpact_museum.edits.override import override
from graphpact_museum.exhibit import exhibit, variant

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
