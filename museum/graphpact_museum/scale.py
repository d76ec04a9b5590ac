"""Exhibits of scale: each is right in plain lanes, and wrong in lanes with one unusual value.

Tall ladders, long contexts, steps of more tokens than a context, mixed layers, wide drafts, high KV slots,
three ranks and more, pages of one slot.

Does not: run exhibits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, metadata_slot
from graphpact.hookspecs import hookimpl
from graphpact.parallel import get_parallel
from graphpact.shapes import EagerReason, GraphShape
from graphpact_museum.edits import Attended, after_attention, after_replay_hook, there
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.runners import after_fill, dummies, fitting

# -- tall ladders ------------------------------------------------------------------------------------


def _at_doubled_sizes(
    runner: Any, batch: ForwardBatch, right: GraphShape | EagerReason
) -> GraphShape | EagerReason:
    """Return the shape at the index that the right one has if captured sizes are powers of two."""
    if isinstance(right, EagerReason):
        return right
    shapes, most = runner.shapes(), max(batch.global_num_tokens_cpu or (batch.num_tokens,))
    index = max(most - 1, 0).bit_length() - (shapes[0].num_tokens - 1).bit_length()
    found: GraphShape = shapes[min(max(index, 0), len(shapes) - 1)]
    return found


_MOST_KEPT = 4


def _evicts_the_fifth(base: type[Any]) -> type[Any]:
    class EvictsTheFifth(base):  # type: ignore[misc]
        """Constants of a shape lie in a cache with room for four shapes."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self._ones: OrderedDict[int, torch.Tensor] = OrderedDict()

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend, and scale by the constants."""
            out = super().forward(q, k, v, layer, metadata)
            if metadata.staging is None:  # no graph
                return out
            if len(out) not in self._ones:
                self._ones[len(out)] = torch.ones(len(out), 1, 1, dtype=out.dtype, device=out.device)
                if len(self._ones) > _MOST_KEPT:
                    self._ones.popitem(last=False)
            return out * self._ones[len(out)]

    return EvictsTheFifth


_LADDERS = [
    Exhibit(
        name="runner-finds-shapes-by-doubling",
        rule="GP12",
        thread="GeeeekExplorer/nano-vllm#216",
        planted="The graph of a batch is found as if every captured size were twice the one before.",
        base="reference_runner",
        lanes=("decode",),
        make=fitting(_at_doubled_sizes),
        values=("tall",),
        site="runner",
    ),
    Exhibit(
        name="reference-constants-of-four-shapes",
        rule="GP14",
        thread="flashinfer-ai/flashinfer#4399",
        planted="A cache keeps the constants of four shapes, and the capture of the fifth frees the first.",
        base="reference",
        lanes=("decode",),
        make=_evicts_the_fifth,
        values=("tall",),
    ),
]

# -- long contexts -----------------------------------------------------------------------------------

_FEW_KEYS = 256


def _narrow_table(base: type[Any]) -> type[Any]:
    class NarrowTable(base):  # type: ignore[misc]
        """The table has room for 256 keys, and later positions are cut off."""

        def declare_slots(self, limits: Any) -> Sequence[GraphSlot]:
            """Return the slots, with a table of at most 256 columns."""
            return [
                replace(slot, shape_fn=lambda bs, _: (bs, min(limits.max_context_len, _FEW_KEYS)))
                if slot.name == "reference.table"
                else slot
                for slot in super().declare_slots(limits)
            ]

        def fill_metadata(self, view: Any, metadata: Any) -> None:
            """Fill what there is room for."""
            columns = metadata.table.shape[1]
            metadata.table.copy_(self.context.req_to_token[view.req_pool_indices, :columns])
            self.fill_request(view, metadata.request)
            metadata.last.copy_(self.last_of(view, metadata.request).clamp_(max=columns - 1))

    return NarrowTable


def _short_kernel_recorded(base: type[Any]) -> type[Any]:
    class ShortKernelRecorded(base):  # type: ignore[misc]
        """Lengths on the host choose the kernel: one reads at most 256 keys."""

        def allocate_metadata(self, view: Any, shape: Any, buffers: Any) -> Any:
            """Choose the kernel, which a capture records."""
            metadata = super().allocate_metadata(view, shape, buffers)
            self._few = max(view.seq_lens_cpu.tolist(), default=0) <= _FEW_KEYS
            return metadata

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend with the chosen kernel."""
            if self._few:
                metadata = replace(metadata, last=metadata.last.clamp(max=_FEW_KEYS - 1))
            return super().forward(q, k, v, layer, metadata)

    return ShortKernelRecorded


