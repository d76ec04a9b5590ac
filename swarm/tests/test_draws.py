"""What a seed means: the same scenario each time, within the engine's limits; every value in some seed."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpact.engines import EngineStart, Feature, Landmarks, LoadedEngine, LoadOffer
from graphpact.errors import EngineError
from graphpact_engine.load.offer import GraphpactLoad
from graphpact_swarm.draws import SEEDS_PER_START, Space, draw_scenario
from graphpact_swarm.models import ModelFacts
from graphpact_swarm.scenario import Scenario

MODEL = ModelFacts(Path("llama"), [*range(3, 160)], 512, None)
MARKS = Landmarks(
    request_counts=(1, 2, 4),
    token_counts=(16, 32),
    page_size=16,
    chunk=24,
    verify_width=4,
    max_len=256,
    max_requests=8,
    cache_tokens=176,
)
MOST_TOKENS = 1500  # of a scenario


class Offer(LoadOffer):
    """An engine of two features, whose second values exclude each other; ``broken`` refuses everything."""

    draft_models = ("eagle",)

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def features(self) -> Sequence[Feature]:
        """Return the features."""
        return (Feature(name="drafts", values=("none", "eagle")), Feature(name="mixed", values=(False, True)))

    def refused(self, choice: Mapping[str, Any]) -> str | None:
        """Refuse drafts in mixed steps."""
        return "both" if self.broken or (choice["drafts"] != "none" and choice["mixed"]) else None

    def prepare(self) -> None:
        """Import nothing."""

    def start(self, how: EngineStart) -> LoadedEngine:
        """Refuse: nothing is started here."""
        raise AssertionError(how)


def drawn(space: Space, seed: int, marks: Landmarks = MARKS, model: ModelFacts = MODEL) -> Scenario:
    """Return the scenario of a seed."""
    return draw_scenario(space.engine, seed, space.configuration(seed), space.load(seed), marks, model)


def digest() -> str:
    """Return a text that is the same if the scenarios of the first seeds are the same."""
    space = Space("graphpact", GraphpactLoad(), ["llama", "window"], has_faults=True)
    texts = [json.dumps(drawn(space, seed).to_json()) for seed in range(60)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def test_a_seed_is_the_same_scenario_in_every_process() -> None:
    """A process with another order of sets draws the same scenarios."""
    there = subprocess.run(
        [sys.executable, "-c", "import test_draws; print(test_draws.digest())"],
        env=os.environ
        | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert there == digest()


@st.composite
def marks(draw: st.DrawFn) -> Landmarks:
    """Draw the landmarks of an engine, small ones too."""
    counts = st.lists(st.integers(1, 300), max_size=4).map(lambda found: tuple(sorted(found)))
    page = draw(st.sampled_from([1, 4, 16, 64]))
    return Landmarks(
        request_counts=draw(counts),
        token_counts=draw(counts),
        page_size=page,
        chunk=draw(st.integers(1, 300)),
        verify_width=draw(st.integers(1, 8)),
        max_len=draw(st.integers(2, 600)),
        max_requests=draw(st.integers(1, 16)),
        cache_tokens=page * draw(st.integers(2, 40)),
    )


@given(seed=st.integers(0, 10**6), marks=marks(), window=st.none() | st.integers(1, 64))
def test_requests_fit_the_engine(seed: int, marks: Landmarks, window: int | None) -> None:
    """Each request has a prompt, asks for a token, fits into cache and model, and comes before its abort."""
    model = ModelFacts(Path("llama"), [*range(3, 160)], 512, window)
    scenario = drawn(Space("graphpact", GraphpactLoad(), ["llama"]), seed, marks, model)
    room = marks.cache_tokens - marks.page_size - marks.verify_width
    most = max(min(marks.max_len, model.max_len, room), 2)
    assert scenario.arrivals
    assert len(scenario.arrivals) == 1 or scenario.num_tokens <= MOST_TOKENS
    for each in scenario.arrivals:
        assert each.prompt
        assert each.max_new_tokens >= 1
        assert len(each.prompt) + each.max_new_tokens <= most
        assert {*each.prompt, *each.stop_token_ids} <= {*model.tokens}
        assert each.aborted_in is None or each.aborted_in >= each.arrives_in
    times = [each.arrives_in for each in scenario.arrivals]
    assert times == sorted(times)


def test_every_value_is_drawn() -> None:
    """The first 400 seeds have every value of every feature, those of drafts and faults too."""
    offer = GraphpactLoad()
    space = Space("graphpact", offer, ["llama", "window"], frozenset(offer.draft_models), has_faults=True)
    missing = {
        (each.name, json.dumps(value))
        for each in [*space.engine_features(), *space.load_features()]
        for value in each.values
    }
    missing -= {("fault", '"kill"'), ("fault", '"slow"')}  # for several ranks
    for seed in range(400):
        values = {**space.configuration(seed), **space.load(seed)}
        missing -= {(name, json.dumps(value)) for name, value in values.items()}
    assert not missing


def test_the_landmarks_are_hit() -> None:
    """Prompts of a chunk, a page and a token count, and one more and less, are in the first 400 seeds."""
    space = Space("graphpact", GraphpactLoad(), ["llama"])
    lengths = {len(each.prompt) for seed in range(400) for each in drawn(space, seed).arrivals}
    for point in (MARKS.chunk, 2 * MARKS.chunk, MARKS.page_size, *MARKS.token_counts, MARKS.verify_width):
        assert {point - 1, point, point + 1} <= lengths
    counts = {len(drawn(space, seed).arrivals) for seed in range(400)}
    assert {1, 2, 3, 4, 5} <= counts


@given(seed=st.integers(0, 10**6))
def test_seeds_of_a_block_share_an_engine(seed: int) -> None:
    """They have one configuration, which the engine does not refuse."""
    space = Space("graphpact", GraphpactLoad(), ["llama", "window"], frozenset(["eagle"]))
    block = seed // SEEDS_PER_START * SEEDS_PER_START
    assert space.configuration(seed) == space.configuration(block)
    assert space.offer.refused(space.configuration(seed)) is None


def test_impossible_values_are_not_drawn() -> None:
    """A draft without its model is not drawn, a fixed feature has its value, no pair is refused."""
    seeds = range(0, 400, SEEDS_PER_START)
    without = Space("e", Offer(), ["llama"])
    assert {without.configuration(seed)["drafts"] for seed in seeds} == {"none"}
    fixed = Space("e", Offer(), ["llama"], frozenset(["eagle"]), fixed={"mixed": True})
    assert {(c["mixed"], c["drafts"]) for c in map(fixed.configuration, seeds)} == {(True, "none")}
    with_it = Space("e", Offer(), ["llama"], frozenset(["eagle"]))
    both = {(c["mixed"], c["drafts"]) for c in map(with_it.configuration, seeds)}
    assert both == {(False, "none"), (True, "none"), (False, "eagle")}


def test_an_engine_that_refuses_everything_is_an_error() -> None:
    """The error has the reason of the engine."""
    with pytest.raises(EngineError, match="refuses its plainest configuration: both"):
        Space("e", Offer(broken=True), ["llama"]).configuration(0)
