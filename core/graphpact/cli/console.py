"""Where the command line writes: data to stdout, talk to stderr; tables and progress by rich.

Strings that come from elsewhere (names, messages, what a model wrote) are never read as markup, and
their control characters never reach a terminal.

Does not: decide what is said, or end the process.
"""

import sys
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))
    if chr(code) not in "\n\t"
}


class _Console(Console):
    """A console that leaves it to `graphpact.cli.app` what happens when nobody reads on."""

    def on_broken_pipe(self) -> None:
        """Let the error through; rich would end the process."""
        raise BrokenPipeError


def clean(text: object) -> str:
    """Return ``text`` with every control character but newline and tab spelled out."""
    return str(text).translate(_CONTROLS)


def data() -> Console:
    """Return the console of results: stdout."""
    return _console(stderr=False)


def talk() -> Console:
    """Return the console of everything else: stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    on_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return _Console(
        stderr=stderr,
        force_terminal=on_terminal,  # not what FORCE_COLOR and its like have rich believe
        width=None if on_terminal else 10_000,  # no line is to be broken there
        markup=False,
        emoji=False,
        highlight=False,
    )


def error(message: str, hint: str | None = None) -> None:
    """Say on stderr what went wrong and what to do next."""
    _say("error: ", "bold red", message, hint)


def warning(message: str, hint: str | None = None) -> None:
    """Say on stderr what is odd and yet goes on."""
    _say("warning: ", "bold yellow", message, hint)


def note(message: str) -> None:
    """Say something on stderr."""
    talk().print(Text(clean(message)), soft_wrap=True)


def internal_error(error: Exception, hint: str) -> None:
    """Say on stderr what nobody foresaw."""
    message = f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"
    _say("", "", message, hint)


def _say(what: str, style: str, message: str, hint: str | None) -> None:
    text = Text.assemble((what, style), clean(message))
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
    """Print a table: under a ruled heading on a terminal, plain aligned columns elsewhere.

    Args:
        console: Where to.
        columns: The headings.
        rows: One cell a column.
        numbers: The columns that are set to the right.
    """
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        header_style="bold",
        padding=(0, 1, 0, 0) if console.is_terminal else (0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        if column in numbers:  # stay whole; text folds where a terminal is narrow
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    console.print(table)
