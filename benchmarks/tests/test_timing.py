"""Ways take turns, and are timed only if all write the same tokens."""

import re
from collections.abc import Callable

import pytest

from graphpact_bench.timing import (
    Agreement,
    DifferentTokensError,
    Spread,
    Tokens,
    UnavailableWayError,
    Written,
    race,
    take_turns,
)

PROMPTS: Tokens = [[1, 2], [3, 4]]


class Counting:
    """A way that continues a prompt by counting on from its last token, and records its calls."""

    is_foreign = False

    def __init__(self, name: str, diary: list[str], rounds: int | None = None) -> None:
        self.name = name
        self.diary = diary
        self.rounds = rounds

    def write(self, prompts: Tokens, count: int) -> Written:
        """Count on, and say that every step took a second."""
        self.diary.append(self.name)
        tokens = [[prompt[-1] + 1 + i for i in range(count)] for prompt in prompts]
        return Written(tokens, first=0.5, steps=[1.0] * (count - 1))


class Wrong(Counting):
    """A way whose last token of the last prompt is another one from its ``since``-th call on."""

    def __init__(self, name: str, diary: list[str], since: int = 1) -> None:
        super().__init__(name, diary)
        self.since = since

    def write(self, prompts: Tokens, count: int) -> Written:
        """Write what `Counting` writes, but for one token."""
        written = super().write(prompts, count)
        if self.diary.count(self.name) >= self.since:
            written.tokens[-1][-1] = 99
        return written


class Broken(Counting):
    """A way that always fails."""

    def write(self, prompts: Tokens, count: int) -> Written:
        """Fail."""
        super().write(prompts, count)
        raise RuntimeError("no kernel for this")


def test_a_way_with_other_tokens_ends_the_run_before_anything_is_timed() -> None:
    """The error contains both rows and their names, and no way was called a second time."""
    diary: list[str] = []
    ways = [Counting("eager", diary), Wrong("odd", diary), Counting("late", diary)]
    with pytest.raises(DifferentTokensError, match=re.escape("row 1: 'odd' writes [5, 6, 99]")) as error:
        race(ways, PROMPTS, 3, rounds=2)
    assert "'eager' writes [5, 6, 7]" in error.value.message
    assert error.value.code == 1
    assert diary == ["eager", "odd"]


def test_tokens_are_compared_in_the_timed_rounds_too() -> None:
    """A way that changes its tokens in a later round ends the run."""
    diary: list[str] = []
    with pytest.raises(DifferentTokensError, match="'odd' writes"):
        race([Counting("eager", diary), Wrong("odd", diary, since=3)], PROMPTS, 3, rounds=5)
    assert diary == ["eager", "odd"] * 3


def test_a_way_with_fewer_prompts_is_not_the_same() -> None:
    """A way that leaves a prompt out is refused, and so is one that stops early."""
    agreement = Agreement(PROMPTS, [[5], [6]], "eager", is_tie=lambda *_: True)
    with pytest.raises(DifferentTokensError, match="odd continues 1 prompts, eager continues 2"):
        agreement.require("odd", [[5]])
    with pytest.raises(DifferentTokensError, match=r"'odd' writes \[\]"):
        agreement.require("odd", [[5], []])


def test_ways_take_turns_and_a_slow_one_has_fewer_rounds() -> None:
    """Every way is called once for the check, and then in turn."""
    diary: list[str] = []
    ways = [Counting("eager", diary), Counting("strict", diary, rounds=1), Counting("tape", diary)]
    raced = race(ways, PROMPTS, 3, rounds=3)
    warm_up = ["eager", "strict", "tape"]
    assert diary == [*warm_up, *warm_up, *["eager", "tape"] * 2]
    assert {name: raced.steps(name) for name in raced.written} == {
        "eager": [1.0] * 6,
        "strict": [1.0] * 2,
        "tape": [1.0] * 6,
    }


def test_other_software_that_fails_is_left_out_with_its_error() -> None:
    """The failure of a foreign way is a reason; that of the engine ends the run."""
    diary: list[str] = []
    broken = Broken("other", diary)
    with pytest.raises(RuntimeError, match="no kernel"):
        race([Counting("eager", diary), broken], PROMPTS, 3, rounds=1)
    broken.is_foreign = True
    raced = race([Counting("eager", diary), broken], PROMPTS, 3, rounds=1)
    assert raced.failed == {"other": "RuntimeError: no kernel for this"}
    assert [*raced.written] == ["eager"]


def test_other_software_that_fails_while_it_is_timed_is_left_out() -> None:
    """Its earlier rounds are dropped with it, and the others go on."""
    diary: list[str] = []

    class Tiring(Counting):
        """A way that fails in its third call."""

        is_foreign = True

        def write(self, prompts: Tokens, count: int) -> Written:
            """Count on, twice."""
            written = super().write(prompts, count)
            if diary.count(self.name) == 3:
                raise UnavailableWayError("its process ended")
            return written

    raced = race([Counting("eager", diary), Tiring("other", diary)], PROMPTS, 3, rounds=3)
    assert raced.failed == {"other": "its process ended"}
    assert [*raced.written] == ["eager"]
    assert diary == ["eager", "other"] * 3 + ["eager"]


def test_a_tie_is_counted_and_judged_by_what_was_written_before_it() -> None:
    """The judge is asked once about the first difference of a prompt; if it is no tie, the run ends."""
    asked = []

    def judge(tokens: list[int], one: int, other: int) -> bool:
        asked.append((tokens, one, other))
        return other == 99

    agreement = Agreement(PROMPTS, [[3, 4], [5, 6]], "eager", judge)
    for _ in range(2):
        assert agreement.require("tape", [[3, 4], [5, 99]]) == 1
    assert asked == [([3, 4, 5], 6, 99)]
    with pytest.raises(DifferentTokensError):
        agreement.require("tape", [[3, 4], [98, 6]])


def test_parts_are_called_in_turn() -> None:
    """A turn calls every part ``calls`` times, one part after the other."""
    diary: list[str] = []
    parts: dict[str, Callable[[], object]] = {n: lambda n=n: diary.append(n) for n in ("a", "b")}  # type: ignore[misc]
    taken = take_turns(parts, turns=2, calls=3)
    assert diary == ["a", "a", "a", "b", "b", "b"] * 2
    assert {name: len(times) for name, times in taken.items()} == {"a": 2, "b": 2}


def test_a_spread_is_the_median_between_the_quartiles_and_the_best() -> None:
    """The quartiles are those of the values themselves; one value is its own spread."""
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0, best=1.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert Spread(1.0, 0.5, 2.0, 0.25).times(1e3) == Spread(1000.0, 500.0, 2000.0, 250.0)


def test_a_difference_is_taken_turn_by_turn_and_of_the_best_alone() -> None:
    """One slow turn of both sides does not change the median; the best are compared with each other."""
    assert Spread.of_differences([3.0, 103.0, 4.0], [1.0, 100.0, 2.0]) == Spread(2.0, 2.0, 2.5, 2.0)
    assert Spread.of_differences([3.0, 9.0], [5.0, 1.0]).best == 2.0
