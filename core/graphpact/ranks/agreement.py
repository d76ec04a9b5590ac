"""`agreed`: a batch with what all ranks of its step decided together.

Every rank calls it with the same exchanged numbers, so all take the same captured shape, or all run eagerly:

    graph or eager     a graph only if no rank asked for an eager run
    shape              that of the rank with most tokens and requests (`CaptureSizes.fit` reads the counts)
    counts             the tokens of each attention group, and how many rows of this rank are real

Does not: communicate, or choose the shape; `Lane.fit` does, from the counts.
"""

from collections.abc import Sequence
from dataclasses import replace

from graphpact.batch import ForwardBatch
from graphpact.ranks.exchange import RankStep
from graphpact.ranks.layout import RankLayout


def agreed(
    batch: ForwardBatch, steps: Sequence[RankStep], layout: RankLayout, *, gathers: bool
) -> ForwardBatch:
    """Return ``batch`` with the counts of all ranks, and whether all may replay a graph.

    Args:
        batch: The batch of this rank; a batch of mode idle if it has no requests.
        steps: The exchanged numbers of the replica's ranks, in their order.
        layout: The place of this rank.
        gathers: Whether layers gather the tokens of all ranks.
    """
    wants_graph = all(step.wants_graph for step in steps)
    if not gathers:
        return batch if wants_graph else replace(batch, can_run_graph=False)
    first_of_each = steps[: layout.tensor : layout.attention_tensor]  # all stages have the same batches
    return replace(
        batch,
        can_run_graph=wants_graph,
        global_num_tokens_cpu=tuple(step.tokens for step in first_of_each),
        global_batch_sizes_cpu=tuple(step.requests for step in first_of_each),
        num_token_non_padded_cpu=batch.num_tokens,
    )
