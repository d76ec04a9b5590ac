"""Fixtures for tests that compile: folders per session, one process, scalar code; or no compilation at all.

Import `compiler` into a ``conftest.py`` or a test file to use it as a fixture.

Does not: change how the driver compiles. Only torch's settings differ from a user's.
"""

import ctypes
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphpact.tensors import address_range
from graphpact_cpu_graph import inductor
from graphpact_cpu_graph.inductor import missing_compiler
from graphpact_kernels.compiled import cache_folder, load


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let inductor compile for real; skip the test where there is no compiler."""
    fault = missing_compiler()
    if fault is not None:
        pytest.skip(fault)
    from torch._inductor import config, cpu_vec_isa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch.utils.mkldnn")  # inductor imports it; it warns

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        cache = tmp_path_factory.mktemp("graphpact")
        if load() is None:  # kernels do not depend on the session, so the cache of this machine is used
            (cache / "kernels").symlink_to(cache_folder() / "kernels")
        patch.setenv("GRAPHPACT_CACHE_DIR", str(cache))
        # Torch takes 15 s to find the vector instructions of the machine, which these tests do not need.
        patch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
        with config.patch(compile_threads=1):
            yield


def _as_compiled_code_sees(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` whose storage begins at its first element, as compiled code expects."""
    begin, end = address_range(tensor)
    if begin == end:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * (end - begin)).from_address(begin)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run recorded graphs of the inductor driver node by node instead of compiling them."""

    def interpreted(graph: torch.fx.Graph, inputs: list[torch.Tensor]) -> Callable[[], Any]:
        module = torch.fx.GraphModule(torch.nn.Module(), graph)

        def call(*tensors: torch.Tensor) -> Any:
            return module(*map(_as_compiled_code_sees, tensors))

        return functools.partial(call, *inputs)

    monkeypatch.setattr(inductor, "compiled", lambda codes: [interpreted(*code) for code in codes])
