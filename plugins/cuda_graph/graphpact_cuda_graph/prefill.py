"""`PrefillRunner`: chooses shapes for prefill graphs, whose attention runs outside the graph.

Graphs pad tokens: a batch takes the smallest captured token count that holds it, unless that count is more
than ``max_padding_ratio`` times its tokens. Requests are padded to the largest number that these tokens can
belong to, but only for the language model head. Attention runs between the segments, on the requests of the
batch.

Does not: compose a region; `graphpact_cuda_graph.breakable` and `graphpact_cuda_graph.piecewise` do.
"""

from collections.abc import Sequence
from typing import ClassVar

from graphpact import CaptureSizes, EagerReason, ForwardBatch, ForwardMode, GraphShape, GraphSlot
from graphpact.attention import GraphSupport
from graphpact.runners import GraphRunner
from graphpact_cuda_graph.bridge import bridge_slots

TOO_MUCH_PADDING = EagerReason(
    "too_much_padding",
    "the smallest captured shape that fits has too many padding tokens (max_padding_ratio)",
)


class PrefillRunner(GraphRunner):
    """Base class of the prefill runners. They work with any backend, because no graph reads metadata."""

    modes = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})
    needs = GraphSupport.NEVER
    eager_attention: ClassVar[bool] = True
    declines = (TOO_MUCH_PADDING,)

    # -- decisions ----------------------------------------------------------------------------------

    def shapes(self) -> Sequence[GraphShape]:
        """Return one shape for each token count: the configured counts, or `default_token_counts`."""
        limits = self.context.limits
        most = min(limits.max_num_tokens, limits.max_bs * limits.max_context_len)
        counts = self.context.require_token_counts(default_token_counts(most))
        pairs = ((min(limits.max_bs, count), count) for count in counts)
        return CaptureSizes.by_pairs(self.context.mode, pairs).shapes

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds ``batch``, or why it runs eagerly.

        If layers gather over DP ranks, the rank with most tokens decides for all ranks.
        """
        shape = super().fit(batch)
        if isinstance(shape, GraphShape):
            tokens = max((batch.num_tokens, *(batch.global_num_tokens_cpu or ())))
            if tokens and shape.num_tokens > tokens * self.context.max_padding_ratio:
                return TOO_MUCH_PADDING
        return shape

    def slots(self) -> Sequence[GraphSlot]:
        """Return the inputs of prefill and the workspaces between segments."""
        return [*super().slots(), *bridge_slots(self.context)]


def default_token_counts(most: int) -> list[int]:
    """Return the default token counts: powers of two and the means between them, up to ``most``.

    So the padding of a batch of 4 tokens or more is at most half of its tokens.
    """
    counts = {count for power in range(2, most.bit_length()) for count in (1 << power, 3 << power - 1)}
    return sorted(count for count in counts | {most} if count <= most)
