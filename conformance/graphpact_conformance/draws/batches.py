"""The batches of a lane: random sequences of them (`draw`), and chosen ones, such as the largest (`corner`).

The batches depend only on the arguments: equal seeds give equal batches. They need only what a backend's
capabilities declare.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from hypothesis import strategies as st

from graphpact import ForwardMode
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.lanes import TILES, VOCAB, Config
from graphpact_conformance.draws.problems import Problem, ProblemRequest, Token

TIERS = 8
"""Number of parts into which the range of lengths is divided to search for changes of the graph."""
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
    return _lay_out(config, prefixes, parents, accepted, rng.randint(0, 999))


def _lay_out(
    config: Config,
    prefixes: Sequence[int],
    parents: Sequence[Sequence[int]],
    accepted: Sequence[int],
    seed: int,
) -> Problem:
    """Return a batch whose requests get request rows and pages in random order.

    Args:
        config: Configuration of the lane.
        prefixes: Number of cached keys of each request.
        parents: For each request, the parents of its new tokens except the first.
        accepted: Accepted drafts of each request.
        seed: Seed of rows, pages and tokens.
    """
    case = config.case
    rng = random.Random(seed)  # noqa: S311  test data
    rows = rng.sample(range(1, config.num_rows), len(prefixes))
    pages = rng.sample(config.pages, len(config.pages))
    drafts, steps = case.mode is ForwardMode.DRAFT_DECODE, case.num_steps
    requests = []
    for i, prefix in enumerate(prefixes):
        count = len(parents[i]) + 1
        in_table = count if not drafts else steps if count == 1 else 0
        in_table = 0 if case.frozen else in_table
        beyond = count * steps if drafts and count > 1 else 0
        length = prefix + in_table
        own = -(-(length + beyond) // config.page_size)
        mine, pages = pages[:own], pages[own:]
        owned = [p * config.page_size + i for p in mine for i in range(config.page_size)]
        table, free = owned[:length], owned[length:]
        if beyond:
            flat = rng.sample(free, beyond)
            slots = [flat[i * steps : (i + 1) * steps] for i in range(count)]
        elif drafts:
            slots = [table[prefix:]]
        elif case.frozen:
            slots = [[]] * count
        else:
            slots = [[slot] for slot in table[prefix:]]
        tokens: list[Token] = []
        for j in range(count):
            parent = None if drafts or case.frozen or j == 0 else parents[i][j - 1]
            depth = 0 if parent is None else tokens[parent].depth + 1
            token_id = tokens[0].token_id if case.frozen and tokens else rng.randrange(VOCAB)
            tokens.append(Token(token_id, slots[j], parent, depth))
        requests.append(ProblemRequest(rows[i], table[:prefix], tokens, table, accepted[i]))
    return Problem(case, requests, rng.randrange(1000))


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
    if case.width is not None:
        least = most if exact else (config.requests_of(fewer[-1]) if fewer else 0) + 1
        most = most - (not exact and least < most)
        return [case.width] * rng.randint(least, most)

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
        _spread(counts, left if exact else least_tokens(bs) - sum(counts), config.context)
    rng.shuffle(counts)
    return counts


def _spread(counts: list[int], more: int, most: int) -> None:
    """Add ``more`` tokens to the requests in order, up to ``most`` tokens per request."""
    for i, count in enumerate(counts):
        own = min(more, most - count)
        counts[i] += own
        more -= own


def _prefix(rng: random.Random, config: Config, count: int) -> int:
    """Draw the number of cached keys, half of the time near the end of a page or a limit."""
    least, most = least_prefix(config.case, count), _most_prefix(config, count)
    page_size = config.page_size
    edges = {least, least + 1, page_size - 1, page_size, page_size + 1, most - 1, most}
    near = rng.choice(sorted(n for n in edges if least <= n <= most))
    return rng.choice((rng.randint(least, most), near))


def least_prefix(case: Case, count: int) -> int:
    """Return the fewest cached keys of a request with ``count`` new tokens."""
    drafted = case.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) or case.frozen
    return 1 if drafted or (case.mode is ForwardMode.MIXED and count == 1) else 0


def _most_prefix(config: Config, count: int, share: int = 1) -> int:
    """Return the most cached keys of a request with ``count`` new tokens, for limits divided by ``share``."""
    case = config.case
    most = min(config.context // share - max(count, case.num_steps), config.longest // share)
    return max(most, least_prefix(case, count))


@lru_cache  # one object for all experiments, so that the oracle computes its answer once
def corner(config: Config) -> Problem:
    """Return the largest batch of the configuration: the longest requests that fill the largest shape."""
    return _largest(config, config.most_requests)


def of_size(config: Config, num_requests: int, chunk: int = 1) -> Problem:
    """Return a batch of short requests, in ragged modes with ``chunk`` new tokens each."""
    width = config.case.width or chunk
    prefix = min(1, _most_prefix(config, width))
    return _lay_out(config, [prefix] * num_requests, [range(width - 1)] * num_requests, [0] * num_requests, 0)


def half_size_batch(config: Config) -> Problem:
    """Return a batch of half the largest size: half as many requests, half as long."""
    return _largest(config, max(config.most_requests // 2, 1), share=2)


def _largest(config: Config, num_requests: int, share: int = 1) -> Problem:
    case, shape = config.case, config.shapes[-1]
    if case.mode is ForwardMode.IDLE:
        return Problem(case, [], 0)
    counts = [case.width or 1] * num_requests
    if case.width is None:
        tokens = shape.num_tokens * num_requests // shape.batch_size
        _spread(counts, tokens - sum(counts), config.context // share)
    prefixes = [_most_prefix(config, count, share) for count in counts]
    parents = [range(count - 1) for count in counts]
    return _lay_out(config, prefixes, parents, [0] * len(counts), 0)


def edges(config: Config) -> list[Problem]:
    """Return batches of requests at boundaries of pages, windows and tiles, and other special batches.

    At a boundary, the length with or without the new tokens is that of one full page, two pages, a window or
    a tile of kernels, or one more. The other batches have requests of equal lengths, requests without cached
    keys, or equal totals. The requests of equal lengths share their first page, like prompts with a common
    prefix in an engine.
    """
    case, most = config.case, config.most_requests
    if case.mode is ForwardMode.IDLE:
        return []
    width = case.width or 2
    least, longest = max(least_prefix(case, 1), least_prefix(case, width)), _most_prefix(config, width)
    windows = {layer.sliding_window or 1 for layer in config.layers}
    ends = {config.page_size, 2 * config.page_size, *windows, *TILES}
    near = {end + more for end in ends for more in (-width, 1 - width, -1, 0)}
    prefixes = sorted(prefix for prefix in near if least <= prefix <= longest) or [least]
    batches = [prefixes[at : at + most] for at in range(0, len(prefixes), most)]

    def parents(at: int) -> range:
        """Return parents of a chain of drafts, or of two new tokens; one token for odd requests if mixed."""
        return range(0 if case.mode is ForwardMode.MIXED and at % 2 else width - 1)

    def laid_out(prefixes: Sequence[int], seed: int) -> Problem:
        each = [parents(at) for at in range(len(prefixes))]
        return _lay_out(config, prefixes, each, [0] * len(prefixes), seed)

    found = [laid_out(batch, number) for number, batch in enumerate(batches)]
    equal = laid_out([min(config.page_size + 2, longest)] * most, len(batches))
    return [*found, _with_one_beginning(config, equal), *_fresh(config), *_of_one_total(config)]


def _of_one_total(config: Config) -> list[Problem]:
    """Return batches that are equal in number of requests, total number of keys and longest request.

    The lengths are in one order, in reverse, and different. A cached plan is stale if its key contains only
    these numbers.
    """
    case, most = config.case, config.most_requests
    width = case.width or 1
    least, longest = least_prefix(case, width), _most_prefix(config, width)
    lengths = [least + (longest - least) * (at + 1) // (most + 1) for at in range(most)]
    differ = most > 2 and lengths[1] > lengths[0] + 1
    others = [lengths[0] + 1, lengths[1] - 1, *lengths[2:]] if differ else lengths
    orders = {tuple(each): None for each in (lengths, lengths[::-1], others)}
    return [_lay_out(config, order, [range(width - 1)] * most, [0] * most, 0) for order in orders]


def _fresh(config: Config) -> list[Problem]:
    """Return batches without cached keys: one of a single request, one that fills the largest shape.

    Most prefill batches of an engine have no cached keys. The list is empty in modes whose requests always
    have some.
    """
    case = config.case
    width, most = case.width, config.most_requests
    if least_prefix(case, width or 1):
        return []
    counts = [width or 1 + at % 3 for at in range(most)]
    several = _lay_out(config, [0] * most, [range(count - 1) for count in counts], [0] * most, 1)
    alone = _lay_out(config, [0], [range((width or 5) - 1)], [0], 2)
    return [alone, several]


def at_tiers(config: Config, choice: Callable[[Problem], object]) -> list[Problem]:
    """Return batches of one request on both sides of each length at which a runner's choice of graph changes.

    The choices are compared at the ends of `TIERS` parts of the range, and changes are found by bisection.

    Args:
        config: Configuration of the lane.
        choice: Returns the choice for a batch.
    """
    case = config.case
    if case.mode is ForwardMode.IDLE:
        return []
    width = case.width or 1
    least, longest = least_prefix(case, width), _most_prefix(config.unbounded, width)
    asked: dict[int, tuple[Problem, object]] = {}

    def at(prefix: int) -> tuple[Problem, object]:
        if prefix not in asked:
            problem = _lay_out(config, [prefix], [range(width - 1)], [0], 0)
            asked[prefix] = problem, choice(problem)
        return asked[prefix]

    def change(low: int, high: int) -> set[int]:
        if at(low)[1] == at(high)[1]:
            return set()
        if high - low == 1:
            return {low, high}
        middle = (low + high) // 2
        return change(low, middle) or change(middle, high)

    grid = sorted({least + (longest - least) * part // TIERS for part in range(TIERS + 1)})
    found = {prefix for ends in itertools.pairwise(grid) for prefix in change(*ends)}
    return [at(prefix)[0] for prefix in sorted(found)]


def _with_one_beginning(config: Config, problem: Problem) -> Problem:
    """Return a batch whose requests share the full pages of cached keys of the first request."""
    whole = len(problem.requests[0].cached) // config.page_size * config.page_size
    shared = problem.requests[0].cached[:whole]
    requests = [
        replace(r, cached=[*shared, *r.cached[whole:]], table=[*shared, *r.table[whole:]])
        for r in problem.requests
    ]
    return replace(problem, requests=requests)


def neighbours(config: Config, problem: Problem) -> list[Problem]:
    """Return batches that differ from ``problem`` in one respect: lengths, pages and rows, or order.

    If the key of a cached plan leaves out this respect, the plan is stale after such a batch.
    """
    if not problem.requests:
        return []
    size, case = config.page_size, config.case
    most = [_most_prefix(config, len(r.tokens)) for r in problem.requests]
    prefixes = [len(r.cached) for r in problem.requests]
    shorter = [
        p - 1 if p > 1 and (p - 1) // size == p // size else min(p + 1, m)
        for p, m in zip(prefixes, most, strict=True)
    ]
    parents = [[t.parent or 0 for t in r.tokens[1:]] for r in problem.requests]
    accepted = [r.accepted for r in problem.requests]
    return [
        _lay_out(config, shorter, parents, accepted, problem.seed),
        _lay_out(config, prefixes, parents, accepted, problem.seed + 1),
        Problem(case, problem.requests[::-1], problem.seed + 2),
    ]


@lru_cache
def assorted(config: Config) -> Problem:
    """Return a batch of requests of different lengths that leaves a padding row.

    All requests are shorter than the longest, so that a plan of the largest batch covers their work.
    """
    whole = corner(config)
    requests = whole.requests[:-1] or whole.requests
    share = [(i + 1) / (len(requests) + 1) for i in range(len(requests))]
    shorter = [
        shortened(r, min(max(int(len(r.cached) * part), 1), len(r.cached)))
        for r, part in zip(requests, share, strict=True)
    ]
    return Problem(config.case, shorter, whole.seed)


def short_and_long(config: Config) -> Problem:
    """Return the largest batch, but with its first request as short as possible."""
    whole = corner(config)
    first = [shortened(r, min(least_prefix(config.case, 1), len(r.cached))) for r in whole.requests[:1]]
    return replace(whole, requests=[*first, *whole.requests[1:]])


def shortened(request: ProblemRequest, length: int) -> ProblemRequest:
    """Return a copy of a request with only ``length`` cached keys; its new tokens move to earlier slots."""
    owned, gone = request.table, len(request.cached) - length
    tokens = [
        replace(t, slots=[owned[owned.index(s) - gone] if s in owned else s for s in t.slots])
        for t in request.tokens
    ]
    return replace(request, cached=owned[:length], tokens=tokens, table=owned[: len(owned) - gone])


def steady(config: Config) -> tuple[Problem, list[Problem]]:
    """Return a batch in the middle of decoding, and two possible previous batches, one key shorter.

    The batch has no padding rows, and no request begins a page. The first previous batch has the same
    requests one step before, the second has other requests of these lengths. A backend that keeps data as
    long as lengths grow by one has stale data after the second.
    """
    bs, width = config.most_requests, config.case.width or 1
    most = _most_prefix(config, width)
    middle = max(min(min(config.page_size, config.context) // 2, config.longest - bs + 1, most), 2)
    lengths = max(most - middle + 1, 1)
    prefixes = [middle + i % lengths for i in range(bs)]
    parents, accepted = [range(width - 1)] * bs, [0] * bs
    one_less = [prefix - 1 for prefix in prefixes]
    before = [_lay_out(config, one_less, parents, accepted, seed) for seed in (0, 1)]
    return _lay_out(config, prefixes, parents, accepted, 0), before
