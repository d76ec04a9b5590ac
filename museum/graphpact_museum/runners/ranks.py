"""Exhibits of ranks that record or replay different graphs: GP17.

Does not: plant bugs that need more than two ranks; see `graphpact_museum.scale`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.parallel import get_parallel, local_num_token_non_padded
from graphpact.shapes import CaptureSizes, EagerReason, GraphShape
from graphpact_conformance.lane.reference_runner import ReferenceSizes
from graphpact_museum.edits.override import overrides, replaces
from graphpact_museum.edits.runners import LONG_CONTEXT, SHORT_TIER, Fit, after_fill, with_length_tiers
from graphpact_museum.exhibit import exhibit


@exhibit("GP17", "vllm-project/vllm#25906", on="cuda_graph", lanes="decode")
@overrides("fit", declines=(LONG_CONTEXT,))
def cuda_graph_declines_by_its_own_requests(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A rank with a long request declines, with a declared reason, while the others replay a graph that
    gathers.
    """
    fit: Fit = right(batch)
    return LONG_CONTEXT if max(batch.seq_lens_cpu.tolist(), default=0) > 40 else fit


@exhibit("GP17", "sgl-project/sglang#37933", on="breakable_cuda_graph", lanes="extend")
@overrides("fit")
def breakable_limits_padding_by_its_own_tokens(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A rank with few tokens finds that the shape of the largest rank has too much padding."""
    fit: Fit = right(batch)
    if isinstance(fit, EagerReason) or not batch.num_tokens:
        return fit
    is_too_much = fit.num_tokens > batch.num_tokens * runner.context.max_padding_ratio
    return runner.declines[0] if is_too_much else fit


@exhibit("GP17", "sgl-project/sglang#25581", on="reference_runner", lanes="target_verify")
@overrides("fit", declines=(LONG_CONTEXT,))
def verify_runner_declines_on_one_rank(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """One rank declines every batch, with a declared reason, while the others replay."""
    fit: Fit = right(batch)
    return LONG_CONTEXT if get_parallel().attn_tp_rank else fit


@exhibit("GP17", "sgl-project/sglang#37933", on="cpu_graph", lanes="decode")
@overrides("fit")
def cpu_graph_idle_rank_takes_the_smallest_bucket(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A rank without requests replays the smallest graph while the others replay larger ones."""
    fit: Fit = right(batch)
    if batch.batch_size or isinstance(fit, EagerReason):
        return fit
    smallest: GraphShape = runner.shapes()[0]
    return smallest


@exhibit("GP17", "sgl-project/sglang#37933", on="reference_runner", lanes="draft_extend")
@overrides("fit")
def draft_runner_idle_rank_runs_eagerly(_: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A rank without requests runs eagerly while the others replay a graph that gathers."""
    fit: Fit = right(batch)
    alone = batch.global_num_tokens_cpu is None
    return fit if batch.batch_size or alone else EagerReason.WRONG_MODE


@exhibit("GP17", "sgl-project/sglang#25581", on="cuda_graph", lanes="decode")
@overrides("shapes")
def cuda_graph_captures_by_the_rank(_: Any, right: Any) -> Any:
    """One rank captures one shape less than the others, so the sequences of captures differ."""
    shapes: Sequence[GraphShape] = right()
    return shapes[get_parallel().attn_tp_rank :]


@exhibit("GP17", "ROCm/aiter#2638", on="fa3", lanes="decode")
@overrides("forward")
def fa3_records_a_call_on_rank_0_alone(_: Any, right: Any, *args: Any) -> Any:
    """Only the rank with a cache miss records the creation of a buffer."""
    out: torch.Tensor = right(*args)
    return out if get_parallel().attn_tp_rank else out + 0


@exhibit("GP17", "vllm-project/vllm#18724", on="trtllm_mla", lanes="target_verify")
@overrides("forward")
def trtllm_mla_gathers_other_rows_on_the_last_rank(_: Any, right: Any, *args: Any) -> Any:
    """The last rank records a gather of one row more than the others."""
    out: torch.Tensor = right(*args)
    parallel = get_parallel()
    rows = len(out) // parallel.attn_tp_size
    if parallel.attn_tp_rank == parallel.attn_tp_size - 1 and parallel.attn_tp_size > 1:
        rows += 1
    mine = out[len(out) - rows :].clone()
    return torch.cat([out[: len(out) - rows], mine])


@exhibit("GP17", "sgl-project/sglang#22404", on="cuda_graph", lanes="decode", site="registry")
@replaces(CudaGraphBufferRegistry, "fill_from")
def registry_splits_the_raw_tokens(right: Any, registry: Any, batch: Any, **counts: int) -> None:
    """A rank's count of live tokens is computed from the tokens of the batch, but its rows are those of the
    padded shape.
    """
    right(registry, batch, **counts)
    if registry.has_slot("num_token_non_padded") and batch.num_token_non_padded_cpu is not None:
        raw = counts["raw_num_tokens"]
        local = local_num_token_non_padded(batch.num_token_non_padded_cpu, raw)
        registry.get_slot("num_token_non_padded").slice_for(0, 0).fill_(local)


@exhibit("GP17", "vllm-project/vllm#25906", on="cuda_graph", lanes="decode", site="capture sizes")
@replaces(CaptureSizes, "fit")
def capture_sizes_look_at_this_rank_alone(right: Any, sizes: Any, batch: ForwardBatch, *variant: str) -> Fit:
    """The shape depends on the rank's own tokens: ranks with other loads take other graphs."""
    fit: Fit = right(sizes, replace(batch, global_num_tokens_cpu=None), *variant)
    return fit


@exhibit(
    "GP17", "vllm-project/vllm#18724", on="reference_runner", lanes="target_verify", site="capture sizes"
)
@replaces(ReferenceSizes, "fit")
def verify_capture_sizes_look_at_this_rank_alone(right: Any, sizes: Any, batch: ForwardBatch) -> Fit:
    """The shape of target verify depends on the rank's own drafts."""
    fit: Fit = right(sizes, replace(batch, global_num_tokens_cpu=None))
    return fit


@exhibit("GP17", "vllm-project/vllm#25906", on="cuda_graph", lanes="decode")
def cuda_graph_takes_the_tier_of_its_own_requests(base: type[Any]) -> type[Any]:
    """Each rank takes the graph for short or for long requests by its own lengths, although ranks gather."""
    return with_length_tiers(base, lambda batch: max(batch.seq_lens_cpu.tolist(), default=0) <= SHORT_TIER)


@exhibit("GP17", "sgl-project/sglang#30898", on="cuda_graph", lanes="decode")
@after_fill
def cuda_graph_counts_the_tokens_of_the_largest_rank(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """The live tokens are those of the rank with most tokens, so that others treat padding as live."""
    if batch.global_num_tokens_cpu is not None and registry.has_slot("num_token_non_padded"):
        count = local_num_token_non_padded(max(batch.global_num_tokens_cpu), shape.num_tokens)
        registry.get_slot("num_token_non_padded").slice_for(0, 0).fill_(count)


@exhibit("GP17", "sgl-project/sglang#37933", on="reference_runner", lanes="target_verify")
@overrides("populate")
def verify_runner_pads_to_the_shape_of_its_own_tokens(
    runner: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """Write indices are reset up to the shape of the rank's own drafts, but a larger shape is replayed."""
    own = runner.fit(replace(batch, global_num_tokens_cpu=None))
    beyond = registry.get_slot("out_cache_loc").slice_for(shape.batch_size, shape.num_tokens)
    beyond = beyond[own.num_tokens :] if isinstance(own, GraphShape) else beyond[:0]
    kept = beyond.clone()
    right(registry, batch, shape)
    beyond.copy_(kept)
