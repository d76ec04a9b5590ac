"""Tests that the first-party plugins are conformant, with the public command."""

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_kernels import COMPILED
from graphpact_cli import main
from graphpact_conformance.results import Report
from graphpact_conformance.rules import RULES

pytestmark = pytest.mark.sweep

BACKENDS = ("flashinfer", "fa3", "trtllm_mla")
RUNNERS = (
    "cuda_graph",
    "cpu_graph",
    "breakable_cuda_graph",
    "piecewise_cuda_graph",
    "eagle_draft",
    "eagle_draft_extend",
    "runner:frozen_kv_mtp",
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_our_plugins_are_conformant(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each plugin and pair is conformant; reports show every rule and list the parts that need a GPU."""
    plugins = (backend, *RUNNERS)
    assert main(["check", *plugins, "--quick", "--report", str(tmp_path)]) == 0, capsys.readouterr()
    report = Report.model_validate_json((tmp_path / "results.json").read_text(encoding="utf-8"))
    runners = [runner.removeprefix("runner:") for runner in RUNNERS]
    assert [p.label for p in report.plugins] == [backend, *runners, *(f"{backend} + {r}" for r in runners)]
    for plugin in report.plugins:
        assert plugin.is_conformant, plugin.label
        assert any("cuda" in line for line in plugin.not_shown)
        shown = {r.rule for r in plugin.results if r.outcome == "pass"}
        if plugin.partner is None:
            assert shown >= set(RULES), plugin.label
    assert report.plugins[0].provider == ("compiled" if COMPILED else "portable")
    assert any(line.startswith("native kernels") for line in report.plugins[0].not_shown)
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "junit.xml", "report.html"}


def test_portable_kernels_are_conformant_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Each backend is conformant with portable kernels, and the report names them."""
    assert main(["check", *BACKENDS, "--quick", "--kernels", "portable", "--json"]) == 0, capsys.readouterr()
    report = Report.model_validate_json(capsys.readouterr().out)
    assert [(p.name, p.provider, p.is_conformant) for p in report.plugins] == [
        (name, "portable", True) for name in BACKENDS
    ]


def test_kernels_that_cannot_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A provider that this machine cannot run is a usage error that says why."""
    assert main(["check", "fa3", "--kernels", "native"]) == 2
    assert "need a CUDA device" in capsys.readouterr().err


def test_two_runs_with_one_seed_differ_in_times_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two reports with one seed are equal except for times, in any order of processes."""
    written: list[dict[str, Any]] = []
    for seed in ("3", "3", "4"):
        main(["check", "trtllm_mla", "--quick", "--lane", "draft_*", "--seed", seed, "--json"])
        written.append(json.loads(capsys.readouterr().out))
    one, two, other = (Report.model_validate(t).timeless() for t in written)
    assert one == two
    assert one["seed"] != other["seed"]
