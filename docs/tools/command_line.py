"""The help of every command as Markdown, by typer's own writer of documentation.

Does not: contain commands of other distributions than the project's own.
"""

import re
from importlib.metadata import version

import typer
from typer.cli import get_docs_for_click

from graphpact.plugins import PluginCatalog
from graphpact_cli.app import application
from graphpact_cli.distributions import FIRST_PARTY

WRITER = f"typer {version('typer')}"
"""What writes the texts; another version may word them differently."""
_SUBCOMMANDS = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n?")


def commands() -> list[str]:
    """Return the names of the project's commands, sorted."""
    infos = PluginCatalog.scan(env={}).infos("command")
    return sorted(info.name for info in infos if info.distribution in FIRST_PARTY)


def help_of(*names: str) -> str:
    """Return usage, arguments and options of commands, and of their subcommands."""
    app = application()
    parts = []
    for name in names:
        context = typer.Context(app, info_name="graphpact")
        command = app.get_command(context, name)
        text = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="graphpact", indent=1)
        text = _SUBCOMMANDS.sub("", text)  # a list with texts that are cut; each subcommand follows whole
        parts.append(text.replace("```console\n$ ", "```text\n").rstrip() + "\n")
    return "\n".join(parts)


def writer() -> str:
    """Return the name and version of `WRITER`, as a sentence of the page."""
    return f"The texts are those of {WRITER}.\n"
