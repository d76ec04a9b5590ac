"""Exhibits of scale: each is right in plain lanes, and wrong in lanes with unusual values.

The values are tall ladders, long contexts, steps with more tokens than a context, mixed layers, wide drafts,
high KV slots, three or more ranks, and pages of one slot.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, metadata_slot
from graphpact.parallel import get_parallel
from graphpact.shapes import EagerReason, GraphShape
from graphpact_museum.edits.backends import (
    AttentionCall,
    after_attention,
    after_replay_hook,
    workspace_memory,
)
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.edits.runners import Fit, after_fill
from graphpact_museum.exhibit import exhibit

# -- tall ladders ------------------------------------------------------------------------------------


@exhibit("GP12", "GeeeekExplorer/nano-vllm#216", on="reference_runner", lanes="decode", values=("tall",))
@overrides("fit")
def runner_finds_shapes_by_doubling(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """The graph of a batch is found as if every captured size were twice the one before."""
    fit: Fit = right(batch)
    if isinstance(fit, EagerReason):
        return fit
    shapes, most = runner.shapes(), max(batch.global_num_tokens_cpu or (batch.num_tokens,))
    index = max(most - 1, 0).bit_length() - (shapes[0].num_tokens - 1).bit_length()
    found: GraphShape = shapes[min(max(index, 0), len(shapes) - 1)]
    return found


_MOST_KEPT = 4


@exhibit("GP14", "flashinfer-ai/flashinfer#4399", on="reference", lanes="decode", values=("tall",))
def reference_constants_of_four_shapes(base: type[Any]) -> type[Any]:
    """A cache keeps the constants of four shapes, and the capture of the fifth frees the first."""

    def init(self: Any, right: Any, context: Any) -> None:
        right(context)
        self._ones = OrderedDict()

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        out = right(q, k, v, layer, metadata)
        if metadata.staging is None:  # no graph
            return out
        if len(out) not in self._ones:
            self._ones[len(out)] = torch.ones(len(out), 1, 1, dtype=out.dtype, device=out.device)
            if len(self._ones) > _MOST_KEPT:
                self._ones.popitem(last=False)
        return out * self._ones[len(out)]

    return override(base, forward, __init__=init)


def _in_groups(rows: int) -> int:
    """Return the rows in whole groups of 8; all rows if there are no more than 8."""
    return rows // 8 * 8 if rows > 8 else rows


@exhibit("GP13", "xLLM-AI/xllm#1939", on="reference", lanes="decode", values=("tall",))
@after_attention
def reference_workspace_of_whole_groups_of_eight(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A workspace has rows for the most requests, rounded down to a multiple of 8."""
    if call.metadata.staging is None:  # an eager step
        return call.out
    rows = max(_in_groups(backend.context.limits.max_bs), 8)
    return call.out[torch.arange(len(call.out), device=call.out.device).clamp_(max=rows - 1)]


