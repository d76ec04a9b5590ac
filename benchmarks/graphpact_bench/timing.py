"""Interleaving, median and quartiles, and the check that everything compared writes the same tokens.

The ways take turns in one process, so that a slow moment of the machine affects all of them. The tokens of
each way are compared before it is timed; this run is also its warm-up.

Does not: know what it times.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from graphpact.errors import GraphpactError

Tokens = list[list[int]]
"""The tokens of each prompt."""


class DifferentResultsError(GraphpactError):
    """What is compared gives different results; nothing was timed."""

    code = 1


class DifferentTokensError(DifferentResultsError):
    """Two ways write different tokens for one prompt."""


class UnavailableWayError(GraphpactError):
    """A way cannot run here; the message is the reason, which the report repeats."""


class Spread(NamedTuple):
    """Median, quartiles and the best of some times.

    Args:
        median: The median.
        low: The first quartile.
        high: The third quartile.
        best: The smallest time, which other work on the machine changes least.
    """

    median: float
    low: float
    high: float
    best: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of ``values``, of which there is at least one."""
        if len(values) == 1:
            return cls(*(values[0],) * 4)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, min(values))

    @classmethod
    def of_differences(cls, values: Sequence[float], others: Sequence[float]) -> "Spread":
        """Return the spread of ``values`` less ``others``, turn by turn; the best less the best."""
        pairs = zip(values, others, strict=True)
        spread = cls.of([value - other for value, other in pairs])
        return spread._replace(best=min(values) - min(others))

    def times(self, factor: float) -> "Spread":
        """Return the spread in another unit."""
        return Spread(*(value * factor for value in self))


def take_turns(
    parts: Mapping[str, Callable[[], object]], *, turns: int, calls: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of one call of each part, per turn.

    Args:
        parts: What to call, by name. In each turn every part is called, in this order.
        turns: The number of turns.
        calls: Calls of a part in one turn, for parts of a few microseconds.
    """
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns):
        for name, part in parts.items():
            start = time.perf_counter()
            for _ in range(calls):
                part()
            taken[name].append((time.perf_counter() - start) / calls)
    return taken


@dataclass
class Written:
    """What a way wrote for some prompts.

    Args:
        tokens: The new tokens of each prompt.
        first: Seconds until every prompt has its first token.
        steps: Seconds of each decode step after it.
    """

    tokens: Tokens
    first: float
    steps: list[float] = field(default_factory=list)


class TokenWriter(Protocol):
    """One way to continue prompts greedily.

    Attributes:
        name: Its name in the table.
        rounds: Maximum number of timed rounds; None for no limit.
        is_foreign: Whether it is other software, whose failure is a reason to skip it.
    """

    name: str
    rounds: int | None
    is_foreign: bool

    def write(self, prompts: Tokens, count: int) -> Written:
        """Continue every prompt by ``count`` tokens."""
        ...


@dataclass
class Race:
    """What `race` measured.

    Args:
        written: The timed rounds of each way, by name.
        failed: Why a way of other software could not run, by name.
        ties: How many prompts a way continued differently after a tie, by name; see `Agreement`.
    """

    written: dict[str, list[Written]]
    failed: dict[str, str]
    ties: dict[str, int]

    def steps(self, name: str) -> list[float]:
        """Return the seconds of every decode step of a way."""
        return [seconds for one in self.written[name] for seconds in one.steps]


class Agreement:
    """The check that every way writes what the first wrote.

    Args:
        prompts: The prompts.
        expected: What the first way wrote.
        reference: The name of the first way.
        is_tie: ``(tokens, one, other) -> whether``: two tokens after ``tokens`` are as good as equal in the
            dtype of the model. None in float32, where every difference is a fault.
    """

    def __init__(
        self,
        prompts: Tokens,
        expected: Tokens,
        reference: str,
        is_tie: Callable[[list[int], int, int], bool] | None = None,
    ) -> None:
        self.prompts = prompts
        self.expected = expected
        self.reference = reference
        self.is_tie = is_tie
        self._judged: dict[tuple[int, int, int], bool] = {}

    def require(self, name: str, found: Tokens) -> int:
        """Return how many prompts way ``name`` continued differently after a tie.

        Raises:
            DifferentTokensError: It wrote something else; the message has both rows.
        """
        if len(found) != len(self.expected):
            raise DifferentTokensError(
                f"{name} continues {len(found)} prompts, {self.reference} continues {len(self.expected)}"
            )
        ties = 0
        for row, (theirs, ours) in enumerate(zip(self.expected, found, strict=True)):
            if theirs != ours:
                if not self._is_tie(row, theirs, ours):
                    raise DifferentTokensError(
                        f"batch {len(found)}, row {row}: {name!r} writes {ours}, {self.reference!r} writes"
                        f" {theirs}",
                        hint="one of the two is wrong: nothing was timed",
                    )
                ties += 1
        return ties

    def _is_tie(self, row: int, theirs: list[int], ours: list[int]) -> bool:
        """Return whether the first difference of a row is between tokens that are as good as equal."""
        if self.is_tie is None or len(theirs) != len(ours):
            return False
        at = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        key = row, at, ours[at]
        if key not in self._judged:
            before = self.prompts[row] + theirs[:at]
            self._judged[key] = self.is_tie(before, theirs[at], ours[at])
        return self._judged[key]


def race(
    ways: Sequence[TokenWriter],
    prompts: Tokens,
    count: int,
    rounds: int,
    *,
    is_tie: Callable[[list[int], int, int], bool] | None = None,
) -> Race:
    """Let every way continue the prompts: once for the check and the warm-up, and then timed, in turns.

    Args:
        ways: The first is the one that the others' tokens are compared with.
        prompts: The prompts.
        count: Tokens to generate for each.
        rounds: Timed rounds of each way.
        is_tie: See `Agreement`.

    Raises:
        DifferentTokensError: A way writes other tokens than the first, before or while it is timed.
    """
    agreement = Agreement(prompts, ways[0].write(prompts, count).tokens, ways[0].name, is_tie)
    result = Race({ways[0].name: []}, {}, {ways[0].name: 0})
    for way in ways[1:]:
        written = _write(way, prompts, count, result)
        if written is None:
            continue
        result.ties[way.name] = agreement.require(way.name, written.tokens)
        result.written[way.name] = []
    running = [way for way in ways if way.name in result.written]
    for turn in range(rounds):
        for way in running:
            if way.name in result.failed or not (way.rounds is None or turn < way.rounds):
                continue
            written = _write(way, prompts, count, result)
            if written is not None:
                agreement.require(way.name, written.tokens)
                result.written[way.name].append(written)
    return result


def _write(way: TokenWriter, prompts: Tokens, count: int, result: Race) -> Written | None:
    """Return what a way writes; None if it is other software and failed: the reason is in ``result``."""
    try:
        return way.write(prompts, count)
    except Exception as error:
        if not way.is_foreign:
            raise
        told = error.message if isinstance(error, UnavailableWayError) else f"{type(error).__name__}: {error}"
        result.failed[way.name] = told
        result.written.pop(way.name, None)
        return None
