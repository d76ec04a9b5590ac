"""What ``GRAPHPACT`` and ``GRAPHPACT_CONFIG`` ask for, and what they refuse."""

from pathlib import Path

import pytest

from graphpact.errors import ConfigError
from graphpact_guard import Ignored, Settings


def _settings(words: str = "", path: Path | None = None) -> Settings:
    environment = {"GRAPHPACT": words}
    if path is not None:
        environment["GRAPHPACT_CONFIG"] = str(path)
    return Settings.from_environment(environment)


def test_nothing_is_asked_for_without_the_variables() -> None:
    """An empty environment leaves everything off."""
    assert not Settings.from_environment({}).is_active
    assert not _settings(" , ").is_active


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("guard", {"guard": True}),
        ("tape", {"tape": "fast", "guard": False}),
        ("tape:strict, guard", {"tape": "strict", "guard": True}),
        ("verify:8", {"guard": True, "verify": 8}),
        ("start", {"guard": True, "start": 3}),
        ("tape,start:5", {"guard": True, "start": 5}),
        ("tape,ranks", {"guard": True, "ranks": True}),
        ("record:a/steps.jsonl", {"guard": True, "record": Path("a/steps.jsonl")}),
        ("contents:0,guard,raise", {"guard": True, "contents": 0, "on_fault": "raise"}),
        ("guard,eager", {"on_fault": "eager"}),
        ("guard,raise,log", {"on_fault": "log"}),
    ],
)
def test_words_combine(words: str, expected: dict[str, object]) -> None:
    """Each word sets its setting; of two words for one setting the last wins."""
    settings = _settings(words)
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.is_active


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gaurd", r"'gaurd', which is unknown\n  help: did you mean 'guard'\?"),
        ("guard,xyzzy", r"'xyzzy', which is unknown\n  help: the words are guard, "),
        ("verify", r"'verify' needs a value\n  help: write verify:N"),
        ("verify:-1", r"'verify:-1' has an invalid value\n  help: verify:N takes a whole number, at least 0"),
        ("verify:٣", r"invalid value"),
        (
            "tape:slow",
            r"'tape:slow' has an invalid value\n  help: tape, tape:strict takes strict, or nothing",
        ),
        ("record:", r"'record:' has an invalid value\n  help: record:FILE takes the path of a file"),
        ("guard:on", r"'guard' takes no value, it has 'on'"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one(words: str, message: str) -> None:
    """The error quotes the word and says what to write."""
    with pytest.raises(ConfigError, match=message):
        _settings(words)


def test_the_file_has_longer_settings_and_words_win(tmp_path: Path) -> None:
    """Keys of the file are the settings' names; ignored faults have rule, field and reason."""
    path = tmp_path / "guard.toml"
    path.write_text(
        'guard = true\nverify = 64\non_fault = "raise"\nrecord = "steps.jsonl"\n'
        '[[ignore]]\nrule = "GP08"\nfield = "*.max_seq_len_k"\nreason = "read from a tensor"\n'
    )
    settings = _settings("verify:8", path)
    assert (settings.guard, settings.verify, settings.on_fault) == (True, 8, "raise")
    assert settings.record == Path("steps.jsonl")
    (ignored,) = settings.ignore
    assert ignored == Ignored("GP08", "*.max_seq_len_k", "read from a tensor")
    assert ignored.covers("GP08", "FlashAttentionBackend.forward_metadata.max_seq_len_k")
    assert not ignored.covers("GP01", "FlashAttentionBackend.forward_metadata.max_seq_len_k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verfy = 1", r"the key 'verfy' is unknown\n  help: did you mean 'verify'\?"),
        ("verify = -1", r"verify = -1 is invalid\n  help: it takes a whole number, at least 0"),
        ("verify = true", r"verify = True is invalid"),
        ("record = 1", r"record = 1 is invalid\n  help: it takes the path of a file"),
        ("record = ''", r"record = '' is invalid\n  help: it takes the path of a file"),
        ("guard = 1", r"guard = 1 is invalid\n  help: it takes true or false"),
        ('tape = "slow"', r"tape = 'slow' is invalid\n  help: it takes 'fast' or 'strict'"),
        (
            "[[ignore]]\nrule = 'GP01'",
            r"an entry of \[\[ignore\]\] is .*\n  help: it has the keys rule, field",
        ),
        (
            "[[ignore]]\nrule = 'GP01'\nfield = 'a'\nreason = ' '",
            r"an entry of \[\[ignore\]\] is .*\n  help: its values are texts",
        ),
        (
            "[[ignore]]\nrule = 'G01'\nfield = 'a'\nreason = 'b'",
            r"the rule 'G01' is unknown\n  help: it is '\*' or an id such as GP01",
        ),
        ("verify = = 1", r"guard.toml: .*\n  help: name a TOML file, or unset GRAPHPACT_CONFIG"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the key, the value, and what is accepted."""
    path = tmp_path / "guard.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        _settings(path=path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A missing or unreadable file is an error, not an empty one."""
    with pytest.raises(ConfigError, match="GRAPHPACT_CONFIG="):
        _settings(path=tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="GRAPHPACT_CONFIG="):
        _settings(path=binary)
