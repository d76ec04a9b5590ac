"""Exhibits of plans, of streams and staging memory, and of work that a graph cannot hold: GP09, GP16, GP20.

Does not: contain exhibits of binding and refresh; see `graphpact_museum.bindings`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.attention import Limits, each_step
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, metadata_slot
from graphpact.graphs import Event
from graphpact.hookspecs import hookimpl
from graphpact.shapes import GraphShape
from graphpact_kernels import schedule_attention
from graphpact_museum.edits import after_replay_hook, not_refreshed, with_spare
from graphpact_museum.exhibit import Exhibit, Make

# -- GP09: plans -------------------------------------------------------------------------------------


def _full_set_planned(base: type[Any]) -> type[Any]:
    class FullSetPlanned(base):  # type: ignore[misc]
        """The plans of layers with a window are made at capture, and not again."""

        captured = False

        @hookimpl
        def init_metadata_capture(self, view: ForwardBatch, shape: GraphShape) -> Any:
            """Plan all."""
            self.captured = False
            metadata = super().init_metadata_capture(view, shape)
            self.captured = True
            return metadata

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Plan all at capture, and the full set at replay."""
            planned = replace(metadata, windows={}) if self.captured else metadata
            super().plan_metadata(view, planned)

    return FullSetPlanned


def _planned_by_pages(base: type[Any]) -> type[Any]:
    class PlannedByPages(base):  # type: ignore[misc]
        """A plan is kept as long as the requests have as many pages."""

        key: Any = None

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Plan where the key is new."""
            pages = (view.seq_lens_cpu // self.context.limits.page_size).tolist()
            key = id(metadata), pages
            if key != self.key:
                super().plan_metadata(view, metadata)
            self.key = key

    return PlannedByPages


def _planned_by_sorted_lengths(base: type[Any]) -> type[Any]:
    class PlannedBySortedLengths(base):  # type: ignore[misc]
        """A plan is kept as long as the lengths are the same, in whatever order."""

        key: Any = None

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Plan where the key is new."""
            key = id(metadata), sorted(view.seq_lens_cpu.tolist())
            if key != self.key:
                super().plan_metadata(view, metadata)
            self.key = key

    return PlannedBySortedLengths


def _first_step_planned(base: type[Any]) -> type[Any]:
    class FirstStepPlanned(base):  # type: ignore[misc]
        """Later steps of a draft keep the plan of their capture."""

        fill_is_device_only = False

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            """Fill all, and plan the first."""
            del shape
            for at, part in each_step(view, captured):
                self.fill_metadata(at, part)
            self.plan_metadata(*next(each_step(view, captured)))
            return captured

    return FirstStepPlanned


def _planned_late(base: type[Any]) -> type[Any]:
    class PlannedLate(base):  # type: ignore[misc]
        """A plan is made from the lengths of the step before, where that had as many requests."""

        last: list[int] | None = None

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Plan with the lengths that were kept, and keep these."""
            lens = view.seq_lens_cpu.tolist()
            if self.last is None or len(self.last) != len(lens):
                self.last = lens
            late = torch.tensor(self.last, dtype=torch.int64)
            super().plan_metadata(replace(view, seq_lens_cpu=late), metadata)
            self.last = lens

    return PlannedLate


def _planned_without_drafts(base: type[Any]) -> type[Any]:
    class PlannedWithoutDrafts(base):  # type: ignore[misc]
        """Every plan is made for the sequences, a chunk shorter than what the kernel is given."""

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Plan for lengths without this step's drafts."""
            lens = (view.seq_lens_cpu - 2 * view.tokens_per_request).clamp_(min=1)
            super().plan_metadata(replace(view, seq_lens_cpu=lens), metadata)

    return PlannedWithoutDrafts


