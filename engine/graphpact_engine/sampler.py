"""`Sampler`: logits to tokens, greedy or by temperature, top-k, top-p and min-p.

The token of a request depends only on its own logits, parameters and random numbers: the same seed and
logits give the same token in any batch, drafted before or not. Float sums would break this: their rounding
depends on the shape of the batch, and a sum near ``top_p`` would keep one token more or fewer. Therefore
probabilities are integers here, relative to `_ONE` for the likeliest token, and their sums are exact in any
order. One uniform number per token, from the request's own generator, picks a token.

Does not: choose the rows that yield a token (the scheduler does), append tokens to requests, or
return probabilities or logprobs.
"""

from collections.abc import Collection, Sequence

import torch

from graphpact.errors import EngineError
from graphpact_engine.logits import change_logits
from graphpact_engine.request import Request

_ONE = 2**36
"""The weight of the likeliest token. A token with less than 2**-36 of its probability is never drawn; a
vocabulary of up to 2**27 tokens cannot overflow int64."""


class Sampler:
    """A sampler of one token per row of logits.

    Args:
        end_token_ids: The end tokens of the model, which no request gets before ``min_new_tokens``.
    """

    def __init__(self, end_token_ids: Collection[int] = ()) -> None:
        self._end_token_ids = end_token_ids

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """Return a token for each row, with one transfer to the host after all device work.

        Each request with a temperature above 0 takes exactly one number from its generator. Of equal
        logits the lower token id ranks first.

        Args:
            logits: ``[bs, V]``, any float dtype and device; not written to.
            requests: The request of each row.

        Raises:
            EngineError: The number of requests is not the number of rows; or a row contains NaN or has no
                finite maximum. Then the message names its request, and no random number is used up.
        """
        tokens = self.sample_after(logits, requests, [()] * len(requests))
        for request in requests:
            request.use_uniforms()
        return tokens

    def sample_after(
        self, logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
    ) -> list[int]:
        """Return for each row the token that the request would get if ``drafts`` were its next tokens.

        It is the token that `sample` would return after them, by the same random number. None is used up:
        call `Request.use_uniforms` with the number of tokens that the request got.

        Args:
            logits: ``[n, V]``, the model's after the drafts of each row.
            requests: The request of each row.
            drafts: The drafts of each row; empty for the next token.

        Raises:
            EngineError: See `sample`.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests):
            raise EngineError(
                f"cannot sample for {len(requests)} requests: expected logits [{len(requests)}, vocab], got"
                f" {list(logits.shape)}"
            )
        if not requests:
            return []
        changed = [at for at, request in enumerate(requests) if request.changes_logits]
        if changed:
            index = torch.tensor(changed, device=logits.device)
            scores = change_logits(
                logits[index],
                [requests[at] for at in changed],
                self._end_token_ids,
                [drafts[at] for at in changed],
            )
            logits = logits.to(scores.dtype).index_copy(0, index, scores)
        likeliest = logits.argmax(dim=-1)  # argmax returns a NaN if there is one
        best = logits.gather(1, likeliest.unsqueeze(1))
        tokens = likeliest
        filtered = [at for at, request in enumerate(requests) if _is_filtered(request)]
        plain = [
            at
            for at, request in enumerate(requests)
            if request.sampling.temperature > 0 and not _is_filtered(request)
        ]
        for rows, draw in ((plain, _draw_any), (filtered, _draw_filtered)):
            if rows:
                index = torch.tensor(rows, device=logits.device)
                chosen_by = [(requests[at], len(drafts[at])) for at in rows]
                params = _params(chosen_by, logits.shape[1], logits.device)
                scores = logits[index]
                weights = _weights(scores, best[index], params[0])
                tokens = tokens.index_copy(0, index, draw(scores, weights, params))
        chosen: list[int] = tokens.masked_fill(~best.squeeze(1).isfinite(), -1).tolist()
        if min(chosen) < 0:
            bad = [requests[at].request_id for at, token in enumerate(chosen) if token < 0]
            raise EngineError(
                f"logits of request {', '.join(map(repr, bad))} contain NaN or have no finite maximum",
                hint="the model or a kernel computed them wrongly: set verify.replay_against_eager = 1 to"
                " compare replays with eager runs",
            )
        return chosen


def _is_filtered(request: Request) -> bool:
    """Return whether top-k, top-p or min-p restrict the tokens of the request."""
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _params(rows: Sequence[tuple[Request, int]], vocab: int, device: torch.device) -> torch.Tensor:
    """Return ``[5, n, 1]`` float64: temperature, top_p, top_k, min_p, and the uniform number in [0, 1).

    Args:
        rows: The request of each row, and how many drafts come before the row's token.
        vocab: Tokens of the vocabulary.
        device: Where to put the result.
    """
    values = [
        (
            request.sampling.temperature,
            request.sampling.top_p,
            request.sampling.top_k or vocab,
            request.sampling.min_p,
            request.uniform(ahead),
        )
        for request, ahead in rows
    ]
    return torch.tensor(values, dtype=torch.float64, device=device).T.unsqueeze(2)


def _weights(scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return ``[n, V]`` int64: probabilities at ``temperature``, scaled so that the largest is `_ONE`."""
    relative = ((scores.double() - best.double()) / temperature).exp_()
    return relative.mul_(_ONE).long()


def _draw_any(_scores: torch.Tensor, weights: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Return ``[n]`` int64: a token drawn by weight."""
    return _pick(weights, params[4]).squeeze(1)


def _draw_filtered(scores: torch.Tensor, weights: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Return ``[n]`` int64: a token drawn by weight from the top-p of the top-k tokens, if over min-p."""
    _, top_p, top_k, min_p, uniform = params
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(scores.shape[1], device=scores.device)
    ranked = weights.gather(1, order).masked_fill_(ranks >= top_k, 0)
    upto = ranked.cumsum(dim=-1)
    likelier = upto - ranked  # 0 for the likeliest token, so it is always kept
    ranked.masked_fill_(likelier >= top_p * upto[:, -1:], 0)
    ranked.masked_fill_(ranked < min_p * _ONE, 0)  # `_ONE` is the weight of the likeliest
    return order.gather(1, _pick(ranked, uniform)).squeeze(1)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return ``[n, 1]`` int64: the column at which the cumulative weight exceeds the uniform share.

    The column is always valid, even if NaN in the logits made the weights meaningless.
    """
    upto = weights.cumsum(dim=-1)
    total = upto[:, -1:]
    target = (uniform * total).long().minimum(total - 1)
    return torch.searchsorted(upto, target, right=True).clamp_(max=weights.shape[1] - 1)
