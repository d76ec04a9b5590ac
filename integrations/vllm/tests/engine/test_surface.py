"""``graphpact vllm diff``: what it compares is in the installed release."""

from pathlib import Path

import pytest

from graphpact_cli.releases.sources import open_source
from graphpact_cli.releases.surface import read_surface
from graphpact_vllm.runs.surface import RELEASES


@pytest.mark.smoke
def test_what_is_compared_is_in_the_installed_release(tmp_path: Path) -> None:
    """Each class and function of the surface is found, and each class has members."""
    source = open_source("installed", RELEASES.package, RELEASES.distribution, tmp_path)
    members = read_surface(source, RELEASES.surface)
    asked = [f"{module}.{name}" for module, names in RELEASES.surface.items() for name in names]
    assert [name for name in asked if name not in members] == []
    owners = {name.rpartition(".")[0] for name in members}
    assert [name for name in asked if members[name].kind == "class" and name not in owners] == []
