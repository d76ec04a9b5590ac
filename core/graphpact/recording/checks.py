"""Checks of a recording's lines whose fields must agree with each other.

    require_lane   a lane
    require_step   a step of a lane

Does not: check the type and the range of a field; see `graphpact.recording.lines`.
"""

from graphpact.batch import ForwardMode
from graphpact.recording.lines import MOST_TOKENS, LaneLine, LineError, RequestLine, StepLine


def _require(holds: object, fault: str) -> None:
    if not holds:
        raise LineError(fault)


def require_lane(lane: LaneLine) -> None:
    """Check a lane.

    Raises:
        LineError: Its sizes contradict each other.
    """
    size, width, each = lane.page_size, lane.tokens_per_request, lane.rows_per_request
    _require(lane.slots % size == 0 and lane.slots > size, f"{lane.slots} KV slots in pages of {size}")
    _require(lane.mode is not ForwardMode.IDLE, "a lane with the mode idle; only steps may be idle")
    for bs, tokens in lane.shapes:
        fits = tokens >= bs if width is None else tokens == bs // each * width and bs % each == 0
        _require(fits, f"a shape of {bs} requests and {tokens} tokens in a lane of {lane.mode.value}")


def require_step(lane: LaneLine, step: StepLine) -> None:
    """Check a step of ``lane``.

    Raises:
        LineError: No right engine with such a lane runs it.
    """
    _require(
        step.mode is lane.mode or (step.mode is ForwardMode.IDLE and not step.requests),
        f"a step of mode {step.mode.value} in a lane of {lane.mode.value}",
    )
    rows = [request.row for request in step.requests]
    _require(len({*rows}) == len(rows), "two requests with the same row")
    _require(min(rows, default=1) > 0, "a request with row 0, which is scratch")
    _require(max(rows, default=0) < lane.rows, f"a request row beyond the {lane.rows} rows of the lane")
    total = sum(len(request.slots) for request in step.requests)
    _require(total <= MOST_TOKENS, f"more than {MOST_TOKENS} tokens")
    cached: set[int] = set()
    for request in step.requests:
        _require_request(lane, request)
        cached.update(request.table(lane.page_size, request.cached))
    written = [slot for request in step.requests for token in request.slots for slot in token]
    _require(len({*written}) == len(written), "a KV slot that two new tokens write")
    _require(cached.isdisjoint(written), "a new token that overwrites a cached one")


def _require_request(lane: LaneLine, request: RequestLine) -> None:
    size, width, each = lane.page_size, lane.tokens_per_request, lane.slots_per_token
    count, cached, pages = len(request.slots), request.cached, request.pages
    _require(width is None or count == width, f"{count} new tokens of a request; the lane has {width}")
    _require(
        all(len(slots) == each for slots in request.slots), f"a new token without exactly {each} KV slots"
    )
    drafts = lane.mode is ForwardMode.DRAFT_DECODE
    in_order = [slot for slots in request.slots for slot in slots] if not drafts or count == 1 else []
    length = cached + len(in_order)
    _require(cached > 0 or not (lane.frozen or drafts), "a draft of a request without cached tokens")
    _require(length <= lane.context, f"{length} tokens of a request; the lane's context is {lane.context}")
    _require(len(pages) == -(-length // size), f"{len(pages)} pages for {length} tokens")
    _require(all(0 < page < lane.num_pages for page in pages), "a page that the lane does not have")
    _require(len({*pages}) == len(pages), "a page that occurs twice in one request")
    _require(
        request.table(size, length)[cached:] == in_order,
        "new tokens whose KV slots do not match their positions",
    )
    _require(
        all(size <= slot < lane.slots for slots in request.slots for slot in slots),
        "a KV slot outside all pages",
    )
    _require_drafts(lane, request)


def _require_drafts(lane: LaneLine, request: RequestLine) -> None:
    count, parents = len(request.slots), request.parents
    _require((parents is not None) is lane.is_tree, "parents are required to verify trees, and only then")
    if parents is not None:
        _require(
            len(parents) == count and parents[0] is None, "parents: one for each token, null for the first"
        )
        follow = all(p is not None and 0 <= p < at for at, p in enumerate(parents) if at)
        _require(follow, "parents: each token must follow an earlier one")
    is_extend = lane.mode is ForwardMode.DRAFT_EXTEND
    _require(
        (request.accepted is not None) is is_extend, "accepted is required in a draft extend, and only there"
    )
    _require((request.accepted or 0) < count, f"{request.accepted} accepted drafts of {count} tokens")
