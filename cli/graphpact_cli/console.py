"""The output of the command line: results to stdout, messages to stderr; tables and progress by rich.

Strings from elsewhere (names, messages, generated text) are never interpreted as markup, and their control
characters never reach a terminal.

Does not: choose the messages, or end the process.
"""

import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"
}


class _Console(Console):
    """A console that drops messages to a broken stderr."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as rich does."""
        with suppress(OSError) if self.stderr else nullcontext():
            super().print(*args, **kwargs)


def clean(text: object) -> str:
    """Return ``text`` with control characters except newline and tab escaped."""
    return str(text).translate(_CONTROLS)


def data() -> Console:
    """Return the console of results: stdout."""
    return _console(stderr=False)


def talk() -> Console:
    """Return the console of messages: stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    on_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(
        stderr=stderr,
        force_terminal=on_terminal,  # ignores FORCE_COLOR
        width=None if on_terminal else 10_000,  # no line breaks in files and pipes
        markup=False,
        emoji=False,
        highlight=False,
    )


def error(message: str, hint: str | None = None, label: str = "error: ") -> None:
    """Print an error and its hint on stderr."""
    _print(label, "bold red", message, hint)


def warning(message: str, hint: str | None = None) -> None:
    """Print a warning and its hint on stderr."""
    _print("warning: ", "bold yellow", message, hint)


def note(message: str) -> None:
    """Print a message on stderr."""
    _print("", "", message, None)


def _print(label: str, style: str, message: str, hint: str | None) -> None:
    text = Text.assemble((label, style), clean(message))
    if hint is not None:
        text.append("\n  help: ", "bold cyan").append(clean(hint))
    talk().print(text, soft_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Collection[str] = (),
) -> None:
    """Print a table: with a ruled heading on a terminal, as plain aligned columns elsewhere.

    A row has one cell for each of ``columns``; those in ``numbers`` are aligned to the right.
    """
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        header_style="bold",
        padding=(0, 1, 0, 0) if console.is_terminal else (0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        if column in numbers:  # numbers are not wrapped; text is, on a narrow terminal
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    console.print(table)
