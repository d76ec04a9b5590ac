"""Batches chosen for a lane: the largest (`corner`), those at boundaries (`edges`), and variations of others.

Each depends only on the configuration of the lane. Like random batches, they need only what a backend's
capabilities declare.

Does not: draw random batches; see `graphpact_conformance.draws.batches`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from graphpact import ForwardMode
from graphpact_conformance.draws.cases import DRAFT_WIDTH
from graphpact_conformance.draws.lanes import TILES, Config
from graphpact_conformance.draws.layout import lay_out, least_prefix, most_prefix, spread
from graphpact_conformance.draws.problems import Problem, ProblemRequest

TIERS = 8
"""Number of parts into which the range of lengths is divided to search for changes of the graph."""


@lru_cache  # one object for all experiments, so that the oracle computes its answer once
def corner(config: Config) -> Problem:
    """Return the largest batch of the configuration: the longest requests that fill the largest shape."""
    return _largest(config, config.most_requests)


def of_size(config: Config, num_requests: int, chunk: int = 1, *, cached: int = 1) -> Problem:
    """Return a batch of short requests, in ragged modes with ``chunk`` new tokens each.

    Args:
        config: Configuration of the lane.
        num_requests: Number of requests.
        chunk: New tokens of each request in ragged modes.
        cached: Cached keys of each request, if the limits allow so many.
    """
    width = config.case.tokens_per_request or chunk
    prefix = min(cached, most_prefix(config, width))
    return lay_out(config, [prefix] * num_requests, [range(width - 1)] * num_requests, [0] * num_requests, 0)


def half_size_batch(config: Config) -> Problem:
    """Return a batch of half the largest size: half as many requests, half as long."""
    return _largest(config, max(config.most_requests // 2, 1), share=2)


def _largest(config: Config, num_requests: int, share: int = 1) -> Problem:
    case, shape = config.case, config.shapes[-1]
    if case.mode is ForwardMode.IDLE:
        return Problem(case, [], 0)
    counts = [case.tokens_per_request or 1] * num_requests
    if case.tokens_per_request is None:
        tokens = shape.num_tokens * num_requests // shape.batch_size
        spread(counts, tokens - sum(counts), config.context // share)
    prefixes = [most_prefix(config, count, share) for count in counts]
    parents = [range(count - 1) for count in counts]
    return lay_out(config, prefixes, parents, [0] * len(counts), 0)


def edges(config: Config) -> list[Problem]:
    """Return batches of requests at boundaries of pages, windows and tiles, and other special batches.

    At a boundary, the length with or without the new tokens is that of one full page, two pages, a window or
    a tile of kernels, or one more. The other batches have requests of equal lengths, requests without cached
    keys, prompts that are shaped like another kind of step, or equal totals. The requests of equal lengths
    share their first page, like prompts with a common prefix in an engine.
    """
    case, most = config.case, config.most_requests
    if case.mode is ForwardMode.IDLE:
        return []
    width = case.tokens_per_request or 2
    least, longest = max(least_prefix(case, 1), least_prefix(case, width)), most_prefix(config, width)
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
        return lay_out(config, prefixes, each, [0] * len(prefixes), seed)

    found = [laid_out(batch, number) for number, batch in enumerate(batches)]
    equal = laid_out([min(config.page_size + 2, longest)] * most, len(batches))
    return [
        *found,
        _with_shared_prefix(config, equal),
        *_without_cached_keys(config),
        *_shaped_like_others(config),
        *_equal_in_total(config),
    ]


def _equal_in_total(config: Config) -> list[Problem]:
    """Return batches that are equal in number of requests, total number of keys and longest request.

    The lengths are in one order, in reverse, and different. A cached plan is stale if its key contains only
    these numbers.
    """
    case, most = config.case, config.most_requests
    width = case.tokens_per_request or 1
    least, longest = least_prefix(case, width), most_prefix(config, width)
    lengths = [least + (longest - least) * (at + 1) // (most + 1) for at in range(most)]
    differ = most > 2 and lengths[1] > lengths[0] + 1
    others = [lengths[0] + 1, lengths[1] - 1, *lengths[2:]] if differ else lengths
    orders = {tuple(each): None for each in (lengths, lengths[::-1], others)}
    return [lay_out(config, order, [range(width - 1)] * most, [0] * most, 0) for order in orders]


def _without_cached_keys(config: Config) -> list[Problem]:
    """Return batches without cached keys: one of a single request, one that fills the largest shape.

    Most prefill batches of an engine have no cached keys. The list is empty in modes whose requests always
    have some.
    """
    case = config.case
    width, most = case.tokens_per_request, config.most_requests
    if least_prefix(case, width or 1):
        return []
    counts = [width or 1 + at % 3 for at in range(most)]
    several = lay_out(config, [0] * most, [range(count - 1) for count in counts], [0] * most, 1)
    alone = lay_out(config, [0], [range((width or 5) - 1)], [0], 2)
    return [alone, several]


def _shaped_like_others(config: Config) -> list[Problem]:
    """Return ragged batches with the shape of a verify or a decode: each request has as many new tokens."""
    if config.case.tokens_per_request is not None:
        return []
    return [each for width in (DRAFT_WIDTH, 1) for each in prompts_of_width(config, width)]


def prompts_of_width(config: Config, width: int) -> list[Problem]:
    """Return batches with ``width`` new tokens of each request: a prompt, prompts, and some beside chunks.

    Prompts have no cached keys. The chunks after cached keys are as many as the prompts beside them.
    """
    count = min(config.most_requests, config.shapes[-1].num_tokens // width)
    beside = [at % 2 * min(config.page_size + 1, most_prefix(config, width)) for at in range(count)]
    return [
        lay_out(config, cached, [range(width - 1)] * len(cached), [0] * len(cached), width)
        for cached in ([0], [0] * count, beside)
    ]


def at_tiers(config: Config, choice: Callable[[Problem], object]) -> list[Problem]:
    """Return batches of one request on both sides of each length at which a runner's choice of graph changes.

    Args:
        config: Configuration of the lane.
        choice: Returns the choice for a batch.
    """
    ends = sorted({prefix for change in tier_ends(config, choice) for prefix in change})
    return [with_prefixes(config, [prefix]) for prefix in ends]


def tier_ends(config: Config, choice: Callable[[Problem], object]) -> list[tuple[int, int]]:
    """Return each pair of successive numbers of cached keys for which a runner chooses different graphs.

    The choices for one request are compared at the ends of `TIERS` parts of the range, and changes are found
    by bisection.

    Args:
        config: Configuration of the lane.
        choice: Returns the choice for a batch.
    """
    case = config.case
    if case.mode is ForwardMode.IDLE:
        return []
    width = case.tokens_per_request or 1
    least, longest = least_prefix(case, width), most_prefix(config.unbounded, width)
    asked: dict[int, object] = {}

    def at(prefix: int) -> object:
        if prefix not in asked:
            asked[prefix] = choice(with_prefixes(config, [prefix]))
        return asked[prefix]

    def change(low: int, high: int) -> list[tuple[int, int]]:
        if at(low) == at(high):
            return []
        if high - low == 1:
            return [(low, high)]
        middle = (low + high) // 2
        return change(low, middle) or change(middle, high)

    grid = sorted({least + (longest - least) * part // TIERS for part in range(TIERS + 1)})
    return [found for ends in itertools.pairwise(grid) for found in change(*ends)]


def of_mixed_tiers(config: Config, low: int, high: int) -> list[Problem]:
    """Return batches of the most requests on both sides of a change of the graph.

    In two batches, in both orders, one request is in the upper tier and the others are in the lower one. In
    the third all requests are at the end of the lower one.

    Args:
        config: Configuration of the lane.
        low: The most cached keys of the lower tier.
        high: The fewest cached keys of the upper tier.
    """
    others = [low] * (config.most_requests - 1)
    orders = {tuple(each): None for each in ([high, *others], [*others, high], [low, *others])}
    return [with_prefixes(config, each) for each in orders]


def with_prefixes(config: Config, prefixes: Sequence[int]) -> Problem:
    """Return a batch with a chain of drafts, or one new token, for each number of cached keys."""
    width = config.case.tokens_per_request or 1
    return lay_out(config, prefixes, [range(width - 1)] * len(prefixes), [0] * len(prefixes), 0)


def _with_shared_prefix(config: Config, problem: Problem) -> Problem:
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
    most = [most_prefix(config, len(r.tokens)) for r in problem.requests]
    prefixes = [len(r.cached) for r in problem.requests]
    shorter = [
        p - 1 if p > 1 and (p - 1) // size == p // size else min(p + 1, m)
        for p, m in zip(prefixes, most, strict=True)
    ]
    parents = [[t.parent or 0 for t in r.tokens[1:]] for r in problem.requests]
    accepted = [r.accepted for r in problem.requests]
    return [
        lay_out(config, shorter, parents, accepted, problem.seed),
        lay_out(config, prefixes, parents, accepted, problem.seed + 1),
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
    bs, width = config.most_requests, config.case.tokens_per_request or 1
    most = most_prefix(config, width)
    middle = max(min(min(config.page_size, config.context) // 2, config.max_cached_keys - bs + 1, most), 2)
    lengths = max(most - middle + 1, 1)
    prefixes = [middle + i % lengths for i in range(bs)]
    parents, accepted = [range(width - 1)] * bs, [0] * bs
    one_less = [prefix - 1 for prefix in prefixes]
    before = [lay_out(config, one_less, parents, accepted, seed) for seed in (0, 1)]
    return lay_out(config, prefixes, parents, accepted, 0), before
