"""Correct backends that make metadata in other ways: on the host, on streams, by two bodies, with plans.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpact.attention import Buffers, LayerSpec, Limits
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy, metadata_slot
from graphpact.shapes import GraphShape
from graphpact_museum.edits.backends import invariants_of_inner
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import variant
from graphpact_museum.variants.slots import CPU, own_slot


@variant(on="fa3", lanes=("decode", "target_verify"))
def two_bodies(base: type[Any]) -> type[Any]:
    """Capture and replay have two bodies; only capture writes the data that is the same for every batch."""

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        slots = [s for s in right(limits) if s.name != "fa3.cu_seqlens_q"]
        constant = GraphSlot(
            "fa3.cu_seqlens_q",
            lambda bs, _: (bs + 1,),
            torch.int32,
            axis="bs",
            slice_fn=lambda buffer, n: buffer[: n + 1],
            padding_policy=PaddingPolicy.FILL_ONCE,
            pad_value=0,
            owner="variant",
            reason="the same offsets for every batch of the lane",
            copy_from_fb=False,
            role="offsets",
        )
        return [*slots, constant]

    def init_metadata_replay(self: Any, _: Any, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        del shape
        spare = torch.empty_like(captured.cu_seqlens_q)
        self.fill_metadata(view, replace(captured, cu_seqlens_q=spare))
        return captured

    return override(base, declare_slots, init_metadata_replay, fill_is_device_only=False)


@variant(on="trtllm_mla", lanes=("decode", "draft_extend"))
def metadata_made_on_the_host(base: type[Any]) -> type[Any]:
    """The host counts keys with numpy in its memory, and the driver copies the counts asynchronously."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.copied = None
        self.staging = None

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        staging = own_slot("staging", lambda bs, _: (bs,), torch.int32, role="staging", device=CPU)
        return [*right(limits), staging]

    def plan_metadata(self: Any, _: Any, view: ForwardBatch, metadata: Any) -> None:
        registry = self._registry
        if registry is None or self.driver is None:
            return
        if registry.slot_of(metadata.seq_lens_k) is None:
            return
        if self.copied is None:
            self.copied = self.driver.event()
        else:
            self.copied.synchronize()
        staging = registry.get_slot("variant.staging").slice_for(view.batch_size, 0)
        staging.numpy()[:] = view.seq_lens_cpu.numpy() + view.uncounted_keys
        self.driver.copy_async(metadata.seq_lens_k, staging)
        self.copied.record()

    return override(base, declare_slots, plan_metadata, __init__=init, fill_is_device_only=False)


@variant(on="fa3", lanes=("decode", "mixed"))
def metadata_on_a_side_stream(base: type[Any]) -> type[Any]:
    """Metadata is refreshed on a side stream that is forked and joined."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self.side = None

    def init_metadata_replay(
        self: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
    ) -> Any:
        assert self.driver is not None  # noqa: S101  it has a lane
        main = self.driver.current_stream()
        self.side = self.side or self.driver.stream()
        self.side.wait_stream(main)
        with self.side:
            right(view=view, shape=shape, captured=captured)
        main.wait_stream(self.side)
        return captured

    return override(base, init_metadata_replay, __init__=init, fill_is_device_only=False)


@variant(on="trtllm_mla", lanes="decode")
@overrides("forward")
def attention_on_a_side_stream(self: Any, right: Any, *args: Any) -> Any:
    """Attention runs on a side stream that is forked and joined inside the graph."""
    if self.driver is None:
        return right(*args)
    main, side = self.driver.current_stream(), self.driver.stream()
    side.wait_stream(main)
    with side:
        out: torch.Tensor = right(*args)
    main.wait_stream(side)
    return out


@variant(on="fa3", lanes=("decode", "draft_decode_tree"))
@overrides("init_metadata_replay")
def replay_hook_that_does_nothing(
    _: Any, __: Any, view: ForwardBatch, shape: GraphShape, captured: Any
) -> Any:
    """The graph makes all metadata, and the replay hook returns what was captured."""
    del view, shape
    return captured


class _Plan:
    """The state of a planner; ``keys`` is the tensor of a slot."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys
        self.num_planned = 0


@dataclass
class _Planned:
    """The base's metadata, and a plan."""

    inner: Any
    plan: _Plan


