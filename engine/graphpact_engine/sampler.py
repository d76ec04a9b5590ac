"""`Sampler`: chooses tokens from logits, greedily or by temperature, top-k, top-p and min-p.

The token of a request depends only on its own logits, parameters and random numbers: the same seed and
logits give the same token in any batch, drafted before or not. Float sums would break this: their rounding
depends on the shape of the batch, and a sum near ``top_p`` would keep one token more or fewer. Therefore
probabilities are integers here, relative to `_ONE` for the likeliest token, and their sums are exact in any
order. One uniform number per token, from the request's own generator, picks a token.

Does not: choose the rows that yield a token (the scheduler does), append tokens to requests, or
return probabilities or logprobs.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch

from graphpact.errors import EngineError
from graphpact_engine.logits import change_logits
from graphpact_engine.request import Request

_Draw: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Scores, weights, parameters and uniform numbers of some rows to their tokens."""

_ONE = 2**36
"""The weight of the likeliest token. A token with less than 2**-36 of its probability is never drawn; a
vocabulary of up to 2**27 tokens cannot overflow int64."""


_SERIAL = 2**16
"""The number of logits from which the likeliest tokens are found in blocks, on a CPU."""
_BLOCK = 256


class Sampler:
    """A sampler of one token per row of logits.

    Values that depend only on the parameters of the requests are kept until a call has other requests.

    Args:
        end_token_ids: The end tokens of the model, which no request gets before ``min_new_tokens``.
    """

    def __init__(self, end_token_ids: Collection[int] = ()) -> None:
        self._end_token_ids = end_token_ids
        self._plan = _Plan([], 0, torch.device("cpu"))

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """Return a token for each row, with one transfer to the host after all device work.

        Each request with a temperature above 0 uses up exactly one of its random numbers. Of equal logits
        the lower token id ranks first.

        Args:
            logits: ``[bs, V]``, any float dtype and device; not written to.
            requests: The request of each row.

        Raises:
            EngineError: The number of requests is not the number of rows; or a row contains NaN or has no
                finite maximum. Then the message names its request, and no random number is used up.
        """
        chosen = self.sample_after(logits, requests)
        for request in self._plan.drawing:
            request.use_uniforms()
        return chosen

    def start(self, logits: torch.Tensor, requests: Sequence[Request], *, ahead: int = 0) -> "PendingTokens":
        """Choose tokens as `sample` does, without waiting for the device; `PendingTokens.read` waits.

        Args:
            logits: See `sample`.
            requests: See `sample`.
            ahead: How many tokens of each request are pending before this one. It must be 0 if the parameters
                of a request change logits, since they depend on its tokens.

        Raises:
            EngineError: The number of requests is not the number of rows. `PendingTokens.read` raises the
                other errors of `sample`.
        """
        tokens, not_finite = self._choose(logits, requests, None, ahead)
        plan = self._plan
        return PendingTokens(tokens, not_finite, plan.requests, plan.drawing, is_free=plan.changed is None)

    def sample_after(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """Return for each row the token that the request would get if ``drafts`` were its next tokens.

        It is the token that `sample` would return after them, by the same random number. No random number is
        used up: call `Request.use_uniforms` with the number of tokens that the request got.

        Args:
            logits: ``[n, V]``, the model's after the drafts of each row.
            requests: The request of each row.
            drafts: The drafts of each row; empty for the next token. None if empty for every row.

        Raises:
            EngineError: See `sample`.
        """
        tokens, not_finite = self._choose(logits, requests, drafts)
        return _read(tokens.masked_fill_(not_finite, -1), requests)

    def _choose(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]] | None,
        ahead: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[n]`` int64 tokens of the vocabulary, and ``[n]`` bool: whether logits were invalid."""
        if logits.dim() != 2 or logits.shape[0] != len(requests):
            raise EngineError(
                f"cannot sample for {len(requests)} requests: expected logits [{len(requests)}, vocab], got"
                f" {list(logits.shape)}"
            )
        plan = self._plan
        if plan.requests != requests or plan.vocab != logits.shape[1] or plan.device != logits.device:
            plan = self._plan = _Plan(requests, logits.shape[1], logits.device)
        if plan.changed is not None:
            rows, changed = plan.changed
            scores = change_logits(
                logits[changed],
                [requests[at] for at in rows],
                self._end_token_ids,
                None if drafts is None else [drafts[at] for at in rows],
            )
            logits = logits.to(scores.dtype).index_copy(0, changed, scores)
        best, tokens = _likeliest(logits)
        not_finite = (best - best).isnan()  # as is the difference of two infinities
        for draw, rows, index, params in plan.draws:
            uniform = [requests[at].uniform(ahead if drafts is None else len(drafts[at])) for at in rows]
            numbers = _to_device(torch.tensor(uniform, dtype=torch.float64), logits.device).unsqueeze(1)
            scores, top = (logits, best) if index is None else (logits[index], best[index])
            drawn = draw(scores, _weights(scores, top.unsqueeze(1), params[0]), params, numbers)
            tokens = drawn if index is None else tokens.index_copy_(0, index, drawn)
        return tokens, not_finite


class PendingTokens:
    """Tokens that the device chooses, before the host has read them.

    Args:
        tokens: ``[n]`` int64, on the device. Those of invalid logits have no meaning, but are in the
            vocabulary.
        not_finite: ``[n]`` bool: whether the logits were invalid.
        requests: The request of each token.
        drawing: The requests that use up a random number.
        is_free: Whether the tokens after these can be chosen before these are read.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        not_finite: torch.Tensor,
        requests: Sequence[Request],
        drawing: Sequence[Request],
        *,
        is_free: bool,
    ) -> None:
        self.tokens = tokens
        self.is_free = is_free
        self._requests = requests
        self._drawing = drawing
        self._event: torch.Event | None = None
        self._host = tokens.masked_fill(not_finite, -1)
        if tokens.device.type == "cuda":  # copied now: a later copy would wait for the steps after this one
            pinned = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._event = torch.Event(device=tokens.device)
            self._event.record()

    def read(self) -> list[int]:
        """Wait for the tokens and return them; the requests use up their random numbers.

        Raises:
            EngineError: See `Sampler.sample`.
        """
        if self._event is not None:
            self._event.synchronize()
        tokens = _read(self._host, self._requests)
        for request in self._drawing:
            request.use_uniforms()
        return tokens


