"""Tests of ``graphpact doctor``: the report on a machine, its problems, and the memory of an engine."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpact import CONTRACT_VERSION
from graphpact.attention import KernelProvider
from graphpact_cli import main
from graphpact_engine.cli import machine
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import Tape, TapeDriver
from support import survey_here

DEMO = Path(__file__).parents[2] / "examples/demo.toml"
MEMORY = ["doctor", "--memory", "--config", str(DEMO), "--set", 'engine.device="cpu"']


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove graphpact's variables from the environment, and import plugins in this process."""
    for name in ("GRAPHPACT_DISABLE_PLUGINS", "GRAPHPACT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    survey_here(monkeypatch)


def examined(capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    """Assert the status of ``doctor --json``, and return its report."""
    assert main(["doctor", "--json"]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["usable"] is (status == 0)
    return report


def test_a_machine_that_can_generate_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """If everything is installed the status is 0; the report has versions, extras, devices and drivers."""
    report = examined(capsys)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["packages"]["torch"] == importlib.metadata.version("torch")
    assert report["packages"]["transformers"] is not None
    assert report["extras"] == {"engine": True, "cli": True, "conformance": True}
    assert report["threads"] == torch.get_num_threads()
    assert report["threads_of_small_models"] in (1, torch.get_num_threads())
    assert len(report["cuda"]["devices"]) == torch.cuda.device_count()
    assert {"graphpact", "graphpact-flashinfer", "graphpact-kernels"} <= set(report["distributions"])
    devices = {"cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))}
    found = {(driver["name"], driver["device"]) for driver in report["drivers"]}
    assert {(name, each) for name in ("tape", "inductor", "cuda") for each in devices} <= found
    assert not [p for p in report["problems"] if p["severity"] == "error"]


def test_a_report_of_a_bug_has_its_versions_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """``--provenance`` prints one line with the versions, the device and the kernels that ``--json`` has."""
    report = examined(capsys)
    assert main(["doctor", "--provenance"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith(f"graphpact {report['distributions']['graphpact']}, contract {CONTRACT_VERSION}; ")
    for name in ("torch", "transformers"):
        assert f"{name} {report['packages'][name]}" in out
    assert f"python {report['python']}, " in out
    assert "kernels fa3 compiled, flashinfer compiled, " in out or torch.cuda.is_available()
    for options in (["--memory"], ["--json"]):
        assert main(["doctor", "--provenance", *options]) == 2
        assert f"--provenance with {options[0]}" in capsys.readouterr().err


def test_the_line_of_a_gpu_has_its_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's version is the kernel module's; equal GPUs are counted, and their kernels chosen."""
    file = tmp_path / "version"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC 12.2.0\n"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(machine, "_DRIVER", file)
    report = examined(capsys)
    assert report["cuda"]["driver"] == "570.86.15"
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8}
    report["cuda"] |= {"built": "12.8", "devices": [gpu, gpu]}
    report["kernels"] = [
        {"backend": "fa3", "provider": "native", "device": "cuda:0", "unavailable": "no library"},
        {"backend": "fa3", "provider": "portable", "device": "cuda:0", "unavailable": None},
        {"backend": "fa3", "provider": "compiled", "device": "cpu", "unavailable": None},
    ]
    report["distributions"]["acme-attention"] = "2.5"
    report["engines"] = {"vllm": "0.32.0"}
    line = machine.provenance(report)
    assert "; device 2 x NVIDIA H200 sm 9.0, driver 570.86.15, CUDA 12.8; kernels fa3 portable" in line
    assert "; acme-attention 2.5; " in line
    assert "vllm 0.32.0; " in line


def test_each_driver_says_why_it_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    """Each driver has an entry for a CPU: the tape is available there, and CUDA has a reason."""
    found = {(d["name"], d["device"]): d["unavailable"] for d in examined(capsys)["drivers"]}
    assert found["tape", "cpu"] is None
    assert "CUDA device" in found["cuda", "cpu"]


def test_a_driver_that_fails_to_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception in a driver's own check is its reason in the report; the status is 3."""

    def unavailable(_: torch.device) -> str | None:
        raise OSError("libdriver.so is missing")

    monkeypatch.setattr(TapeDriver, "unavailable", unavailable)
    assert main(["doctor", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    (reason,) = [d["unavailable"] for d in report["drivers"] if (d["name"], d["device"]) == ("tape", "cpu")]
    assert reason == "OSError: libdriver.so is missing"


def test_each_kernel_provider_says_why_it_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each provider has an entry for a CPU; an exception of a provider is its reason, and no problem."""

    class Native(KernelProvider):
        name = "native"

        @classmethod
        def unavailable(cls, device: torch.device) -> str | None:
            raise OSError("libacme.so is missing")

    class Portable(KernelProvider):
        name = "portable"

    monkeypatch.setattr(FlashInferBackend, "providers", (Native, Portable))
    report = examined(capsys)
    found = {
        (one["backend"], one["provider"], one["device"]): one["unavailable"] for one in report["kernels"]
    }
    reason = "OSError: libacme.so is missing"
    assert found["flashinfer", "native", "cpu"] == reason
    assert found["flashinfer", "portable", "cpu"] is None
    assert main(["doctor"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"flashinfer native on cpu {reason}" in rows
    assert "flashinfer portable on cpu available" in rows


def test_named_kernels_that_cannot_be_had_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels that the environment names and that cannot run here make the machine unusable."""
    monkeypatch.setattr(FlashInferBackend, "providers", ())
    monkeypatch.setenv("GRAPHPACT_ENGINE__KERNEL_PROVIDER", "native")
    (problem,) = [p for p in examined(capsys, 3)["problems"] if p["severity"] == "error"]
    assert 'engine.kernel_provider = "native"' in problem["what"]
    assert '"auto" takes what can run here' in problem["help"]


def test_missing_models_keep_text_from_being_generated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the engine's models cannot be imported the status is 3, and the help has the extra to install."""
    monkeypatch.setitem(sys.modules, "graphpact_engine.models", None)
    (problem,) = [p for p in examined(capsys, 3)["problems"] if p["severity"] == "error"]
    assert "graphpact[engine]" in problem["help"]


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
    """A variable with a misspelt key or plugin is an error, and the rest is still examined."""
    monkeypatch.setenv(variable, "flashinfr")
    report = examined(capsys, 3)
    assert any(says in p["what"] for p in report["problems"] if p["severity"] == "error")
    assert report["drivers"]


def test_people_read_problems_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is text on stdout: versions, each problem with its help, and the verdict last."""
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert importlib.metadata.version("torch") in out
    assert out.splitlines()[-1] == "Text can be generated on this machine."
    monkeypatch.setitem(sys.modules, "graphpact_engine.models", None)
    assert main(["doctor"]) == 3
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    assert lines[at + 1].startswith("  help: pip install")
    assert lines[-1] == "Text cannot be generated on this machine."


# -- the memory of an engine -----------------------------------------------------------------------


def test_memory_is_one_json_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json`` stdout is one object with lanes, rows and totals; the demo has no problem."""
    assert main([*MEMORY, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"usable", "memory", "problems"}
    assert (report["usable"], report["problems"]) == (True, [])
    decode, prefill = report["memory"]["lanes"]
    assert (decode["name"], decode["driver"], decode["absent"]) == ("decode", "tape", None)
    assert (decode["metadata_in_graph"], prefill["metadata_in_graph"]) == (True, None)
    assert prefill["rows"] == []
    kinds = {row["kind"] for row in decode["rows"]}
    assert kinds == {"slot", "pool", "weight", "kv_cache", "request_table"}
    own = [row["nbytes"] for row in decode["rows"] if row["kind"] in ("slot", "pool")]
    assert decode["own_nbytes"] == sum(own)
    assert report["memory"]["nbytes"] == sum(row["nbytes"] for row in decode["rows"])


def test_people_read_memory_as_tables_with_totals(capsys: pytest.CaptureFixture[str]) -> None:
    """There are tables of slots, pools and shared memory, then totals, and the verdict in the last line."""
    assert main(MEMORY) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "seq_lens decode inputs [8] int64 cpu fill_sentinel 1 graph 64" in lines
    assert lines[0] == "lane decode: recorded by tape, metadata made in the graph"
    assert "seq_lens_cpu decode inputs [8] int64 cpu fill_sentinel 1 preparation 64" in lines
    kept = next(line for line in lines if line.startswith("flashinfer.kv_indices "))
    row = r"flashinfer\.kv_indices flashinfer \[(\d+)\] int32 cpu keep_pad graph (\S+) .* in every step"
    found = re.fullmatch(row, kept)
    assert found is not None
    assert found[2] == f"{4 * int(found[1]):,}"
    assert any(line.startswith("decode[bs=8, tokens=8] cpu ") for line in lines)
    assert "lane prefill: no graph-resident memory; this lane captures nothing" in lines
    assert "kv cache 10 tensors [4112, 2, 32] float32 cpu decode 10,526,720" in lines
    assert "weight 48 tensors several float32 cpu decode 7,702,336" in lines
    assert "request table req_to_token [9, 512] int32 cpu decode 18,432" in lines
    assert any(line.startswith("lane decode: ") and "for this lane only" in line for line in lines)
    assert any(line.startswith("graph-resident in all: ") for line in lines)
    assert lines[-1] == "Everything that graphs read and write is declared."


def test_the_engine_is_the_one_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """``--set`` and ``--model`` select the engine, as they do for ``generate``."""
    model = str(DEMO.parent / "models/tiny-llama")
    narrow = [
        "-s",
        'engine.device="cpu"',
        "-s",
        "lanes.decode.batch_sizes=[1, 3]",
        "-s",
        "engine.max_num_seqs=3",
    ]
    assert main(["doctor", "--memory", "--json", "-m", model, *narrow]) == 0
    decode, _ = json.loads(capsys.readouterr().out)["memory"]["lanes"]
    pools = [row["name"] for row in decode["rows"] if row["kind"] == "pool"]
    assert pools == ["decode[bs=3, tokens=3]", "decode[bs=1, tokens=1]"]
    (inputs,) = [row for row in decode["rows"] if row["name"] == "input_ids"]
    assert inputs["shape"] == [3]


def test_lanes_without_graphs_are_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """For an engine that captures nothing the text says so, and the status is 0."""
    assert main([*MEMORY, "--set", "lanes.decode.runner=eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "lane decode: no graph-resident memory; this lane captures nothing" in lines
    assert lines[-1] == "No lane has graphs."


def test_a_driver_that_cannot_tell_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the driver does not report external tensors, the verdict says that, and not that all is declared."""
    monkeypatch.setattr(Tape, "external_tensors", lambda _: None)
    assert main(MEMORY) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Undeclared memory cannot be detected: driver tape does not report")


def test_a_driver_that_sees_a_part_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the driver sees only dispatched operations, the verdict says what it does not cover."""
    monkeypatch.setattr(Tape, "sees", "dispatched")
    assert main(MEMORY) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Everything that torch operations read and write is declared. Driver tape does")
    assert "kernels launched below torch's dispatcher" in last
    assert main([*MEMORY, "--json"]) == 0
    lane = json.loads(capsys.readouterr().out)["memory"]["lanes"][0]
    assert (lane["externals"], lane["knows_externals"]) == ("dispatched", True)
    touched = {row["in_graph"] for row in lane["rows"] if row["kind"] == "weight"}
    assert touched <= {True, None}


@pytest.mark.parametrize(
    "options",
    [
        ["--config", str(DEMO)],
        ["--model", "anything"],
        ["--set", "engine.seed=1"],
        ["--model", "anything", "--json", "--set", "a=b"],
    ],
)
def test_options_of_memory_alone_are_a_usage_error(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options for an engine are refused by name without ``--memory``, and the help says to add it."""
    assert main(["doctor", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(option in err for option in options if option.startswith("--") and option != "--json")
    assert "add --memory" in err


def test_an_engine_that_cannot_be_built_is_the_usual_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without a checkpoint, no model, and an unknown key end with status 2 and an error."""
    for options in (["-m", str(tmp_path)], [], ["-s", "engine.sede=1"]):
        assert main(["doctor", "--memory", *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
