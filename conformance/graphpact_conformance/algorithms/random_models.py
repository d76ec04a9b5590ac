"""`RandomTarget`, a random target model with plain greedy decoding; `RandomDraft`, a draft model beside it.

The target's next token follows from a sum over all tokens so far, each weighted by its position, so a wrong
token or position anywhere changes it. Keys and hidden states hold this sum. All numbers are small integers in
floats, and results do not depend on rounding.

A draft model knows the sum twice: from the hidden state before its token, and from the keys that it attends
to. If the two disagree, because a hidden state or a key is of another token, it drafts wrong tokens.

Does not: run an algorithm; see `graphpact_conformance.algorithms.decoding`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers.slots import Axis
from graphpact.speculation import HIDDEN_STATES
from graphpact.step import Attend, StepOutputs

VOCAB = 13
WIDTH = 4
"""Width of queries, keys and values, and of the draft model's hidden states."""
TARGET_WIDTH = 6
"""Width of the target's hidden states."""
DTYPE = torch.float32

_SUMS, _WEIGHTS = 509, 61
Text = Literal["random", "repeating", "both"]
"""Whether the next token follows from all tokens, from the last one alone, or in part of the cases."""
Skill = Literal["right", "wrong", "mixed"]
"""How often a draft model predicts the token of the target."""

TARGET_LAYER = LayerSpec(0, 1, 1, WIDTH, WIDTH, scaling=1.0)
OWN_LAYER = LayerSpec(1, 1, 1, WIDTH, WIDTH, scaling=1.0)
FROZEN_LAYER = LayerSpec(1, 1, 1, WIDTH, WIDTH, scaling=1.0, kv_layer=0)


class RandomTarget:
    """A random target model.

    Args:
        seed: Seed of its tables.
        text: What the next token follows from.
        positions: Number of positions.
    """

    def __init__(self, seed: int, text: Text, positions: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.weights = torch.randint(1, _WEIGHTS, (VOCAB, positions), generator=rng)
        """``[VOCAB, positions]`` int64: the share of a token at a position in the sum."""
        by_sum = torch.randint(VOCAB, (_SUMS, 1), generator=rng).expand(-1, VOCAB)
        by_last = torch.randperm(VOCAB, generator=rng).expand(_SUMS, -1)
        is_random = {"random": 1.0, "repeating": 0.0, "both": 0.3}[text]
        self.table = torch.where(torch.rand(_SUMS, 1, generator=rng) < is_random, by_sum, by_last)
        """``[sums, VOCAB]`` int64: the next token, by the sum and the last token."""

    def weigh(self, ids: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the share ``[n]`` int64 of tokens ``ids`` ``[n]`` at the positions ``index``."""
        return self.weights[ids, index.clamp(0, self.weights.shape[1] - 1)]

    def next_of(self, sums: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the next tokens ``[n]`` int64 after sequences with these sums and last tokens."""
        return self.table[sums.remainder(_SUMS), last]

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` tokens of plain greedy decoding after a prompt. It uses no memory."""
        weights, table = self.weights.tolist(), self.table.tolist()
        tokens = [*prompt]
        total = sum(weights[token][at] for at, token in enumerate(tokens))
        for _ in range(count):
            tokens.append(table[total % _SUMS][tokens[-1]])
            total += weights[tokens[-1]][len(tokens) - 1]
        return tokens[len(prompt) :]


def hidden_states(
    sums: torch.Tensor, index: torch.Tensor, first: torch.Tensor, width: int, base: torch.Tensor | None = None
) -> torch.Tensor:
    """Return hidden states ``[n, width]``: a sum, the position, the first token's share, the cached sum.

    Args:
        sums: ``[n]``: the sum up to the token.
        index: ``[n]``: its position.
        first: ``[n]``: the share of the first token of its sequence.
        width: Number of columns; those after the fourth repeat the sum.
        base: ``[n]``: the sum of the keys of the target; that of the token by default.
    """
    columns = [sums, index, first, sums if base is None else base]
    return torch.stack([*columns, *[sums] * (width - len(columns))], dim=1).to(DTYPE)


class RandomDraft:
    """A draft model: from a token and the hidden state before it, it predicts the token after it.

    Without hidden states it reads a whole sequence, as a small model of its own does.

    Args:
        target: The target model.
        seed: Seed of its predictions.
        skill: How often they are those of the target.
        frozen: Whether it reads the target's keys and writes none.
    """

    def __init__(self, target: RandomTarget, seed: int, skill: Skill, *, frozen: bool) -> None:
        self.target, self.frozen = target, frozen
        self.layer = FROZEN_LAYER if frozen else OWN_LAYER
        rng = torch.Generator().manual_seed(seed + 1)
        ranks = torch.rand(_SUMS, VOCAB, VOCAB, generator=rng).argsort(dim=2)
        chance = torch.rand(_SUMS, VOCAB, generator=rng)
        place = (chance > 0.55).long() + (chance > 0.75).long() * (VOCAB - 2)
        place = {"right": place * 0, "wrong": place * 0 + VOCAB - 1, "mixed": place}[skill]
        # Exchange the rank of the target's token with the token that has the wanted rank.
        token = target.table[..., None]
        other = (ranks == place[..., None]).long().argmax(dim=2, keepdim=True)
        had = ranks.gather(2, token)
        self.ranks = ranks.scatter(2, other, had).scatter(2, token, place[..., None])
        """``[sums, VOCAB, VOCAB]`` int64: the rank of each token, by the sum and the last token."""
        gaps = torch.rand(_SUMS, VOCAB, 1, generator=rng) + 0.3
        self.gaps = torch.full_like(gaps, 9.0) if skill == "right" else gaps

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return ``logits`` and ``hidden_states``, of the selected rows where the batch selects some."""
        ids, positions = batch.input_ids, batch.positions
        hidden = batch.extra.get(HIDDEN_STATES)
        at = positions if hidden is None or self.frozen else positions + 1
        share = self.target.weigh(ids, at)
        key = torch.zeros(len(ids), 1, WIDTH, dtype=DTYPE)
        value = share[:, None, None].expand(-1, 1, WIDTH).to(DTYPE)
        if self.frozen:
            mean = attend(key, None, None, self.layer, metadata)[:, 0, 0]
        else:
            mean = attend(key, key, value, self.layer, metadata)[:, 0, 0]
        keys = batch.seq_lens.repeat_interleave(batch.tokens_per_request) if self.frozen else positions + 1
        attended = (mean.nan_to_num(nan=-1.0) * keys).round().long()
        if hidden is None:
            total, first, base = attended, attended * 0, attended
            is_right = torch.ones_like(ids, dtype=torch.bool)
        else:
            before, index, first, base = hidden.nan_to_num(nan=-1.0)[:, :4].long().unbind(1)
            total = before + share
            seen = base if self.frozen else total - first
            is_right = (attended == seen) & (index + 1 == at)
        total = torch.where(is_right, total, total + _SUMS // 2)
        found = hidden_states(total, at, first, WIDTH, base)
        order = total.remainder(_SUMS), ids
        logits = -self.ranks[order].to(DTYPE) * self.gaps[order]
        rows = batch.selected_rows
        if rows is not None:
            logits, found = logits[rows], found[rows]
        axis: Axis = "bs" if rows is not None or batch.forward_mode.is_decode else "tokens"
        return StepOutputs(logits=(logits, axis), hidden_states=(found, axis))
