"""Files of recorded steps: rotation, limits, files that exist, and disks that are full."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpact.errors import GraphpactError, UsageError
from graphpact.recording import LineError, RecordingWriter, StepLine, read_recording
from recorded_lanes import DECODE, EXTEND, request, step


def _step(at: int) -> StepLine:
    return step(DECODE, request(1 + at % 7, at % 3, [1 + at % 90]))


def _read(path: Path) -> list[StepLine]:
    return [each for lane in read_recording(path) if lane.line == DECODE for each in lane.steps.values()]


def _write(path: Path, count: int, **limits: Any) -> None:
    with RecordingWriter(path, rotates=True, **limits) as writer:
        for at in range(count):
            writer.write(EXTEND, step(EXTEND, request(1, 0, [5], new=2)))
            writer.write(DECODE, _step(at))


@pytest.mark.parametrize("limits", [{"most_steps": 10}, {"most_bytes": 3000}], ids=["steps", "bytes"])
def test_the_last_steps_are_kept_in_two_files(limits: dict[str, int], tmp_path: Path) -> None:
    """Each file is within the limits and can be read alone; together they are the end of the run."""
    path, older = tmp_path / "steps.jsonl", tmp_path / "steps.jsonl.1"
    _write(path, 64, **limits)
    assert sorted(tmp_path.iterdir()) == [path, older]
    kept = _read(older) + _read(path)
    assert kept == [_step(at) for at in range(64)][-len(kept) :]
    assert len(_read(older)) >= 10
    for file in (path, older):
        assert file.stat().st_size <= limits.get("most_bytes", 10**6)
        assert len(_read(file)) <= limits.get("most_steps", 10**6)


def test_a_lane_grows_in_its_place(tmp_path: Path) -> None:
    """The line of a lane has the sizes of the last step; the steps before and after it are kept."""
    path = tmp_path / "steps.jsonl"
    with RecordingWriter(path, rotates=True) as writer:
        for at in range(20):
            writer.write(EXTEND, step(EXTEND, request(1, 0, [5], new=2)))
            grown = replace(DECODE, slots=[400, 2**10, 2**18][at // 7], rows=9 + at * 50)
            writer.write(grown, _step(at))
    extend, decode = read_recording(path)
    assert (extend.line, decode.line) == (EXTEND, grown)
    assert [*decode.steps.values()] == [_step(at) for at in range(20)]


def test_a_step_larger_than_a_file_changes_no_file(tmp_path: Path) -> None:
    """It is refused before anything is rotated, and recording goes on."""
    path = tmp_path / "steps.jsonl"
    with RecordingWriter(path, rotates=True, most_bytes=450) as writer:
        writer.write(DECODE, _step(0))
        with pytest.raises(LineError, match="a step of more than 450 bytes"):
            writer.write(EXTEND, step(EXTEND, request(1, 0, [*range(1, 17)], new=60)))
        writer.write(DECODE, _step(1))
    assert [*tmp_path.iterdir()] == [path]
    assert _read(path) == [_step(0), _step(1)]


def test_a_killed_process_loses_no_step(tmp_path: Path) -> None:
    """With rotation each step is in the file at once; a reader finds it while the file is open."""
    path = tmp_path / "steps.jsonl"
    with RecordingWriter(path, rotates=True) as writer:
        for at in range(3):
            writer.write(DECODE, _step(at))
            assert len(_read(path)) == at + 1


def test_the_recording_of_an_earlier_run_is_moved(tmp_path: Path) -> None:
    """A new run does not append to it and does not lose it; an empty file does not replace an older one."""
    path, older = tmp_path / "steps.jsonl", tmp_path / "steps.jsonl.1"
    _write(path, 3)
    _write(path, 2)
    assert (len(_read(path)), len(_read(older))) == (2, 3)
    path.write_text("")
    _write(path, 1)
    assert (len(_read(path)), len(_read(older))) == (1, 3)


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.1"])
@pytest.mark.parametrize("content", [b"mine", b"[1]", b"\xff\xfe", b'{"graphpact": "pact"}'])
def test_a_file_that_is_no_recording_is_kept(name: str, content: bytes, tmp_path: Path) -> None:
    """Neither the file nor the older one is replaced if somebody else wrote it."""
    path = tmp_path / "steps.jsonl"
    _write(path, 1)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=rf"{name} exists and is no recording; it is not replaced"):
        RecordingWriter(path, rotates=True).open()
    assert (tmp_path / name).read_bytes() == content


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    """The second writer is refused, also after the first has rotated; the first goes on."""
    path = tmp_path / "steps.jsonl"
    with RecordingWriter(path, rotates=True, most_steps=2) as writer:
        for at in range(3):
            writer.write(DECODE, _step(at))
            with pytest.raises(UsageError, match="is written by another process"):
                RecordingWriter(path, rotates=True).open()
    assert len(_read(path)) == 1
    _write(path, 1)  # when the first has closed it, the file is free


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_ends_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording to a full disk is an error that names the file."""
    full, usual = Path("/dev/full"), Path.open
    monkeypatch.setattr(Path, "open", lambda self, *_, **more: usual(full, "w", **more))
    path = tmp_path / "steps.jsonl"
    large = step(EXTEND, *[request(1, 0, [*range(1, 17)], new=60)] * 100)
    writer = RecordingWriter(path, rotates=True)
    writer.open()
    with pytest.raises(GraphpactError, match=f"{path} cannot be written"):
        writer.write(EXTEND, large)
    with suppress(GraphpactError):
        writer.close()