def _read(tokens: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Return the tokens; raise `EngineError` for those of invalid logits, which are -1.

    A request that ended while its token was pending is not checked, because its token is dropped.
    """
    chosen: list[int] = tokens.tolist()
    if not chosen or min(chosen) >= 0:
        return chosen
    failed = [one for one, token in zip(requests, chosen, strict=True) if token < 0 and not one.is_finished]
    if failed:
        bad = [request.request_id for request in failed]
        raise EngineError(
            f"logits of request {', '.join(map(repr, bad))} contain NaN or have no finite maximum",
            hint="the model or a kernel computed them wrongly: set verify.replay_against_eager = 1 to"
            " compare replays with eager runs",
        )
    return chosen


def _to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host numbers on a device, without waiting for the work that was submitted to it."""
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)


class _Plan:
    """How the tokens of some rows are chosen, from the parameters of their requests.

    Args:
        requests: The request of each row.
        vocab: Tokens of the vocabulary.
        device: The device of the logits.

    Attributes:
        changed: The rows whose logits are changed first, and the same as an index; None if there are none.
        draws: For each way to draw: its function, its rows, the rows as an index (None if they are all), and
            ``[4, n, 1]`` float64: their temperature, top_p, top_k and min_p.
        drawing: The requests of all rows that are drawn.
    """

    def __init__(self, requests: Sequence[Request], vocab: int, device: torch.device) -> None:
        self.requests = [*requests]
        self.vocab = vocab
        self.device = device
        changed = [at for at, request in enumerate(requests) if request.changes_logits]
        self.changed = (changed, torch.tensor(changed, device=device)) if changed else None
        self.draws: list[tuple[_Draw, list[int], torch.Tensor | None, torch.Tensor]] = []
        self.drawing = [request for request in requests if request.sampling.temperature > 0]
        for draw, is_filtered in ((_draw_any, False), (_draw_filtered, True)):
            rows = [
                at
                for at, request in enumerate(requests)
                if request.sampling.temperature > 0 and _is_filtered(request) is is_filtered
            ]
            if rows:
                params = _params([requests[at] for at in rows], vocab, device)
                index = torch.tensor(rows, device=device) if len(rows) < len(requests) else None
                self.draws.append((draw, rows, index, params))


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[n]``: the maximum of each row, and ``[n]`` int64: its first column; NaN is a maximum.

    On a CPU torch searches for a column one number at a time, but computes a maximum with vectors. So the
    maximum of each block of columns is computed first, and the column is searched in one block of each row.
    """
    vocab = logits.shape[1]
    if logits.numel() < _SERIAL or vocab < _BLOCK or logits.device.type != "cpu":
        best, tokens = logits.max(dim=-1)
        return best, tokens
    even = vocab // _BLOCK * _BLOCK
    tops = logits[:, :even].unflatten(1, (-1, _BLOCK)).amax(dim=-1)
    if even < vocab:
        tops = torch.cat([tops, logits[:, even:].amax(dim=-1, keepdim=True)], dim=1)
    best, block = tops.max(dim=-1)
    first = block * _BLOCK
    columns = first.unsqueeze(1) + torch.arange(_BLOCK)
    # Columns past the last one repeat it, so none of them is the first maximum.
    inside = logits.gather(1, columns.clamp(max=vocab - 1)).argmax(dim=-1)
    return best, first + inside


def _is_filtered(request: Request) -> bool:
    """Return whether top-k, top-p or min-p restrict the tokens that the request draws from."""
    sampling = request.sampling
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _params(requests: Sequence[Request], vocab: int, device: torch.device) -> torch.Tensor:
    """Return ``[4, n, 1]`` float64: temperature, top_p, top_k and min_p of each request."""
    each = [request.sampling for request in requests]
    values = [(params.temperature, params.top_p, params.top_k or vocab, params.min_p) for params in each]
    return torch.tensor(values, dtype=torch.float64, device=device).T.unsqueeze(2)


def _weights(scores: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return ``[n, V]`` int64: probabilities at ``temperature``, scaled so that the largest is `_ONE`."""
    relative = ((scores.double() - best.double()) / temperature).exp_()
    return relative.mul_(_ONE).long()


def _draw_any(
    _scores: torch.Tensor, weights: torch.Tensor, _params: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Return ``[n]`` int64: a token drawn by weight."""
    return _pick(weights, uniform).squeeze(1)


def _draw_filtered(
    scores: torch.Tensor, weights: torch.Tensor, params: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Return ``[n]`` int64: a token drawn by weight from the top-p of the top-k tokens, if over min-p."""
    _, top_p, top_k, min_p = params
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
