"""`BucketPrefillRunner`: prefill through full graphs of token buckets.

A runner is policy. `GraphRunner` implements padding, static inputs and dummy batches for every mode; this
class only chooses the shapes to capture.

Does not: serve mixed batches, or run attention outside the graph.
"""

from collections.abc import Sequence

from graphpact import CaptureSizes, ForwardMode, GraphShape
from graphpact.attention import GraphSupport
from graphpact.runners import GraphRunner

SMALLEST = 16
"""Tokens of the smallest bucket; each further bucket has twice the tokens."""


class BucketPrefillRunner(GraphRunner):
    """A runner of full prefill graphs for buckets of 16, 32, 64, .. tokens, up to the largest step."""

    modes = frozenset({ForwardMode.EXTEND})
    needs = GraphSupport.ALWAYS

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each bucket, with room for the largest number of requests."""
        limits = self.context.limits
        # A step has no more tokens than its requests have positions.
        most = min(limits.max_num_tokens, limits.max_bs * limits.max_context_len)
        counts, size = [most], SMALLEST
        while size < most:
            counts.append(size)
            size *= 2
        return CaptureSizes.by_tokens(ForwardMode.EXTEND, counts, limits.max_bs).shapes
