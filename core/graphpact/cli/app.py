"""The commands, as typer sees them.

Does not: turn graphpact's errors into words; they pass through to `graphpact.cli.main`. Mistakes in the
shape of a command line (an unknown option, a number that is none) are typer's to explain, with status 2.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphpact.cli.doctor import doctor
from graphpact.cli.generate import generate
from graphpact.cli.plugins import plugins

_READER_GONE = 141  # what a shell reports for SIGPIPE


class _Group(TyperGroup):
    """A group of commands that ends quietly where nobody reads on."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and see its output out of the door while that can still be told."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _forget_stdout()
            raise typer.Exit(_READER_GONE) from None
        return result


app = typer.Typer(
    name="graphpact",
    cls=_Group,
    help="Run language models through captured graphs, with plugins chosen by name.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(no_args_is_help=False)(generate)
app.command()(plugins)
app.command()(doctor)


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
    from graphpact.cli.plugins import distributions  # noqa: PLC0415

    for name, version in distributions().items():
        sys.stdout.write(f"{name} {version}\n")
    raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[  # noqa: ARG001  its callback does the work
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
    """Send what is still buffered nowhere, so that the interpreter's last flush finds no broken pipe."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # not a file of the process: nothing to flush
