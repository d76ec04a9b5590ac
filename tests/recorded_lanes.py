"""Lanes and steps of every kind, for tests of recordings."""

from typing import Any

from graphpact.batch import ForwardMode
from graphpact.recording import LaneLine, RequestLine, StepLine

PAGE = 4
SIZES: dict[str, Any] = {
    "page_size": PAGE,
    "context": 64,
    "slots": 100 * PAGE,
    "rows": 9,
    "shapes": [],
    "frozen": False,
}


def lane(mode: ForwardMode, draft: list[int] | None = None, **sizes: Any) -> LaneLine:
    """Return a lane of a mode with small sizes, unless others are given."""
    return LaneLine(**SIZES | {"lane": mode.value, "mode": mode, "draft": draft or [1, 1, 1]} | sizes)


def request(
    row: int, cached: int, pages: list[int], new: int = 1, page_size: int = PAGE, **more: Any
) -> RequestLine:
    """Return a request with ``new`` tokens after its cached ones, and as many of ``pages`` as it needs."""
    used = pages[: -(-(cached + new) // page_size)]
    slots = [[used[at // page_size] * page_size + at % page_size] for at in range(cached, cached + new)]
    return RequestLine(row=row, cached=cached, pages=used, slots=slots, **more)


def step(its: LaneLine, *requests: RequestLine) -> StepLine:
    """Return a step of a lane."""
    return StepLine(step=its.lane, mode=its.mode if requests else ForwardMode.IDLE, requests=[*requests])


DECODE = lane(ForwardMode.DECODE, shapes=[[1, 1], [4, 4]])
EXTEND = lane(ForwardMode.EXTEND)
TREE = lane(ForwardMode.TARGET_VERIFY, [2, 2, 3])
ACCEPT = lane(ForwardMode.DRAFT_EXTEND, [2, 1, 3])
DRAFT = lane(ForwardMode.DRAFT_DECODE, [2, 2, 3])
FROZEN = lane(ForwardMode.DECODE, [2, 2, 3], lane="frozen", frozen=True)
STEPS: list[tuple[LaneLine, StepLine]] = [
    (DECODE, step(DECODE, request(1, 5, [7, 3]), request(2, 4, [7, 9]))),
    (DECODE, step(DECODE)),
    (EXTEND, step(EXTEND, request(3, 0, [4, 8], new=6), request(4, 8, [6, 11, 12], new=2))),
    (TREE, step(TREE, request(1, 6, [7, 3, 5], new=3, parents=[None, 0, 0]))),
    (ACCEPT, step(ACCEPT, request(1, 6, [7, 3, 5], new=3, accepted=2))),
    (DRAFT, step(DRAFT, RequestLine(row=1, cached=6, pages=[7, 3], slots=[[80, 81], [84, 85]]))),
    (FROZEN, step(FROZEN, RequestLine(row=1, cached=6, pages=[7, 3], slots=[[], []]))),
]
"""A step of every kind."""
