"""``graphpact swarm``, as a user runs it: seeds, a run that goes on, a scenario, and wrong commands."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from graphpact_cli import main
from graphpact_swarm.report.results import FILE
from graphpact_swarm.scenario import Arrival, Scenario

_SEEDS = (
    *("graphpact", "--workers", "1", "--json"),
    *("--set", "kernels=portable", "--set", "prefill=eager"),  # neither compiles; the sweeps draw all
)


def swarm(*words: str, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run the command in ``folder``; return its status, what it wrote as JSON, and its messages."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(said):
        status = main(["swarm", *words])
    return status, json.loads(out.getvalue()) if out.getvalue() else {}, said.getvalue()


def digests(folder: Path) -> dict[int, str]:
    """Return the digest of each seed in a file of results."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return {line["result"]["seed"]: line["result"]["verdict"]["digest"] for line in lines if "result" in line}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run of two seeds of our engine, and its summary."""
    folder = tmp_path_factory.mktemp("swarm")
    status, summary, said = swarm(*_SEEDS, "--seeds", "0:2", "--out", "here", folder=folder)
    assert status == 0, said
    return folder / "here", summary


def test_clean_seeds_end_with_status_0_a_summary_and_a_page(run: tuple[Path, dict[str, Any]]) -> None:
    """The summary counts the seeds and what was seen, and the page lists features by verdict."""
    folder, summary = run
    assert (summary["seeds"], summary["clean"], summary["findings"]) == (2, 2, [])
    assert any(name.startswith("graph decode") and count for name, count in summary["coverage"].items())
    page = (folder / "report.html").read_text()
    assert "2 runs are clean" in page
    assert "page_size=" in page


_MODELS = Path(__file__).parents[2] / "examples/models"
_DRAFTS = [
    word
    for name, folder in (("eagle", "eagle"), ("eagle_tree", "eagle"), ("frozen_kv_mtp", "mtp"))
    for word in ("--draft", f"{name}={_MODELS}/tiny-llama-{folder}")
]
_WAYS = ([], ["--strict"], ["--faults"], ["--model", f"{_MODELS}/tiny-llama", *_DRAFTS, "--strict"])


@pytest.mark.sweep
@pytest.mark.parametrize("way", range(len(_WAYS)), ids=["plain", "strict", "faults", "drafts"])
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_the_first_500_seeds_are_clean(first: int, way: int, tmp_path: Path) -> None:
    """Our engine has no finding: as it is, on the strict tape, with faults, and with drafts."""
    seeds = f"{first}:{first + 100}"
    status, summary, said = swarm("graphpact", "--seeds", seeds, *_WAYS[way], "--json", folder=tmp_path)
    assert (status, summary["seeds"], summary["clean"]) == (0, 100, 100), said
    if way == 3:
        assert summary["coverage"]["event draft accepted"] > 20


def _burn() -> None:
    while True:
        sum(range(10_000))


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Processes that keep every core busy during a test."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_burn, daemon=True) for _ in range(os.cpu_count() or 2)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.sweep
@pytest.mark.usefixtures("busy_cores")
def test_a_seed_takes_the_same_steps_on_a_busy_machine(run: tuple[Path, dict[str, Any]]) -> None:
    """Each seed runs twice, beside processes on all cores; its digest is that of the run before."""
    folder, _ = run
    status, summary, said = swarm(
        *_SEEDS, "--seeds", "0:2", "--repeat", "2", "--out", "again", folder=folder.parent
    )
    assert (status, summary["clean"]) == (0, 2), said
    assert digests(folder.parent / "again") == digests(folder)


def test_a_run_goes_on(run: tuple[Path, dict[str, Any]]) -> None:
    """In the folder of a run, the seeds that are missing there run, and no other."""
    folder, _ = run
    lines = (folder / FILE).read_text()
    status, summary, said = swarm(*_SEEDS, "--seeds", "0:3", "--out", "here", folder=folder.parent)
    assert (status, summary["seeds"]) == (0, 3), said
    assert (folder / FILE).read_text().startswith(lines)
    assert digests(folder).keys() == {0, 1, 2}


@pytest.mark.sweep
def test_features_of_model_load_and_engine_can_be_fixed(tmp_path: Path) -> None:
    """Each seed has the values of ``--set``."""
    fixed = {"model": "windows", "requests": 1, "logprobs": "all", "page_size": 1, "fault": "raise"}
    words = [word for name, value in fixed.items() for word in ("--set", f"{name}={value}")]
    status, _, said = swarm(*_SEEDS, "--seeds", "4:6", "--faults", *words, "--out", ".", folder=tmp_path)
    assert status == 0, said
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    scenarios = [line["result"]["scenario"] for line in lines if "result" in line]
    assert [{name: each["choice"][name] for name in fixed} for each in scenarios] == [fixed, fixed]


@pytest.mark.sweep
def test_a_run_that_sigterm_ends_leaves_no_model_behind(tmp_path: Path) -> None:
    """The status is that of shells; the made models are removed, the results are kept."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "graphpact_cli", "swarm", *_SEEDS, "--seeds", "0:99"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    with process:
        results = tmp_path / "swarm-graphpact" / FILE
        while not (results.exists() and '"result"' in results.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        assert [*temporary.glob("graphpact-swarm-models-*")]
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not [*temporary.glob("graphpact-swarm-*")]
    assert digests(tmp_path / "swarm-graphpact")


@pytest.mark.sweep
def test_a_scenario_says_what_is_wrong(tmp_path: Path) -> None:
    """A request that the engine refuses is a finding, with status 1 and the engine's own words."""
    arrivals = (Arrival(prompt=(5,) * 300, max_new_tokens=2),)
    choice = {
        "model": "llama",
        "capture_sizes": [1, 2],
        "prefill": "eager",
        "token_counts": [16],
        "page_size": 16,
        "chunk": 256,
        "mixed": False,
        "async_scheduling": False,
        "backend": "flashinfer",
        "kernels": "portable",
        "max_requests": 8,
        "cache": "plenty",
        "drafts": "none",
    }
    Scenario(engine="graphpact", choice=choice, arrivals=arrivals).save(tmp_path / "long.json")
    status, verdict, said = swarm("graphpact", "--scenario", "long.json", "--json", folder=tmp_path)
    assert status == 1
    (finding,) = verdict["findings"]
    assert finding["kind"] == "raised"
    assert "a prompt of 300 tokens" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["acme"], "acme"),
        (["graphpact", "--seeds", "5:5"], "has no seed"),
        (["graphpact", "--seeds", "a:b"], "is no range"),
        (["graphpact", "--set", "page_sise=16"], "there is no feature 'page_sise'"),
        (["graphpact", "--set", "page_size=7"], "the feature has no such value"),
        (["graphpact", "--set", "page_size=true"], "the feature has no such value"),
        (["graphpact", "--set", "model=given"], "the feature has no such value"),
        (["graphpact", "--set", "fault=raise"], "there is no feature 'fault'"),
        (["graphpact", "--set", "page_size"], "is not KEY=VALUE"),
        (["graphpact", "--draft", "eagle"], "is not DRAFTS=DIR"),
        (["graphpact", "--draft", "eagle=nowhere"], "there is no config.json"),
        (["graphpact", "--model", "nowhere"], "--model nowhere"),
        (["graphpact", "--scenario", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_runs(
    words: Sequence[str], message: str, tmp_path: Path
) -> None:
    """The status is 2, the message names what is wrong, and no file is left."""
    status, _, said = swarm(*words, folder=tmp_path)
    assert (status, [*tmp_path.iterdir()]) == (2, []), said
    assert message in said
