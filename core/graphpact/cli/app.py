"""The commands, as typer sees them.

Does not: turn graphpact's errors into words; they pass through to `graphpact.cli.main`. Mistakes in
the shape of a command line (an unknown option, a number that is none) are typer's to explain, with
status 2.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphpact.cli.check import check
from graphpact.cli.doctor import doctor
from graphpact.cli.explain import explain
from graphpact.cli.generate import generate
from graphpact.cli.museum import museum
from graphpact.cli.pact import pact
from graphpact.cli.plugins import distributions, plugins
from graphpact.cli.report_command import report

_READER_GONE = 141  # what a shell reports for SIGPIPE


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """See the output out of the door while it can still be told that nobody reads on."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(_READER_GONE) from None


class _Group(TyperGroup):
    """A group of commands that ends quietly where nobody reads on."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _reader_may_leave():
            return super().invoke(ctx)


app = typer.Typer(
    name="graphpact",
    cls=_Group,
    help="Run language models through captured graphs, with plugins chosen by name.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(plugins)
app.command()(check)
app.command()(explain)
app.command()(museum)
app.command()(report)
app.command()(doctor)
app.add_typer(pact, name="pact")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Raises:
        GraphpactError: What the command could not do.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        typer.main.get_command(app)(args=given, prog_name="graphpact")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _show_versions(wanted: bool) -> None:  # noqa: FBT001  typer calls it with the flag's value
    if not wanted:
        return
    with _reader_may_leave():
        for name, version in distributions().items():
            sys.stdout.write(f"{name} {version}\n")
    raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_versions,
            is_eager=True,
            help="Print the versions of graphpact and of every distribution with plugins.",
        ),
    ] = False,
) -> None:
    """Run language models through captured graphs, with plugins chosen by name."""


def _forget_stdout() -> None:
    """Send what is still buffered nowhere: the interpreter's last flush must not fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # not a file of the process: nothing to flush
