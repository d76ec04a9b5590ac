"""Twenty faults that are planted in our engine: each is found within 50 seeds, and shrunk to four requests.

Without a plant the same seeds are clean.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plants import PLANTS

from graphpact_engine.load.offer import GraphpactLoad
from graphpact_swarm.draws import SEEDS_PER_START
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.judging import RunFinding
from planted_runs import PlantedRuns

SEEDS = 50
TRIALS = 30
MOST_REQUESTS = 4

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Return a function that gives a task to one worker process, and returns its answer."""
    script = Path(__file__).with_name("planted_worker.py")
    with PlantedRuns(script, GraphpactLoad(), tmp_path_factory.mktemp("swarm")) as runs:
        yield runs.ask


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found_and_shrunk(name: str, ask: Ask) -> None:
    """One of 50 seeds finds it, for what it is; a run of four requests is enough, and right without it."""
    plant = PLANTS[name]
    found = ask(plant=name, seeds=[0, SEEDS], trials=TRIALS)
    assert found["seed"] is not None
    finding = RunFinding(**found["finding"])
    assert finding.kind in plant.kinds, f"{finding}\n{found['trace']}"
    assert finding.rule == plant.rule
    assert plant.names in finding.text
    assert 1 <= len(Scenario.from_json(found["smaller"]).arrivals) <= MOST_REQUESTS
    assert not found["without"]


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_START))
def test_the_engine_as_it_is_is_clean(first: int, ask: Ask) -> None:
    """Without a plant, and with all checks, the seeds find nothing."""
    found = ask(plant=None, seeds=[first, min(first + SEEDS_PER_START, SEEDS)], trials=0)
    assert found["seed"] is None, RunFinding(**found["finding"])
