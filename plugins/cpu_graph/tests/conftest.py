"""What the tests of the compiled driver and its runner share: a compiler, and none."""

from collections.abc import Iterator

import pytest
import torch

from compiling import compiler  # noqa: F401  a fixture


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run recorded graphs node by node instead of compiling them: what is recorded is under test."""
    monkeypatch.setattr(torch._inductor, "compile", lambda module, _, __: module)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Tensors of graphs are written in these tests, which inference mode allows."""
    with torch.inference_mode():
        yield
