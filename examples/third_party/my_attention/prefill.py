"""`BucketPrefillRunner`: prefill through full graphs of token buckets.

A runner is policy. Padding of requests and tokens, static inputs and dummies are those that `GraphRunner` has
ready for every mode; what is left is which shapes are captured.

Does not: serve mixed batches, or run attention outside the graph.
"""

from collections.abc import Sequence

from graphpact import CaptureSizes, ForwardMode, GraphShape
from graphpact.attention import GraphSupport
from graphpact.runners import GraphRunner

SMALLEST = 16
"""Tokens of the smallest bucket; each other one is twice as large as the one before."""


class BucketPrefillRunner(GraphRunner):
    """Captures whole prefill steps for buckets of 16, 32, 64, .. tokens, up to the largest step."""

    modes = frozenset({ForwardMode.EXTEND})
    needs = GraphSupport.ALWAYS

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each bucket, with room for as many requests as a step may have."""
        limits = self.context.limits
        counts, size = [limits.max_num_tokens], SMALLEST
        while size < limits.max_num_tokens:
            counts.append(size)
            size *= 2
        return CaptureSizes.by_tokens(ForwardMode.EXTEND, counts, limits.max_bs).shapes
