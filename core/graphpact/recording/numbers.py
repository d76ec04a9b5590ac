"""`Renumbering`: small numbers in the place of an engine's request rows and pages.

A production cache has more pages and rows than a recording may have, and each step uses few of them. A page
gets the smallest free number at its first sight. It keeps it until `KEPT` steps did not use it, or until all
numbers are given and another page needs one; then the page that was not used for the longest time loses its
own. So in each step different pages have different numbers, pages that requests share stay shared, and a page
that two steps in a row use keeps its number. Row 0 and page 0 are scratch: nothing else gets the number 0.

    Renumbering    the numbers
    small_lane     the largest lane of a recording for a lane of an engine
    fitted_lane    a lane that is as large as its steps need

Does not: check a step; see `graphpact.recording.checks`.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from graphpact.recording.checks import require_lane
from graphpact.recording.lines import (
    MOST_CONTEXT,
    MOST_ROWS,
    MOST_SHAPES,
    MOST_SLOTS,
    MOST_TOKENS,
    LaneLine,
    LineError,
    RequestLine,
    StepLine,
    parse,
    text_of,
)

KEPT = 64
"""After how many steps without it a page loses its number. Steps of other lanes may come in between."""


@dataclass
class _Numbers:
    """Numbers from 1.

    Args:
        most: The largest number.
    """

    most: int
    _given: dict[int, int] = field(default_factory=dict)  # the most recently used last
    _used: dict[int, int] = field(default_factory=dict)  # the last step that used each number
    _free: list[int] = field(default_factory=list)  # a heap
    _step: int = 0

    def give(self, used: Iterable[int]) -> dict[int, int]:
        """Return the number of each thing that a step uses, of which there are at most ``most``."""
        self._step += 1
        wanted = dict.fromkeys(used)
        for each in wanted:
            if each in self._given:
                self._given[each] = self._given.pop(each)
                self._used[self._given[each]] = self._step
        while self._given and self._oldest() < self._step - KEPT:
            self._take_oldest()
        for each in wanted:
            if each not in self._given:
                if not self._free and len(self._given) == self.most:
                    self._take_oldest()
                number = heapq.heappop(self._free) if self._free else len(self._given) + 1
                self._given[each], self._used[number] = number, self._step
        return {each: self._given[each] for each in wanted}

    def _oldest(self) -> int:
        return self._used[next(iter(self._given.values()))]

    def _take_oldest(self) -> None:
        heapq.heappush(self._free, self._given.pop(next(iter(self._given))))


class Renumbering:
    """The small numbers of one lane, or of lanes that share a cache.

    Args:
        lane: A lane with the sizes of its engine.
    """

    def __init__(self, lane: LaneLine) -> None:
        small = small_lane(lane)
        self._page_size = small.page_size
        self._rows, self._pages = _Numbers(small.rows - 1), _Numbers(small.num_pages - 1)

    def step(self, step: StepLine) -> StepLine:
        """Return a step with small numbers. It must be a right step of an engine.

        Raises:
            LineError: It uses more rows or pages than a recording may have. No number changes then.
        """
        size = self._page_size
        rows = [request.row for request in step.requests]
        pages = dict.fromkeys(page for request in step.requests for page in request.pages)
        pages |= dict.fromkeys(
            slot // size for request in step.requests for slots in request.slots for slot in slots
        )
        if len(rows) > self._rows.most:
            raise LineError(f"more than {self._rows.most} requests")
        if len(pages) > self._pages.most:
            raise LineError(f"more than {self._pages.most} pages of {size} KV slots")
        row_of, page_of = self._rows.give(rows), self._pages.give(pages)

        def renumbered(request: RequestLine) -> RequestLine:
            return replace(
                request,
                row=row_of[request.row],
                pages=[page_of[page] for page in request.pages],
                slots=[[page_of[s // size] * size + s % size for s in slots] for slots in request.slots],
            )

        return replace(step, requests=[renumbered(request) for request in step.requests])


def small_lane(lane: LaneLine) -> LaneLine:
    """Return a lane with sizes that a recording may have: those of its engine, or the largest that fit.

    Raises:
        LineError: No recording can have such a lane, whatever its sizes.
    """
    shapes = [[bs, tokens] for bs, tokens in lane.shapes if max(bs, tokens) <= MOST_TOKENS]
    small = replace(
        lane,
        context=min(lane.context, MOST_CONTEXT),
        slots=min(lane.num_pages, MOST_SLOTS // lane.page_size) * lane.page_size,
        rows=min(lane.rows, MOST_ROWS),
        shapes=shapes[:MOST_SHAPES],
    )
    parse(text_of(small).encode())
    require_lane(small)
    return small


def fitted_lane(lane: LaneLine, step: StepLine, before: LaneLine | None = None) -> LaneLine:
    """Return a lane with sizes that a step with small numbers needs, so that a check of it is quick.

    Args:
        lane: The lane with its largest sizes, which the step does not exceed.
        step: The step.
        before: The fitted lane of earlier steps, which does not shrink.
    """
    size = lane.page_size
    now = before or replace(lane, context=_LEAST_CONTEXT, slots=_LEAST_PAGES * size, rows=_LEAST_ROWS)
    pages = [page for request in step.requests for page in request.pages]
    pages += [slot // size for request in step.requests for slots in request.slots for slot in slots]
    tokens = max((len(request.pages) for request in step.requests), default=0) * size
    return replace(
        lane,
        context=_doubled(now.context, tokens, lane.context),
        slots=_doubled(now.slots, (max(pages, default=0) + 1) * size, lane.slots),
        rows=_doubled(now.rows, max((request.row for request in step.requests), default=0) + 1, lane.rows),
    )


_LEAST_CONTEXT, _LEAST_PAGES, _LEAST_ROWS = 256, 64, 16


def _doubled(now: int, needed: int, most: int) -> int:
    while now < needed:
        now *= 2
    return min(now, most)
