"""Tests of the tolerances of suite and engine: a coarser dtype has a larger one."""

import math
from collections.abc import Callable

import pytest
import torch

from graphpact import tensors
from graphpact_conformance.experiments import comparison
from graphpact_conformance.experiments.comparison import excess

NAN = float("nan")


def test_excess_is_in_shares_of_what_is_allowed() -> None:
    """`excess` is relative to a tolerance that grows with the expected value; for NaN it is infinite."""
    found = excess(torch.tensor([1.0, 9.02, NAN]), torch.tensor([1.0, 9.0, 1.0]), 1e-3)
    assert found.tolist() == pytest.approx([0.0, 2.0, math.inf], rel=1e-4)


@pytest.mark.parametrize("tolerance_of", [comparison.tolerance_of, tensors.model_tolerance])
def test_tolerances_follow_the_dtype(tolerance_of: Callable[[torch.dtype], float]) -> None:
    """A coarser dtype has a larger tolerance; an unknown dtype has the largest."""
    order = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)
    allowed = [tolerance_of(dtype) for dtype in order]
    assert allowed == sorted(allowed)
