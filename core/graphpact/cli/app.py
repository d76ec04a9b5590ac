"""The command line as typer sees it: one group, whose commands are plugins.

What is installed contributes the commands, in the entry-point group ``graphpact.commands``: a function, or a
`typer.Typer` for a command with subcommands. A command is imported when it is run, or listed with its help.

Does not: turn graphpact's errors into words; they pass through to `graphpact.cli.main`. Mistakes in
the shape of a command line (an unknown option, a number that is none) are typer's to explain, with
status 2.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphpact.cli.plugins import distributions
from graphpact.errors import ConfigError, GraphpactError
from graphpact.plugins import PluginCatalog

_READER_GONE = 141  # what a shell reports for SIGPIPE
_CONTEXT = {"help_option_names": ["-h", "--help"]}


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """See the output out of the door while it can still be told that nobody reads on."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(_READER_GONE) from None


@functools.cache
def _catalog() -> PluginCatalog:
    """Return the installed commands; those that are disabled stay, so that one can say so.

    A variable that disables what is not there is for the command to refuse, or to report.
    """
    try:
        return PluginCatalog.scan()
    except ConfigError:
        return PluginCatalog.scan(env={})


class _Group(TyperGroup):
    """The group of installed commands. It ends quietly where the reader of its output went away."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, from metadata alone."""
        del ctx
        return [info.name for info in _catalog().infos("command")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command called ``cmd_name``; of one that cannot be loaded, one that says why.

        Raises:
            UnknownPluginError: No installed distribution offers it; names the one that does.
        """
        try:
            target = _catalog().select("command", cmd_name)
        except GraphpactError as error:
            if cmd_name not in self.list_commands(ctx):
                raise
            return _refusing(cmd_name, error)
        return _command(cmd_name, target)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and arguments; an option in the place of a command is typer's to refuse."""
        if args[0].startswith("-"):
            ctx.fail(f"No such option: {args[0]}")
        return args[0], self.get_command(ctx, args[0]), args[1:]


def _command(name: str, target: Any) -> Any:
    """Return what typer makes of ``target``, a function or a `typer.Typer`."""
    if isinstance(target, typer.Typer):
        group = typer.main.get_group(target)
        group.name = name
        return group
    single = typer.Typer(
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )
    single.command(name)(target)
    return typer.main.get_command(single)


def _refusing(name: str, error: GraphpactError) -> Any:
    """Return a command that raises ``error``, and says in its help that it cannot be loaded."""

    def refuse() -> None:
        raise error

    refuse.__doc__ = f"(cannot be loaded: {error.message})"
    command = _command(name, refuse)
    command.ignore_unknown_options = True
    command.allow_extra_args = True
    return command


def _main(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=lambda wanted: _show_versions(wanted=wanted),
            is_eager=True,
            help="Print the versions of graphpact and of every distribution with plugins.",
        ),
    ] = False,
) -> None:
    """Run language models through captured graphs, with plugins chosen by name."""


def _show_versions(*, wanted: bool) -> None:
    if not wanted:
        return
    with _reader_may_leave():
        for name, version in distributions().items():
            sys.stdout.write(f"{name} {version}\n")
    raise typer.Exit


def _app() -> Callable[..., Any]:
    app = typer.Typer(
        name="graphpact",
        cls=_Group,
        help="Run language models through captured graphs, with plugins chosen by name.",
        no_args_is_help=True,
        rich_markup_mode="markdown",  # joins the lines of a paragraph
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )
    app.callback()(_main)
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Raises:
        GraphpactError: What the command could not do.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    _catalog.cache_clear()
    try:
        _app()(args=given, prog_name="graphpact")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _forget_stdout() -> None:
    """Send what is still buffered nowhere: the interpreter's last flush must not fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # not a file of the process: nothing to flush
