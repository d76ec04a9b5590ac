"""`LengthTiers`: decode graphs in two tiers of lengths, each request count once for short and once for long.

A backend that knows the tiers bounds the keys of a request by ``shape.variant``, so that its kernels do only
the work of short requests in a graph of the short tier. A batch takes the tier of its longest request.

Does not: leave a batch out. The graphs of the long tier serve requests of every length.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact import CaptureSizes, EagerReason, ForwardBatch, GraphShape
from graphpact.runners import DecodeRunner, RunnerContext
from graphpact.shapes import default_decode_batch_sizes

MOST_KEYS = 64
"""The most keys of a request in the short tier."""
SHORT, LONG = "short", "long"


class LengthTiers(DecodeRunner):
    """A runner whose graphs differ in the number of requests and in the most keys of a request."""

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(context)
        most = context.limits.max_context_len
        self._most_keys = {LONG: most}
        if most > MOST_KEYS:  # a context that is all short needs one tier
            self._most_keys[SHORT] = MOST_KEYS
        self._captured = CaptureSizes(
            tuple(replace(shape, variant=tier) for shape in super().shapes() for tier in self._most_keys)
        )

    def default_batch_sizes(self) -> list[int]:
        """Return the request counts to capture if none are configured; the last is the largest step."""
        return default_decode_batch_sizes(self.context.limits.max_bs)

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each request count and tier."""
        return self._captured.shapes

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape of the batch's tier.

        Ranks that gather must choose the same way, but each knows only its own lengths. So they take the tier
        that serves all lengths.
        """
        longest = max(batch.seq_lens_cpu.tolist(), default=0)
        gathers = batch.global_num_tokens_cpu is not None
        is_short = not gathers and longest <= self._most_keys.get(SHORT, -1)
        return self._captured.fit(batch, SHORT if is_short else LONG)

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch of the longest requests of the tier, so that ``fit`` gives its shape again."""
        dummy = super().dummy(shape)
        lens = torch.full_like(dummy.seq_lens, self._most_keys[shape.variant])
        return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone(), positions=lens - 1)
