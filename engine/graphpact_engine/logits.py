"""Changes logits before tokens are chosen: biases, penalties, and tokens that must not be generated.

The arithmetic is that of transformers' logits processors, in float32. The values of all requests are applied
together, as (row, token) pairs.

Does not: choose tokens, or apply temperature, top-k, top-p and min-p: the sampler does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch

from graphpact_engine.request import Request

_NOTHING: Mapping[int, float] = {}


def change_logits(
    logits: torch.Tensor,
    requests: Sequence[Request],
    end_token_ids: Collection[int],
    drafts: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Return the logits with the biases, penalties and suppressed tokens of each request.

    Args:
        logits: ``[n, V]``, any float dtype and device; not written to.
        requests: The request of each row.
        end_token_ids: The end tokens of the model, which are suppressed before ``min_new_tokens``.
        drafts: The drafts of each row that come after the request's output; None if no row has drafts.

    Returns:
        ``[n, V]``, float32, or float64 if the logits are.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    drafts = [()] * len(requests) if drafts is None else drafts
    sampling = [request.sampling for request in requests]
    at, bias = _pairs([params.logit_bias for params in sampling], scores)
    scores[at] += bias
    penalties = [
        (params.repetition_penalty or 1.0, params.presence_penalty, params.frequency_penalty)
        for params in sampling
    ]
    at, counts = _pairs(
        [
            _NOTHING if penalty == (1, 0, 0) else request.output_counts(ahead)
            for request, penalty, ahead in zip(requests, penalties, drafts, strict=True)
        ],
        scores,
    )
    repetition, presence, frequency = scores.new_tensor(penalties)[at[0]].unbind(-1)
    known = scores[at]
    known = torch.where(known < 0, known * repetition, known / repetition)
    scores[at] = known - counts * frequency - (counts > 0) * presence
    at, forbidden = _pairs(
        [
            dict.fromkeys(
                request.sampling.suppressed(len(request.output_token_ids) + len(ahead), end_token_ids),
                -math.inf,
            )
            for request, ahead in zip(requests, drafts, strict=True)
        ],
        scores,
    )
    scores[at] = forbidden
    return scores


def _pairs(
    rows: Sequence[Mapping[int, float]], scores: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the row and token indices of the values of each row's tokens, and the values."""
    lengths = torch.tensor([len(row) for row in rows])
    indices = torch.stack(
        [
            torch.arange(len(rows)).repeat_interleave(lengths),
            torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64),
        ]
    ).to(scores.device)
    values = list(chain.from_iterable(row.values() for row in rows))
    return (indices[0], indices[1]), scores.new_tensor(values)
