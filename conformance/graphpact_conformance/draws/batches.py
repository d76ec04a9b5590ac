"""Random batches of a lane: `draw` returns sequences of them, and `sequences` a strategy for property tests.

The batches depend only on the arguments: equal seeds give equal batches. They need only what a backend's
capabilities declare.

Does not: choose special batches, such as the largest; see `graphpact_conformance.draws.chosen_batches`.
"""

import random
from collections.abc import Callable

from hypothesis import strategies as st

from graphpact import ForwardMode
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.layout import lay_out, least_prefix, most_prefix, spread
from graphpact_conformance.draws.problems import Problem

REDRAWS = 20
"""How often a batch is drawn again if the runner declines it. After that the last one is kept."""


class Drawn(tuple["Problem", ...]):
    """A sequence of batches for one lane.

    The first four have names. In a lane with more than two shapes they are followed by one batch for each
    other shape, with padding rows if the shape can have any. In an idle lane there are four idle batches.
    """

    __slots__ = ()

    @property
    def exact(self) -> "Problem":
        """A batch that fills the largest shape."""
        return self[0]

    @property
    def small(self) -> "Problem":
        """A batch with padding rows in the smallest shape, if that shape can have any."""
        return self[1]

    @property
    def idle(self) -> "Problem":
        """A batch without requests, or one with padding rows if the runner declines idle batches."""
        return self[2]

    @property
    def padded(self) -> "Problem":
        """A batch with padding rows in the largest shape."""
        return self[3]


Declines = Callable[["Problem"], object]
"""Returns whether the runner declines a batch, that is, runs it eagerly although a graph could hold it."""


def draw(config: Config, count: int, base: int, declines: Declines = lambda _: False) -> list[Drawn]:
    """Return ``count`` sequences of batches for a lane.

    The sequences depend only on the arguments. Hypothesis is not used here, because it would also draw
    constants from the source of imported modules, and other values in other versions. A batch that the
    runner declines is drawn again, at most `REDRAWS` times.

    Args:
        config: Configuration of the lane.
        count: Number of sequences. A larger number adds sequences and does not change the first ones.
        base: A seed: equal seeds give equal sequences.
        declines: Returns whether the runner declines a batch.
    """
    rngs = [random.Random(f"{base}:{at}") for at in range(count)]  # noqa: S311  test data
    return [_drawn(rng, config, declines) for rng in rngs]


def sequences(config: Config) -> st.SearchStrategy[Drawn]:
    """Return a strategy of sequences for one lane, for property tests."""
    return st.randoms(use_true_random=False).map(lambda rng: _drawn(rng, config, lambda _: False))


def _drawn(rng: random.Random, config: Config, declines: Declines) -> Drawn:
    if config.case.mode is ForwardMode.IDLE:
        return Drawn([Problem(config.case, [], 0)] * 4)

    def problem(index: int, *, exact: bool) -> Problem:
        drawn = _problem(rng, config, index, exact=exact)
        for _ in range(REDRAWS):
            if not declines(drawn):
                break
            drawn = _problem(rng, config, index, exact=exact)
        return drawn

    most = len(config.shapes) - 1
    four = [
        problem(most, exact=True),
        problem(0, exact=False),
        Problem(config.case, [], rng.randint(0, 99)),
        problem(most, exact=False),
    ]
    if declines(four[2]):  # `ranks_agree` reports this if ranks gather
        four[2] = problem(most, exact=False)
    return Drawn([*four, *(problem(index, exact=False) for index in range(1, most))])


def _problem(rng: random.Random, config: Config, index: int, *, exact: bool) -> Problem:
    """Draw a batch whose smallest fitting shape is the one at ``index``.

    Args:
        rng: The random generator.
        config: Configuration of the lane.
        index: Index of the shape.
        exact: Whether the batch fills the shape. Otherwise it leaves padding rows if possible.
    """
    case = config.case
    counts = _counts(rng, config, index, exact=exact)
    prefixes = [_prefix(rng, config, count) for count in counts]
    parents = [[rng.randint(0, j - 1) if case.tree else j - 1 for j in range(1, count)] for count in counts]
    accepted = [rng.randint(0, count - 1) for count in counts]
    return lay_out(config, prefixes, parents, accepted, rng.randint(0, 999))


def _counts(rng: random.Random, config: Config, index: int, *, exact: bool) -> list[int]:
    """Draw the number of new tokens of each request, so that no smaller shape can hold the batch."""
    case = config.case
    shape = config.shapes[index]
    size = shape.batch_size, shape.num_tokens
    fewer = [
        s
        for s in config.shapes
        if s.batch_size <= size[0] and s.num_tokens <= size[1]
        if (s.batch_size, s.num_tokens) != size
    ]
    most = config.requests_of(shape)
    if case.tokens_per_request is not None:
        least = most if exact else (config.requests_of(fewer[-1]) if fewer else 0) + 1
        most = most - (not exact and least < most)
        return [case.tokens_per_request] * rng.randint(least, most)

    most = min(most, shape.num_tokens)  # some runners pad to more requests than a shape has tokens

    def least_tokens(bs: int) -> int:
        """Return the fewest tokens for which no smaller shape can hold ``bs`` requests."""
        return max([bs, *(s.num_tokens + 1 for s in fewer if s.batch_size >= bs)])

    sizes = [n for n in range(1, most + (most == 1)) if least_tokens(n) <= shape.num_tokens]
    bs = most if exact else rng.choice(sizes or [most])
    left, counts = shape.num_tokens - bs, [1] * bs
    for i in range(bs):
        least = min(least_tokens(bs) - bs, config.context - 1) if i == 0 else 0
        one = case.mode is ForwardMode.MIXED and i % 2 == 1
        more = 0 if one else rng.randint(least, max(least, left - (not exact)))
        more = min(more, config.context - 1)
        counts[i] += more
        left -= more
    if exact or sum(counts) < least_tokens(bs):
        spread(counts, left if exact else least_tokens(bs) - sum(counts), config.context)
    rng.shuffle(counts)
    return counts


def _prefix(rng: random.Random, config: Config, count: int) -> int:
    """Draw the number of cached keys, half of the time near the end of a page or a limit."""
    least, most = least_prefix(config.case, count), most_prefix(config, count)
    page_size = config.page_size
    edges = {least, least + 1, page_size - 1, page_size, page_size + 1, most - 1, most}
    near = rng.choice(sorted(n for n in edges if least <= n <= most))
    return rng.choice((rng.randint(least, most), near))
