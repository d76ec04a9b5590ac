"""Tests of command lines that name missing things: one line, the right status, no traceback.

Does not: cover every option; the tests of each command do, such as `engine/tests/test_cli_generate.py`.
"""

from pathlib import Path

import pytest

from rigs.command import command, refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["genrate", "Hello"], ["genrate", "generate"]),
        *(
            pytest.param(arguments, words, marks=pytest.mark.sweep)
            for arguments, words in (
                (["generate", "--model", "/nowhere", "Hello"], ["/nowhere", "no such directory"]),
                (["generate", "--config", "/nowhere.toml", "Hello"], ["/nowhere.toml"]),
                (["generate", "--set", "engine.attention_backend=flashinfr", "Hello"], ["flashinfer"]),
                (["report", "/nowhere.json"], ["/nowhere.json"]),
                (["generate", "--set", "engine.max_nun_seqs=1", "Hello"], ["max_nun_seqs", "max_num_seqs"]),
                (["check", "flashinfr"], ["flashinfr", "flashinfer"]),
                (["explain", "GP99"], ["GP99"]),
            )
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_what_is_not_there_is_refused_by_name(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    """A command that names something that does not exist ends with status 2 and one error that names it."""
    refused(command(*arguments, cwd=tmp_path), *words)
