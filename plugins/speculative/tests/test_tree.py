"""The choice of drafts: a beam search in tensors equals one in plain Python, ties included."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.attention import DraftLimits
from graphpact.errors import EngineError
from graphpact_speculative.tree import DraftTree, best, best_tokens
from rigs.draft_model import Node, beam_search

LOGITS = (0.0, 0.0, 1.0, 2.5, -1.0, 200.0, float("-inf"))
"""Logits that are often equal, one that excludes all others, and one that is never chosen."""


@st.composite
def _drafts(draw: st.DrawFn) -> tuple[DraftLimits, torch.Tensor]:
    """Return the limits of a draft, and ``[num_steps, bs, topk, vocab_size]`` logits; one row at level 0."""
    topk, num_steps, bs = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    vocab = draw(st.integers(topk, 6))
    candidates = topk + (num_steps - 1) * topk**2
    draft = DraftLimits(num_steps, topk, 1 + draw(st.integers(1, candidates)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    pick = torch.randint(len(LOGITS), (num_steps, bs, topk, vocab), generator=generator)
    logits = torch.tensor(LOGITS)[pick]
    logits[..., draw(st.integers(0, vocab - 1))] = 0.0  # at least one token is possible
    return draft, logits


@settings(derandomize=True, max_examples=300)
@given(_drafts())
def test_the_drafts_are_those_of_a_beam_search(case: tuple[DraftLimits, torch.Tensor]) -> None:
    """Drafts and parents equal those of a beam search in Python; every parent comes before its child."""
    draft, logits = case
    num_steps, bs, topk, vocab = logits.shape
    first, scores = best_tokens(logits[0, :, 0], topk)
    tree = DraftTree(first, scores)
    for level in range(1, num_steps):
        rows = tree.grow(logits[level].view(bs * topk, vocab))
        assert torch.equal(rows.div(topk, rounding_mode="floor"), torch.arange(bs).repeat_interleave(topk))
    tokens, parents = tree.drafts(draft.num_draft_tokens - 1)
    chances = torch.log_softmax(logits, -1)
    for i in range(bs):

        def expand(node: Node, row: int, level: int, i: int = i) -> tuple[list[float], Any]:
            return chances[level, i, row].tolist(), None

        begin = list(zip(first[i].tolist(), scores[i].tolist(), strict=True))
        expected = beam_search(begin, expand, None, draft)
        assert (tokens[i].tolist(), parents[i].tolist()) == expected[:2]
    assert bool((parents <= torch.arange(parents.shape[1])).all())


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=20, max_size=20), max_size=3))
def test_of_equal_scores_the_first_is_the_best(rows: list[list[float]]) -> None:
    """Equal scores are returned in the order of their indices, for one or several results."""
    scores = torch.tensor(rows).view(len(rows), 20)
    for count in (1, 2, 20):
        values, indices = best(scores, count)
        expected = [sorted(range(20), key=lambda at: -row[at])[:count] for row in rows]
        assert indices.tolist() == expected
        assert torch.equal(values, scores.gather(1, indices))


def test_indices_are_valid_whatever_the_scores_are() -> None:
    """NaN scores, as padding rows may have, still give tokens and parents within their ranges."""
    nan = torch.full((2, 5), float("nan"))
    tree = DraftTree(*best_tokens(nan, 2))
    assert tree.grow(nan.repeat(2, 1)).tolist() == [0, 0, 2, 2]
    tokens, parents = tree.drafts(4)
    assert int(tokens.max()) < 5
    assert 0 <= int(parents.min()) <= int(parents.max()) <= 4


@pytest.mark.parametrize("topk", [1, 3])
def test_no_requests_are_no_drafts(topk: int) -> None:
    """An idle rank's batch has no requests: its drafts have no rows."""
    tree = DraftTree(*best_tokens(torch.zeros(0, 5), topk))
    assert tree.grow(torch.zeros(0, 5)).shape == (0,)
    assert [t.shape for t in tree.drafts(2)] == [(0, 2)] * 2


def test_more_branches_than_tokens_are_refused() -> None:
    """A vocabulary that has fewer tokens than branches is refused, and the error names both numbers."""
    with pytest.raises(EngineError, match=r"topk = 4, but .* vocabulary of 3 tokens"):
        best_tokens(torch.zeros(2, 3), 4)
