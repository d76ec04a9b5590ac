"""docs/vllm.md: its builders pass, and its report is that of the change which it describes."""

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpact_cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/vllm"
PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a copy of the examples, and forget their modules afterwards."""
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("acme_attention", "acme_reader", "acme_npu"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def _check(reference: str, capfd: pytest.CaptureFixture[str], *, status: int) -> str:
    """Run the page's command in its decode lane, and return the report."""
    command = ["check", "--adapter", "vllm", reference, "--quick", "--lane", "decode*"]
    assert f"graphpact {' '.join(command[:4])}" in PAGE
    assert main(command) == status
    return capfd.readouterr().out


@pytest.mark.sweep
def test_the_reader_of_the_page_is_enough(capfd: pytest.CaptureFixture[str]) -> None:
    """A builder whose metadata has names of its own is conformant with the reader of the page."""
    assert "1 of 1 plugin conformant" in _check("acme_reader:checked", capfd, status=0)


@pytest.mark.sweep
def test_a_builder_for_an_npu_passes_with_its_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    """The builder of the page is conformant, and no longer where its update leaves out a task."""
    assert "1 of 1 plugin conformant" in _check("acme_npu:checked", capfd, status=0)
    sys.modules.pop("acme_npu", None)
    file = Path("acme_npu.py")
    right = file.read_text(encoding="utf-8")
    file.write_text(right.replace("for task in graph:", "for task in graph[:1]:"), encoding="utf-8")
    assert "GP21" in _check("acme_npu:checked", capfd, status=1)


def test_the_report_of_the_page_is_that_of_its_change(capfd: pytest.CaptureFixture[str]) -> None:
    """The builder with the cast that the page describes has the report that the page shows."""
    (wrong,) = re.findall(r"`(seq_lens=common\..*?)`", PAGE)
    (shown,) = re.findall(
        r"<!-- report of GP01 -->\n```text\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE
    )
    builder = Path("acme_attention.py")
    right = builder.read_text(encoding="utf-8")
    assert right.count("seq_lens=self.seq_lens[:rows]") == 1
    builder.write_text(right.replace("seq_lens=self.seq_lens[:rows]", wrong), encoding="utf-8")
    assert shown in _check("acme_attention:AcmeMetadataBuilder", capfd, status=1)
