"""Fixtures for tests of the compiled driver and its runner, with and without a compiler."""

from collections.abc import Iterator

import pytest
import torch

from compiling import (
    compiler,  # noqa: F401  a fixture
    interpret,
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run recorded graphs node by node instead of compiling them, to test only the recording."""
    interpret(monkeypatch)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run each test in inference mode, which allows writes to the tensors of graphs."""
    with torch.inference_mode():
        yield
