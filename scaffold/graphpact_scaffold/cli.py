"""``graphpact new``: a distribution with a plugin that works at once.

Does not: render the template; `graphpact_scaffold.rendering` does.
"""

from pathlib import Path
from typing import Annotated

import typer

from graphpact_cli.console import note
from graphpact_scaffold.kinds import NewKind


def new(
    kind: Annotated[NewKind, typer.Argument(help="What the plugin does.", show_default=False)],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The name by which it is selected, such as acme_attention; also the name of its package.",
            show_default=False,
        ),
    ],
    *,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="D", help="The folder to write; by default NAME.", show_default=False),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="GIT",
            help="A template in git, by its folder or address: `copier update` can then follow it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a distribution with a small, right plugin: code, entry points, tests, CI files and README."""
    from graphpact_scaffold.rendering import render  # noqa: PLC0415  copier

    made = render(kind, name, folder, template)
    note(f"written to {made}. Its README.md says how to install, check and use it; the first steps:")
    note(f"  cd {made}")
    note("  pip install -e '.[test]'")
    note("  pytest")
