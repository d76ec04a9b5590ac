"""Exhibits and variants of padding rows and dummies that a consumer indexes with: GP04, GP11.

torch reads and writes from the end of a tensor by a negative index, without an error. The live rows are right
in every exhibit: only padding rows depend on the rows there.

Does not: pad KV slots or request rows; see `graphpact_museum.runners.padding_rows`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.shapes import GraphShape
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.draws.lanes import VOCAB
from graphpact_museum.edits.backends import AttentionCall, after_attention
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.edits.runners import pads
from graphpact_museum.exhibit import Make, exhibit, variant

# -- accepted drafts ---------------------------------------------------------------------------------


@exhibit("GP04", "lightseekorg/tokenspeed#298", on="reference_runner", lanes="draft_extend")
@pads("num_correct_drafts")
def draft_extend_runner_pads_accepted_drafts_with_minus_one(_: Any, __: torch.Tensor) -> int:
    """Padding requests accept -1 drafts, so that their last row is one of the request before."""
    return -1


@exhibit("GP11", "lightseekorg/tokenspeed#298", on="eagle_draft_extend", lanes="draft_extend")
@overrides("dummy")
def draft_extend_dummy_accepts_minus_one(_: Any, right: Any, shape: GraphShape) -> ForwardBatch:
    """The requests of a dummy accept -1 drafts, and the first selects the last row of the batch."""
    dummy: ForwardBatch = right(shape)
    accepted = dummy.num_correct_drafts
    return dummy if accepted is None else replace(dummy, num_correct_drafts=torch.full_like(accepted, -1))


# -- rows that a backend computes ---------------------------------------------------------------------


def _with_scales(scale_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Make:
    """Return an edit of backends that scale the output by a table, in which padding tokens have row -1.

    The scale of each live token is 1. The last row of the table belongs to no token.

    Args:
        scale_of: Returns the scale of each token, from the table and the rows.
    """

    @after_attention
    def edit(_: Any, call: AttentionCall) -> torch.Tensor:
        scales = (torch.arange(3, device=call.out.device) < 2).to(call.out.dtype)
        rows = (call.metadata.out_cache_loc > 0).long() - 1
        return call.out * scale_of(scales, rows)[:, None, None]

    return edit


@exhibit("GP04", "vllm-project/vllm#35969", on="fa3", lanes="decode")
def fa3_scales_of_padding_are_in_row_minus_one(base: type[Any]) -> type[Any]:
    """Padding tokens have row -1 of a table of scales, which is its last row."""
    return _with_scales(lambda scales, rows: scales[rows])(base)


@variant(on="fa3", lanes="decode")
def scales_masked_before_indexing(base: type[Any]) -> type[Any]:
    """Padding tokens have row -1 of a table of scales; attention takes scale 1 for them."""
    return _with_scales(lambda scales, rows: torch.where(rows < 0, 1.0, scales[rows.clamp(min=0)]))(base)


# -- rows of live tokens ------------------------------------------------------------------------------


def _in_padding(value_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Make:
    """Return an edit of backends that writes other results for padding tokens, which write KV slot 0.

    Args:
        value_of: Returns the results of padding tokens, from those of all tokens and a mask of live ones.
    """

    @after_attention
    def edit(_: Any, call: AttentionCall) -> torch.Tensor:
        live = call.metadata.out_cache_loc > 0
        return torch.where(live[:, None, None], call.out, value_of(call.out, live))

    return edit


@exhibit("GP04", "NVIDIA/TensorRT-LLM#9873", on="fa3", lanes="extend")
def fa3_padding_tokens_copy_the_last_live_row(base: type[Any]) -> type[Any]:
    """The results of padding tokens are that of the last live token, to which their index is clamped."""

    def last(out: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        return out.index_select(0, (live.long().sum() - 1).clamp(min=0)[None])

    return _in_padding(last)(base)


@variant(on="fa3", lanes="extend")
def padding_tokens_get_a_scale_of_live_rows(base: type[Any]) -> type[Any]:
    """The results of padding tokens are the largest number of the live ones, as in a quantization."""
    return _in_padding(lambda out, live: out.masked_fill(~live[:, None, None], 0).abs().amax())(base)


# -- a field of the runner's own ---------------------------------------------------------------------

_ADAPTERS = "museum.adapters"
"""An adapter for each token: an index of `_scales`."""


def _scales(device: torch.device) -> torch.Tensor:
    """Return a scale for each adapter, as work of the region. It is exact in every dtype."""
    return 0.5 ** (torch.arange(VOCAB, device=device) % 3)


def _with_adapters(scale_of: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    """Return an edit of runners that also return scaled rows, by the adapter of each token; padding has -1.

    Args:
        scale_of: Returns the scale of each token from the adapters.
    """
    declared = GraphSlot(
        _ADAPTERS,
        lambda _, tokens: (tokens,),
        torch.int64,
        axis="tokens",
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=-1,
        owner="the museum",
    )

    def slots(_: Any, right: Any) -> list[GraphSlot]:
        return [*right(), declared]

    def dummy(_: Any, right: Any, shape: GraphShape) -> ForwardBatch:
        batch: ForwardBatch = right(shape)
        adapters = torch.zeros(shape.num_tokens, dtype=torch.int64, device=batch.device)
        return replace(batch, extra={**batch.extra, _ADAPTERS: adapters})

    def compose(_: Any, right: Any, forward: Forward, step: RegionContext) -> Region:
        region = right(forward, step)

        def adapted() -> StepOutputs:
            outputs = region()
            scale = scale_of(step.view.extra[_ADAPTERS])[:, None]
            named: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
            return StepOutputs(**named, adapted=(outputs["rows"] * scale.to(outputs["rows"].dtype), "tokens"))

        return adapted

    return lambda base: override(base, slots, dummy, compose)


@exhibit("GP04", "sgl-project/sglang#29468", on="reference_runner", lanes="decode")
def runner_indexes_adapters_by_minus_one(base: type[Any]) -> type[Any]:
    """Padding tokens have adapter -1, no adapter, and take the weights of the last adapter."""
    return _with_adapters(lambda adapters: _scales(adapters.device)[adapters])(base)


@variant(on="reference_runner", lanes="decode")
def adapters_masked_before_indexing(base: type[Any]) -> type[Any]:
    """Padding tokens have adapter -1, and the region indexes with 0 in its place and then masks the scale."""

    def scale_of(adapters: torch.Tensor) -> torch.Tensor:
        scales = _scales(adapters.device)[adapters.clamp(min=0)]
        return torch.where(adapters < 0, 1.0, scales)

    return _with_adapters(scale_of)(base)


@variant(on="reference_runner", lanes="decode")
def adapters_masked_after_indexing(base: type[Any]) -> type[Any]:
    """Padding tokens have adapter -1; the region indexes with it, and discards the scale that it read."""

    def scale_of(adapters: torch.Tensor) -> torch.Tensor:
        return torch.where(adapters < 0, 1.0, _scales(adapters.device)[adapters])

    return _with_adapters(scale_of)(base)
