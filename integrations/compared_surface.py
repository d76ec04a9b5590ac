"""What ``diff`` of an integration compares, held against the release in this environment.

Does not: import the engine.
"""

from pathlib import Path

from graphpact_cli.releases.engine import EngineReleases
from graphpact_cli.releases.sources import INSTALLED, open_source
from graphpact_cli.releases.surface import read_surface


def lacking(releases: EngineReleases, scratch: Path) -> list[str]:
    """Return the classes and functions of a surface that are not there, and the classes without a member."""
    source = open_source(INSTALLED, releases.package, releases.distribution, scratch)
    members = read_surface(source, releases.surface)
    owners = {name.rpartition(".")[0] for name in members}
    asked = [f"{module}.{name}" for module, names in releases.surface.items() for name in names]
    return [
        name
        for name in asked
        if name not in members or (members[name].kind == "class" and name not in owners)
    ]
