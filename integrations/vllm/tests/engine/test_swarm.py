"""`graphpact swarm vllm`: seeds of vLLM as it is are clean, and bugs that it had are found by a seed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_plants import PLANTS

from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.judging import RunFinding
from graphpact_vllm.load.offer import VllmLoad
from planted_runs import PlantedRuns

TRIALS = 30
MOST_REQUESTS = 5
SEEDS = {
    "hit_stays_free": 1,
    "whole_prompt_is_a_hit": 35,
    "rejected_stay_computed": 2,
    "late_copy": 0,
    "uniform_by_the_longest": 10,
}
"""The first of 50 seeds that finds a plant."""
USUAL = {"late_copy"}
EXAMPLES = Path(__file__).parents[4] / "examples" / "swarm"

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Return a function that gives a task to one worker process, and returns its answer."""
    script = Path(__file__).with_name("swarm_worker.py")
    with PlantedRuns(script, VllmLoad(), tmp_path_factory.mktemp("swarm")) as runs:
        yield runs.ask


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.sweep) for name in SEEDS]
)
def test_a_bug_that_vllm_had_is_found_and_shrunk(name: str, ask: Ask) -> None:
    """A seed finds it, for what it is; a run of a few requests is enough, and right without it."""
    seed = SEEDS[name]
    found = ask(plant=name, seeds=[seed, seed + 1], trials=TRIALS)
    assert found["seed"] == seed
    finding = RunFinding(**found["finding"])
    assert finding.kind in PLANTS[name].kinds, f"{finding}\n{found['trace']}"
    assert PLANTS[name].names in finding.text
    assert 1 <= len(Scenario.from_json(found["smaller"]).arrivals) <= MOST_REQUESTS
    assert not found["without"]


def test_every_plant_has_a_seed() -> None:
    """None is left out, and each is found within 50 seeds."""
    assert SEEDS.keys() == PLANTS.keys()
    assert all(0 <= seed < 50 for seed in SEEDS.values())


def _swarm(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the command with ``--json``; return its status, its summary and what it wrote."""
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "graphpact_cli",
            "swarm",
            "vllm",
            "--workers=1",
            "--json",
            f"--out={folder}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
    )
    summary: dict[str, Any] = json.loads(found.stdout) if found.stdout else {}
    return found.returncode, summary, found.stderr


@pytest.mark.smoke
def test_the_first_seeds_are_clean(tmp_path: Path) -> None:
    """The command ends with status 0."""
    status, summary, text = _swarm(tmp_path / "out", "--seeds=0:4")
    assert status == 0, text
    assert summary["clean"] == 4


@pytest.mark.parametrize("seeds", ["4:8", pytest.param("0:24", marks=pytest.mark.sweep)])
def test_a_seed_takes_the_same_steps_again(seeds: str, tmp_path: Path) -> None:
    """Each seed runs twice."""
    status, _, text = _swarm(tmp_path / "out", f"--seeds={seeds}", "--repeat=2")
    assert status == 0, text


@pytest.mark.sweep
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("vllm-*.json")), ids=lambda file: file.stem)
def test_what_is_known_is_found(file: Path, tmp_path: Path) -> None:
    """The scenario of each known bug of this release finds it; then its entry can go when vLLM mends it."""
    status, summary, text = _swarm(tmp_path / "out", f"--scenario={file}")
    assert status == 0, text
    assert summary["findings"]