@variant(on="fa3", lanes=("decode", "draft_extend"))
def plan_object(base: type[Any]) -> type[Any]:
    """Kernels read the tensor of a plan object, which counts its steps and is updated in place."""

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        plan = own_slot("plan", lambda bs, _: (bs,), torch.int32, role="plan")
        return [*right(limits), plan]

    def allocate_metadata(_: Any, right: Any, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        inner = right(view, shape, buffers)
        return _Planned(inner, _Plan(buffers("variant.plan")))

    def fill_metadata(_: Any, right: Any, view: ForwardBatch, metadata: _Planned) -> None:
        right(view, metadata.inner)
        metadata.plan.keys.copy_(metadata.inner.cache_seqlens)
        metadata.plan.num_planned += 1

    def forward(_: Any, right: Any, *args: Any) -> Any:
        inner, plan = args[-1].inner, args[-1].plan
        planned = replace(inner, cache_seqlens=plan.keys)
        return right(*args[:-1], planned)

    methods = (declare_slots, allocate_metadata, fill_metadata, forward)
    of_inner = invariants_of_inner(base)
    return override(base, *methods, fill_is_device_only=False, plan_invariants=of_inner)


@dataclass
class _Indexed:
    """The base's metadata, and the index of each token in the batch."""

    inner: Any
    index: torch.Tensor


@variant(on="reference", lanes=("decode", "extend", "draft_decode"))
def constant_in_a_slot(base: type[Any]) -> type[Any]:
    """The kernel reads an arange from a slot that is written once, and by no step."""

    def declare_slots(_: Any, right: Any, limits: Limits) -> Any:
        index = metadata_slot(
            "variant.index",
            lambda _, tokens: (tokens,),
            torch.int64,
            role="constant",
            axis="tokens",
            contents=lambda new: torch.arange(len(new), out=new),
        )
        return [*right(limits), index]

    def allocate_metadata(_: Any, right: Any, view: ForwardBatch, shape: GraphShape, buffers: Buffers) -> Any:
        inner = right(view, shape, buffers)
        return _Indexed(inner, buffers("variant.index"))

    def fill_metadata(_: Any, right: Any, view: ForwardBatch, metadata: _Indexed) -> None:
        right(view, metadata.inner)

    def plan_metadata(_: Any, right: Any, view: ForwardBatch, metadata: _Indexed) -> None:
        right(view, metadata.inner)

    def forward(_: Any, right: Any, *args: Any) -> Any:
        out: torch.Tensor = right(*args[:-1], args[-1].inner)
        return out[args[-1].index]

    return override(base, declare_slots, allocate_metadata, fill_metadata, plan_metadata, forward)


@variant(on="reference", lanes=("decode", "target_verify", "mixed"))
def length_zero_is_empty(base: type[Any]) -> type[Any]:
    """Padding rows have no keys, and their outputs are zeros."""

    def forward(
        self: Any,
        right: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerSpec,
        metadata: Any,
    ) -> Any:
        out: torch.Tensor = right(q, k, v, layer, metadata)
        is_empty = ~self.keys_of(metadata)[1].any(dim=1)
        return out.masked_fill(is_empty[:, None, None], 0)

    return override(base, forward, capabilities=replace(base.capabilities, seq_len_fill_value=0))


@variant(on="reference", lanes=("decode", "draft_decode"))
@overrides("fill_metadata")
def table_marked_behind_the_last_key(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """A table contains -1 after the last key of each request; the kernel does not read it."""
    right(view, metadata)
    at = torch.arange(metadata.table.shape[1], device=view.device)
    lens = view.seq_lens + (0 if metadata.drafts.shape[1] else view.uncounted_keys)
    metadata.table.masked_fill_(at >= lens[:, None], -1)


@variant(on="reference", lanes=("decode", "target_verify_tree"))
@overrides("fill_metadata")
def table_kept_behind_the_last_key(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """A table keeps old entries after the last key of each request; the kernel does not read them."""
    before = metadata.table.clone()
    right(view, metadata)
    at = torch.arange(metadata.table.shape[1], device=view.device)
    lens = view.seq_lens + (0 if metadata.drafts.shape[1] else view.uncounted_keys)
    metadata.table.copy_(torch.where(at < lens[:, None], metadata.table, before))


@variant(on="reference", lanes=("decode", "target_verify"))
def requests_sorted_by_length(base: type[Any]) -> type[Any]:
    """Requests are sorted by length, for an even load."""

    def fill_metadata(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        right(view, metadata)
        order = torch.argsort(view.seq_lens, descending=True, stable=True)
        metadata.table.copy_(metadata.table[order].clone())
        metadata.request.copy_(torch.argsort(order)[metadata.request])

    def plan_metadata(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
        lens = view.seq_lens_cpu
        order = torch.argsort(lens, descending=True, stable=True)
        right(replace(view, seq_lens_cpu=lens[order]), metadata)

    return override(base, fill_metadata, plan_metadata)
