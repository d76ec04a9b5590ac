"""Steps of the real vLLM in a file: the suite's reader takes them, and they are what the engine ran."""

from pathlib import Path
from typing import Any

import pytest
from engines import NGRAMS, PROMPTS, REPEATED, requests, run_in_child, sweep_but

from graphpact.recording import LaneSteps, read_recording
from graphpact_cli import main

WORDS = "tape,guard,contents:1,record:"


def _record(path: Path, **arguments: Any) -> tuple[dict[str, LaneSteps], dict[str, Any]]:
    """Run requests that are recorded; return the lanes of the file by name, and the state of graphpact."""
    run = run_in_child(f"{WORDS}{path}", **arguments)
    assert run.faults == []
    return {lane.line.lane: lane for lane in read_recording(path)}, run.state


@pytest.mark.parametrize(("runner", "block_size"), sweep_but({(1, 16), (2, 32)}, [1, 2], [16, 32]))
def test_every_step_of_an_engine_is_recorded(runner: int, block_size: int, tmp_path: Path) -> None:
    """The file has each prefill and each decode step, replayed or eager, and the suite takes it.

    Requests grow by one token in each decode step, on the pages that they have.
    """
    path = tmp_path / "steps.jsonl"
    lanes, state = _record(path, runner=runner, rounds=2, block_size=block_size)
    recorded = state["guard"]["recorded"]
    assert recorded["left_out"] == []
    counted = sum(graph["replays"] for graph in state["steps"]["graphs"].values())
    counted += sum(each["steps"] for each in state["steps"]["eager"])
    assert recorded["steps"] == counted == sum(len(lane.steps) for lane in lanes.values())
    decode = lanes["decode"]
    assert decode.line.shapes == [[1, 1], [2, 2], [4, 4], [8, 8]]
    assert decode.line.page_size == block_size
    assert {len(step.requests) for step in decode.steps.values()} == {*range(1, 9)}
    grown = 0
    for at, step in decode.steps.items():
        last = decode.steps.get(at - 1)
        before = {} if last is None else {each.pages[0]: each for each in last.requests}
        for request in step.requests:
            if (earlier := before.get(request.pages[0])) is not None:  # it is the same request
                assert request.cached == earlier.cached + 1
                assert request.pages[: len(earlier.pages)] == earlier.pages
                grown += 1
    assert grown > 10 * len(PROMPTS)
    assert main(["check", "fa3", "--scenario", str(path), "--quick"]) == 0


@pytest.mark.parametrize("runner", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_drafts_are_recorded(runner: int, tmp_path: Path) -> None:
    """Steps in which each request has its drafts are a lane of their own, as often as their graphs ran."""
    given = requests(REPEATED, 32, every=0)
    lanes, state = _record(tmp_path / "steps.jsonl", given=given, runner=runner, **NGRAMS)
    verify = lanes["target_verify"]
    assert verify.line.draft == [3, 1, 4]
    assert verify.line.shapes == [[1, 4], [2, 8], [4, 16], [8, 32]]
    assert len(verify.steps) == sum(graph["replays"] for graph in state["steps"]["graphs"].values()) > 3


def test_a_file_of_somebody_else_ends_the_start(tmp_path: Path) -> None:
    """The engine does not start if the file is no recording, and the file is kept."""
    path = tmp_path / "steps.jsonl"
    path.write_text("mine")
    with pytest.raises(AssertionError, match="exists and is no recording; it is not replaced"):
        _record(path)
    assert path.read_text() == "mine"
