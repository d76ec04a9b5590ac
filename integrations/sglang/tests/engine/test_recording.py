"""Steps of the real SGLang in a file: the suite's reader takes them, and they are what the engine ran."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, requests, run_in_child
from test_drafts import DRAFTS, TREE

from graphpact.recording import LaneSteps, read_recording

WORDS = "tape,guard,contents:1,record:"


def _record(path: Path, **arguments: Any) -> tuple[dict[str, LaneSteps], dict[str, Any]]:
    """Run requests that are recorded; return the lanes of the file by name, and the state of graphpact."""
    run = run_in_child(f"{WORDS}{path}", requests(), rounds=2, **arguments)
    assert run.faults == []
    return {lane.line.lane: lane for lane in read_recording(path)}, run.state


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.smoke)])
def test_every_step_of_an_engine_is_recorded(page_size: int, tmp_path: Path) -> None:
    """The file has each prefill and each decode step, replayed or eager, and nothing is left out.

    Requests grow by one token in each decode step, on the pages that they have; the second round finds its
    prompts in the prefix cache, so its requests share pages with those before.
    """
    lanes, state = _record(tmp_path / "steps.jsonl", page_size=page_size)
    recorded = state["guard"]["recorded"]
    assert recorded["left_out"] == []
    counted = sum(graph["replays"] for graph in state["steps"]["graphs"].values())
    counted += sum(each["steps"] for each in state["steps"]["eager"])
    assert recorded["steps"] == counted == sum(len(lane.steps) for lane in lanes.values())
    decode, extend = lanes["decode"], lanes["extend"]
    assert decode.line.shapes == [[1, 1], [2, 2], [4, 4], [8, 8]]
    assert decode.line.page_size == page_size
    assert {len(step.requests) for step in decode.steps.values()} == {*range(1, 9)}
    grown = moved = 0
    for at, step in decode.steps.items():
        before = {each.row: each for each in decode.steps[at - 1].requests} if at - 1 in decode.steps else {}
        for request in step.requests:
            if request.row in before:  # no prefill came in between, so it is the same request
                earlier = before[request.row]
                assert request.cached == earlier.cached + 1
                grown += 1
                moved += request.pages[: len(earlier.pages)] != earlier.pages
    assert grown > 100
    assert moved <= 2 * len(PROMPTS)  # the prefix cache replaces pages of a prompt by equal ones, once
    if page_size == 1:  # a prompt has less than a page of 16
        assert any(request.cached for step in extend.steps.values() for request in step.requests)


@pytest.mark.parametrize(
    "arguments", [DRAFTS, TREE, DRAFTS | {"page_size": 16}], ids=["chain", "tree", "pages"]
)
def test_drafts_are_recorded(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Drafts, verifications and extends of drafts are lanes of their own, as often as their graphs ran.

    The prefills of the draft model are left out, counted and named.
    """
    lanes, state = _record(tmp_path / "steps.jsonl", **arguments)
    replays: Counter[str] = Counter()
    for name, graph in state["steps"]["graphs"].items():
        replays[name.partition("[")[0]] += graph["replays"]
    steps = {lane.line.mode.value: len(lane.steps) for lane in lanes.values()}
    assert steps["target_verify"] == replays["DecodeCudaGraphRunner"]
    assert steps["draft_decode"] == replays["draft EAGLEDraftCudaGraphRunner"]
    assert steps["draft_extend"] == replays["draft EAGLEDraftExtendCudaGraphRunner"]
    verify = next(lane for name, lane in lanes.items() if name.startswith("target_verify"))
    assert verify.line.is_tree == (arguments["speculative_eagle_topk"] > 1)
    if verify.line.is_tree:
        parents = [request.parents for step in verify.steps.values() for request in step.requests]
        assert any(each is not None and each != [None, 0, 1, 2, 3, 4] for each in parents)
    extend = next(lane for name, lane in lanes.items() if name.startswith("draft_extend"))
    assert any(request.accepted for step in extend.steps.values() for request in step.requests)
    (left_out,) = state["guard"]["recorded"]["left_out"]
    assert left_out["kind"] == "extend of the draft model"


def test_a_file_of_somebody_else_ends_the_start(tmp_path: Path) -> None:
    """The engine does not start if the file is no recording, and the file is kept."""
    path = tmp_path / "steps.jsonl"
    path.write_text("mine")
    with pytest.raises(AssertionError, match="exists and is no recording; it is not replaced"):
        _record(path)
    assert path.read_text() == "mine"
