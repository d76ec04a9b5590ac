"""Exhibits of the views, copies, memory, outputs and waits of runners: GP01, 02, 13 to 15, 19, 20.

Does not: plant bugs in padding rows; see `graphpact_museum.runners.padding_rows`.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, fills
from graphpact.errors import EngineError
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import RegionContext
from graphpact_museum.edits.override import override, overrides, replaces
from graphpact_museum.edits.runners import (
    Fit,
    keeps,
    returning,
    rows_of,
)
from graphpact_museum.exhibit import exhibit


def _lacks_slot(base: type[Any], field: str) -> type[Any]:
    """Return a runner without the slot of a field."""

    def slots(_: Any, right: Any) -> Sequence[GraphSlot]:
        return [slot for slot in right() if slot.name != field]

    return override(base, slots)


@exhibit("GP01", "vllm-project/vllm#13353", on="cuda_graph", lanes="decode")
@overrides("prepare_replay")
def cuda_graph_shows_new_tensors(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch:
    """The view's positions are a new tensor in every step."""
    view: ForwardBatch = right(registry, batch, shape)
    return replace(view, positions=view.positions.clone())


@exhibit("GP01", "PaddlePaddle/FastDeploy#7864", on="reference_runner", lanes="extend")
@overrides("prepare_replay")
def extend_runner_pads_a_new_tensor(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch:
    """The extend lengths are padded into a new tensor, which becomes part of the view."""
    view: ForwardBatch = right(registry, batch, shape)
    if not batch.batch_size:
        return view
    more = view.batch_size - batch.batch_size
    padded = torch.nn.functional.pad(batch.required_extend_lens()[0], (0, more))
    return replace(view, extend_seq_lens=padded)


@exhibit("GP02", "sgl-project/sglang#39088", on="cuda_graph", lanes="decode")
def cuda_graph_misses_positions(base: type[Any]) -> type[Any]:
    """Positions of the batch are copied for every mode but decode."""
    return keeps(base, "positions")


@exhibit("GP02", "sgl-project/sglang#39088", on="reference_runner", lanes="draft_extend")
def draft_extend_runner_misses_num_correct_drafts(base: type[Any]) -> type[Any]:
    """The num_correct_drafts of the batch are copied for every mode but draft_extend."""
    return keeps(base, "num_correct_drafts")


@exhibit("GP02", "sgl-project/sglang#39088", on="reference_runner", lanes="target_verify_tree")
def verify_runner_misses_tree_mask(base: type[Any]) -> type[Any]:
    """The tree_mask of the batch is copied for every mode but target_verify_tree."""
    return keeps(base, "tree_mask")


@exhibit("GP02", "sgl-project/sglang#39088", on="reference_runner", lanes="mixed")
def mixed_runner_misses_extend_seq_lens(base: type[Any]) -> type[Any]:
    """The extend_seq_lens of the batch are copied for every mode but mixed."""
    return keeps(base, "extend_seq_lens")


@exhibit("GP02", "sgl-project/sglang#39088", on="reference_runner", lanes="draft_extend")
def draft_extend_runner_has_no_slot_for_num_correct_drafts(base: type[Any]) -> type[Any]:
    """slots() has no slot for num_correct_drafts, which the batches of draft_extend carry."""
    return _lacks_slot(base, "num_correct_drafts")


@exhibit("GP02", "sgl-project/sglang#39088", on="reference_runner", lanes="target_verify_tree")
def verify_runner_has_no_slot_for_tree_mask(base: type[Any]) -> type[Any]:
    """slots() has no slot for tree_mask, which the batches of target_verify_tree carry."""
    return _lacks_slot(base, "tree_mask")


@exhibit("GP02", "sgl-project/sglang#22832", on="cuda_graph", lanes="decode", site="registry")
@replaces(fills, "_getter")
def registry_copies_the_first_batch(right: Any, names: Sequence[str]) -> Any:
    """A fill keeps the tensors of the first batch of each size, and copies them in all later steps."""
    getter = right(names)
    seen: dict[object, Any] = {}

    def fields(batch: Any) -> Any:
        if names and "." in names[0]:  # shapes and dtypes
            return getter(batch)
        values = getter(batch)
        return seen.setdefault(tuple(v.shape for v in values), values)

    return fields


@exhibit("GP13", "sgl-project/sglang#19016", on="reference_runner", lanes="target_verify", site="registry")
@replaces(CudaGraphBufferRegistry, "__init__")
def registry_lacks_tokens_of_a_verify(right: Any, registry: Any, *args: Any, **sizes: Any) -> None:
    """Inputs with a row per token are sized for drafts, without the additional token of each request."""
    sizes["max_num_tokens"] -= sizes["max_bs"]
    right(registry, *args, **sizes)


@exhibit("GP14", "intel/llm-scaler#505", on="cuda_graph", lanes="decode")
@returning
def cuda_graph_grows_memory_in_the_region(
    runner: Any, step: RegionContext, rows: torch.Tensor
) -> torch.Tensor:
    """A tensor that the region reads is replaced by a larger one when a larger shape is captured."""
    if step.is_eager:
        return rows
    zeros: torch.Tensor | None = vars(runner).get("zeros")
    if zeros is None or len(zeros) < len(rows):
        zeros = runner.zeros = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
    return rows + zeros[: len(rows)].view(-1, *[1] * (rows.dim() - 1))


@exhibit("GP15", "pytorch/pytorch#148439", on="reference_runner", lanes="draft_extend")
@returning
def draft_runner_returns_the_previous_graphs_outputs(
    runner: Any, step: RegionContext, rows: torch.Tensor
) -> torch.Tensor:
    """compose() returns the output buffer of the previously recorded graph."""
    if not step.driver.is_capturing:
        return rows
    before: torch.Tensor = vars(runner).get("outputs", rows)
    runner.outputs = rows
    return before[: len(rows)] if len(before) >= len(rows) else rows


@exhibit("GP15", "sgl-project/sglang#22930", on="reference_runner", lanes="target_verify")
@returning
def verify_runner_has_one_output_buffer(runner: Any, step: RegionContext, rows: torch.Tensor) -> torch.Tensor:
    """compose() returns rows of one buffer for all graphs, which the first capture allocated."""
    if not step.driver.is_capturing:
        return rows
    buffer: torch.Tensor = vars(runner).setdefault("outputs", {}).setdefault(rows.shape[1:], rows)
    if buffer is rows or len(buffer) < len(rows):
        return rows
    return buffer[: len(rows)].copy_(rows)


@exhibit("GP15", "sgl-project/sglang#35546", on="cuda_graph", lanes="decode")
def cuda_graph_replays_another_graph_before_outputs_are_read(base: type[Any]) -> type[Any]:
    """A wrapper of run_step replays the graph of the next step before the outputs of this step are read."""

    @hookimpl(wrapper=True)
    def run_step(self: Any, lane: Lane) -> Generator[None, Any, Any]:
        before = lane.stats.replays
        outputs = yield
        other = next(iter(lane.captured.values()), None)
        if other is not None and lane.stats.replays > before:
            lane.launch(lane.prepare(self.dummy(other.context.shape)))
        return outputs

    return type("Prefetches", (base,), {"run_step": run_step})


@exhibit("GP19", "microsoft/onnxruntime#32243", on="cuda_graph", lanes="decode")
@overrides("populate")
def cuda_graph_writes_the_batch(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """populate() clamps the positions of the engine's own batch to the length of a table."""
    batch.positions.clamp_(max=8)
    right(registry, batch, shape)


@exhibit("GP19", "ROCm/ATOM#2267", on="cpu_graph", lanes="decode")
@overrides("populate")
def cpu_graph_captures_over_the_last_batch(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """A capture does not reset out_cache_loc, so that a recapture writes the KV slots of the last batch."""
    real, _ = rows_of(registry, "out_cache_loc", batch, shape)
    kept = real.clone()
    right(registry, batch, shape)
    if batch.req_pool_indices.tolist() == [0] * batch.batch_size:
        real.copy_(kept)


@exhibit("GP19", "ROCm/ATOM#2267", on="reference_runner", lanes="target_verify")
@overrides("dummy")
def verify_dummies_on_live_slots(runner: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """Dummy drafts have KV slots that live requests own."""
    dummy: ForwardBatch = right(shape)
    return replace(
        dummy,
        out_cache_loc=torch.arange(dummy.num_tokens, device=dummy.device) + runner.context.limits.page_size,
    )


@exhibit("GP20", "vllm-project/vllm#40807", on="cuda_graph", lanes="decode")
@overrides("populate")
def cuda_graph_waits_for_a_length(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """populate() reads a length from the device."""
    right(registry, batch, shape)
    if batch.batch_size and batch.seq_lens.max().item() < 0:
        raise EngineError("a length is negative")


@exhibit("GP20", "vllm-project/vllm#22758", on="cpu_graph", lanes="decode")
@overrides("fit")
def cpu_graph_asks_the_device_whether_it_can_run(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """fit() reads a tensor on the device to decide."""
    fit: Fit = right(batch)
    has_keys = not batch.batch_size or bool(batch.seq_lens.max() > 0)
    return fit if has_keys else EagerReason.OVER_LARGEST
