"""The pages about backends of vLLM and SGLang: their plugins pass, and each report is that of its change."""

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpact_cli import main
from support import OF_ENGINES, ROOT


def page_of(adapter: str) -> str:
    """Return the text of an adapter's pages."""
    pages = sorted((ROOT / "docs/how-to").glob(f"{adapter}-*.md"))
    return "".join(page.read_text(encoding="utf-8") for page in pages)


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a copy of the examples, and forget their modules afterwards."""
    for file in OF_ENGINES:
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for file in OF_ENGINES:
        sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()


def _check(adapter: str, reference: str, capfd: pytest.CaptureFixture[str], *, status: int) -> str:
    """Run the page's command in its decode lane, and return the report."""
    command = ["check", "--adapter", adapter, reference, "--quick", "--lane", "decode*"]
    assert f"graphpact {' '.join(command[:4])}" in " ".join(page_of(adapter).split())
    assert main(command) == status
    return capfd.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("adapter", "reference"),
    [
        ("sglang", "acme_packed:checked"),
        ("sglang", "acme_csr:checked"),
        ("vllm", "acme_reader:checked"),
        ("vllm", "acme_split:small"),
    ],
)
def test_the_reader_of_the_page_is_enough(
    adapter: str, reference: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Metadata with other names is conformant with the reader of the page, and so is a kernel in a reader."""
    assert "1 of 1 plugin conformant" in _check(adapter, reference, capfd, status=0)


@pytest.mark.sweep
def test_a_full_list_needs_a_reader(capfd: pytest.CaptureFixture[str]) -> None:
    """Without its reader, the list with the new keys is taken for a prefix, and an eager run is wrong."""
    file = Path("acme_csr.py")
    text = file.read_text(encoding="utf-8")
    assert text.count("Backends(CsrBackend, read=read, ") == 1
    file.write_text(
        text.replace("Backends(CsrBackend, read=read, ", "Backends(CsrBackend, "), encoding="utf-8"
    )
    assert "an eager run: token" in _check("sglang", "acme_csr:checked", capfd, status=1)


@pytest.mark.sweep
def test_small_splits_show_a_frozen_number_in_a_quick_run(capfd: pytest.CaptureFixture[str]) -> None:
    """A count of splits that a graph keeps from the dummy is found where short requests have several."""
    file = Path("acme_split.py")
    text = file.read_text(encoding="utf-8")
    assert text.count("-(-made.max_seq_len // size)") == 1
    wrong = text.replace("-(-made.max_seq_len // size)", "-(-int(made.seq_lens.max()) // size)")
    file.write_text(wrong, encoding="utf-8")
    assert "most_splits" in _check("vllm", "acme_split:small", capfd, status=1)


@pytest.mark.sweep
def test_a_builder_for_an_npu_passes_with_its_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    """The builder of the page is conformant, and no longer where its update leaves out a task."""
    assert "1 of 1 plugin conformant" in _check("vllm", "acme_npu:checked", capfd, status=0)
    sys.modules.pop("acme_npu", None)
    file = Path("acme_npu.py")
    right = file.read_text(encoding="utf-8")
    file.write_text(right.replace("for task in graph:", "for task in graph[:1]:"), encoding="utf-8")
    assert "GP21" in _check("vllm", "acme_npu:checked", capfd, status=1)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("adapter", "reference", "right", "wrong"),
    [
        (
            "sglang",
            "acme_backend:AcmeAttnBackend",
            "metadata.cache_seqlens_int32.copy_(self.keys(forward_batch))",
            r"`(metadata\.cache_seqlens_int32 = .*?)`",
        ),
        (
            "vllm",
            "acme_attention:AcmeMetadataBuilder",
            "seq_lens=self.seq_lens[:rows]",
            r"`(seq_lens=common\..*?)`",
        ),
    ],
    ids=["sglang", "vllm"],
)
def test_the_report_of_the_page_is_that_of_its_change(
    adapter: str, reference: str, right: str, wrong: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The plugin with the change that the page describes has the report that the page shows."""
    page = page_of(adapter)
    (change,) = re.findall(wrong, page)
    (shown,) = re.findall(
        r"<!-- report of GP01 -->\n```text\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE
    )
    file = Path(reference.partition(":")[0] + ".py")
    text = file.read_text(encoding="utf-8")
    assert text.count(right) == 1
    file.write_text(text.replace(right, change), encoding="utf-8")
    assert shown in _check(adapter, reference, capfd, status=1)
