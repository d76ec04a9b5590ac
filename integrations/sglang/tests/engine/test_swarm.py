"""`graphpact swarm sglang`: clean seeds are clean, a seed repeats itself, and planted bugs are found.

Does not: test the swarm itself; its own tests do.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_plants import PLANTS

from graphpact_sglang.load.offer import SglangLoadOffer
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.judging import RunFinding
from planted_runs import PlantedRuns

SEEDS = {
    "rows_stay_in_place": 0,
    "token_after_the_end": 0,
    "aborted_waits_on": 0,
    "freed_by_two_paths": 0,
    "frees_the_shared_prefix": 1,
}
"""The seed of 0 to 49 that finds each plant first."""
USUAL = ("rows_stay_in_place", "token_after_the_end")
"""The plants that each change runs."""
TRIALS = 20
MOST_REQUESTS = {"frees_the_shared_prefix": 12}  # whose cache must be full; few for the others
EXAMPLES = Path(__file__).parents[4] / "examples" / "swarm"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedRuns]:
    """Return a worker process of the swarm."""
    script = Path(__file__).with_name("swarm_worker.py")
    with PlantedRuns(script, SglangLoadOffer(), tmp_path_factory.mktemp("swarm")) as process:
        yield process


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.sweep) for name in SEEDS]
)
def test_a_bug_that_engines_had_is_found_and_shrunk(name: str, runs: PlantedRuns) -> None:
    """Its seed finds it, for what it is; a run of few requests is enough, and right without it."""
    plant, seed = PLANTS[name], SEEDS[name]
    found = runs.ask(plant=name, seeds=[seed, seed + 1], trials=TRIALS)
    assert found["seed"] == seed
    finding = RunFinding(**found["finding"])
    assert finding.kind in plant.kinds, f"{finding}\n{found['trace']}"
    assert plant.names in finding.text
    assert 1 <= len(Scenario.from_json(found["smaller"]).arrivals) <= MOST_REQUESTS.get(name, 4)
    assert not found["without"]


def swarm(folder: Path, *options: str) -> tuple[int, dict[str, object]]:
    """Return the status of the command, and what it says."""
    run = subprocess.run(
        [sys.executable, "-m", "graphpact_cli", "swarm", "sglang", *options, "--json"],
        cwd=folder,
        env=os.environ | {"GRAPHPACT": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    said: dict[str, object] = json.loads(run.stdout)
    return run.returncode, said


@pytest.mark.smoke
def test_seeds_are_clean_and_repeat_themselves(tmp_path: Path) -> None:
    """Seeds of one configuration are clean, and each takes the same steps twice."""
    status, said = swarm(tmp_path, "--seeds", "4:8", "--workers", "1", "--repeat", "2", "--out", "found")
    assert status == 0
    assert said["findings"] == []
    assert said["clean"] == 4


@pytest.mark.sweep
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("sglang-*.json")), ids=lambda file: file.stem)
def test_what_is_known_is_found(file: Path, tmp_path: Path) -> None:
    """The scenario of each known bug of this release finds it; then its entry can go when SGLang mends it."""
    status, said = swarm(tmp_path, "--scenario", str(file))
    assert status == 0
    assert said["findings"]