@exhibit("GP03", "vllm-project/vllm-ascend#16049", on="cuda_graph", lanes="decode", values=("tall",))
@overrides("populate")
def cuda_graph_pads_whole_groups_of_eight(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """Padding rows are reset up to a multiple of 8, and a captured size that is none keeps older rows."""
    tail = registry.get_slot("seq_lens").slice_for(shape.batch_size, shape.num_tokens)
    tail = tail[max(_in_groups(shape.batch_size), batch.batch_size) :]
    kept = tail.clone()
    right(registry, batch, shape)
    tail.copy_(kept)


# -- long contexts -----------------------------------------------------------------------------------

_FEW_KEYS = 256


@exhibit("GP13", "predibase/lorax#363", on="reference", lanes="decode", values=("tall", "long"))
def reference_table_of_256_keys(base: type[Any]) -> type[Any]:
    """The table has columns for 256 keys, and later keys are not read."""

    def declare_slots(_: Any, right: Any, limits: Any) -> Any:
        return [
            replace(slot, shape_fn=lambda bs, _: (bs, min(limits.max_context_len, _FEW_KEYS)))
            if slot.name == "reference.table"
            else slot
            for slot in right(limits)
        ]

    def fill_metadata(self: Any, _: Any, view: Any, metadata: Any) -> None:
        columns = metadata.table.shape[1]
        metadata.table.copy_(self.context.req_to_token[view.req_pool_indices, :columns])
        self.fill_request(view, metadata.request)
        metadata.last.copy_(self.last_of(view, metadata.request).clamp_(max=columns - 1))

    return override(base, declare_slots, fill_metadata)


@exhibit("GP10", "paiml/aprender#2030", on="reference", lanes="decode", values=("long",))
def reference_kernel_of_short_sequences_recorded(base: type[Any]) -> type[Any]:
    """The lengths of the capture select a kernel that reads 256 keys, and all replays run it."""

    def allocate_metadata(self: Any, right: Any, view: Any, shape: Any, buffers: Any) -> Any:
        metadata = right(view, shape, buffers)
        self._few = max(view.seq_lens_cpu.tolist(), default=0) <= _FEW_KEYS
        return metadata

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        if self._few:
            metadata = replace(metadata, last=metadata.last.clamp(max=_FEW_KEYS - 1))
        return right(q, k, v, layer, metadata)

    return override(base, allocate_metadata, forward)


@exhibit("GP11", "vllm-project/vllm#53658", on="reference_runner", lanes="extend", values=("tall",))
@overrides("dummy")
def runner_dummy_longer_than_a_sequence(runner: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The first request of a dummy batch has all spare tokens of the shape, more than a sequence may have."""
    batch: ForwardBatch = right(shape)
    assert batch.extend_seq_lens is not None  # noqa: S101  of a ragged mode
    extend = torch.ones_like(batch.extend_seq_lens)
    extend[0] = batch.num_tokens - (batch.batch_size - 1)
    lens = torch.full_like(batch.seq_lens, runner.context.padded_seq_len).maximum(extend)
    return replace(
        batch,
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        extend_seq_lens=extend,
        extend_seq_lens_cpu=extend.clone(),
    )


@exhibit("GP13", "sgl-project/sglang#31012", on="reference", lanes="extend", values=("tall",))
@after_attention
def reference_rows_of_one_context(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A workspace has a row for each token of a sequence, but steps have more tokens."""
    rows = backend.context.limits.max_context_len
    return call.out[torch.arange(len(call.out), device=call.out.device).clamp_(max=rows - 1)]


# -- high KV slots -----------------------------------------------------------------------------------


@exhibit("GP02", "sgl-project/sglang#14654", on="reference", lanes="decode", values=("high",))
@after_replay_hook
def reference_slots_in_16_bits(_: Any, __: ForwardBatch, metadata: Any) -> None:
    """The replay hook stores KV slots in 16 bits, and the capture hook in 64."""
    metadata.table.copy_(metadata.table.to(torch.int16))


@exhibit("GP02", "sgl-project/sglang#14654", on="reference", lanes="decode", values=("high",))
@after_replay_hook
def reference_offsets_in_32_bits(backend: Any, _: ForwardBatch, metadata: Any) -> None:
    """The replay hook computes offsets of elements in 32 bits, and the capture hook in 64."""
    layer = backend.context.layers[0]
    width = layer.num_kv_heads * layer.head_dim
    metadata.table.copy_((metadata.table * width).to(torch.int32) // width)


# -- mixed layers ------------------------------------------------------------------------------------


def _number_of_each_layer(base: type[Any], name: str) -> type[Any]:
    """Return a backend with a number for each layer in a slot; replays write a wrong number.

    Outputs are scaled by the number in the slot divided by the number of the layer, which is 1 if the slot is
    right. Replays write the number of the first layer that has one.

    Args:
        base: The correct class.
        name: The attribute of layers that holds the number.
    """

    def number(layer: Any) -> float:
        return float(getattr(layer, name) or 0)

    def declare_slots(self: Any, right: Any, limits: Any) -> Any:
        count = len(self.context.layers)
        more = metadata_slot(
            "museum.numbers", lambda *_: (count,), torch.float64, role="lengths", axis="none"
        )
        return [*right(limits), more]

    def write(backend: Any, numbers: Sequence[float]) -> None:
        for at, value in enumerate(numbers):
            workspace_memory(backend, "numbers")[at].fill_(value)

    def init_metadata_capture(self: Any, right: Any, view: Any, shape: Any) -> Any:
        write(self, [number(layer) for layer in self.context.layers])
        return right(view, shape)

    def init_metadata_replay(self: Any, right: Any, view: Any, shape: Any, captured: Any) -> Any:
        own = [number(layer) for layer in self.context.layers]
        first = next((value for value in own if value), 0.0)
        write(self, [value and first for value in own])
        return right(view, shape, captured)

    def forward(self: Any, right: Any, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
        out = right(q, k, v, layer, metadata)
        own = number(layer)
        if self._registry is None or not own or metadata.staging is None:
            return out
        return out * (workspace_memory(self, "numbers")[layer.layer_id] / own).to(out.dtype)

    return override(
        base,
        declare_slots,
        init_metadata_capture,
        init_metadata_replay,
        forward,
        fill_is_device_only=False,
    )


@exhibit("GP02", "NVIDIA/TensorRT-LLM#18769", on="reference", lanes="decode", values=("mixed",))
def reference_scale_of_the_first_layer(base: type[Any]) -> type[Any]:
    """A replay refreshes the scale of every layer with that of the first."""
    return _number_of_each_layer(base, "scaling")


@exhibit("GP02", "NVIDIA/TensorRT-LLM#18769", on="reference", lanes="decode", values=("mixed",))
def reference_window_of_the_first_layer(base: type[Any]) -> type[Any]:
    """A replay refreshes every sliding window with the window of the first layer that has one."""
    return _number_of_each_layer(base, "sliding_window")


# -- wide drafts -------------------------------------------------------------------------------------


@exhibit(
    "GP02", "NVIDIA/TensorRT-LLM#13426", on="reference_runner", lanes="target_verify_tree", values=("broad",)
)
@after_fill
def runner_mask_of_32_drafts(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """The mask of a tree is copied as one word of 32 bits for each draft."""
    del batch
    registry.get_slot("tree_mask").slice_for(shape.batch_size, shape.num_tokens)[:, 32:] = False


@exhibit("GP13", "ModelTC/LightLLM#1583", on="reference", lanes="draft_decode_tree", values=("wide",))
@after_attention
def reference_as_many_branches_as_steps(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A workspace has a row for each draft step of all requests, but drafts have more branches."""
    if call.metadata.staging is None:  # an eager step
        return call.out
    limits = backend.context.limits
    row = torch.arange(len(call.out), device=call.out.device)
    return call.out[row.clamp(max=limits.max_bs * limits.draft.num_steps - 1)]


@exhibit("GP02", "sgl-project/sglang#21987", on="reference_runner", lanes="draft_extend", values=("wide",))
@after_fill
def runner_accepts_no_more_than_steps(
    runner: Any, registry: CudaGraphBufferRegistry, _: ForwardBatch, __: GraphShape
) -> None:
    """The count of accepted drafts is limited to the number of steps, but a verify has more tokens."""
    buffer = registry.get_slot("num_correct_drafts").buffer
    if buffer is not None:
        buffer.clamp_(max=runner.context.limits.draft.num_steps)


@exhibit(
    "GP02",
    "sgl-project/sglang#21709",
    on="reference",
    lanes=("draft_decode", "draft_decode_tree"),
    values=("single",),
)
@after_replay_hook
def reference_drafts_of_one_step_not_refreshed(backend: Any, view: Any, metadata: Any) -> None:
    """A draft of a single step takes a path whose replay does not write the slots of drafts."""
    if backend.context.limits.draft.num_steps == 1 and view.draft_step is not None:
        metadata.drafts.zero_()


# -- ranks -------------------------------------------------------------------------------------------


@exhibit("GP17", "vllm-project/vllm-ascend#12841", on="reference_runner", lanes="extend")
@after_fill
def runner_counts_for_two_ranks(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """A rank's share of the live tokens is computed for two ranks, however many there are."""
    count, parallel = batch.num_token_non_padded_cpu, get_parallel()
    if count is None or parallel.attn_tp_size == 1:
        return
    rows, buffer = shape.num_tokens // 2, registry.get_slot("num_token_non_padded").buffer
    if buffer is not None:
        buffer.fill_(min(max(count - parallel.attn_tp_rank * rows, 0), rows))


@exhibit("GP17", "vllm-project/vllm#25906", on="reference_runner", lanes="extend")
@overrides("shapes")
def runner_third_rank_captures_less(_: Any, right: Any) -> Any:
    """The third and later ranks do not capture the smallest shape."""
    shapes: Sequence[GraphShape] = right()
    return shapes[1:] if get_parallel().attn_tp_rank >= 2 else shapes


# -- pages -------------------------------------------------------------------------------------------


@after_fill
def _own_slot_for_each_padding_row(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    buffer, more = registry.get_slot("out_cache_loc").buffer, shape.num_tokens - batch.num_tokens
    if buffer is not None:
        buffer[batch.num_tokens : shape.num_tokens] = torch.arange(more, device=buffer.device)


@exhibit("GP04", "m0at/rvllm#32", on="reference_runner", lanes="decode", values=("page1",))
def runner_padding_beyond_a_page_of_one_slot(base: type[Any]) -> type[Any]:
    """Each padding row has its own KV slot, from 0 up, but a page has only one slot."""
    return _own_slot_for_each_padding_row(base)


@exhibit("GP04", "m0at/rvllm#32", on="reference_runner", lanes="target_verify", values=("tall", "wide"))
def runner_more_padding_rows_than_a_page(base: type[Any]) -> type[Any]:
    """Each padding row has its own KV slot, from 0 up, and there are more rows than a page has slots."""
    return _own_slot_for_each_padding_row(base)
