"""Correct plugins with regions with other work: segments, several passes.

Does not: contain bugs; see the exhibits in the other rooms.
"""

from typing import Any

from graphpact.step import Forward, Region, Step, StepOutputs
from graphpact_conformance.lane.reference import broken_at_attention
from graphpact_conformance.museum.exhibit import Variant


def _attends_between_segments(base: type[Any]) -> type[Any]:
    class Breakable(base):  # type: ignore[misc]
        """Records everything but attention, which is an eager call between two segments."""

        def compose(self, forward: Forward, step: Step) -> Region:
            """Return a forward pass whose attention reads the metadata of each replay."""
            return broken_at_attention(forward, step)

    return Breakable


def _runs_three_times(base: type[Any]) -> type[Any]:
    class ThreeTimes(base):  # type: ignore[misc]
        """Records three forward passes in one graph, each with its own outputs."""

        def compose(self, forward: Forward, step: Step) -> Region:
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
]
