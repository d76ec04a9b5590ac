"""`lay_out`, which makes a batch from lengths and drafts, and the limits on lengths in a lane.

Does not: choose lengths; see ``batches`` and ``chosen_batches``.
"""

import random
from collections.abc import Sequence

from graphpact import ForwardMode
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.lanes import VOCAB, Config
from graphpact_conformance.draws.problems import Problem, ProblemRequest, Token


def lay_out(
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


def spread(counts: list[int], more: int, most: int) -> None:
    """Add ``more`` tokens to the requests in order, up to ``most`` tokens per request."""
    for i, count in enumerate(counts):
        own = min(more, most - count)
        counts[i] += own
        more -= own


def least_prefix(case: Case, count: int) -> int:
    """Return the fewest cached keys of a request with ``count`` new tokens."""
    drafted = case.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE) or case.frozen
    return 1 if drafted or (case.mode is ForwardMode.MIXED and count == 1) else 0


def most_prefix(config: Config, count: int, share: int = 1) -> int:
    """Return the most cached keys of a request with ``count`` new tokens, for limits divided by ``share``."""
    case = config.case
    most = min(config.context // share - max(count, case.num_steps), config.max_cached_keys // share)
    return max(most, least_prefix(case, count))
