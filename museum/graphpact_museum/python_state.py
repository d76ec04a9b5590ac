"""Exhibits of Python beside the graph: the region changes host state, and a replay skips that: GP10.

Replays alone are right, because nothing changes the state then, and so are eager steps alone.

Does not: contain the correct plugins; see `graphpact_museum.variants.python_state`.
"""

from typing import Any

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import GraphShape
from graphpact_museum.edits.override import override, overrides
from graphpact_museum.exhibit import exhibit
from graphpact_museum.variants.python_state import RingOfLengths, both_positions, second_positions


@exhibit("GP10", "local-inference-lab/b12x#79", on="reference", lanes="decode")
@overrides("to_fill", of=RingOfLengths)
def turn_of_two_buffers_in_the_region(self: Any, _: Any) -> list[int]:
    """Lengths are filled into one of two buffers, and the region takes the next one in Python."""
    return [self.turn]


@exhibit("GP10", "vllm-project/vllm#29608", on="cuda_graph", lanes=("decode", "target_verify"))
def positions_by_a_count_of_the_region(base: type[Any]) -> type[Any]:
    """Positions are copied into one of two slots by a count of steps, which the region raises in Python."""

    def populate(
        self: Any, right: Any, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> None:
        first, second = both_positions(registry, shape)
        kept = first.clone(), second.clone()
        right(registry, batch, shape)
        if self.steps % 2:
            first.copy_(kept[0])
        else:
            second.copy_(kept[1])

    return override(second_positions(base), populate)
