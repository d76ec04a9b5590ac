"""`scenes`: the batches of ranks that step together, one batch for each group of ranks with its own requests.

    equal loads, exact and padded; uneven loads; one idle rank; one load above the largest shape, so that all
    run eagerly; fewer requests after more in one shape; the same batches several times

Does not: step them.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphpact_conformance.draws.lanes import VOCAB, Config
from graphpact_conformance.draws.layout import lay_out, least_prefix, most_prefix, spread
from graphpact_conformance.draws.problems import Problem

PADDING_ID = VOCAB - 1
"""A token id that no live request has in its first step, so that only padding rows read its weights."""


@dataclass(frozen=True)
class Scene:
    """Batches that ranks step together.

    Args:
        about: What is special about them.
        problems: A batch for each group of ranks.
        repeats: How often they are stepped.
        fits: Whether a captured shape holds each of them.
    """

    about: str
    problems: tuple[Problem, ...]
    repeats: int = 1
    fits: bool = True

    @property
    def words(self) -> str:
        """The batches in words."""
        return " | ".join(problem.words for problem in self.problems)


def scenes(config: Config, groups: int) -> list[Scene]:
    """Return the scenes of a lane in their order.

    Args:
        config: The configuration of the lane. A step may have one request, or one token, beyond its shapes.
        groups: Number of groups of ranks with their own requests.
    """
    found = []
    for number, (about, sizes, repeats) in enumerate(_loads(config)):
        loads = [*itertools.islice(sizes, groups)]
        if any(loads):
            problems = tuple(_problem(config, load, 100 * number + at) for at, load in enumerate(loads))
            fits = max(loads) <= max(_sizes(config))
            found.append(Scene(about, problems, repeats, fits=fits))
    return found


def _loads(config: Config) -> Iterator[tuple[str, Iterator[int], int]]:
    """Yield for each scene its description, the load of each group, and how often it is stepped.

    A load is a number of requests, in ragged modes of tokens.
    """
    small, large = min(_sizes(config)), max(_sizes(config))
    less = max(small - 1, 1)
    more = min(small + 1, large)
    others = (1, 0, less)

    def then(*first: int) -> Iterator[int]:
        return itertools.chain(first, itertools.cycle(others))

    yield "equal loads that fill the largest shape", itertools.repeat(large), 1
    yield "uneven loads", then(large, 1), 1
    yield "one idle rank", then(max(large - 1, 1), 0), 1
    yield "equal loads in the smallest shape", itertools.repeat(less), 1
    yield "more load on the second rank, in a larger shape", then(less, large), 1
    yield "less load than before in the same shape", then(1, more), 1
    yield "one load above the largest shape, so that all ranks run eagerly", then(large + 1, 1), 1
    yield "replays after an eager step, the same three times", then(1, max(large - 1, 1)), 3
    yield "an idle first rank", then(0, more), 1


def _sizes(config: Config) -> list[int]:
    """Return the load that fills each shape."""
    ragged = config.case.tokens_per_request is None
    return [s.num_tokens if ragged else config.requests_of(s) for s in config.shapes]


def _problem(config: Config, load: int, seed: int) -> Problem:
    """Return a batch of requests with lengths of their own; an idle one for no load."""
    case = config.case
    if not load:
        return Problem(case, [], seed)
    rng = random.Random(f"ranks:{seed}")  # noqa: S311  test data
    counts = _counts(config, load)
    prefixes = [_prefix(rng, config, count) for count in counts]
    parents: Sequence[Sequence[int]] = [
        [rng.randint(0, at) if case.tree else at for at in range(count - 1)] for count in counts
    ]
    accepted = [rng.randrange(count) for count in counts]
    return _without_padding_id(lay_out(config, prefixes, parents, accepted, seed))


def _counts(config: Config, load: int) -> list[int]:
    """Return the new tokens of each request."""
    width = config.case.tokens_per_request
    if width is not None:
        return [width] * load
    holds = [shape for shape in config.shapes if shape.num_tokens >= load] or [config.shapes[-1]]
    counts = [1] * min(config.requests_of(holds[0]), load)
    spread(counts, load - len(counts), -(-load // len(counts)))
    return counts


def _prefix(rng: random.Random, config: Config, count: int) -> int:
    least = least_prefix(config.case, count)
    return rng.randint(least, max(most_prefix(config, count), least))


def _without_padding_id(problem: Problem) -> Problem:
    """Return a batch without tokens of `PADDING_ID`."""
    requests = [
        replace(request, tokens=[replace(t, token_id=t.token_id % PADDING_ID) for t in request.tokens])
        for request in problem.requests
    ]
    return replace(problem, requests=requests)
