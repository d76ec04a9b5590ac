"""`main`: errors become messages and exit statuses; there is no traceback by default."""

import re
from collections.abc import Sequence

import pytest
from typer.core import TyperCommand

from graphpact import errors
from graphpact.plugins import PluginCatalog
from graphpact_cli import main
from graphpact_engine.errors import RequestError, VerificationError


@pytest.fixture
def scan_raises(monkeypatch: pytest.MonkeyPatch) -> Sequence[BaseException]:
    """Return a list; `PluginCatalog.scan` raises the error that a test puts into it."""
    planted: list[BaseException] = []

    def scan(**_: object) -> PluginCatalog:
        raise planted[0]

    monkeypatch.setattr(PluginCatalog, "scan", scan)
    monkeypatch.delenv("GRAPHPACT_TRACEBACK", raising=False)
    return planted


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
    said = r"internal error: RuntimeError: two lines of \[b\]it\[/b\] \(at tests/test_main.py:\d+\)"
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


def test_an_interrupted_command_says_so_by_its_status(
    scan_raises: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """Control-C ends with status 130 and without a traceback."""
    scan_raises.append(KeyboardInterrupt())
    assert main(["plugins"]) == 130
    assert "Traceback" not in capsys.readouterr().err
