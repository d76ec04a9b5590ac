"""The driver contract as pytest tests: `driver_contract` makes one test for each promise.

    from graphpact_conformance.driver_contract import driver_contract

    @driver_contract(MyDriver)
    def test_keeps_the_contract(check):
        check()

``graphpact check driver:NAME`` verifies the same promises of an installed driver.

Does not: check what a strict mode refuses, or backends and runners; ``graphpact check`` does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from graphpact.graphs import GraphDriver
from graphpact_conformance.drivers.promises import CHECKS


@dataclass(frozen=True, repr=False, slots=True)
class DriverCheck:
    """The check of one promise for one driver; a test calls it.

    Args:
        name: Its name in `CHECKS`.
        make: Returns a new driver.
        device: The device that the driver records on.
    """

    name: str
    make: Callable[[torch.device], GraphDriver]
    device: torch.device

    def __call__(self) -> None:
        """Check the promise on a new driver.

        Raises:
            AssertionError: The driver breaks the promise, or raises an error. The message begins with the
                promise; then it has both values, or the error.
        """
        __tracebackhide__ = True
        CHECKS[self.name](lambda: self.make(self.device))


def driver_contract(
    make: Callable[[torch.device], GraphDriver], *, device: str = "cpu"
) -> pytest.MarkDecorator:
    """Return a decorator that parametrizes a test with ``check``: one per promise of a driver.

    Args:
        make: The driver class, or a function from a device to a driver.
        device: The device to record on.
    """
    checks = [DriverCheck(name, make, torch.device(device)) for name in CHECKS]
    return pytest.mark.parametrize("check", [pytest.param(c, id=c.name) for c in checks])


__all__ = ["CHECKS", "DriverCheck", "driver_contract"]
