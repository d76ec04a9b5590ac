"""Tests that broken scenario files are refused with file and line before any plugin is imported.

Does not: test single lines; `conformance/tests/test_scenario.py` does.
"""

import os
from pathlib import Path

import pytest

from rigs.command import command, refused

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"graphpact": "recording", "version": 2}\n', ["line 1", "version", "generate --record"]),
        pytest.param(
            b'{"graphpact": "recording", "version": 1}\n' + b"[" * 10**6,
            ["line 2", "graphpact generate --record"],
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["version", "nested"],
)
def test_a_broken_scenario_is_refused_at_the_door(content: bytes, words: list[str], tmp_path: Path) -> None:
    """The command ends with one error that names file and line, and checks nothing."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    refused(command("check", "fa3", "--scenario", path), str(path), *words)


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["check", "fa3", "--scenario"], []),
        *(
            pytest.param(arguments, more, marks=pytest.mark.sweep)
            for arguments, more in (
                (["pact", "show"], []),
                (["report"], []),
                (["generate", "--config"], ["Hello"]),
            )
        ),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused_by_every_reader(
    arguments: list[str], more: list[str], tmp_path: Path
) -> None:
    """Each reader of a pact, recording, report or configuration refuses a pipe at once, with one error."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    refused(command(*arguments, path, *more), str(path), "it is a pipe or a device")


def test_a_recording_in_a_wrong_place_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    """An existing file is kept, and no text is generated."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    refused(
        command("generate", "--model", TINY, "--record", mine, "Hello"), str(mine), "exists", "another file"
    )
    assert mine.read_text() == "mine"
