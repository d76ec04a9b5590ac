"""Exhibits of the padding rows that a runner or the registry writes, and of their number: GP03 to GP06.

Does not: plant bugs in backends; see `graphpact_museum.padding`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, fills
from graphpact.shapes import GraphShape
from graphpact.step import Forward, Region, RegionContext
from graphpact_conformance.draws.problems import Problem
from graphpact_museum.edits.override import overrides, replaces
from graphpact_museum.edits.runners import (
    keeps,
    keeps_tails,
    pads,
    returning,
    without_axis,
)
from graphpact_museum.exhibit import exhibit


@exhibit("GP03", "sgl-project/sglang#26292", on="cuda_graph", lanes="decode", prefix="cuda-graph")
@exhibit("GP03", "sgl-project/sglang#26292", on="cpu_graph", lanes="decode", prefix="cpu-graph")
@exhibit(
    "GP03",
    "sgl-project/sglang#26292",
    on="reference_runner",
    lanes="draft_extend",
    prefix="draft-extend-runner",
)
@exhibit(
    "GP03",
    "sgl-project/sglang#26292",
    on="reference_runner",
    lanes="target_verify_tree",
    prefix="verify-runner",
)
@exhibit("GP03", "sgl-project/sglang#26292", on="eagle_draft", lanes="draft_decode", prefix="eagle-draft")
@exhibit(
    "GP03",
    "sgl-project/sglang#26292",
    on="eagle_draft_extend",
    lanes="draft_extend",
    prefix="eagle-draft-extend",
)
@exhibit(
    "GP03", "sgl-project/sglang#26292", on="frozen_kv_mtp", lanes="decode_frozen", prefix="frozen-kv-mtp"
)
def keeps_request_rows(base: type[Any]) -> type[Any]:
    """Lengths and slots of padding rows are reset, but not their request rows."""
    return keeps_tails(base, "req_pool_indices")


@exhibit("GP03", "sgl-project/sglang#10892", on="cpu_graph", lanes="decode", prefix="cpu-graph")
@exhibit(
    "GP03",
    "sgl-project/sglang#10892",
    on="reference_runner",
    lanes="draft_decode_tree",
    prefix="draft-runner",
)
def keeps_positions(base: type[Any]) -> type[Any]:
    """Padded tokens keep the positions of an earlier, larger batch."""
    return keeps_tails(base, "positions")


@exhibit("GP03", "sgl-project/sglang#18647", on="reference_runner", lanes="draft_decode")
def draft_runner_keeps_several_fields(base: type[Any]) -> type[Any]:
    """Token ids, positions and request rows of padded branches are those of an earlier batch."""
    return keeps_tails(base, "input_ids", "positions", "req_pool_indices")


@exhibit("GP03", "SJTU-DENG-Lab/Diffulex#44", on="reference_runner", lanes="mixed")
def mixed_runner_keeps_slots_and_tokens(base: type[Any]) -> type[Any]:
    """Only offsets are padded; slots and lengths of padding rows are those of an earlier batch."""
    return keeps_tails(base, "out_cache_loc", "seq_lens")


@exhibit("GP03", "sgl-project/sglang#25512", on="cuda_graph", lanes="decode")
def cuda_graph_keeps_lengths_on_the_host(base: type[Any]) -> type[Any]:
    """Lengths of padding rows are reset on the device, but not on the host, where plans are made."""
    return keeps_tails(base, "seq_lens_cpu")


@exhibit("GP03", "vllm-project/vllm#21196", on="cuda_graph", lanes="decode", site="registry")
@replaces(fills, "_plan_tails")
def registry_resets_no_tail(*_: Any) -> Any:
    """A fill copies the heads of all slots, and resets none of their tails."""
    return [], []


@exhibit("GP04", "vllm-project/vllm#43810", on="cuda_graph", lanes="decode")
@pads("out_cache_loc")
def cuda_graph_pads_slots_with_minus_one(_: Any, __: torch.Tensor) -> int:
    """Padding tokens have KV slot -1, which is the last slot in plain indexing."""
    return -1


@exhibit("GP04", "sgl-project/sglang#38997", on="cpu_graph", lanes="decode")
@pads("out_cache_loc")
def cpu_graph_pads_slots_behind_scratch(runner: Any, _: torch.Tensor) -> int:
    """Padding tokens write the first KV slot after the scratch page, which requests own."""
    slot: int = runner.context.limits.page_size
    return slot


@exhibit("GP04", "m0at/rvllm#32", on="reference_runner", lanes="target_verify")
@pads("out_cache_loc")
def verify_runner_pads_with_a_live_slot(_: Any, live: torch.Tensor) -> torch.Tensor:
    """Padded drafts write to the KV slot of the first real draft."""
    return live[:1]


@exhibit("GP04", "sgl-project/sglang#1469", on="cuda_graph", lanes="decode")
@pads("seq_lens")
def cuda_graph_pads_lengths_with_zero(_: Any, __: torch.Tensor) -> int:
    """Padding rows have length 0, but the backend declares another length for them."""
    return 0


@exhibit("GP04", "NVIDIA/TensorRT-LLM#9873", on="reference_runner", lanes="draft_extend")
@pads("req_pool_indices")
def draft_extend_runner_pads_with_an_active_row(_: Any, live: torch.Tensor) -> torch.Tensor:
    """Padding requests have the request row of the last live request."""
    return live[-1:]


@exhibit("GP04", "sgl-project/sglang#38997", on="reference_runner", lanes="extend")
@pads("req_pool_indices")
def extend_runner_pads_with_the_last_row(runner: Any, _: torch.Tensor) -> int:
    """Padding requests have request row max_bs, which is the last row of the pool: row 0 is reserved."""
    row: int = runner.context.limits.max_bs
    return row


@exhibit("GP04", "vllm-project/vllm#35969", on="cpu_graph", lanes="decode", site="registry")
@replaces(GraphSlot, "initial_value")
def registry_forgets_pad_values(*_: Any) -> int:
    """Every tail is zeroed, whatever value its slot declares."""
    return 0


@exhibit("GP05", "vllm-project/vllm#25265", on="reference_runner", lanes="draft_extend", site="registry")
@replaces(CudaGraphBufferRegistry, "extract_buffer")
def registry_cuts_requests_by_tokens(
    right: Any, registry: CudaGraphBufferRegistry, **more: Any
) -> ForwardBatch:
    """Lengths are sliced by the number of tokens, which is larger than that of requests."""
    view: ForwardBatch = right(registry, **more)
    whole = registry.get_slot("seq_lens").slice_for(*[more["padded_num_tokens"]] * 2)
    return replace(view, seq_lens=whole)


@exhibit("GP05", "sgl-project/sglang#35588", on="reference_runner", lanes="target_verify")
@overrides("slots")
def verify_runner_has_no_count_of_real_tokens(runner: Any, right: Any) -> Sequence[GraphSlot]:
    """The count of live tokens is registered only in some configurations, although layers need it."""
    slots: list[GraphSlot] = [*right()]
    if not runner.context.require_gathered_buffer:
        return slots
    return [slot for slot in slots if slot.name != "num_token_non_padded"]


@exhibit("GP05", "sgl-project/sglang#35588", on="cuda_graph", lanes="decode")
@overrides("populate")
def cuda_graph_counts_padding_as_real(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """The count of live tokens is that of the padded shape."""
    if batch.num_token_non_padded_cpu is not None:
        batch = replace(batch, num_token_non_padded_cpu=shape.num_tokens)
    right(registry, batch, shape)


@exhibit("GP05", "sgl-project/sglang#39574", on="cuda_graph", lanes="decode", prefix="cuda-graph")
@exhibit("GP05", "sgl-project/sglang#39574", on="reference_runner", lanes="extend", prefix="extend-runner")
def keeps_the_count_of_the_capture(base: type[Any]) -> type[Any]:
    """The count of live tokens is written only at capture."""
    return keeps(base, "num_token_non_padded")


@exhibit("GP05", "ROCm/ATOM#1595", on="reference_runner", lanes="target_verify", site="batch")
@replaces(Problem, "batch")
def scheduler_counts_one_token_for_each_request(right: Any, problem: Problem, **more: Any) -> ForwardBatch:
    """The batch gives its number of requests as the count of live tokens, although each has several."""
    batch: ForwardBatch = right(problem, **more)
    if batch.num_token_non_padded is None:
        return batch
    count = len(problem.requests)
    return replace(
        batch,
        num_token_non_padded=batch.num_token_non_padded // 4,
        num_token_non_padded_cpu=count,
    )


@exhibit("GP05", "vllm-project/vllm#28202", on="reference_runner", lanes="target_verify")
@overrides("prepare_replay")
def verify_runner_cuts_lengths_by_raw_counts(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch:
    """The view has the batch's number of lengths, and the shape's number of tokens."""
    view: ForwardBatch = right(registry, batch, shape)
    return replace(view, seq_lens=view.seq_lens[: max(batch.batch_size, 1)])


@exhibit("GP05", "vllm-project/vllm-ascend#7460", on="cuda_graph", lanes="decode")
@overrides("prepare_replay")
def cuda_graph_shows_the_raw_batch_size(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch:
    """The view has the batch's number of requests, and tensors with padding rows."""
    view: ForwardBatch = right(registry, batch, shape)
    return replace(view, batch_size=batch.batch_size)


