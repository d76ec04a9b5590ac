"""`LaneStats` and `ShapeStats`: the counters of a lane.

Does not: count; `graphpact.lane` does.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

from graphpact.batch import ForwardMode
from graphpact.graphs.driver import Externals
from graphpact.shapes import EagerReason, GraphShape


@dataclass(slots=True)
class ShapeStats:
    """Statistics of one captured shape.

    Attributes:
        capture_seconds: Time that its capture took.
        num_nodes: Recorded operations, or -1 if the driver does not know.
        externals: How complete the driver's report of the memory is that the graph reads.
        replays: Replays of its graph.
        raw_rows: Live requests in these replays.
        raw_tokens: Live tokens in these replays.
    """

    capture_seconds: float = 0.0
    num_nodes: int = 0
    externals: Externals = "all"
    replays: int = 0
    raw_rows: int = 0
    raw_tokens: int = 0

    def padding_waste(self, shape: GraphShape) -> float:
        """Return the ratio of padding tokens to all replayed tokens; 0 without replays."""
        return 1 - self.raw_tokens / (self.replays * shape.num_tokens) if self.replays else 0.0


@dataclass(slots=True)
class LaneStats:
    """Statistics of one lane.

    Attributes:
        shapes: Statistics of each captured shape, in the order of capture.
        eager: Eager runs by forward mode and reason.
        pact_checks: Replays whose pact was checked.
    """

    shapes: dict[GraphShape, ShapeStats] = field(default_factory=dict)
    eager: Counter[tuple[ForwardMode, EagerReason]] = field(default_factory=Counter)
    pact_checks: int = 0

    @property
    def externals(self) -> Externals:
        """The least complete `ShapeStats.externals` among all shapes."""
        order: tuple[Externals, ...] = get_args(Externals)
        return max((s.externals for s in self.shapes.values()), key=order.index, default="all")

    @property
    def replays(self) -> int:
        """Replays of all shapes."""
        return sum(s.replays for s in self.shapes.values())
