"""Recorded steps of a guarded engine: a large cache in small numbers, rotation, ranks, what is left out."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from large_engine import LANE, PAGE, LargeEngine

from graphpact.errors import GraphpactError, UsageError
from graphpact.recording import MOST_CONTEXT, MOST_STEPS, LaneSteps, RecordingWriter, read_recording
from graphpact_guard import Guard, Settings, StepRecording

Start = Callable[..., tuple[Guard, StepRecording]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a guard which records; its file is closed after the test."""
    with ExitStack() as stack:

        def started(path: Path, rank: str = "") -> tuple[Guard, StepRecording]:
            settings = Settings.from_environment({"GRAPHPACT": f"record:{path}"})
            guard = Guard(settings, {"engine": "large"}, rank=rank)
            assert guard.recording is not None
            stack.callback(guard.recording.close)
            return guard, guard.recording

        yield started


def _record(recording: StepRecording, engine: LargeEngine, count: int) -> None:
    for batch in engine.steps(count):
        recording.record(LANE, batch, engine.table)


def _read(path: Path) -> LaneSteps:
    (found,) = read_recording(path)
    return found


def test_a_production_cache_is_recorded_in_small_numbers(start: Start, tmp_path: Path) -> None:
    """Pages and rows of a cache of millions of slots get small numbers; what requests share stays shared."""
    guard, recording = start(tmp_path / "steps.jsonl")
    engine = LargeEngine()
    lengths = list(engine.lengths)
    _record(recording, engine, 40)
    found = _read(tmp_path / "steps.jsonl")
    steps = [*found.steps.values()]
    assert len(steps) == 40
    for at, step in enumerate(steps):
        assert [request.row for request in step.requests] == [1, 2, 3]
        assert [request.cached for request in step.requests] == [length + at for length in lengths]
        assert {tuple(request.pages[:2]) for request in step.requests} == {(1, 2)}
    assert (found.line.context, found.line.slots, found.line.rows) == (256, 64 * PAGE, 16)
    assert found.line.shapes == LANE.shapes
    recorded = guard.summary()["recorded"]
    assert recorded == {
        "file": str(tmp_path / "steps.jsonl"),
        "steps": 40,
        "left_out": [],
        "failure": None,
    }


def test_a_long_run_keeps_its_last_steps(start: Start, tmp_path: Path) -> None:
    """The file has at most as many steps as a reader takes, the older one those before; each can be read."""
    path = tmp_path / "steps.jsonl"
    _, recording = start(path)
    engine = LargeEngine((35,), shared=0)
    _record(recording, engine, 2 * MOST_STEPS + 100)
    older, newer = _read(tmp_path / "steps.jsonl.1"), _read(path)
    assert (len(older.steps), len(newer.steps)) == (MOST_STEPS, 100)
    cached = [step.requests[0].cached for lane in (older, newer) for step in lane.steps.values()]
    assert cached == [*range(35 + MOST_STEPS, 35 + 2 * MOST_STEPS + 100)]


def test_steps_that_no_recording_can_have_are_counted_and_named(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence beyond the limit is left out, counted by its reason and named once; later steps are kept."""
    guard, recording = start(tmp_path / "steps.jsonl")
    engine = LargeEngine((MOST_CONTEXT - 2, 40))
    _record(recording, engine, 12)
    recording.record(LANE, engine.batch(), torch.empty(0))  # pages of such a step are not read
    engine.lengths.pop(0)
    engine.rows.pop(0)
    _record(recording, engine, 1)
    assert guard.summary()["recorded"]["steps"] == 3
    assert guard.summary()["recorded"]["left_out"] == [
        {"kind": "decode", "reason": "N tokens of a request; the lane's context is N", "steps": 11}
    ]
    assert caplog.text.count("is not recorded: 8193 tokens of a request; the lane's context is 8192") == 1
    assert [len(step.requests) for step in _read(recording.path).steps.values()] == [2, 2, 1]


def test_scratch_in_a_live_request_is_not_hidden_by_a_number(start: Start, tmp_path: Path) -> None:
    """A request with page 0, row 0, or a KV slot of another position is left out with that reason."""
    _, recording = start(tmp_path / "steps.jsonl")
    engine = LargeEngine((35,), shared=0)
    (batch,) = engine.steps(1)
    recording.record(LANE, batch, torch.zeros_like(engine.table))
    recording.record(LANE, replace(batch, req_pool_indices=torch.zeros(1, dtype=torch.int64)), engine.table)
    recording.record(LANE, replace(batch, out_cache_loc=batch.out_cache_loc + 1), engine.table)
    reasons = [reason for _, reason in recording.left_out]
    assert reasons == [
        "a page that the lane does not have",
        "a request with row N, which is scratch",
        "new tokens whose KV slots do not match their positions",
    ]


def test_a_lane_that_no_recording_can_have_is_left_out(start: Start, tmp_path: Path) -> None:
    """Drafts larger than a reader takes are counted, and do not end the engine's step."""
    _, recording = start(tmp_path / "steps.jsonl")
    engine = LargeEngine()
    for batch in engine.steps(2):
        recording.record(replace(LANE, draft=[1, 1, 65]), batch, engine.table)
    ((_, reason),) = recording.left_out
    assert "draft.N: needs a whole number" in reason
    assert recording.left_out.total() == 2


def test_each_rank_has_its_own_file(start: Start, tmp_path: Path) -> None:
    """The rank is a part of the name; two processes with one name are refused before they write."""
    path = tmp_path / "steps.jsonl"
    for rank in ("tp0", "tp1"):
        _record(start(path, rank)[1], LargeEngine(), 2)
        with pytest.raises(UsageError, match=rf"steps\.{rank}\.jsonl is written by another process"):
            start(path, rank)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["steps.tp0.jsonl", "steps.tp1.jsonl"]


def test_a_file_that_cannot_be_written_ends_the_start(start: Start, tmp_path: Path) -> None:
    """A missing folder, and a file of somebody else, are refused when the guard is made."""
    with pytest.raises(UsageError, match="cannot be written"):
        start(tmp_path / "no" / "steps.jsonl")
    mine = tmp_path / "steps.jsonl"
    mine.write_text("mine")
    with pytest.raises(UsageError, match="is no recording"):
        start(mine)
    assert mine.read_text() == "mine"


def test_a_disk_that_fills_up_ends_the_recording_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on, the log says it once, and the summary has the failure."""
    guard, recording = start(tmp_path / "steps.jsonl")
    _record(recording, LargeEngine(), 2)

    def full(*_: object) -> None:
        raise GraphpactError("the disk is full")

    monkeypatch.setattr(RecordingWriter, "write", full)
    _record(recording, LargeEngine(), 5)
    assert caplog.text.count("recording ends; the engine goes on") == 1
    assert guard.summary()["recorded"]["failure"] == "the disk is full"
    assert guard.summary()["recorded"]["steps"] == 2


def test_the_guard_announces_the_file(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the file, that of the rank, and what is in it."""
    with caplog.at_level(logging.WARNING):
        start(tmp_path / "steps.jsonl", "tp1")
    assert f"steps are recorded in {tmp_path / 'steps.tp1.jsonl'}" in caplog.text
