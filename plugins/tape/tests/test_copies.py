"""Copies from host memory that a strict driver keeps in flight until something waits for them."""

import pytest
import torch

from graphpact.errors import ReplayError
from graphpact_tape.tape import TapeDriver


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_copy_from_memory_of_any_stride_arrives(count: int, stride: int) -> None:
    """A strided source of one element is copied like one of several elements, and checked for rewrites."""
    driver = TapeDriver(torch.device("cpu"), strict=True)
    numbers, target = torch.arange(1, 17), torch.zeros(count, dtype=torch.int64)
    source = numbers.as_strided((count,), (stride,))
    driver.copy_async(target, source)
    driver.synchronize()
    assert target.tolist() == source.tolist()
    driver.copy_async(target, source)
    numbers.neg_()
    if not count:
        driver.synchronize()
        return
    with pytest.raises(ReplayError, match="rewritten while a copy from it was in flight") as error:
        driver.synchronize()
    assert error.value.rule == "GP16"
