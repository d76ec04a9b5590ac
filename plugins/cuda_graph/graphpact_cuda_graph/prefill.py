"""`PrefillRunner`: the policy of prefill graphs, whose attention leaves the graph.

Graphs pad tokens: a batch takes the smallest captured token count that holds it, unless that count is more
than ``max_padding_ratio`` times its tokens. Requests are padded up to the most that the tokens can belong to,
for the language model head alone; attention runs between the segments, on the requests of the batch.

Does not: compose a region; `graphpact_cuda_graph.breakable` and `graphpact_cuda_graph.piecewise` do.
"""

from collections.abc import Sequence
from typing import ClassVar

from graphpact import CaptureSizes, EagerReason, ForwardBatch, ForwardMode, GraphShape, GraphSlot
from graphpact.attention import GraphSupport
from graphpact.runners import GraphRunner
from graphpact_cuda_graph.bridge import bridge_slots

TOO_MUCH_PADDING = EagerReason(
    "too_much_padding", "the smallest captured shape has too many padding tokens for it (max_padding_ratio)"
)


class PrefillRunner(GraphRunner):
    """Base class of the prefill runners. Any attention backend serves them: no graph reads its metadata."""

    modes = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})
    needs = GraphSupport.NEVER
    eager_attention: ClassVar[bool] = True
    declines = (TOO_MUCH_PADDING,)

    # -- policy ----------------------------------------------------------------------------------

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each token count: the configured ones, or `default_token_counts`."""
        limits = self.context.limits
        most = min(limits.max_num_tokens, limits.max_bs * limits.max_context_len)
        counts = self.context.require_token_counts(default_token_counts(most))
        pairs = ((min(limits.max_bs, count), count) for count in counts)
        return CaptureSizes.by_pairs(self.context.mode, pairs).shapes

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds ``batch``, or why it runs eagerly.

        If layers gather over DP ranks, the rank with most tokens decides for all.
        """
        shape = super().fit(batch)
        if isinstance(shape, GraphShape):
            tokens = max((batch.num_tokens, *(batch.global_num_tokens_cpu or ())))
            if tokens and shape.num_tokens > tokens * self.context.max_padding_ratio:
                return TOO_MUCH_PADDING
        return shape

    def slots(self) -> Sequence[GraphSlot]:
        """Return the inputs of prefill, and the workspaces between segments."""
        return [*super().slots(), *bridge_slots(self.context)]


def default_token_counts(most: int) -> list[int]:
    """Return the token counts to capture by default: powers of two and their halves between, up to ``most``.

    So no batch of 4 tokens or more has more than half as many padding tokens as it has tokens.
    """
    counts = {count for power in range(2, most.bit_length()) for count in (1 << power, 3 << power - 1)}
    return sorted(count for count in counts | {most} if count <= most)
