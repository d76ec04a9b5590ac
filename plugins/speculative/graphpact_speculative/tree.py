"""`DraftTree`: the drafts of each request as a tree that grows level by level, and the choice of the best.

Every level adds the ``topk`` best tokens after each of ``topk`` branches, and the best ``topk`` of these
candidates are the next branches. A score is the log probability of a whole path.

Ties are decided by order: of equal scores the earlier candidate is better. A path is never more probable than
its beginning, so a parent is always better than its children, and is chosen before them.

All work is on the device and has fixed shapes, so a graph can record it.

Does not: run a model; the runners do.
"""

import torch

from graphpact.errors import EngineError


def best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest values of each row and their indices, ``[n, count]``, ties in order.

    The order in which `torch.topk` returns equal values is undefined.

    Args:
        scores: ``[n, m]``.
        count: At most ``m``.
    """
    if count == 1:
        values, indices = scores.max(dim=1, keepdim=True)
        return values, indices
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count].contiguous(), indices[:, :count].contiguous()


def best_tokens(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable tokens of each row, best first, and their log probabilities.

    Args:
        logits: ``[n, vocab_size]``.
        topk: Tokens of each row.

    Returns:
        ``[n, topk]`` int64 and ``[n, topk]`` float32.

    Raises:
        EngineError: The vocabulary has fewer tokens.
    """
    if topk > logits.shape[1]:
        raise EngineError(
            f"speculative.topk = {topk}, but the draft model has a vocabulary of {logits.shape[1]} tokens",
            hint="lower speculative.topk",
        )
    scores, tokens = best(torch.log_softmax(logits, dim=1, dtype=torch.float32), topk)
    return tokens, scores


class DraftTree:
    """The drafts of ``bs`` requests.

    The newest token of a sequence is node 0 of its tree. The candidates of all levels follow, in the order in
    which they are generated.

    Args:
        tokens: ``[bs, topk]`` int64: the tokens of the first level.
        scores: ``[bs, topk]`` float32: their log probabilities.

    Attributes:
        branches: ``[bs * topk]`` int64: the last token of each branch, which a model reads next.
    """

    def __init__(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        self.batch_size, self.topk = tokens.shape
        self.branches = tokens.flatten()
        self._scores = scores.flatten()
        self._nodes = torch.arange(1, self.topk + 1, device=tokens.device).expand_as(tokens)
        """``[bs, topk]``: the node of each branch."""
        self._levels = [(tokens, scores, torch.zeros_like(tokens))]
        """For each level, the candidates' tokens, scores and parent nodes."""

    def grow(self, logits: torch.Tensor) -> torch.Tensor:
        """Add a level, and return ``[bs * topk]`` int64: the row of the branch that each new one continues.

        Args:
            logits: ``[bs * topk, vocab_size]``: the logits after each branch.
        """
        bs, topk = self.batch_size, self.topk
        tokens, scores = best_tokens(logits, topk)
        tokens = tokens.view(bs, topk * topk)
        scores = (self._scores[:, None] + scores).view(bs, topk * topk)
        parents = self._nodes.repeat_interleave(topk, dim=1)
        begin = 1 + sum(level[0].shape[1] for level in self._levels)
        self._levels.append((tokens, scores, parents))
        top, chosen = best(scores, topk)
        self.branches, self._scores = tokens.gather(1, chosen).flatten(), top.flatten()
        self._nodes = begin + chosen
        first_rows = torch.arange(0, bs * topk, topk, device=logits.device)
        return (first_rows[:, None] + chosen.div(topk, rounding_mode="floor")).flatten()

    def drafts(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best ``count`` candidates of all levels, in the order of their nodes.

        Returns:
            Two ``[bs, count]`` int64: the tokens, and the index of the token that each follows: 0 for the
            newest token of the sequence, ``j`` for draft ``j - 1``.
        """
        tokens, scores, parents = (torch.cat(part, dim=1) for part in zip(*self._levels, strict=True))
        chosen = best(scores, count)[1].sort(dim=1).values
        is_draft = torch.zeros_like(tokens).scatter(1, chosen, 1)
        # The index of a node among the chosen ones: 0 for node 0, 1 for the first draft.
        index = torch.cat([is_draft.new_zeros(self.batch_size, 1), is_draft.cumsum(dim=1)], dim=1)
        return tokens.gather(1, chosen), index.gather(1, parents.gather(1, chosen))
