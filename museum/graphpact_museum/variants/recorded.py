"""Correct plugins with regions with other work: segments, several passes, inputs written in place.

Does not: contain bugs; see the exhibits in the other rooms.
"""

import itertools
from dataclasses import replace
from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_conformance.lane.reference import broken_at_attention
from graphpact_museum.exhibit import Variant


def _attends_between_segments(base: type[Any]) -> type[Any]:
    class Breakable(base):  # type: ignore[misc]
        """Records everything but attention, which is an eager call between two segments."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return a forward pass whose attention reads the metadata of each replay."""
            return broken_at_attention(forward, step)

    return Breakable


def _runs_three_times(base: type[Any]) -> type[Any]:
    class ThreeTimes(base):  # type: ignore[misc]
        """Records three forward passes in one graph, each with its own outputs."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return three passes over the same view; the last one's rows are the step's."""

            def region() -> StepOutputs:
                first, second, last = (
                    forward(step.view, step.metadata, step.backend.forward) for _ in range(3)
                )
                given = {name: (tensor, last.axes[name]) for name, tensor in last.items()}
                for which, outputs in (("first", first), ("second", second)):
                    for name, tensor in outputs.items():
                        given[f"{which}_{name}"] = tensor, outputs.axes[name]
                return StepOutputs(**given)

            return region

    return ThreeTimes


def _runs_twice(base: type[Any]) -> type[Any]:
    class Twice(base):  # type: ignore[misc]
        """Runs its region twice in one graph, and says whether both chose the same tokens."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return both runs; the outputs are those of the second."""
            once = super().compose(forward, step)

            def region() -> StepOutputs:
                first, second = once(), once()
                given = {name: (tensor, second.axes[name]) for name, tensor in second.items()}
                agree = (first["next_tokens"] == second["next_tokens"]).all(dim=1)
                return StepOutputs(**given, agree=(agree, "bs"))

            return region

    return Twice


def _writes_its_positions(base: type[Any]) -> type[Any]:
    class Writes(base):  # type: ignore[misc]
        """Writes the positions of each pass of a draft into its own static input."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return a region whose graph writes the view; eager steps leave the batch as it is."""
            if step.is_eager:
                right: Region = super().compose(forward, step)
                return right
            view, passes = step.view, itertools.count()

            def one(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
                branches = view.num_tokens // view.batch_size
                view.positions.copy_(view.seq_lens.repeat_interleave(branches) + next(passes))
                return forward(replace(batch, positions=view.positions), metadata, attend)

            drafts = super().compose(one, step)

            def region() -> StepOutputs:
                nonlocal passes
                passes = itertools.count()
                outputs: StepOutputs = drafts()
                return outputs

            return region

    return Writes


VARIANTS: list[Variant] = [
    Variant(
        name="attention-between-segments",
        style="Attention is an eager call between two segments of a graph, with the metadata of each replay.",
        base="reference_runner",
        lanes=("decode", "extend"),
        make=_attends_between_segments,
    ),
    Variant(
        name="three-passes-in-one-graph",
        style="The model runs three times in one graph, each pass with its own outputs.",
        base="reference_runner",
        lanes=("decode", "extend"),
        make=_runs_three_times,
    ),
    Variant(
        name="draft-extend-that-runs-twice",
        style="The region of a draft extend runs twice in one graph, and compares its choices.",
        base="eagle_draft_extend",
        lanes=("draft_extend",),
        make=_runs_twice,
    ),
    Variant(
        name="draft-that-writes-its-positions",
        style="A graph writes the positions of each pass into its own input, which every step fills anew.",
        base="eagle_draft",
        lanes=("draft_decode", "draft_decode_tree"),
        make=_writes_its_positions,
    ),
]
