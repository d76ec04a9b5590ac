"""Make a distribution known to Python without pip: a folder with its metadata and links to its packages.

The folder has to be on the path, such as in ``PYTHONPATH``. It is for commands of pages and pictures that
need a plugin, and may not change the environment that they run in.

Does not: build, or install what a distribution needs.
"""

import configparser
import tomllib
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import get_core_metadata_constructors
from hatchling.plugin.manager import PluginManager


def add(project: Path, site: Path) -> str:
    """Add the distribution of the folder ``project`` to the folder ``site``; return its name."""
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    name, version = table["project"]["name"], table["project"]["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = ProjectMetadata(str(project), PluginManager())
    (info / "METADATA").write_text(get_core_metadata_constructors()["2.4"](metadata), "utf-8")
    groups = configparser.ConfigParser(delimiters="=")
    groups.read_dict(table["project"].get("entry-points", {}))
    with (info / "entry_points.txt").open("w", encoding="utf-8") as file:
        groups.write(file)
    for package in table["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        (site / package).symlink_to((project / package).resolve())
    return str(name)


def remove(name: str, site: Path) -> None:
    """Remove a distribution that `add` added."""
    (info,) = site.glob(f"{name.replace('-', '_')}-*.dist-info")
    for file in info.iterdir():
        file.unlink()
    info.rmdir()