def _all_tokens_first(runner: Any, batch: ForwardBatch) -> ForwardBatch:
    """Return a dummy whose first request has all tokens but one for each other request."""
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


def _rows_of_a_context(backend: Any, call: Attended) -> torch.Tensor:
    """Copy rows through a workspace with a row for each token of a sequence, clamped to its last row."""
    rows = backend.context.limits.max_context_len
    return call.out[torch.arange(len(call.out), device=call.out.device).clamp_(max=rows - 1)]


_CONTEXTS = [
    Exhibit(
        name="reference-table-of-256-keys",
        rule="GP13",
        thread="predibase/lorax#363",
        planted="The table has columns for 256 keys, and keys after them are not read.",
        base="reference",
        lanes=("decode",),
        make=_narrow_table,
        values=("tall", "long"),
    ),
    Exhibit(
        name="reference-kernel-of-short-sequences-recorded",
        rule="GP10",
        thread="paiml/aprender#2030",
        planted="Lengths of the capture choose a kernel that reads 256 keys, for all replays.",
        base="reference",
        lanes=("decode",),
        make=_short_kernel_recorded,
        values=("long",),
    ),
    Exhibit(
        name="runner-dummy-longer-than-a-sequence",
        rule="GP11",
        thread="vllm-project/vllm#53658",
        planted="A dummy's first request has all tokens of the shape, more than a sequence may have.",
        base="reference_runner",
        lanes=("extend",),
        make=dummies(_all_tokens_first),
        values=("tall",),
        site="runner",
    ),
    Exhibit(
        name="reference-rows-of-one-context",
        rule="GP13",
        thread="sgl-project/sglang#31012",
        planted="A workspace has a row for each token of a sequence, and steps have more tokens.",
        base="reference",
        lanes=("extend",),
        make=after_attention(_rows_of_a_context),
        values=("tall",),
    ),
]

# -- high KV slots -----------------------------------------------------------------------------------


def _table_in_16_bits(_: Any, __: ForwardBatch, metadata: Any) -> None:
    metadata.table.copy_(metadata.table.to(torch.int16))


