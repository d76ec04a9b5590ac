"""Small numbers in the place of an engine's rows and pages: the steps stay what they were."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.batch import ForwardMode
from graphpact.recording import (
    MOST_CONTEXT,
    MOST_ROWS,
    MOST_SLOTS,
    LaneLine,
    LineError,
    Renumbering,
    RequestLine,
    StepLine,
    fitted_lane,
    numbers,
    require_lane,
    require_step,
    small_lane,
)
from recorded_lanes import DECODE, DRAFT, FROZEN, PAGE, STEPS, lane, request, step

LARGE = 2**21
PRODUCTION = lane(
    ForwardMode.DECODE, context=131_072, slots=LARGE * PAGE, rows=4097, shapes=[[1, 1], [8192, 8192]]
)
FEW_PAGES, FEW_ROWS = 12, 5  # that a recording may have in these tests, scratch included


@st.composite
def _step(draw: st.DrawFn) -> StepLine:
    """Draw a decode step of a large cache, whose pages come from few, so that steps have some in common."""
    pages = iter(draw(st.permutations([*range(1, 9), LARGE - 1, LARGE - 2, 70_000, 70_001])))
    shared = [next(pages)] if draw(st.booleans()) else []
    rows = draw(st.lists(st.sampled_from([1, 2, 3, 4096, 4095, 4094]), max_size=FEW_ROWS - 1, unique=True))
    requests = []
    for row in rows:
        own = [next(pages) for _ in range(draw(st.integers(1, 2)))]
        cached = draw(st.integers((len(shared + own) - 1) * PAGE, len(shared + own) * PAGE - 1))
        requests.append(request(row, cached, shared + own))
    return step(PRODUCTION, *requests)


def _pages(its: StepLine) -> list[int]:
    """Return the pages of a step in their order, those of written slots after those of positions."""
    return [
        page
        for each in its.requests
        for page in [*each.pages, *(slot // PAGE for slots in each.slots for slot in slots)]
    ]


def _rows(its: StepLine) -> list[int]:
    return [each.row for each in its.requests]


def _map(before: list[int], after: list[int]) -> dict[int, int]:
    """Return the number of each thing, which is the same wherever it occurs, and of no other thing."""
    found = dict(zip(before, after, strict=True))
    assert [found[each] for each in before] == after
    assert len({*found.values()}) == len(found)
    return found


@settings(derandomize=True, max_examples=200)
@given(steps=st.lists(_step(), max_size=8), kept=st.integers(1, 9))
def test_renumbered_steps_are_the_engines_own(steps: list[StepLine], kept: int) -> None:
    """In each step the numbers are one to one, and things that two steps in a row use keep theirs.

    Every step is one that a reader takes, with lengths and places in pages as they were, and no number of
    scratch. There are fewer numbers than pages, and pages are soon forgotten, so many lose theirs.
    """
    with (
        mock.patch.object(numbers, "MOST_SLOTS", FEW_PAGES * PAGE),
        mock.patch.object(numbers, "MOST_ROWS", FEW_ROWS),
        mock.patch.object(numbers, "KEPT", kept),
    ):
        small, renumbering = small_lane(PRODUCTION), Renumbering(PRODUCTION)
        before: dict[str, dict[int, int]] = {}
        fitted = None
        for each in steps:
            if len({*_pages(each)}) >= FEW_PAGES:
                continue
            got = renumbering.step(each)
            fitted = fitted_lane(small, got, fitted)
            require_step(fitted, got)
            assert [r.cached for r in got.requests] == [r.cached for r in each.requests]
            assert [s % PAGE for r in got.requests for (s,) in r.slots] == [
                s % PAGE for r in each.requests for (s,) in r.slots
            ]
            now = {"pages": _map(_pages(each), _pages(got)), "rows": _map(_rows(each), _rows(got))}
            for kind, numbered in now.items():
                assert 0 not in numbered.values()
                last = before.get(kind, {})
                assert {x: n for x, n in numbered.items() if x in last} == {
                    x: n for x, n in last.items() if x in numbered
                }
            before = now


def test_a_page_keeps_its_number_in_a_pause() -> None:
    """A request that pauses for some steps finds its pages under their numbers; then others get these."""
    renumbering = Renumbering(PRODUCTION)
    first = step(PRODUCTION, request(4096, 5, [LARGE - 1, 70_000]))
    begun = renumbering.step(first)
    assert _pages(begun) == [1, 2, 2]
    for at in range(numbers.KEPT - 1):
        renumbering.step(step(PRODUCTION, request(7, 1, [1000 + at])))
    assert renumbering.step(first) == begun
    later = [renumbering.step(step(PRODUCTION, request(7, 1, [2000 + at]))) for at in range(numbers.KEPT + 2)]
    assert {1, 2} <= {page for each in later for page in _pages(each)}


def test_numbers_stay_as_small_as_the_steps_need() -> None:
    """Steps that use ever new pages, few at a time, need few numbers: a long run does not fill the table."""
    renumbering = Renumbering(PRODUCTION)
    most, fitted = 0, None
    for at in range(2000):
        got = renumbering.step(step(PRODUCTION, request(1 + at % 4000, 5, [2 * at + 1, 2 * at + 2])))
        fitted = fitted_lane(small_lane(PRODUCTION), got, fitted)
        most = max(most, *_pages(got))
    assert most <= 2 * (numbers.KEPT + 2)
    assert fitted is not None
    assert (fitted.context, fitted.slots, fitted.rows) == (256, 256 * PAGE, 128)


@pytest.mark.parametrize(("its", "given"), STEPS, ids=[its.lane for its, _ in STEPS])
def test_steps_of_every_kind_are_renumbered(its: LaneLine, given: StepLine) -> None:
    """Draft slots beyond the sequence, parents and accepted drafts are kept; the reader takes the step."""
    got = Renumbering(its).step(given)
    require_step(small_lane(its), got)
    _map(_pages(given), _pages(got))
    assert [(r.parents, r.accepted) for r in got.requests] == [
        (r.parents, r.accepted) for r in given.requests
    ]


def test_a_step_that_needs_too_much_changes_no_number() -> None:
    """More rows or pages than a recording may have are refused, and later steps do not notice."""
    small = lane(ForwardMode.DECODE, rows=3, slots=4 * PAGE)
    calm, disturbed = Renumbering(small), Renumbering(small)
    a, b = step(small, request(900, 1, [500])), step(small, request(901, 5, [501, 502]))
    assert calm.step(a) == disturbed.step(a)
    with pytest.raises(LineError, match="more than 3 pages of 4 KV slots"):
        disturbed.step(step(small, request(902, 9, [503, 504, 505]), request(903, 1, [506])))
    with pytest.raises(LineError, match="more than 2 requests"):
        disturbed.step(step(small, *(request(row, 1, [500]) for row in (903, 904, 905))))
    assert calm.step(b) == disturbed.step(b)


def test_a_production_lane_becomes_one_that_a_recording_may_have() -> None:
    """Sizes beyond the limits are cut to them, shapes beyond them are left out, and all others stay."""
    small = small_lane(PRODUCTION)
    require_lane(small)
    assert (small.context, small.slots, small.rows) == (MOST_CONTEXT, MOST_SLOTS, MOST_ROWS)
    assert small.shapes == [[1, 1]]
    assert small_lane(lane(ForwardMode.DECODE, page_size=48, slots=LARGE * 48)).slots == 5461 * 48
    assert small_lane(DECODE) == DECODE
    assert small_lane(FROZEN) == FROZEN


@pytest.mark.parametrize(("last", "pages"), [(63, 64), (64, 128), (127, 128), (128, 256)])
def test_a_fitted_lane_has_room_for_the_last_page(last: int, pages: int) -> None:
    """Sizes double where the largest page, row or sequence of a step would not fit."""
    small = small_lane(PRODUCTION)
    fitted = fitted_lane(small, step(small, request(last // 4, 5, [1, last])))
    assert (fitted.slots, fitted.rows) == (pages * PAGE, max(16, 2 ** (last // 4).bit_length()))
    long = step(small, request(1, 4 * last + 3, [*range(1, last + 2)]))
    assert fitted_lane(small, long).context == pages * PAGE
    require_step(fitted_lane(small, long), long)


def test_a_draft_beyond_the_sequence_keeps_its_pages_apart() -> None:
    """Branches of a draft write to pages that no position has; these get numbers of their own."""
    given = step(
        DRAFT, RequestLine(row=1, cached=6, pages=[70_000, 3], slots=[[80_000, 80_001], [80_004, 80_005]])
    )
    (got,) = Renumbering(DRAFT).step(given).requests
    assert (got.pages, got.slots) == ([1, 2], [[12, 13], [16, 17]])
