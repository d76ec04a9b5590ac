"""A folder of fake installed distributions, for tests of discovery by entry points.

Does not: define fixtures; a test file makes its own with `installed`.
"""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphpact.plugins import DISABLE_VARIABLE


class Site:
    """A folder of fake installed distributions, whose names begin with ``fake-``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        name: str,
        source: str,
        *,
        offers: Mapping[str, str],
        version: str = "1.0",
        contract: str | None = "1",
        group: str = "graphpact.runners",
    ) -> str:
        """Install distribution ``fake-<name>`` with module ``fake_<name>``; return the latter."""
        module = f"fake_{name}"
        self.root.mkdir(exist_ok=True)
        (self.root / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.root / f"{module}-{version}.dist-info"
        info.mkdir()
        lines = [f"[{group}]", *(f"{n} = {module}:{attribute}" for n, attribute in offers.items())]
        if contract is not None:
            lines += ["[graphpact.contract]", f"{contract} = graphpact.hookspecs:CONTRACT_VERSION"]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
        return module


@contextmanager
def installed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Yield an empty site on ``sys.path``; modules imported from it are removed afterwards."""
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    yield Site(root)
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]