@exhibit("GP06", "NVIDIA/TensorRT-LLM#5058", on="cuda_graph", lanes="decode")
@overrides("compose")
def cuda_graph_hands_padded_rows_to_the_sampler(
    _: Any, right: Any, forward: Forward, step: RegionContext
) -> Region:
    """compose() declares no axis for its outputs, so that they are returned with their padding rows."""
    return without_axis(right(forward, step))


@exhibit("GP06", "NVIDIA/TensorRT-LLM#5058", on="reference_runner", lanes="draft_decode")
@returning
def draft_runner_returns_the_last_rows(_: Any, step: RegionContext, rows: torch.Tensor) -> torch.Tensor:
    """The live rows are taken from the padded end of the outputs."""
    if not len(rows):
        return rows
    real = (step.view.req_pool_indices > 0).sum() * step.view.tokens_per_request
    at = torch.arange(len(rows), device=rows.device) - real
    return rows[at % len(rows)]


@exhibit("GP06", "sgl-project/sglang#31838", on="cpu_graph", lanes="decode")
@overrides("compose")
def cpu_graph_masks_no_padded_token(_: Any, right: Any, forward: Forward, step: RegionContext) -> Any:
    """compose() passes the model a batch without the count of live tokens, so that layers pool padding rows
    too.
    """
    view = replace(step.view, num_token_non_padded=None)
    return right(forward, replace(step, view=view))
