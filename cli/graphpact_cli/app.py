"""The typer application: one group, whose commands are plugins.

Installed distributions offer commands in the entry-point group ``graphpact.commands``: a function, or a
`typer.Typer` for a command with subcommands. A command is imported when it is run, or listed with its help.

Does not: print graphpact's errors; `graphpact_cli.main` does. typer reports wrong command lines (an unknown
option, an invalid number) with status 2.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphpact.errors import ConfigError, GraphpactError
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_cli.distributions import FIRST_PARTY, installed_distributions

_OPTIONS: dict[str, Any] = {
    "rich_markup_mode": "markdown",  # joins the lines of a paragraph
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Passing(BaseException):
    """Carries an exception past typer, which ends some with status 1."""


@contextmanager
def _past_typer() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, KeyboardInterrupt) as error:
        raise _Passing from error


@functools.cache
def _catalog() -> PluginCatalog:
    """Return the catalog. A variable that disables unknown plugins is ignored; the command reports it."""
    try:
        return PluginCatalog.scan()
    except ConfigError:
        return PluginCatalog.scan(env={})


def third_party(given: Sequence[str]) -> PluginInfo | None:
    """Return the third party's command that a command line names, or None."""
    name = next((word for word in given if not word.startswith("-")), None)
    infos = [info for info in _catalog().infos("command") if info.distribution not in FIRST_PARTY]
    return next((info for info in infos if info.name == name), None)


class _Group(TyperGroup):
    """The group of installed commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; this prints help and versions."""
        with _past_typer():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _past_typer():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, from metadata only."""
        del ctx
        return [info.name for info in _catalog().infos("command")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command for the help and for completion, which import no third party's code."""
        other = third_party([cmd_name])
        if other is None:
            return self._loaded(ctx, cmd_name)
        return _refusing(cmd_name, GraphpactError("not run"), f"(of {other.distribution} {other.version})")

    def _loaded(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command ``cmd_name``, or one that raises why it cannot be loaded; raise if unknown."""
        try:
            target = _catalog().select("command", cmd_name)
        except GraphpactError as error:
            if cmd_name not in self.list_commands(ctx):
                raise
            return _refusing(cmd_name, error, f"(cannot be loaded: {error.message})")
        return _command(cmd_name, target)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and arguments; typer refuses an option in place of a command."""
        if args[0].startswith("-"):
            ctx.fail(f"No such option: {args[0]}")
        return args[0], self._loaded(ctx, args[0]), args[1:]


def _command(name: str, target: Any) -> Any:
    """Return the command of ``target``, a function or a `typer.Typer`."""
    if isinstance(target, typer.Typer):
        group = typer.main.get_group(target)
        group.name = name
        return group
    single = typer.Typer(add_completion=False, **_OPTIONS)
    single.command(name)(target)
    return typer.main.get_command(single)


def _refusing(name: str, error: GraphpactError, about: str) -> Any:
    """Return a command that raises ``error`` and has the help ``about``."""

    def refuse() -> None:
        raise error

    refuse.__doc__ = about
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
            help="Print the version of every distribution of graphpact and of others with plugins, and the"
            " names of their plugins.",
        ),
    ] = False,
) -> None:
    """Run language models through captured graphs, with plugins chosen by name."""


def _show_versions(*, wanted: bool) -> None:
    if not wanted:
        return
    for name, (version, plugins) in installed_distributions().items():
        sys.stdout.write(f"{name} {version}: {plugins}\n" if plugins else f"{name} {version}\n")
    raise typer.Exit


def application() -> Any:
    """Return the command ``graphpact``, a group that finds its commands when they are asked for."""
    _catalog.cache_clear()
    app = typer.Typer(name="graphpact", cls=_Group, help=_main.__doc__, no_args_is_help=True, **_OPTIONS)
    app.callback()(_main)
    return typer.main.get_command(app)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status, or raise what it raised."""
    app = application()
    error: BaseException | None = None
    try:
        app(args=list(arguments), prog_name="graphpact")
    except _Passing as passing:
        error = passing.__cause__
    except OSError as unprinted:  # stderr is full, and typer refuses the command line
        return getattr(unprinted.__context__, "exit_code", 3)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the process then
            error = end.__context__
        elif isinstance(end.code, str):
            error = GraphpactError(end.code)
        else:
            return end.code or 0
    if error is not None:
        raise error
    return 0
