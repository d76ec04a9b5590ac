"""Configuration files that are damaged, odd or huge: one error that names the file and the key, and status 2.

Does not: list the faults of each key; ``engine/tests/test_config.py`` does.
"""

import os
from pathlib import Path

import pytest

from graphpact_cli import main
from rigs.command import command, refused

DIGITS = "9" * 5000
FILES: dict[str, tuple[bytes, list[str]]] = {
    "not TOML": (b"{'engine': 1}", ["is not TOML", "line 1"]),
    "cut off": (b"[engine]\nmax_num_seqs =", ["is not TOML"]),
    "not UTF-8": (b"[engine]\n# caf\xe9\n", ["is not UTF-8 text", "line 2"]),
    "UTF-16": ("[engine]\nseed = 1\n".encode("utf-16"), ["is not UTF-8 text"]),
    "binary": (bytes(range(256)) * 64, ["is not UTF-8 text"]),
    "a zero byte": (b"[engine]\nseed = \x00", ["is not TOML"]),
    "nested arrays": (b"a = " + b"[" * 50_000, ["nested too deeply"]),
    "nested tables": (b"[" + b".".join([b"a"] * 5000) + b"]\n", ["unknown key"]),
    "a table for a key": (b"[engine.seed]\na = 1\n", ["engine.seed", "a whole number"]),
    "a key for a table": (b"engine = 3\n", ["engine", "a table, not a key"]),
    "a list for a table": (b"[[engine]]\nseed = 1\n", ["engine", "a table, not a key"]),
    "a list of lanes": (b"[[lanes.decode]]\nstrict = true\n", ["lanes.decode"]),
    "a date": (b"engine.seed = 2026-11-22\n", ["engine.seed", "a whole number"]),
    "a string for a number": (b"engine.seed = '1'\n", ["engine.seed = '1'", "a whole number"]),
    "a number for a string": (b"model.path = 7\n", ["model.path = 7", "put it in quotes"]),
    "a list of everything": (
        b"lanes.decode.batch_sizes = [1, 'a', [], {}, 1.5]\n",
        [f"lanes.decode.batch_sizes[{n}]" for n in (1, 2, 3, 4)],
    ),
    "a huge number": (f"engine.seed = {DIGITS}\n".encode(), ["5000 digits"]),
    "a huge batch": (b"engine.max_num_seqs = 10000000000\n", ["engine.max_num_seqs", "65536"]),
    "a negative number": (b"engine.page_size = -1\n", ["engine.page_size", "power of two"]),
    "infinity": (b"engine.kv_cache_memory_gib = inf\n", ["engine.kv_cache_memory_gib"]),
    "not a number": (b"verify.replay_against_eager = nan\n", ["verify.replay_against_eager"]),
    "an empty name": (b"engine.attention_backend = ''\n", ["engine.attention_backend"]),
    "control characters": (b'engine.device = "\\u001b[2J"\n', ["engine.device = '\\x1b[2J'"]),
    "a lane of one letter case": (b"[lanes.Decode]\nmode = 'decode'\n", ["lanes.Decode"]),
    "a lane that is empty text": (b"[lanes.'']\nmode = 'decode'\n", ["not a valid lane name"]),
    "a long key": (b"engine." + b"k" * 100_000 + b" = 1\n", ["unknown key"]),
}


@pytest.mark.parametrize("name", FILES)
def test_an_odd_file_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not a configuration gives one error with its name and the fault, and status 2."""
    data, words = FILES[name]
    file = tmp_path / "odd.toml"
    file.write_bytes(data)
    assert main(["generate", "--config", str(file), "Hello"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert "\x1b" not in err
    for word in ["odd.toml", *words]:
        assert word in err


@pytest.mark.parametrize(
    "kind",
    [
        "pipe",
        *(
            pytest.param(kind, marks=pytest.mark.sweep)
            for kind in ("loop", "directory", "device", "below a file")
        ),
    ],
)
def test_what_is_no_file_is_refused_without_reading_it(kind: str, tmp_path: Path) -> None:
    """A directory, a pipe without a writer, an endless device and a link to itself are refused by name."""
    path = tmp_path / "odd.toml"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.touch()
        path = path / "below"
    refused(command("generate", "--config", path, "Hello"), str(path))


def test_a_shell_may_pass_the_output_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe that the shell has opened, as by ``--config <(command)``, is read like a file."""
    reader, writer = os.pipe()
    os.write(writer, b"engine.sede = 1\n")
    os.close(writer)
    assert main(["generate", "--config", f"/dev/fd/{reader}", "Hello"]) == 2
    os.close(reader)
    assert "did you mean engine.seed?" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["[" * 50_000, DIGITS, "\x00", "\udcff", "{" * 100, "'", "a\nb"])
def test_an_odd_value_is_refused_where_it_is_given(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd value of ``--set`` or of a variable is refused with the key and the source, and status 2."""
    assert main(["generate", "--set", f"engine.seed={value}", "Hello"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "engine.seed" in err
    assert "(--set)" in err
    if "\x00" not in value:  # an environment cannot hold it
        monkeypatch.setenv("GRAPHPACT_ENGINE__SEED", value)
        assert main(["generate", "Hello"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "engine.seed" in err
        assert "GRAPHPACT_ENGINE__SEED" in err
