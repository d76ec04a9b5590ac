"""Compiling in tests: into a folder of the session, in one process, for plain scalar code.

Import `compiler` into a ``conftest.py`` or a test file to have it there as a fixture.

Does not: make the driver compile otherwise than it does for a user; only torch's settings differ.
"""

import importlib
import warnings
from collections.abc import Iterator

import pytest

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
