"""Exhibits of batches whose shape is that of another kind of step, and correct plugins near them: GP02, GP12.

A prompt can have as many tokens as a request with its drafts, or one token like a decode. In a batch of such
prompts every request has equally many new tokens. Only the batch's mode and its lengths say what it is.

Does not: plant bugs in ``fit``; see `graphpact_museum.requests`.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.hookspecs import hookimpl
from graphpact.lane import Lane
from graphpact.shapes import GraphShape
from graphpact_museum.edits.override import overrides
from graphpact_museum.exhibit import exhibit, variant


def _live(view: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new tokens and the cached keys of each live request of a ragged view, on the host."""
    _, new = view.required_extend_lens()
    is_live = new > 0
    return new[is_live], (view.seq_lens_cpu - new)[is_live]


@exhibit("GP02", "vllm-project/vllm#49918", on="fa3", lanes="extend")
@overrides("init_metadata_replay", fill_is_device_only=False)
def fa3_takes_equal_prompts_for_drafts(
    _: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
) -> Any:
    """Several prompts of equal lengths are taken for drafts, whose metadata the hook does not make."""
    new, cached = _live(view)
    if len(new) > 1 and not cached.any() and (new == new[0]).all():
        return captured
    return right(view, shape, captured)


@exhibit("GP02", "vllm-project/vllm#57573", on="fa3", lanes="mixed")
@overrides("init_metadata_replay", fill_is_device_only=False)
def fa3_takes_prompts_of_one_token_for_decodes(
    _: Any, right: Any, view: ForwardBatch, shape: GraphShape, captured: Any
) -> Any:
    """A batch of one-token requests, one of which is a prompt, keeps the metadata of the step before."""
    new, cached = _live(view)
    if len(new) and (new == 1).all() and not cached.all():
        return captured
    return right(view, shape, captured)


# -- batches of another kind -------------------------------------------------------------------------


def _as_decode(batch: ForwardBatch) -> ForwardBatch:
    """Return a ragged batch of one-token requests as a decode; other batches as they are."""
    new = batch.extend_seq_lens_cpu
    if new is None or not batch.batch_size or not bool((new == 1).all()):
        return batch
    return replace(batch, forward_mode=ForwardMode.DECODE, extend_seq_lens=None, extend_seq_lens_cpu=None)


@exhibit("GP12", "vllm-project/vllm#26892", on="cuda_graph", lanes="decode")
def decode_runner_runs_prompts_of_one_token_as_decodes(base: type[Any]) -> type[Any]:
    """A wrapper of run_step replays chunks and prompts of one token as a decode, which fit() refuses."""

    @hookimpl(wrapper=True)
    def run_step(self: Any, lane: Lane, batch: ForwardBatch) -> Generator[None, Any, Any]:
        del self
        decode = _as_decode(batch)
        outputs = yield
        return outputs if decode is batch else lane.launch(lane.prepare(decode))

    return type("RunsAsDecodes", (base,), {"run_step": run_step})


# -- correct plugins near them --------------------------------------------------------------------------


@variant(on="fa3", lanes=("extend", "mixed"))
@overrides("fill_metadata")
def offsets_of_equal_prompts_by_a_stride(_: Any, right: Any, view: ForwardBatch, metadata: Any) -> None:
    """In batches in which each live request has equally many new tokens, offsets are multiples of them."""
    right(view, metadata)
    new, _ = view.required_extend_lens()
    if not len(new):
        return
    each, offsets = new.max(), metadata.cu_seqlens_q
    is_live = torch.arange(1, len(offsets), device=new.device) <= (new > 0).sum()
    strided = (is_live.cumsum(0) * each).to(offsets.dtype)
    is_equal = ((new == each) | (new == 0)).all()
    offsets[1:] = torch.where(is_equal, strided, offsets[1:])
