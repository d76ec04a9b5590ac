"""Exhibits of the runners that draft, whose graphs run a draft model several times: GP01 to GP03, GP06.

No output of such a bug is invalid: the drafts are worse, and fewer are accepted.

Does not: plant bugs that eager steps have too; no rule is about those, and the suite finds them as well.
"""

from dataclasses import replace
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.speculation import HIDDEN_STATES, SCORES
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.exhibit import Exhibit
from graphpact_museum.runners import (
    composing,
    cuts_nothing,
    keeps,
    keeps_tails,
    slotting,
    viewing,
)

_RUNNERS = (
    ("eagle_draft", "draft_decode"),
    ("eagle_draft_extend", "draft_extend"),
    ("frozen_kv_mtp", "decode_frozen"),
)


def _named(base: str, what: str) -> str:
    return f"{base.replace('_', '-')}-{what}"


def _keeps_hidden_states(_: Any, slots: list[GraphSlot]) -> list[GraphSlot]:
    """Return slots of which that of hidden states keeps its padding rows."""
    kept = {"padding_policy": PaddingPolicy.KEEP_PAD, "reason": "outputs of padding rows are cut off"}
    return [replace(s, **kept) if s.name == HIDDEN_STATES else s for s in slots]  # type: ignore[arg-type]


def _takes_the_batchs_own(view: ForwardBatch, batch: ForwardBatch) -> ForwardBatch:
    """Return a view with the hidden states of the batch, where they fill it."""
    if batch.num_tokens != view.num_tokens:
        return view
    return view.with_tensors({HIDDEN_STATES: batch.extra[HIDDEN_STATES]})


def _positions_of_capture(base: type[Any]) -> type[Any]:
    class Frozen(base):  # type: ignore[misc]
        """A runner whose later passes have positions from before the recording."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Advance the positions before the region is recorded, not in it."""
            ahead = [step.view.positions + i for i in range(step.view.num_draft_steps)]
            passes = 0

            def one(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
                nonlocal passes
                at, passes = passes, passes + 1
                return forward(replace(batch, positions=ahead[at]) if at else batch, metadata, attend)

            region: Region = super().compose(one, step)

            def anew() -> StepOutputs:
                nonlocal passes
                passes = 0
                return region()

            return anew

    return Frozen


EXHIBITS = [
    *(
        Exhibit(
            name=_named(base, "keeps-request-rows"),
            rule="GP03",
            thread="sgl-project/sglang#26292",
            planted="Lengths and slots of padding rows are reset, but not their request rows.",
            base=base,
            lanes=(lane,),
            make=keeps_tails("req_pool_indices"),
            site="runner",
        )
        for base, lane in _RUNNERS
    ),
    *(
        Exhibit(
            name=_named(base, "keeps-hidden-states"),
            rule="GP03",
            thread="sgl-project/sglang#18647",
            planted="Padding rows keep the hidden states of an earlier, larger batch.",
            base=base,
            lanes=(lane,),
            make=slotting(_keeps_hidden_states),
            site="runner",
        )
        for base, lane in _RUNNERS
    ),
    Exhibit(
        name="eagle-draft-keeps-scores",
        rule="GP03",
        thread="sgl-project/sglang#23037",
        planted="Padded branches keep the scores of an earlier batch, by which the graph chooses among them.",
        base="eagle_draft",
        lanes=("draft_decode_tree",),
        make=keeps_tails(SCORES),
        site="runner",
    ),
    Exhibit(
        name="frozen-kv-mtp-misses-hidden-states",
        rule="GP02",
        thread="sgl-project/sglang#39088",
        planted="Hidden states are copied at capture only.",
        base="frozen_kv_mtp",
        lanes=("decode_frozen_tree",),
        make=keeps(HIDDEN_STATES),
        site="runner",
    ),
    Exhibit(
        name="eagle-draft-extend-shows-the-batchs-hidden-states",
        rule="GP01",
        thread="PaddlePaddle/FastDeploy#7864",
        planted="A batch without padding is not copied: its view has the batch's own hidden states.",
        base="eagle_draft_extend",
        lanes=("draft_extend",),
        make=viewing(_takes_the_batchs_own),
        site="runner",
    ),
    Exhibit(
        name="eagle-draft-advances-positions-once",
        rule="GP01",
        thread="huggingface/candle#3728",
        planted="Positions of the later passes are made before the region is recorded, so that a graph reads"
        " those of its dummy.",
        base="eagle_draft",
        lanes=("draft_decode",),
        make=_positions_of_capture,
        site="runner",
    ),
    Exhibit(
        name="eagle-draft-hands-padded-drafts-to-the-verifier",
        rule="GP06",
        thread="NVIDIA/TensorRT-LLM#5058",
        planted="compose() declares no axis for drafts and parents, so that they have padding rows.",
        base="eagle_draft",
        lanes=("draft_decode_tree",),
        make=composing(cuts_nothing),
        site="runner",
    ),
]
"""All exhibits of the room."""
