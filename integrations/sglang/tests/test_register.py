"""What SGLang calls by its entry points ends the process at an error, which SGLang would only log."""

import subprocess
import sys

import pytest

import graphpact_sglang


@pytest.mark.parametrize(
    ("words", "installed", "status", "message"),
    [
        ("guard", "0.5.22", 2, "SGLang 0.5.22 is installed, whose seams were not compared"),
        ("guard,start", "0.5.21", 2, "asks for start, which SGLang 0.5.21 does not serve"),
        ("gaurd", "0.5.23", 2, "did you mean 'guard'?"),
        ("guard", "0.5.23", 3, "GRAPHPACT is set and cannot be served: ModuleNotFoundError"),
    ],
    ids=["release", "start", "word", "import"],
)
def test_an_error_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    installed: str,
    status: int,
    message: str,
) -> None:
    """A wrong word, another release and a missing module end the start with a message."""
    monkeypatch.setenv("GRAPHPACT", words)
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(graphpact_sglang, "version", lambda name: installed)
    with pytest.raises(SystemExit) as ended:
        graphpact_sglang.register()
    assert ended.value.code == status
    assert message in capsys.readouterr().err


def test_nothing_happens_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``GRAPHPACT`` the plugin does nothing, whatever is installed."""
    monkeypatch.delenv("GRAPHPACT", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    graphpact_sglang.register()
    assert graphpact_sglang.platform_class() is None


def test_its_import_is_light() -> None:
    """SGLang imports the plugin in each of its processes: neither torch nor SGLang is imported with it."""
    code = "import sys, graphpact_sglang; print({'torch', 'sglang', 'graphpact_guard'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_a_guard_that_cannot_be_imported_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import error of what reads the settings ends the start too, with what to install."""
    monkeypatch.setenv("GRAPHPACT", "guard")
    monkeypatch.setitem(sys.modules, "graphpact_guard", None)
    with pytest.raises(SystemExit) as ended:
        graphpact_sglang.platform_class()
    assert ended.value.code == 3
    assert 'the tape needs "graphpact-sglang[tape]"' in capsys.readouterr().err
