"""`Renumbering`: small numbers in the place of an engine's request rows and pages.

A production cache has more pages and rows than a recording may have, and each step uses few of them. A page
gets a number at its first sight and keeps it. When all numbers are given, the page that was not used for the
longest time loses its number to a new one. So in each step different pages have different numbers, pages that
requests share stay shared, and a page that two steps in a row use keeps its number. Row 0 and page 0 are
scratch and stay so: no other row or page gets the number 0.

Does not: check a step; see `graphpact.recording.checks`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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
)


@dataclass
class _Numbers:
    """Numbers from 1.

    Args:
        most: The largest number.
    """

    most: int
    _given: dict[int, int] = field(default_factory=dict)  # the most recently used last

    def give(self, used: Iterable[int]) -> dict[int, int]:
        """Return the number of each thing that a step uses, of which there are at most ``most``."""
        wanted = dict.fromkeys(used)
        for each in wanted:
            if each in self._given:
                self._given[each] = self._given.pop(each)
        for each in wanted:
            if each not in self._given:
                is_full = len(self._given) == self.most
                number = self._given.pop(next(iter(self._given))) if is_full else len(self._given) + 1
                self._given[each] = number
        return {each: self._given[each] for each in wanted}


class Renumbering:
    """The small numbers of one lane, or of lanes that share a cache.

    Args:
        lane: A lane with the sizes of its engine.
    """

    def __init__(self, lane: LaneLine) -> None:
        small = small_lane(lane)
        self._page_size = lane.page_size
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
    """Return a lane with sizes that a recording may have: those of its engine, or the largest that fit."""
    shapes = [[bs, tokens] for bs, tokens in lane.shapes if tokens <= MOST_TOKENS]
    return replace(
        lane,
        context=min(lane.context, MOST_CONTEXT),
        slots=min(lane.num_pages, MOST_SLOTS // lane.page_size) * lane.page_size,
        rows=min(lane.rows, MOST_ROWS),
        shapes=shapes[:MOST_SHAPES],
    )
