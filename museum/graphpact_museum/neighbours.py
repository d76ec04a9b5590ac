"""Exhibits of regions in which a request takes rows of another request, and a correct one: GP05.

A region of this kind is also wrong in eager steps, and right for a batch of one request.

Does not: plant bugs of padding rows; see `graphpact_museum.runners.padding_rows`.
"""

from typing import Any

import torch

from graphpact.batch import ForwardBatch
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.override import overrides
from graphpact_museum.exhibit import exhibit, variant


@exhibit("GP05", "sgl-project/sglang#26866", on="frozen_kv_mtp", lanes="decode_frozen_tree")
@overrides("compose")
def frozen_kv_mtp_reads_the_newest_token_without_a_stride(
    runner: Any, right: Any, forward: Forward, step: RegionContext
) -> Region:
    """The logits after the newest token of request i are read from row i, although it has several rows."""

    def one(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
        outputs = forward(batch, metadata, attend)
        if batch is not step.view:
            return outputs
        logits = outputs.logits.repeat_interleave(runner.context.limits.draft.topk, dim=0)
        given: dict[str, Any] = {name: (tensor, outputs.axes[name]) for name, tensor in outputs.items()}
        return StepOutputs(**given | {"logits": (logits[: len(outputs.logits)], "tokens")})

    region: Region = right(one, step)
    return region


def _gathered(tokens: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return ``[bs, count]``: tokens of the flattened batch, from the first one of each request."""
    return tokens.flatten()[first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)]


@exhibit("GP05", "mlc-ai/mlc-llm#2949", on="eagle_draft", lanes=("draft_decode", "draft_decode_tree"))
@overrides("drafts")
def eagle_draft_gathers_drafts_without_an_offset(
    _: Any, right: Any, tree: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts are gathered from those of the whole batch by their number in the request."""
    tokens, parents = right(tree)
    return _gathered(tokens, torch.zeros_like(tokens[:, 0])), parents


@variant(on="eagle_draft", lanes=("draft_decode", "draft_decode_tree"))
@overrides("drafts")
def drafts_gathered_from_the_flattened_batch(
    _: Any, right: Any, tree: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts are gathered from those of the whole batch, by the first of the request and their number."""
    tokens, parents = right(tree)
    first = torch.arange(0, tokens.numel(), tokens.shape[1], device=tokens.device)
    return _gathered(tokens, first), parents
