"""Tests of what all commands share: tables, usage errors, closed pipes, completion, and fast help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphpact_cli import main
from graphpact_engine.config import EngineConfig
from support import survey_here

ROOT = Path(__file__).parents[1]
CLI = (sys.executable, "-m", "graphpact_cli")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a subprocess and return the finished process."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["plugins"],
        ["doctor"],
        ["doctor", "--memory", "--config", "examples/demo.toml", "--set", "lanes.decode.batch_sizes=[1]"],
        ["check", "--list"],
        ["check", "--list", "fa3"],
        ["museum", "--list"],
    ],
    ids=" ".join,
)
def test_no_cell_of_a_table_is_none(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables describe missing values in words or leave the cell empty; they never print None."""
    monkeypatch.chdir(ROOT)
    survey_here(monkeypatch)
    assert main(arguments) == 0
    out = capsys.readouterr().out
    cells = {cell for line in out.splitlines() for cell in re.split(r"\s{2,}", line.strip())}
    assert len(cells) > 5
    assert cells & {"None", "NoneType", "nan", "[]", "()", "{}"} == set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plugin"], "did you mean 'plugins'?"),
        (["plugins", "--jsn"], "--json"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "x", "--top-k", "2.5"], "--top-k"),
    ],
)
def test_a_misspelt_command_line_is_a_usage_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid command line ends with status 2; stderr names the invalid part and has no traceback."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_the_traceback_variable_is_no_configuration() -> None:
    """``GRAPHPACT_TRACEBACK`` is not read as a configuration key, so the configuration stays valid."""
    assert EngineConfig.load(env={"GRAPHPACT_TRACEBACK": "1"}) == EngineConfig()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "arguments", [["explain"], ["explain", "--json"], ["--version"], ["explain", "--help"]]
)
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    """If the reader closes stdout, the command ends with 141, as after SIGPIPE, and stderr stays empty."""
    with subprocess.Popen([*CLI, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(120) == 141
    assert said == b""


def completed(*words: str, of: str = "bash") -> tuple[list[str], str]:
    """Return the completions after ``graphpact`` and ``words``, and whether torch was imported."""
    program = (
        "import sys; from graphpact_cli import main; status = main()\n"
        "sys.exit(f'status {status}, torch' if status or 'torch' in sys.modules else 0)"
    )
    line = " ".join(("graphpact", *words))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "_GRAPHPACT_COMPLETE": f"complete_{of}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else [], done.stderr


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ge",), ["generate"]),
        (("check", "flash"), ["flashinfer"]),
        (("check", "--only", "GP2"), ["GP20", "GP21"]),
        (("explain", "GP0"), [f"GP0{n}" for n in range(1, 10)]),
        (("generate", "--set", "lanes.prefill.ru"), ["lanes.prefill.runner="]),
        (
            ("generate", "-c", "{file}", "-s", "lanes.acme.mode=d"),
            ["decode", "draft_prefill", "draft", "draft_extend"],
        ),
        (("generate", "--set", "lanes.acme."), []),
        (("generate", "-s", "engine.attention_backend=fl"), ["flashinfer"]),
        (("generate", "-c", "/nowhere", "-s", "engine.se"), ["engine.seed="]),
    ],
)
def test_a_shell_is_offered_what_fits(words: tuple[str, ...], offered: list[str], tmp_path: Path) -> None:
    """Completion offers matching commands, plugins, rules, keys, lanes and values without importing torch."""
    file = tmp_path / "a.toml"
    file.write_text("[lanes.acme]\nmode = 'decode'\n")
    found, err = completed(*(word.replace("{file}", str(file)) for word in words))
    key = words[-1].partition("=")
    assert found == [f"{key[0]}={each}" if key[1] else each for each in offered]
    assert err == ""


def test_fish_is_offered_help_too() -> None:
    """A shell that shows help for completions gets the summaries of commands and the names of rules."""
    assert completed("pl", of="fish")[0][0].startswith("plugins\tList the installed plugins")
    assert completed("explain", "GP03", of="fish") == (["GP03\tstale-pad-tail"], "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["generate", "--help"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    """Versions and help are printed without torch and transformers, whose import takes seconds."""
    done = python(
        "-c",
        f"import sys; from graphpact_cli import main; status = main({arguments!r})\n"
        "sys.exit(status or len({'torch', 'transformers'} & sys.modules.keys()))",
    )
    assert (done.returncode, done.stderr) == (0, "")
