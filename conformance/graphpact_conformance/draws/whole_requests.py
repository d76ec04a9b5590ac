"""Requests from their prompt to their end: `turns_of` returns their batches in the order of an engine.

    prompts     of several lengths, in chunks; one ends just before a page, one has a single token
    steps       of the lane's mode: lengths grow over the end of a page, requests join, end and change places,
                one of them ends between two that stay; one step runs eagerly
    memory      a request that ends frees its row and its pages. The next request gets that row and the first
                of these pages, but other pages after it, and has as many keys as the other had

Does not: run a step; see `graphpact_conformance.experiments.whole_requests`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from graphpact.batch import ForwardMode
from graphpact_conformance.draws.cases import Case
from graphpact_conformance.draws.lanes import VOCAB, Config
from graphpact_conformance.draws.layout import least_prefix, most_prefix
from graphpact_conformance.draws.problems import Problem, ProblemRequest, Token

PROMPT = Case(ForwardMode.EXTEND)
"""The kind of step that computes prompts."""


@dataclass(frozen=True)
class Turn:
    """One batch of an engine.

    Args:
        problem: The batch.
        is_prompt: Whether a lane of `PROMPT` runs it, not the lane itself.
        eagerly: Whether the lane runs it without a graph.
        freed: KV slots of requests that ended after the batch before.
        after: The requests that began and ended since the last step of the lane, in words; may be empty.
    """

    problem: Problem
    is_prompt: bool
    eagerly: bool
    freed: tuple[int, ...]
    after: str


def is_followed(case: Case) -> bool:
    """Return whether requests can be followed over several steps of a kind.

    Idle batches have no requests. A tree's accepted tokens are moved by the engine, and a frozen cache is
    written by another model.
    """
    has_branches = case.tree or case.branches > 1 or case.topk > 1
    return not (case.mode is ForwardMode.IDLE or case.frozen or case.embeds or has_branches)


@lru_cache  # one list for all experiments
def turns_of(config: Config) -> Sequence[Turn]:
    """Return the batches of requests from their prompt on; empty if they cannot be followed."""
    if not is_followed(config.case):
        return ()
    script = _Script(config)
    first, second = script.begin(_before_a_page(config)), script.begin(_beyond_a_page(config))
    for _ in range(3):
        script.step([first, second])
    third = script.begin(3)
    script.step([first, second, third])
    script.end(second)
    script.step([first, third], eagerly=True)
    script.step([first, third])
    fourth = script.begin(second.length)
    script.step([first, fourth, third])
    script.end(first)
    fifth = script.begin(least_prefix(config.case, script.width))
    script.step([fifth, third, fourth])
    script.step([third, fifth])
    return tuple(script.turns)


def _before_a_page(config: Config) -> int:
    """Return the length of a prompt that ends just before a page, if there is room for some steps."""
    most = most_prefix(config, config.case.tokens_per_request or 1)
    return max(min(config.page_size - 2, most - 8), 1) if config.page_size > 2 else min(7, most)


def _beyond_a_page(config: Config) -> int:
    """Return the length of a prompt of more than one page, if there is room for some steps."""
    most = most_prefix(config, config.case.tokens_per_request or 1)
    return max(min(config.page_size + 2, most - 16), 3)


@dataclass
class _Live:
    """A request: its row, its pages in order, and the number of its keys."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class _Script:
    """Collects the batches of one lane, and gives rows and pages to its requests.

    Args:
        config: The configuration of the lane.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._case = config, config.case
        self.width = config.case.tokens_per_request or 1
        self._rng = random.Random(1)  # noqa: S311  test data
        self._rows = self._rng.sample(range(1, config.num_rows), config.num_rows - 1)
        self._pages = self._rng.sample(config.pages, len(config.pages))
        self._freed: list[int] = []
        self._after: list[str] = []
        self._count = 0
        self.turns: list[Turn] = []

    def begin(self, length: int) -> _Live:
        """Return a new request after its prompt of ``length`` tokens, which is computed in chunks."""
        request = _Live(self._rows.pop())
        self._after.append(f"a request of {length} tokens began in row {request.row}")
        self._extend(request, length)
        return request

    def end(self, request: _Live) -> None:
        """Free the row and the pages of a request; the next one gets the row and the first page."""
        self._after.append(f"the request of row {request.row} ended")
        self._rows.append(request.row)
        self._pages = [*request.pages[1:], *self._pages, *request.pages[:1]]
        size = self._config.page_size
        self._freed += [page * size + at for page in request.pages for at in range(size)]
        request.pages = []

    def step(self, requests: Sequence[_Live], *, eagerly: bool = False) -> None:
        """Run one step of the lane for some of the requests: those that it holds, and that have room."""
        most = most_prefix(self._config, self.width)
        able = [r for r in requests if r.length <= most][: self._config.most_requests]
        ragged = self._case.mode.is_ragged
        counts = [1 + at % 2 * 2 if ragged else self.width for at in range(len(able))]
        if not able:
            return
        kept = [self._kept(at, count) for at, count in enumerate(counts)]
        made = [self._tokens(r, n, k, self._case) for r, n, k in zip(able, counts, kept, strict=True)]
        self._add(made, self._case, is_prompt=False, eagerly=eagerly)
        for request, more in zip(able, kept, strict=True):
            request.length += more
        if self._case.mode is ForwardMode.DRAFT_DECODE:  # the target model computes the tokens after it
            for request in able:
                self._extend(request, 1 + self._count % 2)

    def _extend(self, request: _Live, length: int) -> None:
        """Add ``length`` tokens to a request, in chunks that a lane holds."""
        is_own = self._case.mode.is_ragged
        most = max(s.num_tokens for s in self._config.shapes) if is_own else _CHUNK
        left = min(length, self._config.context - request.length)
        while left > 0:
            chunk = min(left, most)
            case = self._case if is_own else PROMPT
            self._add([self._tokens(request, chunk, chunk, case)], case, is_prompt=not is_own, eagerly=False)
            request.length += chunk
            left -= chunk

    def _kept(self, at: int, count: int) -> int:
        """Return how many of the new tokens of a request stay: all, but of drafts the accepted ones."""
        if self._case.mode is ForwardMode.DRAFT_DECODE:
            return 0
        return 1 + (self._count + at) % count if self._case.has_drafts else count

    def _tokens(self, request: _Live, count: int, kept: int, case: Case) -> ProblemRequest:
        """Return a request with ``count`` new tokens, or one branch of drafts."""
        drafts, size = case.mode is ForwardMode.DRAFT_DECODE, self._config.page_size
        length = request.length + (case.num_steps if drafts else count)
        while len(request.pages) * size < length:
            request.pages.append(self._pages.pop())
        table = [page * size + at for page in request.pages for at in range(size)][:length]
        new = table[request.length :]
        each = [new] if drafts else [[slot] for slot in new]
        tokens = [
            Token(self._rng.randrange(VOCAB), slots, at - 1 if at else None, at)
            for at, slots in enumerate(each)
        ]
        return ProblemRequest(request.row, table[: request.length], tokens, table, max(kept - 1, 0))

    def _add(self, requests: list[ProblemRequest], case: Case, *, is_prompt: bool, eagerly: bool) -> None:
        self._count += 1
        problem = Problem(case, requests, self._count)
        after = ", ".join(self._after)
        self.turns.append(Turn(problem, is_prompt, eagerly or is_prompt, tuple(self._freed), after))
        self._freed = []
        if not is_prompt:
            self._after = []


_CHUNK = 10
"""Tokens of a chunk of a prompt; the smallest ragged shape holds as many."""


def prompts_config(config: Config) -> Config:
    """Return the configuration of the lane that computes the prompts of a lane's requests."""
    return replace(
        config, case=PROMPT, capture_shapes=(), extra_requests=0, counts=False, fields=False, most_cached=None
    )
