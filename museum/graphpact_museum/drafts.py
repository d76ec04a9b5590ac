"""Exhibits of the runners that draft, whose graphs run a draft model several times: GP01 to GP03, GP06.

Such a bug makes no invalid output. The drafts are worse, and fewer are accepted.

Does not: plant bugs that eager steps have too, because no rule covers them; the suite finds these as well.
"""

from dataclasses import replace
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.shapes import GraphShape
from graphpact.speculation import HIDDEN_STATES, SCORES
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.edits.override import overrides
from graphpact_museum.edits.runners import keeps, keeps_tails, without_axis
from graphpact_museum.exhibit import exhibit


@exhibit("GP03", "sgl-project/sglang#18647", on="eagle_draft", lanes="draft_decode", prefix="eagle-draft")
@exhibit(
    "GP03",
    "sgl-project/sglang#18647",
    on="eagle_draft_extend",
    lanes="draft_extend",
    prefix="eagle-draft-extend",
)
@exhibit(
    "GP03", "sgl-project/sglang#18647", on="frozen_kv_mtp", lanes="decode_frozen", prefix="frozen-kv-mtp"
)
@overrides("slots")
def keeps_hidden_states(_: Any, right: Any) -> list[GraphSlot]:
    """Padding rows keep the hidden states of an earlier, larger batch."""
    kept = {"padding_policy": PaddingPolicy.KEEP_PAD, "reason": "outputs of padding rows are cut off"}
    return [replace(s, **kept) if s.name == HIDDEN_STATES else s for s in right()]


@exhibit("GP01", "PaddlePaddle/FastDeploy#7864", on="eagle_draft_extend", lanes="draft_extend")
@overrides("prepare_replay")
def eagle_draft_extend_shows_the_batchs_hidden_states(
    _: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch:
    """A batch without padding is not copied: its view refers to the hidden states of the batch."""
    view: ForwardBatch = right(registry, batch, shape)
    if batch.num_tokens != view.num_tokens:
        return view
    return view.with_tensors({HIDDEN_STATES: batch.extra[HIDDEN_STATES]})


@exhibit("GP01", "huggingface/candle#3728", on="eagle_draft", lanes="draft_decode")
@overrides("compose")
def eagle_draft_advances_positions_once(_: Any, right: Any, forward: Forward, step: RegionContext) -> Any:
    """Positions of the later passes are computed before the region is recorded, so that a graph reads those
    of its dummy batch.
    """
    ahead = [step.view.positions + i for i in range(step.view.num_draft_steps)]
    passes = 0

    def one(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
        nonlocal passes
        at, passes = passes, passes + 1
        return forward(replace(batch, positions=ahead[at]) if at else batch, metadata, attend)

    region: Region = right(one, step)

    def anew() -> StepOutputs:
        nonlocal passes
        passes = 0
        return region()

    return anew


@exhibit("GP03", "sgl-project/sglang#23037", on="eagle_draft", lanes="draft_decode_tree")
def eagle_draft_keeps_scores(base: type[Any]) -> type[Any]:
    """Padded branches keep the scores of an earlier batch, by which the graph chooses among them."""
    return keeps_tails(base, SCORES)


@exhibit("GP02", "sgl-project/sglang#39088", on="frozen_kv_mtp", lanes="decode_frozen_tree")
def frozen_kv_mtp_misses_hidden_states(base: type[Any]) -> type[Any]:
    """Hidden states are copied only at capture."""
    return keeps(base, HIDDEN_STATES)


@exhibit("GP06", "NVIDIA/TensorRT-LLM#5058", on="eagle_draft", lanes="draft_decode_tree")
@overrides("compose")
def eagle_draft_hands_padded_drafts_to_the_verifier(
    _: Any, right: Any, forward: Forward, step: RegionContext
) -> Region:
    """compose() declares no axis for drafts and parents, so that they are returned with padding rows."""
    return without_axis(right(forward, step))
