"""`RankExchange`: every rank gets the numbers of all, and different actions are one error for all."""

from collections.abc import Callable
from typing import Any

import pytest

from graphpact.parallel import ranks_named
from graphpact.ranks.exchange import checksum, said_by

STEP = checksum("a step")


@pytest.fixture(scope="module")
def found(start_ranks: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return what both ranks got from their exchanges, by case."""
    ranks = start_ranks("exchange_rank.py")
    return [ranks.printed_by(rank)[0] for rank in range(2)]


def test_every_rank_gets_the_numbers_of_all(found: list[dict[str, Any]]) -> None:
    """An exchange returns the numbers of each rank, in the order of the ranks, the same on both."""
    expected = [
        [[10, 0, 0, 1, STEP, 2**32 - 1, epoch], [11, 1, 5, 0, STEP, 2**32 - 2, epoch]] for epoch in range(2)
    ]
    assert [rank["numbers"] for rank in found] == [expected, expected]


def test_numbers_that_are_not_given_are_those_of_a_rank_without_work(found: list[dict[str, Any]]) -> None:
    """Without arguments a rank has no tokens and no requests, and can replay any graph."""
    assert [rank["defaults"] for rank in found] == [[[0, 0, 0, 1, STEP, 0, 2]] * 2] * 2


def test_objects_of_all_ranks_are_in_their_order(found: list[dict[str, Any]]) -> None:
    """`objects` returns what every rank gave, the same on both."""
    assert [rank["objects"] for rank in found] == [[{"rank": 0}, {"rank": 1}]] * 2


def test_different_actions_are_the_same_error_on_both_ranks(found: list[dict[str, Any]]) -> None:
    """Both ranks raise one text, which names what each was about to do, and where."""
    text, other = (rank["actions"] for rank in found)
    assert text == other
    assert "rank 0: a capture, at line 0, exchange 3; rank 1: a decode, at line 1, exchange 3" in text
    assert "help: all ranks of a replica have to take the same steps" in text


def test_ranks_can_go_on_after_an_error(found: list[dict[str, Any]]) -> None:
    """An error leaves both ranks at the same exchange: the next one is as any other."""
    for rank in found:
        assert rank["after an error"] == [[of, 0, 0, 1, STEP, 0, 4] for of in range(2)]


def test_a_rank_that_made_one_exchange_more_is_named(found: list[dict[str, Any]]) -> None:
    """A rank that takes a step which the other one does not take is named, or one that counts differently."""
    more, count = ({rank[case] for rank in found} for case in ("one more", "another count"))
    assert len(more) == len(count) == 1
    assert "rank 0: the end, exchange 6; rank 1: a step, exchange 6" in more.pop()
    assert "rank 0: a step, exchange 0; rank 1: a step, exchange 7" in count.pop()


def test_an_exchange_works_inside_and_outside_of_inference_mode(found: list[dict[str, Any]]) -> None:
    """An exchange may be made and used inside of inference mode, or outside, in any combination."""
    assert [rank["inference"] for rank in found] == [[[0, 1]] * 4] * 2


def test_ranks_that_say_the_same_are_named_together() -> None:
    """Texts are told once, with their ranks; the order is that of the first rank with each."""
    assert said_by([2, 3, 5], ["eager", "replay", "eager"]) == "ranks 2, 5: eager; rank 3: replay"
    assert ranks_named([4]) == "rank 4"


def test_a_checksum_of_nothing_is_zero() -> None:
    """An empty text has checksum 0, and texts that differ in a letter have different ones."""
    assert checksum("") == 0
    assert checksum("decode") not in {0, checksum("Decode")}
