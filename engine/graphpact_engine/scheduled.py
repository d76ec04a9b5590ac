"""`ScheduledBatch`: the work of one step.

Does not: choose requests; `Scheduler` does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from graphpact.batch import ForwardBatch
from graphpact_engine.request import Request


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """The work of one step: a batch to run, and which of its requests yield a token.

    Args:
        batch: The batch.
        requests: In batch order, oldest first.
        samples: Whether each request yields a token; False while part of its prompt remains.
        step: Number of the step; only the newest step can be committed.
        cache_loc: ``[bs, num_reserved]`` int64: the KV slots that a decode reserved for each request, the one
            of its newest token first; None for a prefill step, in which nothing is drafted.
        computed: The computed tokens of each request after a prefill step; None for a decode, which computes
            one more for each of its tokens.

    The tensors of a decode are valid until the next step is scheduled.
    """

    batch: ForwardBatch
    requests: list[Request]
    samples: list[bool]
    step: int
    cache_loc: torch.Tensor | None = None
    computed: list[int] | None = None

    @property
    def all_sample(self) -> bool:
        """Whether every request yields a token."""
        return all(self.samples)

    @property
    def sampled_indices(self) -> list[int]:
        """Batch indices of the requests that yield a token."""
        return [at for at, yields in enumerate(self.samples) if yields]

    def tokens_of(self, sampled: Iterable[int]) -> list[list[int]]:
        """Return the tokens of each request, one or none, from those of `sampled_requests`."""
        if self.all_sample:
            return [[token] for token in sampled]
        each = iter(sampled)
        return [[next(each)] if yields else [] for yields in self.samples]

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that yield a token, in batch order."""
        return self.requests if self.all_sample else [self.requests[at] for at in self.sampled_indices]
