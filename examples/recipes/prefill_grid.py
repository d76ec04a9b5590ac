"""`PrefillGrid`: prefill through full graphs whose shapes differ in requests and in tokens.

A graph for one request needs no rows for the others, so a single long prompt wastes less padding.

Does not: fit every step. A step of more requests or tokens than the largest shape runs eagerly, and is
counted as ``over_largest``.
"""

from collections.abc import Sequence

from graphpact import CaptureSizes, ForwardMode, GraphRunner, GraphShape
from graphpact.attention import GraphSupport

SMALLEST = 16
"""Tokens of the smallest shapes; each further one has twice the tokens, up to the largest step."""


class PrefillGrid(GraphRunner):
    """A runner of prefill, or of prefill mixed with decodes; a lane has one of the two modes."""

    modes = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})
    needs = GraphSupport.ALWAYS  # requests of one step have different numbers of tokens

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each pair of a request count and a token count."""
        limits = self.context.limits
        # `batch_sizes` of the lane's table, or one request and the largest step
        batch_sizes = self.context.require_batch_sizes(sorted({1, limits.max_bs}))
        counts, tokens = [limits.max_num_tokens], SMALLEST
        while tokens < limits.max_num_tokens:
            counts.append(tokens)
            tokens *= 2
        # A request has at least one token, and not more than a sequence may have.
        most = {bs: min(limits.max_num_tokens, bs * limits.max_context_len) for bs in batch_sizes}
        pairs = [(bs, min(tokens, most[bs])) for bs in batch_sizes for tokens in counts if tokens >= bs]
        return CaptureSizes.by_pairs(self.context.mode, pairs).shapes
