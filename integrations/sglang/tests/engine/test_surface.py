"""``graphpact sglang diff``: what it compares is in the installed release."""

from pathlib import Path

import pytest
from compared_surface import lacking

from graphpact_sglang.runs.surface import RELEASES


@pytest.mark.smoke
def test_what_is_compared_is_in_the_installed_release(tmp_path: Path) -> None:
    """Each class and function of the surface is found, and each class has members."""
    assert lacking(RELEASES, tmp_path) == []
