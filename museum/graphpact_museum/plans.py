"""Exhibits of plans, of streams and staging memory, and of work that a graph cannot hold: GP09, GP16, GP20.

Does not: contain exhibits of binding and refresh; see `graphpact_museum.bindings`.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from graphpact.attention import Limits, each_step
from graphpact.batch import ForwardBatch
from graphpact.buffers import metadata_slot
from graphpact.graphs import Event
from graphpact.shapes import GraphShape
from graphpact_kernels import schedule_attention
from graphpact_museum.edits.backends import after_replay_hook, not_refreshed, with_spare
from graphpact_museum.edits.override import named_after, override, overrides
from graphpact_museum.exhibit import Make, exhibit

# -- GP09: plans -------------------------------------------------------------------------------------


@exhibit("GP09", "NVIDIA/TensorRT-LLM#18769", on="flashinfer", lanes="decode")
def flashinfer_window_not_planned(base: type[Any]) -> type[Any]:
    """Only the plan of layers without a window is made before a replay."""

    def init_metadata_capture(self: Any, right: Any, view: ForwardBatch, shape: GraphShape) -> Any:
        self.captured = False
        metadata = right(view, shape)
        self.captured = True
        return metadata

    def plan_metadata(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        planned = replace(metadata, windows={}) if self.captured else metadata
        right(view, planned)

    return override(base, init_metadata_capture, plan_metadata, captured=False)


@exhibit("GP09", "NVIDIA/TensorRT-LLM#15556", on="flashinfer", lanes="target_verify")
@overrides("plan_metadata", key=None)
def flashinfer_planned_by_pages(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """A plan is reused while its key is equal; the key contains page counts, but no lengths."""
    pages = (view.seq_lens_cpu // self.context.limits.page_size).tolist()
    key = id(metadata), pages
    if key != self.key:
        right(view, metadata)
    self.key = key


@exhibit("GP09", "ModelTC/LightLLM#1367", on="flashinfer", lanes="decode")
@overrides("plan_metadata", key=None)
def flashinfer_planned_by_sorted_lengths(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """A plan is skipped by a key that contains the lengths of all requests, but not their order."""
    key = id(metadata), sorted(view.seq_lens_cpu.tolist())
    if key != self.key:
        right(view, metadata)
    self.key = key


@exhibit("GP09", "alibaba/rtp-llm#1084", on="flashinfer", lanes="draft_decode_tree")
@overrides("init_metadata_replay", fill_is_device_only=False)
def flashinfer_first_step_planned(
    self: Any, _: Any, view: ForwardBatch, shape: GraphShape, captured: Any
) -> Any:
    """The replay hook of a draft plans only its first step."""
    del shape
    for at, part in each_step(view, captured):
        self.fill_metadata(at, part)
    self.plan_metadata(*next(each_step(view, captured)))
    return captured


@exhibit("GP09", "flashinfer-ai/flashinfer#411", on="flashinfer", lanes="extend")
@overrides("plan_metadata", last=None)
def flashinfer_planned_one_step_late(self: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """A plan is made from the lengths of the previous step."""
    lens = view.seq_lens_cpu.tolist()
    if self.last is None or len(self.last) != len(lens):
        self.last = lens
    late = torch.tensor(self.last, dtype=torch.int64)
    right(replace(view, seq_lens_cpu=late), metadata)
    self.last = lens


@exhibit("GP09", "sgl-project/sglang#21161", on="flashinfer", lanes="target_verify")
@overrides("plan_metadata")
def flashinfer_planned_without_drafts(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """Every plan, even in eager steps, is made for fewer keys than the kernel gets."""
    lens = (view.seq_lens_cpu - 2 * view.tokens_per_request).clamp_(min=1)
    right(replace(view, seq_lens_cpu=lens), metadata)


@exhibit("GP09", "vllm-project/vllm#27884", on="fa3", lanes="draft_extend")
@after_replay_hook
def fa3_schedule_for_other_lengths(_: Any, view: ForwardBatch, metadata: Any) -> None:
    """The replay hook makes scheduler_metadata for other lengths than those of the kernel."""
    lens = metadata.cache_seqlens - view.tokens_per_request
    schedule_attention(metadata.cu_seqlens_q, (lens // 2).to(torch.int32), out=metadata.scheduler_metadata)


@exhibit("GP09", "vllm-project/vllm#36611", on="fa3", lanes="decode")
def fa3_schedule_of_capture(base: type[Any]) -> type[Any]:
    """scheduler_metadata is computed at capture, outside the recorded work."""
    return not_refreshed(base, with_spare("scheduler_metadata"), in_graph=True)


# -- GP16: streams and staging -----------------------------------------------------------------------


_Copy: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(backend, target, staging, lengths)``: writes the staging memory and begins the copy."""


