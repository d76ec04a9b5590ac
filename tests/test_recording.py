"""Tests of recordings of an engine: every step of every lane, in a format that the suite reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact.batch import ForwardMode
from graphpact.errors import UsageError
from graphpact_conformance.draws.scenario import RecordedLane, read
from graphpact_conformance.experiments import EXPERIMENTS
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.results import Outcome
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options
from graphpact_engine.config import EngineConfig
from graphpact_engine.engine import Engine
from graphpact_engine.recording import StepRecorder
from graphpact_engine.request import SamplingParams

MODELS = Path(__file__).resolve().parents[1] / "examples" / "models"
PROMPTS = [[3, 5, 7], [11], [2] * 20]
EAGLE = {"algorithm": "eagle", "draft_model": str(MODELS / "tiny-llama-eagle"), "num_steps": 2}
MTP = {"algorithm": "frozen_kv_mtp", "draft_model": str(MODELS / "tiny-llama-mtp"), "num_steps": 2}


def record(path: Path, *, count: int = 18, **speculative: Any) -> tuple[list[RecordedLane], Engine, int]:
    """Generate with the tiny model; return the recording, the engine, and the number of steps."""
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(MODELS / "tiny-llama")},
            "engine": {
                "attention_backend": "flashinfer",
                "max_num_seqs": 2,
                "max_model_len": 96,
                "page_size": 8,
            },
            "speculative": speculative,
        }
    )
    with StepRecorder(path) as recorder, Engine(config, observers=[recorder]) as engine:
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=count, ignore_eos=True))
    return read(path), engine, recorder.num_steps


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param({}, id="plain"),
        pytest.param({**EAGLE, "topk": 1, "num_draft_tokens": 3}, id="chain"),
        pytest.param({**EAGLE, "topk": 2, "num_draft_tokens": 4}, id="tree", marks=pytest.mark.sweep),
        pytest.param({**MTP, "topk": 2, "num_draft_tokens": 4}, id="frozen"),
    ],
)
def test_what_an_engine_records_is_what_it_ran(speculative: dict[str, Any], tmp_path: Path) -> None:
    """A recording has a line for each lane with its sizes, and all its steps; the suite reads every line."""
    recordings, engine, count = record(tmp_path / "steps.jsonl", **speculative)
    ran = {lane.name: lane.stats.replays + lane.stats.eager.total() for lane in engine.lanes}
    assert {r.line.lane: len(r.steps) for r in recordings} == {name: n for name, n in ran.items() if n}
    assert sum(ran.values()) == count
    for recording in recordings:
        lane = next(lane for lane in engine.lanes if lane.name == recording.line.lane)
        assert [tuple(shape) for shape in recording.line.shapes] == [
            (shape.batch_size, shape.num_tokens) for shape in lane.shapes
        ]
        assert recording.line.context == engine.memory.limits.max_context_len
        assert recording.line.page_size == 8
        config = recording.config(ReferenceBackend.capabilities, torch.device("cpu"))
        assert config is not None
        for problem in recording.steps:
            assert problem.batch().require_consistent() is None
    by_mode = {r.case.mode: r for r in recordings}
    if speculative.get("algorithm") == "eagle":
        accepted = [r.accepted for p in by_mode[ForwardMode.DRAFT_EXTEND].steps for r in p.requests]
        assert max(accepted) > 0
    if speculative.get("topk") == 2:
        tokens = [t for p in by_mode[ForwardMode.TARGET_VERIFY].steps for t in p.tokens]
        assert any(t.parent is not None and t.depth != 1 for t in tokens)


def test_the_requests_of_a_recording_grow_as_they_did(tmp_path: Path) -> None:
    """A request of a decode step has one more cached token than before; no text is recorded."""
    path = tmp_path / "steps.jsonl"
    recordings, _, _ = record(path)
    decode = next(r for r in recordings if r.case.mode is ForwardMode.DECODE)
    before: dict[int, int] = {}
    for step in decode.steps:
        for request in step.requests:
            cached = len(request.cached)
            assert before.get(request.row) in (None, cached - 1) or cached in map(len, PROMPTS)
            before[request.row] = cached
    keys = {key for line in path.read_text().splitlines() for key in json.loads(line)}
    assert not keys & {"token_ids", "input_ids", "text", "prompt"}


@pytest.mark.sweep
def test_a_shipped_backend_passes_what_an_engine_recorded(tmp_path: Path) -> None:
    """The recorded steps of a speculating engine are replayed correctly in each of its lanes."""
    record(tmp_path / "steps.jsonl", **EAGLE, topk=1, num_draft_tokens=3)
    options = Options(scenario=str(tmp_path / "steps.jsonl"), examples=1)
    plans = planned_lanes(ReferenceBackend, ReferenceRunner, options)
    assert len(plans) == 5
    experiments = [e for e in EXPERIMENTS if e.name in ("recorded_steps", "answers_replayed")]
    for plan in plans:
        results = [*examine_lane(plan, options, experiments=experiments)]
        assert {r.outcome for r in results} == {Outcome.PASS}, results


# -- the file ----------------------------------------------------------------------------------------


def test_a_recording_replaces_no_file(tmp_path: Path) -> None:
    """An existing file is refused and not changed; a missing folder is refused too."""
    path = tmp_path / "steps.jsonl"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"), StepRecorder(path):
        pass
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be written"), StepRecorder(tmp_path / "no" / "steps.jsonl"):
        pass


def test_a_run_without_steps_leaves_no_file(tmp_path: Path) -> None:
    """If the engine cannot be built, no empty recording is left behind."""
    with pytest.raises(ZeroDivisionError), StepRecorder(tmp_path / "steps.jsonl"):
        raise ZeroDivisionError
    assert not [*tmp_path.iterdir()]
