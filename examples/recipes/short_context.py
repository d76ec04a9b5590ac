"""`ShortContexts`: a runner of decode graphs for requests of at most 64 keys.

A batch with a longer request runs eagerly, counted with its reason: for an attention whose graphs are
slower, or wrong, for long requests.

Does not: capture graphs for long requests; `length_tiers.py` does.
"""

from dataclasses import replace

import torch

from graphpact import EagerReason, ForwardBatch, GraphShape
from graphpact.runners import DecodeRunner
from graphpact.shapes import default_decode_batch_sizes

LONGEST = 64
"""The most keys of a request that the graphs serve."""
LONG_CONTEXT = EagerReason("acme_long_context", f"a request has more than {LONGEST} keys")
OTHER_RANKS = EagerReason("acme_other_ranks", f"another rank may have a request of more than {LONGEST} keys")


class ShortContexts(DecodeRunner):
    """A runner that leaves batches with long requests to eager steps."""

    declines = (LONG_CONTEXT, OTHER_RANKS)

    def default_batch_sizes(self) -> list[int]:
        """Return the request counts to capture if none are configured; the last is the largest step."""
        return default_decode_batch_sizes(self.context.limits.max_bs)

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape that holds the batch, or why it runs eagerly.

        Ranks that gather must choose the same way, but each knows only its own lengths. So their batches run
        eagerly.
        """
        fit = super().fit(batch)
        if isinstance(fit, EagerReason):  # no shape is large enough
            return fit
        if batch.global_num_tokens_cpu is not None:
            return OTHER_RANKS
        longest = max(batch.seq_lens_cpu.tolist(), default=0)
        return LONG_CONTEXT if longest > LONGEST else fit

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return a batch of the longest requests that the graphs serve, on scratch memory.

        For backends whose graphs keep no bound on lengths, the dummy of the base class is enough.
        """
        dummy = super().dummy(shape)
        longest = min(LONGEST, self.context.limits.max_context_len)
        lens = torch.full_like(dummy.seq_lens, longest)
        return replace(dummy, seq_lens=lens, seq_lens_cpu=lens.cpu().clone(), positions=lens - 1)
