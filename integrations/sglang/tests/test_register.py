"""What SGLang calls by its entry points ends the process at an error, which SGLang would only log."""

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