def _staged(name: str) -> Callable[[_Copy], Make]:
    """Return a decorator of an edit that copies lengths from host memory at replay.

    Args:
        name: The field of the metadata that holds the lengths.
    """

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        staging = metadata_slot("museum.staging", lambda bs, _: (bs,), torch.int32, role="staging", axis="bs")
        return [*right(limits), staging]

    def decorate(copy: _Copy) -> Make:
        def init_metadata_replay(
            self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
        ) -> Any:
            fresh = right(view, shape, captured)
            for step, (at, part) in enumerate(each_step(view, fresh)):
                slot = "museum.staging" + (f".step{step}" if step else "")
                staging = self._registry.get_slot(slot).slice_for(shape.batch_size, 0)
                lens = at.seq_lens_cpu + at.uncounted_keys
                copy(self, getattr(part, name)[: at.batch_size], staging, lens)
            return fresh

        edited = {"fill_is_device_only": False, "copied": None}
        return named_after(copy, lambda base: override(base, declare_slots, init_metadata_replay, **edited))

    return decorate


@exhibit("GP16", "vllm-project/vllm#24527", on="trtllm_mla", lanes="mixed")
@_staged("seq_lens_k")
def trtllm_mla_staging_not_awaited(
    backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor
) -> None:
    """Host memory is written for the next step while the previous copy may be in flight."""
    staging.copy_(lens)
    backend.driver.copy_async(target, staging)


@exhibit("GP16", "NVIDIA/TensorRT-LLM#14008", on="fa3", lanes="draft_extend")
@_staged("cache_seqlens")
def fa3_lengths_overwritten(
    backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor
) -> None:
    """Lengths are copied from host memory that the same hook then sets to 1 for the next phase."""
    if backend.copied is not None:
        backend.copied.synchronize()
    staging.copy_(lens)
    backend.driver.copy_async(target, staging)
    staging.fill_(1)  # for the next phase
    backend.copied = backend.driver.event()
    backend.copied.record()


@exhibit("GP16", "vllm-project/vllm#47644", on="fa3", lanes="extend")
@_staged("cache_seqlens")
def fa3_event_of_the_shape(
    backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor
) -> None:
    """All shapes share one staging buffer, and each waits only for its own last copy."""
    events = backend.copied = backend.copied or {}
    if len(lens) in events:
        events[len(lens)].synchronize()
    staging.copy_(lens)
    backend.driver.copy_async(target, staging)
    events[len(lens)] = backend.driver.event()
    events[len(lens)].record()


@exhibit("GP16", "vllm-project/vllm#24527", on="fa3", lanes="mixed")
@_staged("cache_seqlens")
def fa3_event_before_the_copy(
    backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor
) -> None:
    """The event that a later step waits for is recorded before the copy starts."""
    events = backend.copied = backend.copied or {}
    if staging.data_ptr() in events:
        events[staging.data_ptr()].synchronize()
    staging.copy_(lens)
    events[staging.data_ptr()] = backend.driver.event()
    events[staging.data_ptr()].record()
    backend.driver.copy_async(target, staging)


