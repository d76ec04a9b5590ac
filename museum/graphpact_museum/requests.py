"""Exhibits of fresh requests, requests that look like padding, and batches of other kinds and sizes.

The rules are GP02, GP04, GP06 and GP12.

Does not: plant a bug in the memory of a graph; see `graphpact_museum.life`.
"""

from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.backends import AttentionCall, after_attention
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.edits.runners import Fit, after_fill
from graphpact_museum.exhibit import exhibit

# -- fresh prompts -----------------------------------------------------------------------------------


@exhibit("GP02", "sgl-project/sglang#28250", on="reference_runner", lanes="extend")
@after_fill
def extend_runner_takes_no_rows_of_fresh_prompts(
    _: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> None:
    """If no request has cached keys, request rows count as unused and are zeroed."""
    new = batch.extend_seq_lens_cpu
    if batch.batch_size and new is not None and torch.equal(batch.seq_lens_cpu, new):
        registry.get_slot("req_pool_indices").slice_for(shape.batch_size, shape.num_tokens).zero_()


# -- live requests that look like padding ------------------------------------------------------------


@exhibit("GP04", "vllm-project/vllm#35969", on="fa3", lanes="decode")
@after_attention
def fa3_skips_requests_of_the_fill_length(backend: Any, call: AttentionCall) -> torch.Tensor:
    """The kernel treats a request with the length of a padding row as padding, and outputs zeros."""
    lens = call.metadata.cache_seqlens
    width = len(call.out) // len(lens)
    more = width if width > 1 else 0  # lengths include drafts
    is_padding = lens == backend.capabilities.seq_len_fill_value + more
    return call.out.masked_fill(is_padding.repeat_interleave(width)[:, None, None], 0)


@exhibit("GP04", "sgl-project/sglang#31838", on="cuda_graph", lanes="decode")
@overrides("compose")
def decode_runner_masks_token_0_at_position_0(
    _: Any, right: Any, forward: Forward, step: RegionContext
) -> Region:
    """Rows of token 0 at position 0 are masked as padding."""
    region: Region = right(forward, step)

    def masked() -> StepOutputs:
        outputs = region()
        given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
        is_padding = (step.view.positions == 0) & (step.view.input_ids == 0)
        rows = outputs["rows"].masked_fill(is_padding[:, None], 0)
        return StepOutputs(**given | {"rows": (rows, "tokens")})

    return masked


# -- scratch -----------------------------------------------------------------------------------------


@exhibit("GP06", "vllm-project/vllm#56922", on="reference", lanes="decode")
@after_attention
def reference_prefetches_scratch_in_full_batches(backend: Any, call: AttentionCall) -> torch.Tensor:
    """A kernel loads the tile after the last row too, times 0; in a batch without padding it is scratch."""
    tail = backend.context.kv_cache.k[call.layer.cache_layer][0].flatten()[:1]
    is_last_live = call.metadata.out_cache_loc[-1:] >= backend.context.limits.page_size
    return call.out + torch.where(is_last_live, tail * 0, 0)[:, None, None]


@exhibit("GP06", "vllm-project/vllm#37442", on="reference", lanes="target_verify")
@after_attention
def reference_scales_by_scratch_in_full_batches(backend: Any, call: AttentionCall) -> torch.Tensor:
    """The scale of the whole batch includes scratch if no row is padding."""
    keys = backend.context.kv_cache.k[call.layer.cache_layer][:1]
    is_full = (call.metadata.out_cache_loc >= backend.context.limits.page_size).all()
    amax = torch.where(is_full, keys.abs().amax(), 1)
    return call.out * (amax / amax)


# -- batches of other kinds --------------------------------------------------------------------------


def _takes_chunks(base: type[Any], mode: ForwardMode) -> type[Any]:
    """Return a runner that takes prompt chunks of one width for batches of ``mode``."""

    def fit(self: Any, right: Any, batch: ForwardBatch) -> Any:
        chunks = batch.extend_seq_lens_cpu
        shapes = sorted(self.shapes(), key=lambda s: s.batch_size)
        width = shapes[0].num_tokens // shapes[0].batch_size
        if chunks is None or chunks.tolist() != [width] * batch.batch_size or shapes[0].mode is not mode:
            return right(batch)
        fits = (s for s in shapes if s.batch_size >= batch.batch_size)
        return next(fits, right(batch))

    return override(base, fit)


@exhibit("GP12", "vllm-project/vllm#54933", on="cuda_graph", lanes="decode")
@overrides("default_batch_sizes")
def decode_runner_lacks_one_more_than_a_multiple(_: Any, right: Any) -> list[int]:
    """The default capture sizes end at a multiple of 8, although max_bs is one more."""
    sizes: list[int] = right()
    largest = sizes[-1]
    return sizes[:-1] if largest > 8 and largest % 8 == 1 else sizes


@exhibit("GP12", "vllm-project/vllm#36165", on="cuda_graph", lanes="decode")
@overrides("fit")
def decode_runner_takes_one_size_more_above_8(runner: Any, right: Any, batch: ForwardBatch) -> Fit:
    """A batch of more than 8 requests that fills a shape exactly takes the next larger shape."""
    fit: Fit = right(batch)
    if isinstance(fit, EagerReason) or batch.batch_size <= 8 or batch.batch_size != fit.batch_size:
        return fit
    larger = (
        s for s in sorted(runner.shapes(), key=lambda s: s.batch_size) if s.batch_size > batch.batch_size
    )
    return next(larger, fit)


@exhibit("GP12", "vllm-project/vllm#53407", on="cuda_graph", lanes="decode")
def decode_runner_takes_chunks_of_one_token(base: type[Any]) -> type[Any]:
    """fit() treats a prompt in chunks of one token as a decode."""
    return _takes_chunks(base, ForwardMode.DECODE)


@exhibit("GP12", "vllm-project/vllm#28739", on="cuda_graph", lanes="target_verify")
def verify_runner_takes_chunks_of_its_width(base: type[Any]) -> type[Any]:
    """fit() treats a prompt in chunks with as many tokens as a draft as a target verify."""
    return _takes_chunks(base, ForwardMode.TARGET_VERIFY)
