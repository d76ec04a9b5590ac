"""``graphpact doctor``: what is found, what is wrong with it, and what to do."""

import json
import sys
from typing import Any

import pytest
import torch

from graphpact.cli import main
from graphpact.graphs.tape import TapeDriver


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the configuration of whoever runs the tests out of the environment."""
    for name in ("GRAPHPACT_DISABLE_PLUGINS", "GRAPHPACT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


def examined(capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    """Return what ``doctor --json`` says, having held it to its status."""
    assert main(["doctor", "--json"]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["usable"] is (status == 0)
    return report


def test_a_machine_that_can_generate_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Where all is installed the status is 0, and the report has versions, devices and drivers."""
    report = examined(capsys)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["packages"]["torch"] == torch.__version__
    assert report["packages"]["transformers"] is not None
    assert report["extras"] == {"models": True, "cli": True}
    assert report["threads"] == torch.get_num_threads()
    assert len(report["cuda"]["devices"]) == torch.cuda.device_count()
    assert {"graphpact", "graphpact-flashinfer"} <= set(report["distributions"])
    assert not [p for p in report["problems"] if p["severity"] == "error"]


def test_each_driver_says_why_it_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    """Every driver is asked about every device; the tape is available on a CPU, CUDA is not."""
    found = {(d["name"], d["device"]): d["unavailable"] for d in examined(capsys)["drivers"]}
    assert found["tape", "cpu"] is None
    assert "CUDA device" in found["cuda", "cpu"]


def test_a_driver_that_fails_to_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception in a driver's own check is its reason, and not the doctor's end."""

    def unavailable(_: torch.device) -> str | None:
        raise OSError("libdriver.so is missing")

    monkeypatch.setattr(TapeDriver, "unavailable", unavailable)
    assert main(["doctor", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    (reason,) = [
        d["unavailable"] for d in report["drivers"] if (d["name"], d["device"]) == ("tape", "cpu")
    ]
    assert reason == "OSError: libdriver.so is missing"


def test_missing_models_keep_text_from_being_generated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where transformers cannot be imported the status is 3, and the pip command is given."""
    monkeypatch.setitem(sys.modules, "graphpact.models", None)
    (problem,) = [p for p in examined(capsys, 3)["problems"] if p["severity"] == "error"]
    assert "graphpact[models]" in problem["help"]


def test_a_default_that_cannot_be_had_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin that the configuration selects and that is disabled makes the machine unusable."""
    monkeypatch.setenv("GRAPHPACT_DISABLE_PLUGINS", "flashinfer")
    report = examined(capsys, 3)
    severities = {p["severity"]: p["what"] for p in report["problems"]}
    assert "flashinfer" in severities["error"]
    assert "disabled" in severities["warning"]
    assert report["environment"]["GRAPHPACT_DISABLE_PLUGINS"] == "flashinfer"


@pytest.mark.parametrize(
    ("variable", "says"),
    [("GRAPHPACT_ENGINE__SEDE", "SEED"), ("GRAPHPACT_DISABLE_PLUGINS", "flashinfr")],
)
def test_a_misspelt_variable_is_a_problem(
    variable: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable of graphpact's that means nothing is named, and the rest is examined all the same."""
    monkeypatch.setenv(variable, "flashinfr")
    report = examined(capsys, 3)
    assert any(says in p["what"] for p in report["problems"] if p["severity"] == "error")
    assert report["drivers"]


def test_people_read_problems_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is text on stdout: what was found, each problem with its help, the verdict last."""
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert torch.__version__ in out
    assert out.splitlines()[-1] == "Text can be generated on this machine."
    monkeypatch.setitem(sys.modules, "graphpact.models", None)
    assert main(["doctor"]) == 3
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    assert lines[at + 1].startswith("  help: pip install")
    assert lines[-1] == "Text cannot be generated on this machine."
