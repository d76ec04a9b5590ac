"""Requests that are followed from their prompt on."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from graphpact import ForwardMode
from graphpact_conformance.draws.cases import CASES, Case
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.whole_requests import Turn, is_followed, turns_of
from graphpact_conformance.experiments.whole_requests import whole_requests
from graphpact_conformance.lane.lane_under_test import LaneUnderTest
from graphpact_conformance.lane.reference_backend import ReferenceBackend

CPU = torch.device("cpu")
FOLLOWED = [case for case in CASES if is_followed(case)]


def config_of(case: Case, page_size: int = 16) -> Config:
    """Return a plain configuration of a kind of step."""
    found = configs_of(ReferenceBackend.capabilities, CPU, [case])
    return next(c for c in found if c.page_size == page_size and c.dtype is torch.float32)


def steps_of(config: Config) -> Sequence[Turn]:
    """Return the batches of the lane itself."""
    return [turn for turn in turns_of(config) if not turn.is_prompt]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("case", FOLLOWED, ids=str)
def test_each_key_was_written_by_an_earlier_step(case: Case, page_size: int) -> None:
    """A step reads only KV slots that earlier batches of its requests wrote, and writes none of others."""
    owner: dict[int, int] = {}
    for turn in turns_of(config_of(case, page_size)):
        for slot in turn.freed:
            owner.pop(slot, None)
        for request in turn.problem.requests:
            assert all(owner[slot] == request.row for slot in request.cached)
            for slot in (slot for token in request.tokens for slot in token.slots):
                assert owner.setdefault(slot, request.row) == request.row


@pytest.mark.parametrize("case", FOLLOWED, ids=str)
def test_batches_fit_the_shapes_and_the_context(case: Case) -> None:
    """A step has at most the requests and tokens of the largest shape, and no sequence is too long."""
    config = config_of(case)
    largest = config.shapes[-1]
    for turn in turns_of(config):
        problem = turn.problem
        assert all(len(r.table) <= config.context for r in problem.requests)
        if not turn.is_prompt:
            assert problem.batch_size <= largest.batch_size
            assert len(problem.tokens) <= largest.num_tokens


@pytest.mark.parametrize("case", FOLLOWED, ids=str)
def test_a_length_grows_over_a_page(case: Case) -> None:
    """Some request is in two steps of the lane, and its keys begin a page between them."""
    config = config_of(case)
    grown = [
        (len(earlier.cached), len(later.cached))
        for one, other in itertools.pairwise(steps_of(config))
        for earlier in one.problem.requests
        for later in other.problem.requests
        if later.row == earlier.row
        and earlier.cached
        and later.cached[: len(earlier.cached)] == earlier.cached
    ]
    size = config.page_size
    assert any(before // size < after // size for before, after in grown)


def test_a_new_request_has_row_first_page_and_length_of_one_that_ended() -> None:
    """The key of a cache by row, first page and length is equal, although another page differs."""
    steps = steps_of(config_of(Case(ForwardMode.DECODE)))
    seen = {(r.row, r.table[0], len(r.table)): r.table for t in steps for r in t.problem.requests}
    recycled = [
        (seen[key], r.cached)
        for turn in steps
        for r in turn.problem.requests
        if (key := (r.row, r.table[0], len(r.cached))) in seen
    ]
    assert any(before != now for before, now in recycled)


def test_a_request_ends_between_two_that_stay() -> None:
    """In some step a row in the middle of the batch before is gone, and its neighbours move together."""
    rows = [[r.row for r in turn.problem.requests] for turn in steps_of(config_of(Case(ForwardMode.DECODE)))]
    left = [
        (at, len(before), [row for row in before if row in after] == after)
        for before, after in itertools.pairwise(rows)
        for at, row in enumerate(before)
        if row not in after
    ]
    assert any(0 < at < count - 1 and is_rest for at, count, is_rest in left)


def test_one_step_among_replays_is_eager() -> None:
    """An eager step has replays before and after it."""
    eagerly = [turn.eagerly for turn in steps_of(config_of(Case(ForwardMode.DECODE)))]
    assert eagerly.count(True) % 2 == 1
    assert not eagerly[0]
    assert not eagerly[-1]


class _WithoutPrompts(ReferenceBackend):
    """The suite's backend for decode only."""

    capabilities = replace(
        ReferenceBackend.capabilities, modes=frozenset({ForwardMode.DECODE, ForwardMode.IDLE})
    )


@pytest.mark.parametrize("backend", [ReferenceBackend, _WithoutPrompts])
@torch.inference_mode()
def test_the_reference_backend_is_right(backend: type[ReferenceBackend]) -> None:
    """A right backend passes, also if it has no mode for prompts and their keys are received."""
    lane = LaneUnderTest(config_of(Case(ForwardMode.DECODE)), backend)
    (steps,) = lane.drawn(1, 0)
    assert not [*whole_requests(lane, steps)]
    assert lane.rig().lane.stats.replays >= 7
