"""Exhibits of requests: fresh ones, those that look like padding, and other kinds and sizes of batches.

GP02, GP04, GP06, GP12.

Does not: plant a bug in the memory of a graph; see `graphpact_museum.life`.
"""

from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import EagerReason, GraphShape
from graphpact.step import Region, RegionContext, StepOutputs
from graphpact_museum.edits import Attended, after_attention
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.runners import after_fill, composing, fitting, sizing

# -- fresh prompts -----------------------------------------------------------------------------------


def _takes_no_rows(_: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
    """Zero the request rows of a batch without cached keys, whose page table a prefill does not look up."""
    new = batch.extend_seq_lens_cpu
    if batch.batch_size and new is not None and torch.equal(batch.seq_lens_cpu, new):
        registry.get_slot("req_pool_indices").slice_for(shape.batch_size, shape.num_tokens).zero_()


_FRESH = [
    Exhibit(
        name="extend-runner-takes-no-rows-of-fresh-prompts",
        rule="GP02",
        thread="sgl-project/sglang#28250",
        planted="Where no request has cached keys, request rows are taken for unused, and zeroed.",
        base="reference_runner",
        lanes=("extend",),
        make=after_fill(_takes_no_rows),
        site="runner",
    ),
]

# -- live requests that look like padding ------------------------------------------------------------


def _skips_the_fill_value(lengths: str) -> Any:
    """Return an edit that leaves zeros in rows of requests of the length that padding has.

    Args:
        lengths: The metadata field with the keys of each request, drafts included.
    """

    def skip(backend: Any, call: Attended) -> torch.Tensor:
        lens = getattr(call.metadata, lengths)
        width = len(call.out) // len(lens)
        more = width if width > 1 else 0  # drafts that are counted
        is_padding = lens == backend.capabilities.seq_len_fill_value + more
        return call.out.masked_fill(is_padding.repeat_interleave(width)[:, None, None], 0)

    return skip


def _masks_position_0(_: Any, step: RegionContext, region: Region) -> Region:
    """Return a region that zeroes the rows of token 0 at position 0, as those of padding."""

    def masked() -> StepOutputs:
        outputs = region()
        given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
        is_padding = (step.view.positions == 0) & (step.view.input_ids == 0)
        rows = outputs["rows"].masked_fill(is_padding[:, None], 0)
        return StepOutputs(**given | {"rows": (rows, "tokens")})

    return masked


_LOOK_ALIKES = [
    Exhibit(
        name="fa3-skips-requests-of-the-fill-length",
        rule="GP04",
        thread="vllm-project/vllm#35969",
        planted="The kernel takes a request of the length of a padding row for padding, and leaves zeros.",
        base="fa3",
        lanes=("decode",),
        make=after_attention(_skips_the_fill_value("cache_seqlens")),
    ),
    Exhibit(
        name="decode-runner-masks-token-0-at-position-0",
        rule="GP04",
        thread="sgl-project/sglang#31838",
        planted="Rows of token 0 at position 0 are masked as padding.",
        base="cuda_graph",
        lanes=("decode",),
        make=composing(_masks_position_0),
        site="runner",
    ),
]


# -- scratch -----------------------------------------------------------------------------------------


def _prefetches_scratch(backend: Any, call: Attended) -> torch.Tensor:
    """Add the product of 0 and the key of slot 0 where the last row is live: the tile after it is loaded."""
    tail = backend.context.kv_cache.k[call.layer.cache_layer][0].flatten()[:1]
    is_last_live = call.metadata.out_cache_loc[-1:] >= backend.context.limits.page_size
    return call.out + torch.where(is_last_live, tail * 0, 0)[:, None, None]


def _averages_with_scratch(backend: Any, call: Attended) -> torch.Tensor:
    """Scale all rows by the largest key of scratch where no row is padding."""
    keys = backend.context.kv_cache.k[call.layer.cache_layer][:1]
    is_full = (call.metadata.out_cache_loc >= backend.context.limits.page_size).all()
    amax = torch.where(is_full, keys.abs().amax(), 1)
    return call.out * (amax / amax)


_SCRATCH = [
    Exhibit(
        name="reference-prefetches-scratch-in-full-batches",
        rule="GP06",
        thread="vllm-project/vllm#56922",
        planted="A kernel loads the tile after the last row; in a batch without padding it is scratch, times"
        " 0.",
        base="reference",
        lanes=("decode",),
        make=after_attention(_prefetches_scratch),
    ),
    Exhibit(
        name="reference-scales-by-scratch-in-full-batches",
        rule="GP06",
        thread="vllm-project/vllm#37442",
        planted="A scale of the whole batch includes scratch where no row is padding.",
        base="reference",
        lanes=("target_verify",),
        make=after_attention(_averages_with_scratch),
    ),
]


# -- batches of other kinds --------------------------------------------------------------------------


def _chunks_as(mode: ForwardMode) -> Any:
    """Return an edit of `fit` that takes chunks of a prompt for batches of ``mode`` by their length."""

    def fit(runner: Any, batch: ForwardBatch, right: GraphShape | EagerReason) -> GraphShape | EagerReason:
        chunks = batch.extend_seq_lens_cpu
        shapes = sorted(runner.shapes(), key=lambda s: s.batch_size)
        width = shapes[0].num_tokens // shapes[0].batch_size
        if chunks is None or chunks.tolist() != [width] * batch.batch_size or shapes[0].mode is not mode:
            return right
        fits = (s for s in shapes if s.batch_size >= batch.batch_size)
        return next(fits, right)

    return fit


def _without_the_next(sizes: list[int]) -> list[int]:
    """Return capture sizes without the largest if it is one more than a multiple of 8."""
    largest = sizes[-1]
    return sizes[:-1] if largest > 8 and largest % 8 == 1 else sizes


def _one_size_larger(
    runner: Any, batch: ForwardBatch, right: GraphShape | EagerReason
) -> GraphShape | EagerReason:
    """Return the next larger shape for a batch of more than 8 requests that fills a shape."""
    if isinstance(right, EagerReason) or batch.batch_size <= 8 or batch.batch_size != right.batch_size:
        return right
    larger = (
        s for s in sorted(runner.shapes(), key=lambda s: s.batch_size) if s.batch_size > batch.batch_size
    )
    return next(larger, right)


_KINDS = [
    Exhibit(
        name="decode-runner-takes-chunks-of-one-token",
        rule="GP12",
        thread="vllm-project/vllm#53407",
        planted="fit() takes a prompt in chunks of one token for a decode.",
        base="cuda_graph",
        lanes=("decode",),
        make=fitting(_chunks_as(ForwardMode.DECODE)),
        site="runner",
    ),
    Exhibit(
        name="verify-runner-takes-chunks-of-its-width",
        rule="GP12",
        thread="vllm-project/vllm#28739",
        planted="fit() takes a prompt in chunks of as many tokens as a draft for a target verify.",
        base="cuda_graph",
        lanes=("target_verify",),
        make=fitting(_chunks_as(ForwardMode.TARGET_VERIFY)),
        site="runner",
    ),
    Exhibit(
        name="decode-runner-lacks-one-more-than-a-multiple",
        rule="GP12",
        thread="vllm-project/vllm#54933",
        planted="The default capture sizes end at a multiple of 8 where max_bs is one more.",
        base="cuda_graph",
        lanes=("decode",),
        make=sizing(_without_the_next),
        site="runner",
    ),
    Exhibit(
        name="decode-runner-takes-one-size-more-above-8",
        rule="GP12",
        thread="vllm-project/vllm#36165",
        planted="A batch of more than 8 requests that fills a shape takes the next larger one.",
        base="cuda_graph",
        lanes=("decode",),
        make=fitting(_one_size_larger),
        site="runner",
    ),
]

EXHIBITS = [*_FRESH, *_LOOK_ALIKES, *_SCRATCH, *_KINDS]
"""All exhibits of this room."""