def _offsets_in_32_bits(backend: Any, _: ForwardBatch, metadata: Any) -> None:
    layer = backend.context.layers[0]
    width = layer.num_kv_heads * layer.head_dim
    metadata.table.copy_((metadata.table * width).to(torch.int32) // width)


_CACHES = [
    Exhibit(
        name="reference-slots-in-16-bits",
        rule="GP02",
        thread="sgl-project/sglang#14654",
        planted="The replay hook keeps KV slots in 16 bits, the capture hook in 64.",
        base="reference",
        lanes=("decode",),
        make=after_replay_hook(_table_in_16_bits),
        values=("high",),
    ),
    Exhibit(
        name="reference-offsets-in-32-bits",
        rule="GP02",
        thread="sgl-project/sglang#14654",
        planted="The replay hook computes offsets of elements in 32 bits, the capture hook in 64.",
        base="reference",
        lanes=("decode",),
        make=after_replay_hook(_offsets_in_32_bits),
        values=("high",),
    ),
]

# -- mixed layers ------------------------------------------------------------------------------------


def _number_of_each_layer(name: str) -> Any:
    """Return a factory of backends with a number of each layer in a slot, that replays write otherwise.

    Outputs are scaled by the number in the slot, divided by the layer's own: by 1 if the slot is right.
    Replays write the number of the first layer that has one.

    Args:
        name: Name of the attribute of layers.
    """

    def number(layer: Any) -> float:
        return float(getattr(layer, name) or 0)

    def make(base: type[Any]) -> type[Any]:
        class NumberOfEachLayer(base):  # type: ignore[misc]
            """A backend with a number of each layer on the device."""

            fill_is_device_only = False

            def declare_slots(self, limits: Any) -> Sequence[GraphSlot]:
                """Return the slots, and one for the numbers."""
                count = len(self.context.layers)
                more = metadata_slot(
                    "museum.numbers", lambda *_: (count,), torch.float64, role="lengths", axis="none"
                )
                return [*super().declare_slots(limits), more]

            def _write(self, numbers: Sequence[float]) -> None:
                for at, value in enumerate(numbers):
                    there(self, "numbers")[at].fill_(value)

            @hookimpl
            def init_metadata_capture(self, view: Any, shape: Any) -> Any:
                """Write the number of each layer."""
                self._write([number(layer) for layer in self.context.layers])
                return super().init_metadata_capture(view, shape)

            @hookimpl
            def init_metadata_replay(self, view: Any, shape: Any, captured: Any) -> Any:
                """Write the first number for all layers that have one."""
                own = [number(layer) for layer in self.context.layers]
                first = next((value for value in own if value), 0.0)
                self._write([value and first for value in own])
                return super().init_metadata_replay(view, shape, captured)

            def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                """Attend, and scale."""
                out = super().forward(q, k, v, layer, metadata)
                own = number(layer)
                if self._registry is None or not own or metadata.staging is None:
                    return out
                return out * (there(self, "numbers")[layer.layer_id] / own).to(out.dtype)

        return NumberOfEachLayer

    return make


_LAYERS = [
    Exhibit(
        name="reference-scale-of-the-first-layer",
        rule="GP02",
        thread="NVIDIA/TensorRT-LLM#18769",
        planted="A replay refreshes the scale of every layer with that of the first.",
        base="reference",
        lanes=("decode",),
        make=_number_of_each_layer("scaling"),
        values=("mixed",),
    ),
    Exhibit(
        name="reference-window-of-the-first-layer",
        rule="GP02",
        thread="NVIDIA/TensorRT-LLM#18769",
        planted="A replay refreshes the window of every layer that has one with the first of them.",
        base="reference",
        lanes=("decode",),
        make=_number_of_each_layer("sliding_window"),
        values=("mixed",),
    ),
]

# -- wide drafts -------------------------------------------------------------------------------------


def _mask_of_32(_: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
    """Lose the drafts of each row after the first 32."""
    del batch
    registry.get_slot("tree_mask").slice_for(shape.batch_size, shape.num_tokens)[:, 32:] = False


def _branches_as_steps(backend: Any, call: Attended) -> torch.Tensor:
    """Copy rows of a graph through a workspace that has a row for each draft step of all requests."""
    if call.metadata.staging is None:  # an eager step
        return call.out
    limits = backend.context.limits
    row = torch.arange(len(call.out), device=call.out.device)
    return call.out[row.clamp(max=limits.max_bs * limits.draft.num_steps - 1)]


def _accepted_by_steps(
    runner: Any, registry: CudaGraphBufferRegistry, _: ForwardBatch, __: GraphShape
) -> None:
    buffer = registry.get_slot("num_correct_drafts").buffer
    if buffer is not None:
        buffer.clamp_(max=runner.context.limits.draft.num_steps)


def _drafts_of_one_step(backend: Any, view: Any, metadata: Any) -> None:
    """Leave the drafts' slots those of the capture, where a draft has one step."""
    if backend.context.limits.draft.num_steps == 1 and view.draft_step is not None:
        metadata.drafts.zero_()


_DRAFTS = [
    Exhibit(
        name="reference-drafts-of-one-step-not-refreshed",
        rule="GP02",
        thread="sgl-project/sglang#21709",
        planted="A draft of a single step takes a path whose replay does not write the slots of drafts.",
        base="reference",
        lanes=("draft_decode", "draft_decode_tree"),
        make=after_replay_hook(_drafts_of_one_step),
        values=("single",),
    ),
    Exhibit(
        name="reference-as-many-branches-as-steps",
        rule="GP13",
        thread="ModelTC/LightLLM#1583",
        planted="A workspace has a row for each draft step of all requests, and drafts have more branches.",
        base="reference",
        lanes=("draft_decode_tree",),
        make=after_attention(_branches_as_steps),
        values=("wide",),
    ),
    Exhibit(
        name="runner-mask-of-32-drafts",
        rule="GP02",
        thread="NVIDIA/TensorRT-LLM#13426",
        planted="The mask of a tree is copied as one word of 32 bits for each draft.",
        base="reference_runner",
        lanes=("target_verify_tree",),
        make=after_fill(_mask_of_32),
        values=("broad",),
        site="runner",
    ),
    Exhibit(
        name="runner-accepts-no-more-than-steps",
        rule="GP02",
        thread="sgl-project/sglang#21987",
        planted="Accepted drafts are cut to the number of steps, and a verify has more tokens.",
        base="reference_runner",
        lanes=("draft_extend",),
        make=after_fill(_accepted_by_steps),
        values=("wide",),
        site="runner",
    ),
]

# -- ranks -------------------------------------------------------------------------------------------


def _count_of_two_ranks(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """Count the live tokens of half of the rows, however many ranks there are."""
    count, parallel = batch.num_token_non_padded_cpu, get_parallel()
    if count is None or parallel.attn_tp_size == 1:
        return
    rows, buffer = shape.num_tokens // 2, registry.get_slot("num_token_non_padded").buffer
    if buffer is not None:
        buffer.fill_(min(max(count - parallel.attn_tp_rank * rows, 0), rows))


def _last_rank_alone(base: type[Any]) -> type[Any]:
    class LastRankAlone(base):  # type: ignore[misc]
        """Every second rank captures one shape less; rank 1 is looked after by a barrier of two ranks."""

        def shapes(self) -> Sequence[GraphShape]:
            """Return the shapes; from rank 2 on without the smallest."""
            shapes: Sequence[GraphShape] = super().shapes()
            return shapes[1:] if get_parallel().attn_tp_rank >= 2 else shapes

    return LastRankAlone


_RANKS = [
    Exhibit(
        name="runner-counts-for-two-ranks",
        rule="GP17",
        thread="vllm-project/vllm-ascend#12841",
        planted="A rank's count of live tokens is that of one of two ranks, however many there are.",
        base="reference_runner",
        lanes=("extend",),
        make=after_fill(_count_of_two_ranks),
        site="runner",
    ),
    Exhibit(
        name="runner-third-rank-captures-less",
        rule="GP17",
        thread="vllm-project/vllm#25906",
        planted="From the third rank on the smallest shape is not captured.",
        base="reference_runner",
        lanes=("extend",),
        make=_last_rank_alone,
        site="runner",
    ),
]

# -- pages -------------------------------------------------------------------------------------------


def _own_slot_for_each_padding_row(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    buffer, more = registry.get_slot("out_cache_loc").buffer, shape.num_tokens - batch.num_tokens
    if buffer is not None:
        buffer[batch.num_tokens : shape.num_tokens] = torch.arange(more, device=buffer.device)


_PAGES = [
    Exhibit(
        name="runner-padding-beyond-a-page-of-one-slot",
        rule="GP04",
        thread="m0at/rvllm#32",
        planted="Each padding row has a KV slot of its own, from 0 up, and a page has one.",
        base="reference_runner",
        lanes=("decode",),
        make=after_fill(_own_slot_for_each_padding_row),
        values=("page1",),
        site="runner",
    ),
    Exhibit(
        name="runner-more-padding-rows-than-a-page",
        rule="GP04",
        thread="m0at/rvllm#32",
        planted="Each padding row has a KV slot of its own, from 0 up, and there are more than a page has.",
        base="reference_runner",
        lanes=("target_verify",),
        make=after_fill(_own_slot_for_each_padding_row),
        values=("tall", "wide"),
        site="runner",
    ),
]

EXHIBITS = (*_LADDERS, *_CONTEXTS, *_CACHES, *_LAYERS, *_DRAFTS, *_RANKS, *_PAGES)
"""The exhibits of this room."""
