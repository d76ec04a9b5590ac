"""`add_diff`: the command ``diff`` of an integration, which compares two releases of its engine.

Does not: need the engine or the author's package to be installed; import what compares, for the sake of
``graphpact --help``.
"""

from pathlib import Path
from typing import Annotated

import typer

from graphpact_cli.releases.engine import EngineReleases


def add_diff(app: typer.Typer, engine: EngineReleases) -> None:
    """Add the command ``diff`` to the command group of an integration."""
    name = engine.name

    @app.command(
        "diff",
        help=f"Compare what attention backends and graph runners build on in two releases of {name}.\n\n"
        f"A release is a version, which pip downloads; the path of a wheel or of a folder; or 'installed'."
        " Files are read, and nothing is imported. With --package, only the changes of what that package"
        " uses are shown, and the exit status is 1 if one of them may break it.",
    )
    def diff(
        before: Annotated[str, typer.Argument(help="The release that is in use.", show_default=False)],
        after: Annotated[str, typer.Argument(help="The other release.", show_default=False)],
        *,
        package: Annotated[
            Path | None,
            typer.Option(
                "--package",
                metavar="FOLDER",
                help="The folder of a package that builds on it.",
                show_default=False,
            ),
        ] = None,
        show_all: Annotated[
            bool, typer.Option("--all", help="Show what the package does not use, too.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")] = False,
    ) -> None:
        from graphpact_cli.releases.comparison import compare_releases  # noqa: PLC0415  needed by no help

        if not compare_releases(engine, before, after, package=package, show_all=show_all, as_json=as_json):
            raise typer.Exit(1)
