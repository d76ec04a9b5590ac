"""Behaviour common to all commands: output streams, exit statuses, and no traceback by default."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.core import TyperCommand

import graphpact
from graphpact import errors
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import RequestError, VerificationError
from support import survey_here

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "graphpact_cli")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a subprocess and return the finished process."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def scan_raises(monkeypatch: pytest.MonkeyPatch) -> Sequence[BaseException]:
    """Return a list; `PluginCatalog.scan` raises the error that a test puts into it."""
    planted: list[BaseException] = []

    def scan(**_: object) -> PluginCatalog:
        raise planted[0]

    monkeypatch.setattr(PluginCatalog, "scan", scan)
    monkeypatch.delenv("GRAPHPACT_TRACEBACK", raising=False)
    return planted


def test_importing_graphpact_stays_light() -> None:
    """`import graphpact` imports neither torch, nor a plugin, nor the command line's tools."""
    done = python("-X", "importtime", "-c", "import graphpact")
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "graphpact.errors" in imported
    heavy = {"torch", "pydantic", "typer", "rich", "graphpact_cli", "graphpact.lane"}
    assert not imported & (heavy | {"graphpact_flashinfer", "graphpact_cuda_graph"})


def test_every_public_name_is_there_and_declared_once() -> None:
    """Each name of `graphpact.__all__` can be imported, and the stub declares the same names."""
    stub = ast.parse(Path(graphpact.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    (declared,) = [
        ast.literal_eval(node.value)
        for node in stub.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(declared) == graphpact.__all__
    for name in graphpact.__all__:
        assert getattr(graphpact, name) is not None
    assert "lane" not in graphpact.__all__
    assert "conformance" not in graphpact.__all__  # `import *` needs no other distribution
    assert graphpact.conformance is not None
    assert graphpact.lane.Lane is graphpact.Lane
    with pytest.raises(AttributeError, match="has no attribute 'lan'"):
        graphpact.lan  # noqa: B018


def test_version_names_every_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints each distribution of this repository, one a line, and each plugin by name."""
    assert main(["--version"]) == 0
    out, err = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert set(_distributions()) <= set(lines)
    assert all(version[0].isdigit() for version in lines.values())
    assert err == ""
    for info in PluginCatalog.scan(env={}).infos():
        offers = lines[info.distribution].partition(": ")[2].split("; ")
        (names,) = [each.partition(" ")[2] for each in offers if each.startswith(f"{info.kind} ")]
        assert info.name in names.split(", ")


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
    """A table says in words what is not there, or leaves its cell empty; Python's None is no word."""
    monkeypatch.chdir(ROOT)
    survey_here(monkeypatch)
    assert main(arguments) == 0
    out = capsys.readouterr().out
    cells = {cell for line in out.splitlines() for cell in re.split(r"\s{2,}", line.strip())}
    assert len(cells) > 5
    assert cells & {"None", "NoneType", "nan", "[]", "()", "{}"} == set()


def _distributions() -> list[str]:
    """Return the names of the distributions of this repository."""
    projects = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    return [tomllib.loads(each.read_text(encoding="utf-8"))["project"]["name"] for each in projects]


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


def test_no_command_is_answered_with_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments the commands are listed, none is run, and the status is 2."""
    ran: list[str] = []
    monkeypatch.setattr(TyperCommand, "invoke", lambda command, _: ran.append(command.name))
    assert main([]) == 2
    shown = "".join(capsys.readouterr())
    assert all(command in shown for command in ("generate", "plugins", "doctor"))
    assert ran == []
    assert main(["plugins"]) == 0
    assert ran == ["plugins"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConfigError("it is so", hint="do this"), 2),
        (RequestError("it is so", hint="do this"), 2),
        (VerificationError("it is so", hint="do this"), 1),
        (errors.CaptureError("it is so", hint="do this"), 1),
        (errors.EngineError("it is so", hint="do this"), 3),
    ],
)
def test_an_error_becomes_words_and_its_status(
    error: errors.GraphpactError,
    status: int,
    scan_raises: list[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error of graphpact prints its message and its help on stderr; its class determines the status."""
    scan_raises.append(error)
    assert main(["plugins"]) == status
    assert capsys.readouterr() == ("", "error: it is so\n  help: do this\n")


def test_an_error_without_a_hint_is_one_line(
    scan_raises: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """An error without a hint prints no help line."""
    scan_raises.append(errors.ConfigError("it is so"))
    assert main(["plugins"]) == 2
    assert capsys.readouterr().err == "error: it is so\n"


def test_foreign_text_is_neither_markup_nor_a_terminal_command(
    scan_raises: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a message are printed unchanged; control characters are printed as escapes."""
    message = "no [red]such[/red] name :smile: [/nope] \x1b[2J\r " + 30 * "long "
    scan_raises.append(errors.ConfigError(message, hint="[bold]do\x07"))
    main(["plugins"])
    expected = message.replace("\x1b", "\\x1b").replace("\r", "\\x0d")
    assert capsys.readouterr().err == f"error: {expected}\n  help: [bold]do\\x07\n"


def test_a_narrow_terminal_does_not_break_a_message(
    scan_raises: list[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A long message is printed as one line on a narrow terminal too, so that it can be copied."""
    message = "it is so " * 30
    scan_raises.append(errors.ConfigError(message.strip()))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    main(["plugins"])
    assert capsys.readouterr().err.splitlines() == [f"error: {message.strip()}"]


def test_an_unforeseen_error_is_one_line(
    scan_raises: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected error is one line with its place, then how to get the traceback; the status is 3."""
    scan_raises.append(RuntimeError("two\nlines of [b]it[/b]"))
    assert main(["plugins"]) == 3
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    said = r"internal error: RuntimeError: two lines of \[b\]it\[/b\] \(at tests/test_cli.py:\d+\)"
    assert re.fullmatch(said, first)
    assert "GRAPHPACT_TRACEBACK=1" in second


@pytest.mark.parametrize("error", [errors.ConfigError("it is so"), RuntimeError("it is so")])
def test_the_traceback_is_there_for_those_who_ask(
    error: Exception,
    scan_raises: list[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``GRAPHPACT_TRACEBACK=1`` prints the traceback before the message and keeps the status."""
    scan_raises.append(error)
    assert main(["plugins"]) == (quiet := 2 if isinstance(error, errors.ConfigError) else 3)
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("GRAPHPACT_TRACEBACK", "1")
    assert main(["plugins"]) == quiet
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert "error: " in err.splitlines()[-1] or "error: " in err.splitlines()[-2]


def test_the_traceback_variable_is_no_configuration() -> None:
    """``GRAPHPACT_TRACEBACK`` does not make the configuration invalid."""
    assert EngineConfig.load(env={"GRAPHPACT_TRACEBACK": "1"}) == EngineConfig()


def test_an_interrupted_command_says_so_by_its_status(
    scan_raises: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """Control-C ends with status 130 and without a traceback."""
    scan_raises.append(KeyboardInterrupt())
    assert main(["plugins"]) == 130
    assert "Traceback" not in capsys.readouterr().err


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
    """Return what a shell is offered after ``graphpact`` and ``words``, and whether torch was imported."""
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
    """Commands, plugins, rules, keys, lanes and values that begin with a word are offered, without torch."""
    file = tmp_path / "a.toml"
    file.write_text("[lanes.acme]\nmode = 'decode'\n")
    found, err = completed(*(word.replace("{file}", str(file)) for word in words))
    key = words[-1].partition("=")
    assert found == [f"{key[0]}={each}" if key[1] else each for each in offered]
    assert err == ""


def test_fish_is_offered_help_too() -> None:
    """A shell that shows help gets the summaries of commands and the names of rules."""
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