def _scheduled_otherwise(_: Any, view: ForwardBatch, metadata: Any) -> None:
    lens = metadata.cache_seqlens - view.tokens_per_request
    schedule_attention(metadata.cu_seqlens_q, (lens // 2).to(torch.int32), out=metadata.scheduler_metadata)


_STALE = [
    Exhibit(
        name="flashinfer-window-not-planned",
        rule="GP09",
        thread="NVIDIA/TensorRT-LLM#18769",
        planted="Only the plan of layers without a window is made before a replay.",
        base="flashinfer",
        lanes=("decode",),
        make=_full_set_planned,
    ),
    Exhibit(
        name="flashinfer-planned-by-pages",
        rule="GP09",
        thread="NVIDIA/TensorRT-LLM#15556",
        planted="A plan is reused while its key is equal; the key has pages and no lengths.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_planned_by_pages,
    ),
    Exhibit(
        name="flashinfer-planned-by-sorted-lengths",
        rule="GP09",
        thread="ModelTC/LightLLM#1367",
        planted="The key by which a plan is skipped has the lengths of all requests without their order.",
        base="flashinfer",
        lanes=("decode",),
        make=_planned_by_sorted_lengths,
    ),
    Exhibit(
        name="flashinfer-first-step-planned",
        rule="GP09",
        thread="alibaba/rtp-llm#1084",
        planted="The replay hook of a draft plans only its first step.",
        base="flashinfer",
        lanes=("draft_decode_tree",),
        make=_first_step_planned,
    ),
    Exhibit(
        name="flashinfer-planned-one-step-late",
        rule="GP09",
        thread="flashinfer-ai/flashinfer#411",
        planted="A plan is made from the lengths of the previous step.",
        base="flashinfer",
        lanes=("extend",),
        make=_planned_late,
    ),
    Exhibit(
        name="flashinfer-planned-without-drafts",
        rule="GP09",
        thread="sgl-project/sglang#21161",
        planted="Every plan, also of eager steps, is made for fewer keys than the kernel gets.",
        base="flashinfer",
        lanes=("target_verify",),
        make=_planned_without_drafts,
    ),
    Exhibit(
        name="fa3-schedule-of-capture",
        rule="GP09",
        thread="vllm-project/vllm#36611",
        planted="scheduler_metadata is computed at capture, outside the recorded work.",
        base="fa3",
        lanes=("decode",),
        make=not_refreshed(with_spare("scheduler_metadata"), in_graph=True),
    ),
    Exhibit(
        name="fa3-schedule-for-other-lengths",
        rule="GP09",
        thread="vllm-project/vllm#27884",
        planted="The replay hook makes scheduler_metadata for other lengths than those of the kernel.",
        base="fa3",
        lanes=("draft_extend",),
        make=after_replay_hook(_scheduled_otherwise),
    ),
]


# -- GP16: streams and staging -----------------------------------------------------------------------


def _staged(name: str, copy: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Make:
    """Return a factory of backends that copies its lengths from host memory at replay.

    Args:
        name: The field of the metadata that has them.
        copy: ``(backend, target, staging, lengths)``: writes the staging memory and begins the copy.
    """

    def make(base: type[Any]) -> type[Any]:
        class Staged(base):  # type: ignore[misc]
            """Lengths come from the host."""

            fill_is_device_only = False
            copied: Any = None

            def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
                """Declare host memory for them."""
                staging = metadata_slot(
                    "museum.staging", lambda bs, _: (bs,), torch.int32, role="staging", axis="bs"
                )
                return [*super().declare_slots(limits), staging]

            @hookimpl
            def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
                """Refresh, and copy the lengths."""
                fresh = super().init_metadata_replay(view, shape, captured)
                for step, (at, part) in enumerate(each_step(view, fresh)):
                    slot = "museum.staging" + (f".step{step}" if step else "")
                    staging = self._registry.get_slot(slot).slice_for(shape.batch_size, 0)
                    lens = at.seq_lens_cpu + at.uncounted_keys
                    copy(self, getattr(part, name)[: at.batch_size], staging, lens)
                return fresh

        return Staged

    return make


def _no_wait(backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor) -> None:
    staging.copy_(lens)
    backend.driver.copy_async(target, staging)


def _cleared(backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor) -> None:
    if backend.copied is not None:
        backend.copied.synchronize()
    staging.copy_(lens)
    backend.driver.copy_async(target, staging)
    staging.fill_(1)  # the next phase's
    backend.copied = backend.driver.event()
    backend.copied.record()


def _event_by_shape(backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor) -> None:
    events = backend.copied = backend.copied or {}
    if len(lens) in events:
        events[len(lens)].synchronize()
    staging.copy_(lens)
    backend.driver.copy_async(target, staging)
    events[len(lens)] = backend.driver.event()
    events[len(lens)].record()


def _marked_early(backend: Any, target: torch.Tensor, staging: torch.Tensor, lens: torch.Tensor) -> None:
    events = backend.copied = backend.copied or {}
    if staging.data_ptr() in events:
        events[staging.data_ptr()].synchronize()
    staging.copy_(lens)
    events[staging.data_ptr()] = backend.driver.event()
    events[staging.data_ptr()].record()
    backend.driver.copy_async(target, staging)


def _plan_staging_not_awaited(base: type[Any]) -> type[Any]:
    class PlanStagingNotAwaited(base):  # type: ignore[misc]
        """Plans are copied from host memory that is written again without a wait."""

        def attach(self, registry: Any, driver: Any = None) -> None:
            """Take a driver whose events are done at once."""
            super().attach(registry, driver)
            self.driver = _Unwaiting(driver)

    return PlanStagingNotAwaited


class _Unwaiting:
    """A driver with events that do not wait."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def event(self) -> Event:
        """Return an event that marks nothing."""
        return Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def _on_a_side_stream(*, forks: bool, joins: bool) -> Make:
    """Return a factory of backends that refreshes metadata on a stream of its own."""

    def make(base: type[Any]) -> type[Any]:
        class Sided(base):  # type: ignore[misc]
            """Metadata is refreshed beside the stream that replays."""

            fill_is_device_only = False
            side: Any = None

            @hookimpl
            def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
                """Refresh on the side."""
                main = self.driver.current_stream()
                self.side = self.side or self.driver.stream()
                if forks:
                    self.side.wait_stream(main)
                with self.side:
                    fresh = super().init_metadata_replay(view, shape, captured)
                if joins:
                    main.wait_stream(self.side)
                return fresh

        return Sided

    return make


_RACES = [
    Exhibit(
        name="trtllm-mla-staging-not-awaited",
        rule="GP16",
        thread="vllm-project/vllm#24527",
        planted="Host memory is written for the next step while the previous copy may be in flight.",
        base="trtllm_mla",
        lanes=("mixed",),
        make=_staged("seq_lens_k", _no_wait),
    ),
    Exhibit(
        name="flashinfer-plan-staging-not-awaited",
        rule="GP16",
        thread="vllm-project/vllm#47644",
        planted="The host memory of the plans is written for the next step without a wait for the previous"
        " copy.",
        base="flashinfer",
        lanes=("extend",),
        make=_plan_staging_not_awaited,
    ),
    Exhibit(
        name="fa3-lengths-overwritten",
        rule="GP16",
        thread="NVIDIA/TensorRT-LLM#14008",
        planted="Lengths are copied from host memory that the same hook then sets to 1 for the next phase.",
        base="fa3",
        lanes=("draft_extend",),
        make=_staged("cache_seqlens", _cleared),
    ),
    Exhibit(
        name="fa3-event-of-the-shape",
        rule="GP16",
        thread="vllm-project/vllm#47644",
        planted="All shapes share one staging buffer, and each waits only for its own last copy.",
        base="fa3",
        lanes=("extend",),
        make=_staged("cache_seqlens", _event_by_shape),
    ),
    Exhibit(
        name="fa3-event-before-the-copy",
        rule="GP16",
        thread="vllm-project/vllm#24527",
        planted="The event that a later step waits for is recorded before the copy starts.",
        base="fa3",
        lanes=("mixed",),
        make=_staged("cache_seqlens", _marked_early),
    ),
    Exhibit(
        name="flashinfer-side-stream-not-joined",
        rule="GP16",
        thread="sgl-project/sglang-omni#1369",
        planted="Metadata is refreshed on a side stream that the replay does not wait for.",
        base="flashinfer",
        lanes=("draft_extend",),
        make=_on_a_side_stream(forks=True, joins=False),
    ),
    Exhibit(
        name="trtllm-mla-side-stream-not-forked",
        rule="GP16",
        thread="sgl-project/sglang#19177",
        planted="Metadata is refreshed on a side stream that does not wait for the copy of the batch.",
        base="trtllm_mla",
        lanes=("decode",),
        make=_on_a_side_stream(forks=False, joins=True),
    ),
]


# -- GP20: what no graph holds -----------------------------------------------------------------------


def _before_forward(check: Callable[[Any, Any], None]) -> Make:
    """Return a factory of backends that looks at its metadata before it attends."""

    def make(base: type[Any]) -> type[Any]:
        class Checked(base):  # type: ignore[misc]
            """Metadata is checked in every layer."""

            def forward(self, *args: Any) -> torch.Tensor:
                """Check, and attend."""
                check(self, args[-1])
                return super().forward(*args)  # type: ignore[no-any-return]

        return Checked

    return make


def _after_fill(edit: Callable[[Any, ForwardBatch, Any], None]) -> Make:
    """Return a factory of backends that does more in the body that every path goes through."""

    def make(base: type[Any]) -> type[Any]:
        class More(base):  # type: ignore[misc]
            """The body does more."""

            def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
                """Fill, and do more."""
                super().fill_metadata(view, metadata)
                edit(self, view, metadata)

        return More

    return make


def _assert_lengths(_: Any, metadata: Any) -> None:
    if not metadata.cache_seqlens.min() >= 0:
        raise ValueError("a request has fewer than no keys")


def _list_offsets(_: Any, __: ForwardBatch, metadata: Any) -> None:
    offsets = metadata.qo_indptr.tolist()
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    metadata.max_q_len = max(metadata.max_q_len, longest)


def _set_first(_: Any, __: ForwardBatch, metadata: Any) -> None:
    metadata.cu_seqlens_q[0] = torch.tensor(0)


def _masked_write(_: Any, __: ForwardBatch, metadata: Any) -> None:
    table = metadata.page_table
    table[table < 0] = table[table < 0] * 0


def _lengths_from_the_device(base: type[Any]) -> type[Any]:
    class LengthsFromTheDevice(base):  # type: ignore[misc]
        """A plan is made from the lengths on the device."""

        def plan_metadata(self, view: ForwardBatch, metadata: Any) -> None:
            """Fetch them, and plan."""
            super().plan_metadata(replace(view, seq_lens_cpu=view.seq_lens.cpu()), metadata)

    return LengthsFromTheDevice


def _forked_in_forward(base: type[Any]) -> type[Any]:
    class ForkedInForward(base):  # type: ignore[misc]
        """A backend with a prefetch on a stream that is not joined."""

        side: Any = None

        def forward(self, *args: Any) -> torch.Tensor:
            """Fork, and attend."""
            if self.driver is not None:
                self.side = self.side or self.driver.stream()
                self.side.wait_stream(self.driver.current_stream())
                with self.side:
                    args[1].sum()
            return super().forward(*args)  # type: ignore[no-any-return]

    return ForkedInForward


_ILLEGAL = [
    Exhibit(
        name="fa3-assert-on-the-device",
        rule="GP20",
        thread="vllm-project/vllm#22758",
        planted="Every layer asserts on the host that no length on the device is negative.",
        base="fa3",
        lanes=("extend",),
        make=_before_forward(_assert_lengths),
    ),
    Exhibit(
        name="flashinfer-offsets-listed",
        rule="GP20",
        thread="vllm-project/vllm#40807",
        planted="The replay hook calls tolist() on query offsets of the device to find the longest request.",
        base="flashinfer",
        lanes=("mixed",),
        make=after_replay_hook(_list_offsets),
    ),
    Exhibit(
        name="trtllm-mla-scalar-assignment",
        rule="GP20",
        thread="sgl-project/sglang#23738",
        planted="The recorded body sets the first offset from a host number.",
        base="trtllm_mla",
        lanes=("extend",),
        make=_after_fill(_set_first),
    ),
    Exhibit(
        name="fa3-masked-write",
        rule="GP20",
        thread="vllm-project/vllm#43747",
        planted="The recorded body writes the page table by a boolean mask on the device.",
        base="fa3",
        lanes=("draft_decode_tree",),
        make=_after_fill(_masked_write),
    ),
    Exhibit(
        name="flashinfer-lengths-from-the-device",
        rule="GP20",
        thread="InternLM/lmdeploy#2544",
        planted="A plan is made from lengths that are copied from the device.",
        base="flashinfer",
        lanes=("target_verify_tree",),
        make=_lengths_from_the_device,
    ),
    Exhibit(
        name="trtllm-mla-unjoined-stream",
        rule="GP20",
        thread="deepseek-ai/DeepEP#62",
        planted="Attention starts work on a side stream inside the capture and does not join it.",
        base="trtllm_mla",
        lanes=("draft_decode",),
        make=_forked_in_forward,
    ),
]

EXHIBITS: list[Exhibit] = [*_STALE, *_RACES, *_ILLEGAL]
