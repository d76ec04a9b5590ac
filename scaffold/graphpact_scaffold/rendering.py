"""`render`, `write_project`: a new distribution with one plugin, by copier from the template that is here.

Does not: install or check it, or write into a folder that has files.
"""

import importlib.util
import keyword
import re
import sys
import tempfile
from pathlib import Path

import copier
from copier.errors import CopierError
from jinja2 import TemplateError

from graphpact._version import CONTRACT_VERSION, __version__
from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog
from graphpact_scaffold.kinds import NewKind

TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def render(kind: NewKind, name: str, folder: Path | None = None, template: str | None = None) -> Path:
    """Write a distribution with one plugin into a new or an empty folder.

    Args:
        kind: What the plugin does.
        name: The name of the plugin and of its package; hyphens count as underscores.
        folder: The folder to write; None for one that is called like the distribution.
        template: A folder or an address of a template in git, as copier takes it; None for the template of
            this distribution.

    Returns:
        The folder.

    Raises:
        UsageError: The name cannot be one, or is taken; the folder has files, or cannot be written; the
            template cannot be rendered.
    """
    name = name.replace("-", "_")
    _require_name(kind, name)
    folder = folder or Path(name.replace("_", "-"))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is no empty folder", hint="name another folder with --dir")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".graphpact-new-", dir=folder.parent) as beside:
            made = Path(beside, "made")
            write_project(kind, name, made, template)
            made.replace(folder)  # whole, or not at all
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror or error}", hint="name another folder with --dir"
        ) from error
    return folder


def write_project(kind: NewKind, name: str, made: Path, template: str | None = None) -> None:
    """Render a template into a new folder; the name may be taken.

    Raises:
        UsageError: The template cannot be rendered.
    """
    answers = {
        "kind": kind.value,
        "name": name,
        "graphpact_version": __version__,
        "contract_version": CONTRACT_VERSION,
    }
    hint = None if template is None else "leave --template out to take the template that is installed"
    try:
        copier.run_copy(template or str(TEMPLATE), made, data=answers, defaults=True, quiet=True)
    except (CopierError, TemplateError, ValueError) as error:
        raise UsageError(
            f"the template {template or TEMPLATE} cannot be rendered: {error}", hint=hint
        ) from error
    if not (made / "pyproject.toml").is_file():
        raise UsageError(f"{template} is no template of a plugin: it has no pyproject.toml", hint=hint)


def _require_name(kind: NewKind, name: str) -> None:
    """Refuse a name that no package can have, that Python knows, or that something installed has."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a plugin and of its package",
            hint="use small letters, digits and single underscores, beginning with a letter: acme_attention",
        )
    for info in PluginCatalog.scan(env={}).infos(kind.offers):
        if info.name == name:
            raise UsageError(
                f"{info.distribution} {info.version} has a plugin of this kind called {name!r}",
                hint="choose another name: one that two distributions offer cannot be selected",
            )
    is_python = keyword.iskeyword(name) or name in sys.stdlib_module_names or name == "tests"
    if is_python or importlib.util.find_spec(name) is not None:
        what = "a word of Python" if is_python else "an installed package"
        raise UsageError(
            f"{name!r} is {what}; the new package would have the same name",
            hint=f"choose another name, such as acme_{name}",
        )
