"""Batches of the experiments about what an engine does in its life, and about whom it serves."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact import ForwardBatch, ForwardMode, GraphShape, hookimpl
from graphpact_conformance.draws.batches import draw, sequences
from graphpact_conformance.draws.cases import CASES, DRAFT_WIDTH
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.chosen_batches import edges, of_size
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.layout import least_prefix
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.experiments.asked_batches import MOST, of_default_sizes, of_other_kinds
from graphpact_conformance.experiments.look_alikes import look_alikes, with_look_alike
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options

QUICK = Options(size="quick", examples=1, shrink=False)
CONFIGS = [
    config
    for config in configs_of(ReferenceBackend.capabilities, cases=CASES)
    if config.page_size == 16 and config.heads.name == "gqa" and config.case.mode is not ForwardMode.IDLE
]


# -- requests that look like padding -----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(CONFIGS), st.integers(0, 2))
def test_a_look_alike_is_last_and_live(data: st.DataObject, config: Config, length: int) -> None:
    """The last request has token 0 and no more than the wanted length, or the shortest that its mode allows.

    The batch has as many requests and tokens as before, its fields agree, and its KV slots are its own.
    """
    drawn = data.draw(sequences(config))
    for problem in (drawn.exact, drawn.padded):
        made = with_look_alike(config, problem, length)
        batch, last = made.batch(), made.requests[-1]
        assert (made.batch_size, len(made.tokens)) == (problem.batch_size, len(problem.tokens))
        batch.require_consistent()
        assert {t.token_id for t in last.tokens} == {0}
        least = min(int(batch.seq_lens_cpu[-1]), len(last.tokens) + 1)
        assert int(batch.seq_lens_cpu[-1]) <= max(length, least)
        slots = [s for r in made.requests for s in (*r.cached, *(s for t in r.tokens for s in t.slots))]
        assert len(slots) == len(set(slots))
        assert all(slot >= config.page_size for slot in slots)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_sequence_has_look_alikes(config: Config) -> None:
    """In each mode a padded and an exact batch end with one; position 0 is there where a mode allows it."""
    (drawn,) = draw(config, 1, 0)
    for problem in (drawn.padded, drawn.exact):
        made = look_alikes(config, problem, 1)
        assert made
        first = min(len(each.requests[-1].cached) for each in made)
        assert first == least_prefix(config.case, len(made[0].requests[-1].tokens))
    assert look_alikes(config, drawn.idle, 1) == []


# -- lengths at which counts change ------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_requests_end_and_begin_pages_and_windows(config: Config) -> None:
    """Every mode has requests that fill a page, a window, and one token more; all fit a captured shape."""
    batches, last = edges(config), config.shapes[-1]
    ends = {config.page_size, *(layer.sliding_window for layer in config.layers if layer.sliding_window)}
    width = config.case.tokens_per_request or 2
    for batch in (problem.batch() for problem in batches):
        batch.require_consistent()
        assert batch.batch_size <= last.batch_size
        assert batch.num_tokens <= last.num_tokens
    cached = {len(request.cached) for problem in batches for request in problem.requests}
    longest = max(cached)
    for end in ends:
        assert {n for n in (end - width, end - width + 1, end) if 0 < n <= longest} <= cached
    lengths = [[len(request.cached) for request in problem.requests] for problem in batches]
    equal = [each for each in lengths if len({*each}) == 1 and each[0] > config.page_size]
    assert config.most_requests in map(len, equal)
    if least_prefix(config.case, config.case.tokens_per_request or 1) == 0:
        without = [each for each in lengths if not any(each)]
        assert [0] in without
        assert [0] * config.most_requests in without
    sums = Counter((len(each), sum(each), max(each)) for each in {tuple(each) for each in lengths})
    assert sums.most_common(1)[0][1] == (3 if config.most_requests > 2 else 2)


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda lens, page: [at > 0 and n == lens[0] for at, n in enumerate(lens)],
        lambda lens, page: [n > 1 and n % page == 1 for n in lens],
    ],
    ids=["told-apart-by-lengths", "new-page-forgotten"],
)
def test_a_bug_of_few_lengths_is_found_with_its_field(
    is_wrong: Callable[[list[int], int], list[bool]],
) -> None:
    """A replay hook that is wrong for equal lengths, or for the first token of a page, breaks GP02 or 07."""

    class OfFewLengths(ReferenceBackend):
        fill_is_device_only = False

        @hookimpl
        def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
            fresh = super().init_metadata_replay(view, shape, captured)
            lens = view.seq_lens_cpu.tolist()
            fresh.last.sub_(torch.tensor(is_wrong(lens, self.context.limits.page_size)).long())
            return fresh

    (plan,) = planned_lanes(
        OfFewLengths,
        ReferenceRunner,
        replace(QUICK, lanes=("decode-page16-gqa-float32",)),
    )
    replayed = [e for e in EXPERIMENTS if e.name == "answers_replayed"]
    found = [f for r in examine_lane(plan, QUICK, experiments=replayed) for f in r.findings]
    named = [f for f in found if f.rule in ("GP02", "GP07")]
    assert named
    assert all("metadata.last" in str(f.field) for f in named)


# -- other kinds and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_batches_of_other_kinds_have_the_fields_of_their_mode(config: Config) -> None:
    """There is a batch of every other mode, with its fields, and chunks of several widths."""
    batches = [problem.batch() for _, problem in of_other_kinds(config)]
    here = {config.case.mode, ForwardMode.IDLE}
    assert {b.forward_mode for b in batches} == {*ForwardMode} - here
    for batch in batches:
        batch.require_consistent()
        assert (batch.extend_seq_lens_cpu is not None) is batch.forward_mode.is_ragged
    ragged = [b.extend_seq_lens_cpu for b in batches]
    chunks = {n for lens in ragged if lens is not None for n in lens.tolist()}
    widths = {1, DRAFT_WIDTH, config.case.tokens_per_request or 1}
    assert chunks == widths or not {ForwardMode.EXTEND, ForwardMode.MIXED} - here


def test_default_sizes_are_asked_at_every_multiple_and_its_neighbours() -> None:
    """Up to 256, and for max_bs as well: no regular step of sizes is left out."""
    (config,) = [c for c in CONFIGS if c.case.mode is ForwardMode.DECODE and "float32" in str(c)]
    asked = {problem.batch_size for problem in of_default_sizes(config, 256)}
    for step in (8, 16, 32, 64):
        for at in range(step, 257, step):
            assert {n for n in (at - 1, at, at + 1) if n <= 256} <= asked
            assert {at - 1, at, at + 1} <= {*MOST}
    assert {*range(1, 9)} <= asked


def test_an_eager_step_may_have_any_number_of_requests() -> None:
    """A configuration with room has request rows for every size up to the room."""
    (config,) = [c for c in CONFIGS if c.case.mode is ForwardMode.DECODE and "float32" in str(c)]
    roomy = replace(config, extra_requests=24)
    whole = of_size(roomy, roomy.most_requests + 24)
    assert len({r.row for r in whole.requests}) == len(whole.requests) == config.most_requests + 24
    assert replace(config, extra_requests=2).num_rows == config.num_rows
