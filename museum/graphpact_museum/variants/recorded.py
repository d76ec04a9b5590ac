"""Correct runners whose regions do other work: segments, several passes, inputs written in place.

Does not: contain bugs; see the exhibits in the other rooms.
"""

import itertools
from dataclasses import replace
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.lane.reference_runner import broken_at_attention
from graphpact_museum.edits.override import overrides
from graphpact_museum.exhibit import variant


@variant(on="reference_runner", lanes=("decode", "extend"))
@overrides("compose")
def attention_between_segments(_: Any, __: Any, forward: Forward, step: RegionContext) -> Region:
    """Attention is an eager call between two segments of a graph, with new metadata in each replay."""
    return broken_at_attention(forward, step)


@variant(on="reference_runner", lanes=("decode", "extend"))
@overrides("compose")
def three_passes_in_one_graph(_: Any, __: Any, forward: Forward, step: RegionContext) -> Region:
    """The model runs three times in one graph, each pass with its own outputs."""

    def region() -> StepOutputs:
        first, second, last = (forward(step.view, step.metadata, step.backend.forward) for _ in range(3))
        given = {name: (tensor, last.axes[name]) for name, tensor in last.items()}
        for which, outputs in (("first", first), ("second", second)):
            for name, tensor in outputs.items():
                given[f"{which}_{name}"] = tensor, outputs.axes[name]
        return StepOutputs(**given)

    return region


@variant(on="eagle_draft_extend", lanes="draft_extend")
@overrides("compose")
def draft_extend_that_runs_twice(_: Any, right: Any, forward: Forward, step: RegionContext) -> Any:
    """The region of a draft extend runs twice in one graph, and compares its choices."""
    once = right(forward, step)

    def region() -> StepOutputs:
        first, second = once(), once()
        given = {name: (tensor, second.axes[name]) for name, tensor in second.items()}
        agree = (first["next_tokens"] == second["next_tokens"]).all(dim=1)
        return StepOutputs(**given, agree=(agree, "bs"))

    return region


@variant(on="eagle_draft", lanes=("draft_decode", "draft_decode_tree"))
@overrides("compose")
def draft_that_writes_its_positions(_: Any, right: Any, forward: Forward, step: RegionContext) -> Any:
    """A graph writes the positions of each pass into its own input, which every step fills again."""
    if step.is_eager:
        return right(forward, step)
    view, passes = step.view, itertools.count()

    def one(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
        branches = view.num_tokens // view.batch_size
        view.positions.copy_(view.seq_lens.repeat_interleave(branches) + next(passes))
        return forward(replace(batch, positions=view.positions), metadata, attend)

    drafts = right(one, step)

    def region() -> StepOutputs:
        nonlocal passes
        passes = itertools.count()
        return drafts()  # type: ignore[no-any-return]

    return region