@exhibit("GP16", "vllm-project/vllm#47644", on="flashinfer", lanes="extend")
@overrides("attach")
def flashinfer_plan_staging_not_awaited(self: Any, right: Any, registry: Any, driver: Any = None) -> None:
    """The host memory of the plans is written for the next step without a wait for the previous copy."""
    right(registry, driver)
    self.driver = _Unwaiting(driver)


class _Unwaiting:
    """A driver with events that do not wait."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def event(self) -> Event:
        """Return an event that marks nothing."""
        return Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def _on_a_side_stream(base: type[Any], *, forks: bool, joins: bool) -> type[Any]:
    """Return a backend that refreshes metadata on a side stream, without one of the two waits."""

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        main = self.driver.current_stream()
        self.side = self.side or self.driver.stream()
        if forks:
            self.side.wait_stream(main)
        with self.side:
            fresh = right(view, shape, captured)
        if joins:
            main.wait_stream(self.side)
        return fresh

    return override(base, init_metadata_replay, fill_is_device_only=False, side=None)


@exhibit("GP16", "sgl-project/sglang-omni#1369", on="flashinfer", lanes="draft_extend")
def flashinfer_side_stream_not_joined(base: type[Any]) -> type[Any]:
    """Metadata is refreshed on a side stream that the replay does not wait for."""
    return _on_a_side_stream(base, forks=True, joins=False)


@exhibit("GP16", "sgl-project/sglang#19177", on="trtllm_mla", lanes="decode")
def trtllm_mla_side_stream_not_forked(base: type[Any]) -> type[Any]:
    """Metadata is refreshed on a side stream that does not wait for the copy of the batch."""
    return _on_a_side_stream(base, forks=False, joins=True)


# -- GP20: work that no graph can hold ---------------------------------------------------------------


@exhibit("GP20", "vllm-project/vllm#22758", on="fa3", lanes="extend")
@overrides("forward")
def fa3_assert_on_the_device(_: Any, right: Any, *args: Any) -> Any:
    """Every layer asserts on the host that no length on the device is negative."""
    if not args[-1].cache_seqlens.min() >= 0:
        raise ValueError("a request has a negative number of keys")
    return right(*args)


@exhibit("GP20", "vllm-project/vllm#40807", on="flashinfer", lanes="mixed")
@after_replay_hook
def flashinfer_offsets_listed(_: Any, __: ForwardBatch, metadata: Any) -> None:
    """The replay hook calls tolist() on query offsets of the device to find the longest request."""
    offsets = metadata.qo_indptr.tolist()
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    metadata.max_q_len = max(metadata.max_q_len, longest)


@exhibit("GP20", "sgl-project/sglang#23738", on="trtllm_mla", lanes="extend")
@overrides("fill_metadata")
def trtllm_mla_scalar_assignment(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """The recorded body sets the first offset from a host number."""
    right(view, metadata)
    metadata.cu_seqlens_q[0] = torch.tensor(0)


@exhibit("GP20", "vllm-project/vllm#43747", on="fa3", lanes="draft_decode_tree")
@overrides("fill_metadata")
def fa3_masked_write(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """The recorded body writes the page table by a boolean mask on the device."""
    right(view, metadata)
    table = metadata.page_table
    table[table < 0] = table[table < 0] * 0


@exhibit("GP20", "InternLM/lmdeploy#2544", on="flashinfer", lanes="target_verify_tree")
@overrides("plan_metadata")
def flashinfer_lengths_from_the_device(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """A plan is made from lengths that are copied from the device."""
    right(replace(view, seq_lens_cpu=view.seq_lens.cpu()), metadata)


@exhibit("GP20", "deepseek-ai/DeepEP#62", on="trtllm_mla", lanes="draft_decode")
@overrides("forward", side=None)
def trtllm_mla_unjoined_stream(self: Any, right: Any, *args: Any) -> Any:
    """Attention starts work on a side stream inside the capture and does not join it."""
    if self.driver is not None:
        self.side = self.side or self.driver.stream()
        self.side.wait_stream(self.driver.current_stream())
        with self.side:
            args[1].sum()
    return right(*args)
