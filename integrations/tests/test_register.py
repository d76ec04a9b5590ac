"""What an engine calls by its entry points ends the process at an error, which engines would only log."""

import subprocess
import sys
from types import ModuleType

import pytest

import graphpact_sglang
import graphpact_vllm

PACKAGES = pytest.mark.parametrize(
    ("package", "engine"),
    [(graphpact_sglang, "sglang"), (graphpact_vllm, "vllm")],
    ids=["sglang", "vllm"],
)


@pytest.mark.parametrize(
    ("engine", "words", "installed", "status", "message"),
    [
        ("sglang", "guard", "0.5.22", 2, "SGLang 0.5.22 is installed, whose seams were not compared"),
        ("sglang", "guard,start", "0.5.21", 2, "asks for start, which SGLang 0.5.21 does not serve"),
        ("sglang", "gaurd", "0.5.23", 2, "did you mean 'guard'?"),
        ("sglang", "guard", "0.5.23", 3, "GRAPHPACT is set and cannot be served: ModuleNotFoundError"),
        ("vllm", "guard", "0.31.0", 2, "vLLM 0.31.0 is installed, whose seams were not compared"),
        ("vllm", "tape", "0.33.0+cpu", 2, "vLLM 0.33.0 is installed, whose seams were not compared"),
        ("vllm", "gaurd", "0.32.0", 2, "did you mean 'guard'?"),
        ("vllm", "guard", "0.32.0+cpu", 3, "GRAPHPACT is set and cannot be served: ModuleNotFoundError"),
    ],
)
def test_an_error_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    words: str,
    installed: str,
    status: int,
    message: str,
) -> None:
    """A wrong word, another release and a missing module end the start with a message."""
    package = {"sglang": graphpact_sglang, "vllm": graphpact_vllm}[engine]
    monkeypatch.setenv("GRAPHPACT", words)
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.setattr(package, "version", lambda name: installed)
    with pytest.raises(SystemExit) as ended:
        package.register()
    assert ended.value.code == status
    assert message in capsys.readouterr().err


@PACKAGES
def test_nothing_happens_without_words(
    monkeypatch: pytest.MonkeyPatch, package: ModuleType, engine: str
) -> None:
    """Without ``GRAPHPACT`` the plugin does nothing, whatever is installed."""
    monkeypatch.delenv("GRAPHPACT", raising=False)
    monkeypatch.setitem(sys.modules, engine, None)
    package.register()
    assert package.platform_class() is None


@PACKAGES
def test_its_import_is_light(package: ModuleType, engine: str) -> None:
    """An engine imports the plugin in each of its processes: neither torch nor the engine comes with it."""
    name = package.__name__
    code = f"import sys, {name}; print({{'torch', '{engine}', 'graphpact_guard'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@PACKAGES
def test_a_guard_that_cannot_be_imported_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: ModuleType, engine: str
) -> None:
    """An import error of what reads the settings ends the start too, with what to install."""
    monkeypatch.setenv("GRAPHPACT", "guard")
    monkeypatch.setitem(sys.modules, "graphpact_guard", None)
    with pytest.raises(SystemExit) as ended:
        package.platform_class()
    assert ended.value.code == 3
    assert f'the tape needs "graphpact-{engine}[tape]"' in capsys.readouterr().err
