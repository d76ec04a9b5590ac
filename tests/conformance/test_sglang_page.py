"""docs/sglang.md: its backends pass, and its report is that of the change which it describes."""

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpact_cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/sglang"
PAGE = (ROOT / "docs/sglang.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a copy of the examples, and forget their modules afterwards."""
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("acme_backend", "acme_packed"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def _check(reference: str, capfd: pytest.CaptureFixture[str], *, status: int) -> str:
    """Run the page's command in its decode lane, and return the report."""
    command = ["check", "--adapter", "sglang", reference, "--quick", "--lane", "decode*"]
    assert f"graphpact {' '.join(command[:4])}" in PAGE
    assert main(command) == status
    return capfd.readouterr().out


@pytest.mark.sweep
def test_the_reader_of_the_page_is_enough(capfd: pytest.CaptureFixture[str]) -> None:
    """A backend whose metadata has names of its own is conformant with the reader of the page."""
    assert "1 of 1 plugin conformant" in _check("acme_packed:checked", capfd, status=0)


@pytest.mark.sweep
def test_the_report_of_the_page_is_that_of_its_change(capfd: pytest.CaptureFixture[str]) -> None:
    """The backend with the binding that the page describes has the report that the page shows."""
    (wrong,) = re.findall(r"`(metadata\.cache_seqlens_int32 = .*?)`", PAGE)
    (shown,) = re.findall(
        r"<!-- report of GP01 -->\n```text\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE
    )
    backend = Path("acme_backend.py")
    right, copied = (
        backend.read_text(encoding="utf-8"),
        "metadata.cache_seqlens_int32.copy_(self.keys(forward_batch))",
    )
    assert right.count(copied) == 1
    backend.write_text(right.replace(copied, wrong), encoding="utf-8")
    assert shown in _check("acme_backend:AcmeAttnBackend", capfd, status=1)
