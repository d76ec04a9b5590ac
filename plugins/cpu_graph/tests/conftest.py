"""Compiling in tests: into a folder of the session, in one process, for plain scalar code."""

import importlib
import warnings
from collections.abc import Iterator

import pytest
import torch

from graphpact_cpu_graph.inductor import missing_compiler


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let inductor compile for real; skip where it cannot."""
    fault = missing_compiler()
    if fault is not None:
        pytest.skip(fault)
    from torch._inductor import config, cpu_vec_isa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch.utils.mkldnn")  # inductor's, and it uses deprecated things

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        # To learn what vectors the machine has takes torch 15 s, and says nothing about us.
        patch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
        with config.patch(compile_threads=1):
            yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run recorded graphs node by node instead of compiling them: what is recorded is under test."""
    monkeypatch.setattr(torch._inductor, "compile", lambda module, _, __: module)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Tensors of graphs are written in these tests, which inference mode allows."""
    with torch.inference_mode():
        yield
